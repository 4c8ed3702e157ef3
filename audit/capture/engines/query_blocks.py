r"""Query blocks: rows of every row-wise variant of rollout, a block of queries at a time.

Derivation. A row is carried from the last layer down, r ← (1-ρ)·r·F + ρ·r, with F the fused and pruned
attention of a layer. Head fusion by max or min, discarding and top-k act on each row of F alone, and

.. math:: (rF)_k = \sum_q r_q F_{qk} = \sum_{\text{blocks } B}\; \sum_{q\in B} r_q F_{qk},

so F is needed for one block of queries at a time: softmax of the block, fuse, prune, renormalise, add.
Memory is head × block × n, probe after probe; a block, and the keys of its probe, that stay in the
processor's cache make one row about as cheap as one call of the fused kernel. Where heads are averaged and
nothing is pruned, F need not be formed: r·F = mean_h r·A^h. Queries on which no row draws are left out,
unless pruning may leave rows empty: an output row of one position costs one row of the last layer.
Soft-capped scores, position bias, masks and learned sinks are those of
:func:`audit.capture.attention.weights.attention_weights`; a sink is a position that draws on itself alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from audit.capture.attention.interface import KernelCall
from audit.capture.attention.scratch import Scratch
from audit.capture.attention.weights import attention_weights
from audit.capture.engines.settings import FoldSettings
from audit.errors import CaptureError
from audit.methods.fusion import fuse_heads_counted

BLOCK_ENTRIES = 2**20
"""Weights (batch × head × query × key) of one block of queries: 4 MB in float32."""
FEWEST_QUERIES = 32
"""Of a block, however long the input: each block reads all keys, and fewer queries do not repay that."""
FEW_ROWS = 2
"""Up to so many rows are multiplied with each head; more with the mean of the heads, formed once."""


def rows_by_blocks(
    call: KernelCall,
    rows: Tensor,
    valid: Tensor,
    settings: FoldSettings,
    layer: int,
    *,
    empty_rows: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Return r·F of one layer for each row r, F being its fused and pruned attention.

    Parameters
    ----------
    call : KernelCall
    rows : float Tensor (batch, row, query), perhaps one more query: the sink
        Zero at pads.
    valid : bool Tensor (batch, position)
    settings : FoldSettings
        Fusion and pruning of heads.
    layer : int
        Whose weights of heads are taken.
    empty_rows : int Tensor (batch,), optional
        Where pruning may leave rows empty, their number is added here.
    scratch : Scratch, optional
        Where a block's weights may lie.

    Returns
    -------
    Tensor (batch, row, key), one more key with a sink
        Each with the sum of its row.

    Raises
    ------
    CaptureError
        When a valid row's weights do not sum to 1.
    """
    call = laid_out(call)
    n = call.query.shape[2]
    sinks = call.options.get("s_aux")
    extra = max(int(sinks is not None), rows.shape[2] - n)
    found = rows.new_zeros(*rows.shape[:2], n + extra)
    if rows.shape[2] > n:
        found[..., n] = rows[..., n]
    scratch, empties = scratch or Scratch(), may_empty(settings)
    for probe, one in single_probes(call):
        for block in query_blocks(one) if empties else drawn_blocks(one, rows[probe]):
            weighed, pads = rows[probe, :, block], ~valid[probe, block]
            weights = block_weights(one, block, scratch)
            if bool(pads.any()):
                weights = weights.masked_fill(pads[:, None, :, None], 0.0)
            part, empty = _times_fused(weights, weighed.to(weights.dtype), settings, layer, block)
            found[probe, :, : part.shape[2]] += part
            if empties and empty_rows is not None:
                empty_rows[probe] += empty - pads.sum(dim=1)
    _check_sums(call, found, rows)
    return found


