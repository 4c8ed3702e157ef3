"""Attention within bands and blocks of keys: the whole matrix (query, key), from what the layer computed.

Longformer and LED give the weights of a sliding window, of global keys and of global queries apart; LongT5
those of three blocks around each block of queries; BigBird's own matrix is wrong where two of its blocks of
keys fall together. What is built here is compared with the layer's own output in every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import VALUE_TOLERANCE
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.parts import Inner
from audit.errors import CaptureError

Given = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments of a call."""
_given_length: ContextVar[int | None] = ContextVar("given_length", default=None)
_WINDOW = ("LongformerSelfAttention", "LEDEncoderSelfAttention")
_BLOCKS = ("BigBirdBlockSparseAttention", "BigBirdPegasusBlockSparseAttention")
_LOCAL = ("LongT5LocalAttention",)


@dataclass(frozen=True)
class DenseCall:
    """One call of a layer, and its output computed once more from the whole matrix.

    Attributes
    ----------
    call : AttentionCall
        Without the positions that the model itself added at the end.
    mixed : Tensor (batch, query, head, dim)
        Attention × values; with gradients, where the pass has them.
    first : int
        Index of the first tensor of weights among what the layer returned.
    """

    call: AttentionCall
    mixed: Tensor
    first: int


@dataclass(frozen=True)
class _Parts:
    """Weights (batch, head, n, n), values (batch, head, n, dim) and output (batch, n, head, dim) of a layer.

    `rows` (batch, n) are queries with other values, `other`; `projection` takes the output inside the layer;
    `first` is the index of the first tensor of weights among what the layer returned.
    """

    weights: Tensor
    value: Tensor
    output: Tensor
    rows: Tensor | None = None
    other: Tensor | None = None
    projection: str = ""
    first: int = 1


