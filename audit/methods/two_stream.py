"""Relevance through two streams that attend to themselves and to each other (co-attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from audit.methods._arrays import AnyArray, as_working, normalize_rows
from audit.methods.gradient import weigh_by_gradient

Stream = Literal["first", "second"]


class SelfAttention(NamedTuple):
    """One layer in which a stream attends to itself: weights and gradient (batch, head, query, key)."""

    stream: Stream
    attention: AnyArray
    gradient: AnyArray


class CoAttention(NamedTuple):
    """One layer in which a stream attends to the other, or both do, from the state before the layer.

    `first` is (batch, head, first position, second position): queries of the first stream. `second`
    has queries of the second stream. Either direction may be left out.
    """

    first: AnyArray | None = None
    first_gradient: AnyArray | None = None
    second: AnyArray | None = None
    second_gradient: AnyArray | None = None


class Relevances(NamedTuple):
    """Relevance of the positions of one stream (last axis) for those of another (batch, query, key).

    The self relevances contain the identity: their map is a row of R - I. The cross relevances are
    read as they are.
    """

    first_first: Any
    first_second: Any
    second_first: Any
    second_second: Any


def two_stream_relevance(
    steps: Sequence[SelfAttention | CoAttention], *, normalize: bool = True
) -> Relevances:
    r"""Return how the positions of both streams bear on one target logit.

    Self-attention of stream s, with q the other stream:
    :math:`R_{ss} \mathrel{+}= \bar A R_{ss},\; R_{sq} \mathrel{+}= \bar A R_{sq}`. Attention from s
    to q: :math:`R_{sq} \mathrel{+}= \bar R_{ss}^\top \bar A \bar R_{qq},\;
    R_{ss} \mathrel{+}= \bar A R_{qs}` with :math:`\bar R = (R - I)/\mathrm{rowsum}(R - I) + I`
    (Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679, equations 5 to 11). All additions of a layer are
    computed before any is made.

    Parameters
    ----------
    steps : sequence of SelfAttention and CoAttention
        The layers in the order of the forward pass, each with the gradient of one logit.
    normalize : bool
        Use R̄; with False the self relevances enter a cross step as they are.

    Returns
    -------
    Relevances
        ``first_first``, ``first_second``, ``second_first``, ``second_second``, not normalised.

    Raises
    ------
    ValueError
        When shapes contradict each other, a stream never appears, or values are NaN.

    Notes
    -----
    It tells which positions of either stream the attention paths that favour the target start from.
    It cannot tell evidence against the target, and the size of cross relevance is not comparable with
    that of self relevance.

    Examples
    --------
    A text position attends to the second of two patches, and the gradient favours that.

    >>> import torch
    >>> cross = CoAttention(first=torch.tensor([[[[.2, .8]]]]), first_gradient=torch.ones(1, 1, 1, 2))
    >>> two_stream_relevance([cross]).first_second
    tensor([[[0.2000, 0.8000]]])
    """
    if not steps:
        raise ValueError("steps: expected at least one layer, got none")
    relevances = initial_relevances(steps)
    for index, step in enumerate(steps):
        try:
            relevances = _apply(relevances, step, normalize)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"steps[{index}]: {error}") from error
    if isinstance(_arrays_of(steps[0])[0], torch.Tensor):
        return relevances
    return Relevances(*(relevance.detach().numpy() for relevance in relevances))


def self_step(relevances: Relevances, stream: Stream, weighted: AnyArray) -> Relevances:
    """Return the relevances after a self-attention layer of `stream`.

    Parameters
    ----------
    relevances : Relevances
    stream : {"first", "second"}
    weighted : (batch, query, key)
        Ā of the layer, from :func:`audit.methods.gradient.weigh_by_gradient`.

    Returns
    -------
    Relevances

    Raises
    ------
    ValueError
        When `stream` is unknown or the shape of `weighted` does not fit.
    """
    layer = as_working("weighted", weighted).to(relevances.first_first.device)
    first_first, first_second, second_first, second_second = relevances
    if stream == "first":
        _check_fits(layer, first_first.shape)
        first_first, first_second = first_first + layer @ first_first, first_second + layer @ first_second
    elif stream == "second":
        _check_fits(layer, second_second.shape)
        second_first = second_first + layer @ second_first
        second_second = second_second + layer @ second_second
    else:
        raise ValueError(f"stream: expected 'first' or 'second', got {stream!r}")
    return Relevances(first_first, first_second, second_first, second_second)


def cross_step(
    relevances: Relevances,
    first: AnyArray | None,
    second: AnyArray | None = None,
    *,
    normalize: bool = True,
) -> Relevances:
    """Return the relevances after a layer in which one stream, or both, attend to the other.

    Parameters
    ----------
    relevances : Relevances
    first : (batch, first position, second position) or None
        Ā of the first stream's attention to the second.
    second : (batch, second position, first position) or None
        Ā of the second stream's attention to the first.
    normalize : bool
        See :func:`two_stream_relevance`.

    Returns
    -------
    Relevances

    Raises
    ------
    ValueError
        When a shape does not fit.
    """
    before = relevances
    scaled = _normalized_self if normalize else _unchanged
    own, other = scaled(before.first_first), scaled(before.second_second)
    after = list(before)
    if first is not None:
        layer = as_working("first", first).to(own.device)
        _check_fits(layer, before.first_second.shape)
        after[0] = after[0] + layer @ before.second_first
        after[1] = after[1] + own.transpose(1, 2) @ (layer @ other)
    if second is not None:
        layer = as_working("second", second).to(own.device)
        _check_fits(layer, before.second_first.shape)
        after[2] = after[2] + other.transpose(1, 2) @ (layer @ own)
        after[3] = after[3] + layer @ before.first_second
    return Relevances(*after)


def initial_relevances(steps: Sequence[SelfAttention | CoAttention]) -> Relevances:
    """Return self relevances I and cross relevances 0 in the sizes that `steps` imply."""
    sizes: dict[str, int] = {}
    for step in steps:
        if isinstance(step, SelfAttention):
            sizes.setdefault(step.stream, step.attention.shape[-1])
        elif step.first is not None:
            sizes.setdefault("first", step.first.shape[-2])
            sizes.setdefault("second", step.first.shape[-1])
        elif step.second is not None:
            sizes.setdefault("second", step.second.shape[-2])
            sizes.setdefault("first", step.second.shape[-1])
    if set(sizes) != {"first", "second"}:
        raise ValueError(f"steps: expected layers of streams 'first' and 'second', got {sorted(sizes)}")
    like = as_working("steps", _arrays_of(steps[0])[0])
    return identity_relevances(like, sizes["first"], sizes["second"])


def identity_relevances(like: torch.Tensor, first: int, second: int) -> Relevances:
    """Return self relevances I and cross relevances 0 for the batch, dtype and device of `like`."""
    batch = like.shape[0]
    eye = [
        torch.eye(size, dtype=like.dtype, device=like.device).repeat(batch, 1, 1) for size in (first, second)
    ]
    return Relevances(
        eye[0], like.new_zeros(batch, first, second), like.new_zeros(batch, second, first), eye[1]
    )


def _apply(relevances: Relevances, step: SelfAttention | CoAttention, normalize: bool) -> Relevances:
    if isinstance(step, SelfAttention):
        return self_step(relevances, step.stream, _weigh(step.attention, step.gradient))
    if not _arrays_of(step):
        raise ValueError("expected attention of at least one stream to the other, got none")
    directions = [(step.first, step.first_gradient), (step.second, step.second_gradient)]
    first, second = (
        None if attention is None else _weigh(attention, gradient) for attention, gradient in directions
    )
    return cross_step(relevances, first, second, normalize=normalize)


def _weigh(attention: AnyArray, gradient: AnyArray | None) -> torch.Tensor:
    if gradient is None:
        raise ValueError("gradient: expected one for the attention given, got None")
    return weigh_by_gradient(as_working("attention", attention), as_working("gradient", gradient))


def _arrays_of(step: SelfAttention | CoAttention) -> list[AnyArray]:
    given = [step.attention] if isinstance(step, SelfAttention) else [step.first, step.second]
    return [array for array in given if array is not None]


def _normalized_self(relevance: torch.Tensor) -> torch.Tensor:
    """Return R̄ = (R - I)/rowsum(R - I) + I; a row without relevance keeps I."""
    eye = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    return normalize_rows(relevance - eye) + eye


def _unchanged(relevance: torch.Tensor) -> torch.Tensor:
    return relevance


def _check_fits(layer: torch.Tensor, shape: torch.Size) -> None:
    if tuple(layer.shape) != tuple(shape):
        raise ValueError(
            f"attention: expected (batch, query, key) = {tuple(shape)}, got {tuple(layer.shape)}"
        )