def laid_out(call: KernelCall) -> KernelCall:
    """Return the call as blocks are computed from it: head after head, in float32, keys along their length.

    Otherwise every block would copy and convert all keys again.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key = call.query.to(dtype).transpose(0, 1), call.key.to(dtype).permute(1, 0, 3, 2)
    if len(key) != len(query):
        key = key.repeat_interleave(len(query) // len(key), dim=0)
    return replace(call, query=query.contiguous().transpose(0, 1), key=key.contiguous().permute(1, 0, 3, 2))


def kept_call(call: KernelCall, scratch: Scratch, number: int) -> KernelCall:
    """Return the `number`-th call of a batch without its values, queries and keys copied as blocks read them.

    They lie in `scratch` until the call of this number of the next batch; keys stand in the place of the
    values. Keys of grouped queries and half precision are kept as they are, for :func:`laid_out`.
    """
    query = scratch.keep(f"queries of call {number}", call.query.transpose(0, 1)).transpose(0, 1)
    key = scratch.keep(f"keys of call {number}", call.key.permute(1, 0, 3, 2)).permute(1, 0, 3, 2)
    return replace(call, query=query, key=key, value=key)


def single_probes(call: KernelCall) -> Iterator[tuple[slice, KernelCall]]:
    """Yield the call of each probe of a batch, whose keys a cache holds from block to block."""
    batch = len(call.query)
    for i in range(batch):
        probe = slice(i, i + 1)
        mask, bias = (
            t[probe] if t is not None and t.dim() == 4 and len(t) == batch else t
            for t in (call.mask, call.options.get("position_bias"))
        )
        query, key, value = call.query[probe], call.key[probe], call.value[probe]
        options = {**call.options, "position_bias": bias}
        yield probe, replace(call, query=query, key=key, value=value, mask=mask, options=options)


def query_blocks(call: KernelCall) -> Iterator[slice]:
    """Yield the blocks of queries of a call: BLOCK_ENTRIES weights each, or FEWEST_QUERIES."""
    n, size = call.query.shape[2], _block_size(call)
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def drawn_blocks(call: KernelCall, rows: Tensor) -> Iterator[slice | Tensor]:
    """Yield blocks of the queries on which a row draws; of few queries their positions."""
    n = call.query.shape[2]
    drawn = rows[..., :n].flatten(0, 1).any(dim=0)
    if 2 * int(drawn.sum()) > n:
        yield from query_blocks(call)
    else:
        yield from torch.split(drawn.nonzero()[:, 0], _block_size(call)) if bool(drawn.any()) else ()


def _block_size(call: KernelCall) -> int:
    batch, heads = call.query.shape[:2]
    return max(FEWEST_QUERIES, BLOCK_ENTRIES // (batch * heads * call.key.shape[2]))


def _times_fused(
    weights: Tensor, rows: Tensor, settings: FoldSettings, layer: int, block: slice | Tensor
) -> tuple[Tensor, Tensor | int]:
    """Return r·F for a block of queries: (batch, row, key); and how many of them have no mass: (batch,)."""
    shares = settings.head_weights_of(layer)
    if prunes(settings):
        offset = block.start if isinstance(block, slice) else None  # what is left out has no empty rows
        fused, empty = fuse_heads_counted(
            weights, query_offset=offset, head_weights=shares, **settings.fusion
        )
        return rows @ fused, empty
    if rows.shape[1] > FEW_ROWS:
        return rows @ _mean_of_heads(weights, shares), 0
    return _mean_of_heads(rows[:, None] @ weights, shares), 0


def _mean_of_heads(heads: Tensor, shares: Sequence[float] | None) -> Tensor:
    """Return the mean over the heads, or with `shares` the weighted sum: (batch, row, key).

    Equal groups of heads come first, one for each thread: a thread adds the heads that it wrote itself, and
    caches exchange the groups' sums alone.
    """
    if shares is not None:
        return torch.einsum("h,bhrk->brk", heads.new_tensor(shares), heads)
    batch, count, *shape = heads.shape
    groups = math.gcd(count, torch.get_num_threads())
    return heads.view(batch, groups, count // groups, *shape).sum(dim=2).sum(dim=1).div_(count)


def prunes(settings: FoldSettings) -> bool:
    """Return whether heads are fused by another rule than a weighted mean, or rows pruned."""
    fusion = settings.fusion
    pruned = fusion.get("discard_ratio") or fusion.get("discard_below") is not None or fusion.get("top_k")
    return fusion.get("head_fusion", "mean") not in ("mean", "weighted") or bool(pruned)


def may_empty(settings: FoldSettings) -> bool:
    """Return whether fusion or pruning may leave a row without mass."""
    return settings.fusion.get("head_fusion") == "min" or settings.fusion.get("discard_below") is not None


def _check_sums(call: KernelCall, found: Tensor, rows: Tensor) -> None:
    error = (found.sum(dim=-1) - rows.sum(dim=-1)).abs().amax()
    if not error <= 1e-4:
        raise CaptureError(f"attention layer {call.path} has rows that sum to 1 ± {float(error):.3g}")


def block_weights(call: KernelCall, block: slice | Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return the weights of a block of queries: (batch, head, query of the block, key).

    A block is a slice of the positions, or an int Tensor of them. With `scratch` its weights are good until
    the next block's are asked for.
    """
    n, mask = call.query.shape[2], call.mask
    if mask is None and call.is_causal and n > 1:
        positions = torch.arange(n, device=call.query.device)
        mask = positions[None] <= positions[block, None]
    compute = attention_weights if scratch is None else scratch.weights
    return compute(
        call.query[:, :, block],
        call.key,
        _rows_of(mask, block, n),
        scaling=call.options.get("scaling"),
        softcap=call.options.get("softcap"),
        position_bias=_rows_of(call.options.get("position_bias"), block, n),
        sinks=call.options.get("s_aux"),
    )


def _rows_of(tensor: Tensor | None, block: slice | Tensor, length: int) -> Tensor | None:
    """Return the rows of a mask or bias; one that is the same for every query stays as it is."""
    if tensor is None or tensor.dim() < 2 or tensor.shape[-2] != length:
        return tensor
    return tensor[..., block, :]
