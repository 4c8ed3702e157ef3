"""Measure which position of one part of a model each position of an earlier part feeds.

No table of families: a gradient tells. Every earlier position is given a code by the bits of the later
positions that draw on it, so that 2·log2(n) backward passes through the connection find them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NONE, SEVERAL = -1, -2


def feeds(target: Tensor, leaves: Sequence[Tensor], *, whole: bool = True) -> list[Tensor]:
    """Return which row of `target` each position of each leaf feeds.

    Parameters
    ----------
    target : Tensor (row, dim)
        Computed from the leaves.
    leaves : sequence of Tensor
        With gradients.
    whole : bool
        Whether the last axis of a leaf is one position's vector. Else each of its numbers is a position.

    Returns
    -------
    list of int64 Tensor
        Shape of the leaf, without its last axis where `whole`. ``NONE`` where a position feeds no row,
        ``SEVERAL`` where it feeds more than one.

    Notes
    -----
    A position that feeds one row i shows a gradient from the rows whose index has bit b set, or from
    those that have not, never from both; which of them spells i.

    Examples
    --------
    >>> leaf = torch.ones(3, 2, requires_grad=True)
    >>> [found.tolist() for found in feeds(leaf[[2, 0]] * 3.0, [leaf])]
    [[1, -1, 0]]
    >>> feeds(leaf.cumsum(0), [leaf])[0].tolist()
    [-2, -2, 2]
    """
    rows = len(target)
    index = torch.arange(rows, device=target.device)
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(target.shape, generator=draw).to(target)
    found = [torch.zeros(_shape(leaf, whole), dtype=torch.int64, device=leaf.device) for leaf in leaves]
    hits = [torch.zeros_like(code) for code in found]
    several = [torch.zeros_like(code, dtype=torch.bool) for code in found]
    bits = max(1, (rows - 1).bit_length())
    for bit in range(bits):
        chosen = [weights * (index >> bit & 1 == side)[:, None] for side in (0, 1)]
        sides = [_touched(target, leaves, each, whole) for each in chosen]
        for i, (zero, one) in enumerate(zip(*sides, strict=True)):
            found[i] += one.long() << bit
            hits[i] += (zero | one).long()
            several[i] |= zero & one
    return [
        code.masked_fill(count < bits, SEVERAL).masked_fill(both, SEVERAL).masked_fill(count == 0, NONE)
        for code, count, both in zip(found, hits, several, strict=True)
    ]


def _shape(leaf: Tensor, whole: bool) -> torch.Size:
    return leaf.shape[:-1] if whole else leaf.shape


def _touched(target: Tensor, leaves: Sequence[Tensor], weights: Tensor, whole: bool) -> list[Tensor]:
    """Return which positions of the leaves have a gradient from `weights` of the target."""
    if not target.requires_grad:
        return [torch.zeros(_shape(leaf, whole), dtype=torch.bool, device=leaf.device) for leaf in leaves]
    gradients = torch.autograd.grad(target, leaves, weights, retain_graph=True, allow_unused=True)
    touched = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        hit = torch.zeros_like(leaf, dtype=torch.bool) if gradient is None else gradient != 0
        touched.append(hit.any(dim=-1) if whole else hit)
    return touched
