"""Encoder-decoder models: from a decoder position to the source, and to the decoder's own prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from audit.methods._arrays import (
    AnyArray,
    Array,
    Residual,
    as_layers,
    as_working,
    check_row_sums,
    check_share,
    check_square,
    residual_per_layer,
    restore,
)
from audit.methods.fusion import fuse_heads
from audit.methods.gradient import gradients_by_layer, weigh_by_gradient
from audit.methods.rollout import add_residual, attention_rollout
from audit.methods.two_stream import cross_step, identity_relevances, self_step


def encoder_decoder_rollout(
    encoder: Sequence[Array] | Array,
    decoder: Sequence[Array] | Array,
    cross: Sequence[Array] | Array,
    *,
    residual: Residual = 0.5,
    cross_residual: Residual = 0.5,
    decoder_residual: Residual | None = None,
) -> tuple[Array, Array]:
    r"""Return how each decoder position draws on the source and on the decoder's own input.

    With E the rollout of the encoder, D = I and S = 0, each decoder layer does
    :math:`D \leftarrow \tilde A D,\; S \leftarrow \tilde A S`, then
    :math:`S \leftarrow \beta S + (1-\beta)\, C E,\; D \leftarrow \beta D`, C being the fused
    cross-attention (the rollout of Abnar & Zuidema, arXiv 2005.00928, carried through the cross block
    and its residual connection).

    Parameters
    ----------
    encoder : sequence of (batch, head, s, s), or (layer, batch, head, s, s)
        Self-attention of the encoder; rows over keys sum to 1.
    decoder : sequence of (batch, head, t, t), or (layer, batch, head, t, t)
        Self-attention of the decoder.
    cross : sequence of (batch, head, t, s), or (layer, batch, head, t, s)
        Attention of the decoder to the encoder's output.
    residual : float, one float per layer, or (layer, batch, query)
        Weight ρ of the identity in the self-attention of both.
    cross_residual : float, one float per decoder layer, or (layer, batch, query)
        Weight β of the residual connection around the cross block.
    decoder_residual : the same, optional
        ρ of the decoder where it differs from the encoder's `residual`.

    Returns
    -------
    source : (batch, t, s)
    prefix : (batch, t, t)
        Rows of both together sum to 1. The source map is a row of `source` divided by its sum, the
        source share.

    Raises
    ------
    ValueError
        When shapes contradict each other, rows do not sum to 1, or weights lie outside [0, 1].

    Notes
    -----
    It tells which source positions a step draws on. With a fixed β the source share is 1 - β^L for
    every model, so how much comes from the source against the prefix can be told only with measured
    weights (:func:`audit.methods.rollout.measured_residual`). Read the row whose output predicts the
    token.

    Examples
    --------
    >>> import numpy as np
    >>> swap, decoder = np.array([[0., 1.], [1., 0.]]), np.array([[1., 0.], [.5, .5]])
    >>> layers = [matrix[None, None, None] for matrix in (swap, decoder, np.eye(2))]
    >>> source, prefix = encoder_decoder_rollout(*layers)
    >>> source[0].tolist(), prefix[0].tolist()
    ([[0.25, 0.25], [0.25, 0.25]], [[0.5, 0.0], [0.125, 0.375]])
    """
    encoder, decoder, cross = _checked_stacks(encoder, decoder, cross)
    top = as_working("encoder", attention_rollout(encoder, residual=residual))
    check_row_sums("encoder", top, exact=True)
    batch, _, steps, _ = decoder[0].shape
    own = residual if decoder_residual is None else decoder_residual
    weights = residual_per_layer("residual", own, len(decoder), (batch, steps))
    betas = residual_per_layer("cross_residual", cross_residual, len(cross), (batch, steps))
    source = top.new_zeros(batch, steps, top.shape[-1])
    prefix = torch.eye(steps, dtype=top.dtype, device=top.device).repeat(batch, 1, 1)
    for index, (layer, cross_layer) in enumerate(zip(decoder, cross, strict=True)):
        mixed = add_residual(_fused("decoder", index, layer).to(top.device), weights[index])
        source, prefix = mixed @ source, mixed @ prefix
        fused = _fused("cross", index, cross_layer).to(top.device)
        source, prefix = cross_rollout_step(source, prefix, fused @ top, betas[index])
    return restore(source, decoder[0]), restore(prefix, decoder[0])


def cross_rollout_step(
    source: Array, prefix: Array, reached: Array, residual: float | AnyArray = 0.5
) -> tuple[Array, Array]:
    """Return S and D after a cross block: βS + (1 - β)·C·E and βD.

    Parameters
    ----------
    source : (batch, t, s)
    prefix : (batch, t, t)
    reached : (batch, t, s)
        C·E, the fused cross-attention times the rollout of the encoder.
    residual : float or (batch, t)
        Weight β of the block's residual connection.

    Returns
    -------
    source, prefix
        Rows of both together keep their sum.

    Raises
    ------
    ValueError
        When `residual` lies outside [0, 1].

    Examples
    --------
    >>> import torch
    >>> zero, one = torch.zeros(1, 1, 2), torch.ones(1, 1, 1)
    >>> cross_rollout_step(zero, one, torch.tensor([[[.5, .5]]]), 0.75)
    (tensor([[[0.1250, 0.1250]]]), tensor([[[0.7500]]]))
    """
    past, own, new = (
        as_working("source", source),
        as_working("prefix", prefix),
        as_working("reached", reached),
    )
    beta = torch.as_tensor(residual, dtype=past.dtype, device=past.device)
    check_share("residual", beta)
    beta = beta[..., None] if beta.ndim else beta
    return restore(beta * past + (1 - beta) * new, source), restore(beta * own, prefix)


def encoder_decoder_relevance(  # noqa: PLR0917
    encoder: Sequence[Array] | Array,
    decoder: Sequence[Array] | Array,
    cross: Sequence[Array] | Array,
    encoder_grad: Sequence[Array] | Mapping[int, Array] | Array,
    decoder_grad: Sequence[Array] | Mapping[int, Array] | Array,
    cross_grad: Sequence[Array] | Mapping[int, Array] | Array,
    *,
    normalize: bool = True,
) -> Array:
    """Return how the source bears on one target logit, through an encoder-decoder model.

    The two-stream rules (Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679): the encoder by the self
    rule, then each decoder layer's self-attention and cross-attention
    (:func:`audit.methods.two_stream.two_stream_relevance` gives the equations).

    Parameters
    ----------
    encoder, decoder, cross
        Attention as in :func:`encoder_decoder_rollout`.
    encoder_grad, decoder_grad, cross_grad
        Gradient of one logit with respect to each, in the order of the layers or keyed by layer.
    normalize : bool
        Normalise both self relevances before they enter a cross step.

    Returns
    -------
    (batch, decoder position, encoder position), float32 or float64
        Cross relevance, not normalised; the map is the row of the position that predicts the target.

    Raises
    ------
    ValueError
        When shapes contradict each other, a gradient is missing, or values are NaN.

    Notes
    -----
    It tells which source positions the attention paths that favour the target start from. It cannot
    tell evidence against the target; a row of zeros has no map.

    Examples
    --------
    >>> import torch
    >>> ones = torch.ones(1, 1, 1, 1, 1)
    >>> encoder_decoder_relevance(ones, ones, ones, ones, ones, ones)
    tensor([[[4.]]])
    """
    encoder, decoder, cross = _checked_stacks(encoder, decoder, cross)
    gradients = [
        gradients_by_layer(given, layers, name)
        for given, layers, name in (
            (encoder_grad, encoder, "encoder_grad"),
            (decoder_grad, decoder, "decoder_grad"),
            (cross_grad, cross, "cross_grad"),
        )
    ]
    relevances = identity_relevances(
        as_working("decoder", decoder[0]), decoder[0].shape[2], encoder[0].shape[2]
    )
    for layer, gradient in zip(encoder, gradients[0], strict=True):
        relevances = self_step(relevances, "second", weigh_by_gradient(layer, gradient))
    for index, layer in enumerate(decoder):
        relevances = self_step(relevances, "first", weigh_by_gradient(layer, gradients[1][index]))
        weighted = weigh_by_gradient(cross[index], gradients[2][index])
        relevances = cross_step(relevances, weighted, normalize=normalize)
    return restore(relevances.first_second, decoder[0])


def _checked_stacks(
    encoder: Sequence[Array] | Array, decoder: Sequence[Array] | Array, cross: Sequence[Array] | Array
) -> tuple[list[Array], list[Array], list[Array]]:
    """Return the three stacks as lists of layers whose shapes agree."""
    stacks = as_layers("encoder", encoder), as_layers("decoder", decoder), as_layers("cross", cross)
    check_square("encoder", stacks[0])
    check_square("decoder", stacks[1])
    source, steps, between = (stack[0].shape for stack in stacks)
    if len(stacks[1]) != len(stacks[2]):
        raise ValueError(f"cross: expected {len(stacks[1])} layers like the decoder, got {len(stacks[2])}")
    if (between[0], between[2], between[3]) != (steps[0], steps[2], source[2]) or source[0] != steps[0]:
        raise ValueError(
            f"cross: expected (batch, head, {steps[2]} decoder positions, {source[2]} encoder positions) "
            f"for encoder {tuple(source)} and decoder {tuple(steps)}, got {tuple(between)}"
        )
    return stacks


def _fused(name: str, index: int, layer: AnyArray) -> torch.Tensor:
    offset = None if name == "cross" else 0
    fused = fuse_heads(as_working(name, layer), query_offset=offset)
    check_row_sums(f"{name}[{index}]", fused, exact=True)
    return fused