@contextmanager
def given_length(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Remember how long the inputs of a pass are: some models pad them to a multiple of their window."""
    given = next((tensors[name] for name in ("input_ids", "inputs_embeds") if name in tensors), None)
    token = _given_length.set(None if given is None else given.shape[1])
    try:
        yield
    finally:
        _given_length.reset(token)


def padded_length(module: nn.Module, length: int) -> int:
    """Return how many positions a layer has when its model is given `length`.

    Examples
    --------
    >>> padded_length(nn.Linear(1, 1), 5)
    5
    """
    step, name = 1, type(module).__name__
    if name in _WINDOW:
        windows: int | list[int] = module.config.attention_window  # type: ignore[assignment, union-attr]
        step = windows if isinstance(windows, int) else max(windows)
    if name in _BLOCKS:
        step = module.block_size  # type: ignore[assignment]
    return -(-length // step) * step


def dense_call(
    path: str, module: nn.Module, given: Given, output: Any, inner: Inner, *, verify: bool = True
) -> DenseCall | None:
    """Return one call of a layer that attends within bands or blocks, None for other layers.

    Parameters
    ----------
    path : str
    module : nn.Module
    given : what the layer was called with
    output : what it returned, asked for its weights
    inner : mapping of a projection's name to its input and output
    verify : bool
        Off where the output is not what the layer attended to, but what it was given in a replay.

    Raises
    ------
    CaptureError
        When the matrix times the values is not what the layer returned.
    """
    build = _BUILD.get(type(module).__name__)
    if build is None:
        return None
    args, kwargs = given
    parts = build(module, inspect.signature(module.forward).bind(*args, **kwargs).arguments, output, inner)
    own = _given_length.get()
    size = parts.weights.shape[-1]
    n = own if own is not None and padded_length(module, own) == size else size
    weights, result = parts.weights[..., :n, :n], parts.output[:, :n]
    mixed = _mixed(weights, parts)
    if verify:
        _verify(path, module, mixed, result)
    # The layers of a model that pads have more positions than the map: nothing can split what they add.
    value = parts.value if type(module).__name__ in _LOCAL else None
    call = AttentionCall(path, weights, result, value, returned=output[0], projection=parts.projection)
    return DenseCall(call, mixed, parts.first)


def _mixed(weights: Tensor, parts: _Parts) -> Tensor:
    wide, n = torch.promote_types(weights.dtype, torch.float32), weights.shape[-1]
    mixed = (weights.to(wide) @ parts.value[:, :, :n].to(wide)).transpose(1, 2)
    if parts.rows is None or parts.other is None:
        return mixed
    other = (weights.to(wide) @ parts.other[:, :, :n].to(wide)).transpose(1, 2)
    return torch.where(parts.rows[:, :n, None, None], other, mixed)


def _verify(path: str, module: nn.Module, mixed: Tensor, output: Tensor) -> None:
    error = (mixed - output).detach().abs().amax()
    scale = output.detach().abs().amax().to(mixed.dtype).clamp_min(1e-6)
    tolerance = VALUE_TOLERANCE[output.dtype]
    if not error <= tolerance * scale:
        raise CaptureError(
            f"attention layer {path} ({type(module).__name__}): its bands put together, times its values, "
            f"differ from the layer's own output by {float(error / scale):.3g}, allowed {tolerance:g}; "
            "this architecture is not supported"
        )


def through(module: nn.Module, dense: DenseCall) -> Tensor:
    """Return what the layer returned, to the last bit, with the gradient of the whole matrix."""
    returned = dense.call.returned
    if returned is None:
        raise ValueError("dense: expected a call with what its layer returned")
    states = dense.mixed.flatten(2).to(returned.dtype)
    if dense.call.projection:
        states = module.get_submodule(dense.call.projection)(states)
    rest = returned.detach()
    added = torch.zeros_like(rest)
    added = torch.cat([states - states.detach(), added[:, states.shape[1] :]], dim=1)
    return rest + added


def _heads(states: Tensor, heads: int) -> Tensor:
    """Return (batch, n, head · dim) as (batch, head, n, dim)."""
    return _split(states, heads).transpose(1, 2)


def _split(states: Tensor, heads: int) -> Tensor:
    """Return (batch, n, head · dim) as (batch, n, head, dim)."""
    return states.reshape(*states.shape[:-1], heads, -1)


def _window_parts(module: Any, given: Mapping[str, Any], output: Any, inner: Inner) -> _Parts:
    """Put together a sliding window, global keys and global queries (Beltagy et al., arXiv 2004.05150, §3.1).

    Global queries have projections of their own, their values included.
    """
    heads, side, returned = module.num_heads, module.one_sided_attn_window_size, output[1]
    value = _heads(inner["value"][1].transpose(0, 1), heads)
    output_heads = _split(output[0], heads)
    extra = returned.shape[-1] - (2 * side + 1)
    weights = banded_matrix(returned[..., extra:].transpose(1, 2), side)
    if not given.get("is_global_attn"):
        return _Parts(weights, value, output_heads)
    rows: Tensor = given["is_index_global_attn"]
    weights = _with_global_keys(weights, returned[..., :extra].transpose(1, 2), rows)
    slot = (rows.long().cumsum(dim=1) - 1).clamp_min(0)[:, None, :, None].expand_as(weights)
    weights = torch.where(rows[:, None, :, None], output[2].gather(2, slot), weights)
    other = _heads(inner["value_global"][1].transpose(0, 1), heads)
    return _Parts(weights, value, output_heads, rows, other)


def banded_matrix(band: Tensor, side: int) -> Tensor:
    """Return a band as a matrix that is zero outside it.

    Parameters
    ----------
    band : Tensor (…, n, 2 · side + 1)
        Row i holds the weights of the keys i − side to i + side.
    side : int

    Returns
    -------
    Tensor (…, n, n)

    Examples
    --------
    >>> banded_matrix(torch.tensor([[0.0, 0.9, 0.1], [0.2, 0.3, 0.5], [0.4, 0.6, 0.0]]), 1)
    tensor([[0.9000, 0.1000, 0.0000],
            [0.2000, 0.3000, 0.5000],
            [0.0000, 0.4000, 0.6000]])
    """
    n, width = band.shape[-2:]
    key = torch.arange(n, device=band.device)[:, None] + torch.arange(width, device=band.device)
    whole = band.new_zeros(*band.shape[:-1], n + 2 * side)
    return whole.scatter(-1, key.expand(band.shape), band)[..., side : side + n]


def _with_global_keys(weights: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
    """Add `columns` (batch, head, n, slot): slot s is the s-th global position of its probe, in order."""
    at = [probe.nonzero()[:, 0] for probe in rows]
    slots = columns.shape[-1]
    # A probe with fewer global positions than another has empty slots, of weight 0.
    filled = torch.stack([torch.nn.functional.pad(one, (0, slots - len(one))) for one in at])
    return weights.scatter_add(-1, filled[:, None, None, :].expand(columns.shape), columns)


def _block_parts(module: Any, given: Mapping[str, Any], output: Any, inner: Inner) -> _Parts:
    """Give BigBird's kernel the identity as values, which makes it return its weights (arXiv 2007.14062).

    Outside training its random blocks of keys are all the first block, which is a global one as well: the
    matrix that the layer returns keeps the last of such entries, where the output has their sum.
    """
    heads = module.num_attention_heads
    query, key, value = (_heads(inner[name][1], heads) for name in ("query", "key", "value"))
    batch, _, n, _ = query.shape
    identity = torch.eye(n, dtype=value.dtype, device=value.device).expand(batch, heads, n, n).contiguous()
    masks = (given[f"{name}_mask"] for name in ("band", "from", "to", "from_blocked", "to_blocked"))
    context, _ = module.bigbird_block_sparse_attention(
        query,
        key,
        identity,
        *masks,
        heads,
        module.num_random_blocks,
        module.attention_head_size,
        module.block_size,
        module.block_size,
        batch,
        n,
        n,
        seed=module.seed,
        plan_from_length=None,
        plan_num_rand_blocks=None,
    )
    weights = context.reshape(batch, n, heads, n).transpose(1, 2)
    return _Parts(weights, value, _split(output[0], heads))


def _local_parts(module: Any, given: Mapping[str, Any], output: Any, inner: Inner) -> _Parts:
    """Put together the blocks of LongT5's local attention (Guo et al., arXiv 2112.07916, §3.1.1)."""
    blocks: Tensor = output[-1]  # batch, block, head, query in block, key in three blocks
    heads, size, n = module.n_heads, module.block_len, given["hidden_states"].shape[1]
    whole = blocks.new_zeros(len(blocks), heads, blocks.shape[1] * size, (blocks.shape[1] + 2) * size)
    row = torch.arange(whole.shape[2], device=blocks.device)
    key = (row // size * size)[:, None] + torch.arange(3 * size, device=blocks.device)
    lines = blocks.transpose(1, 2).flatten(2, 3)
    weights = whole.scatter(-1, key.expand(lines.shape), lines)[..., :n, size : size + n]
    value = _heads(inner["v"][1], heads)
    return _Parts(weights, value, _split(inner["o"][0], heads), projection="o", first=2)


_BUILD = {
    **dict.fromkeys(_WINDOW, _window_parts),
    **dict.fromkeys(_BLOCKS, _block_parts),
    **dict.fromkeys(_LOCAL, _local_parts),
}
