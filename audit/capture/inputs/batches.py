"""Cut probes into batches of equal length, so that no probe is padded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from audit.capture.inputs.encoded import Encoded
from audit.records import Captured


def length_batches(
    encoded: Sequence[Encoded], batch_tokens: int, *, max_size: int | None = None
) -> list[list[int]]:
    """Group probes of one shape into batches of at most `batch_tokens` positions.

    Parameters
    ----------
    encoded : sequence of Encoded
    batch_tokens : int
        Constant budget: which probes share a batch depends on it and the probes alone.
    max_size : int, optional
        Largest number of probes in a batch.

    Returns
    -------
    list of lists of indices into `encoded`
        Short probes first; within one length by probe id, so that the order of the probes does not
        matter. Every index occurs once.
    """
    shapes: dict[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], list[int]] = defaultdict(list)
    for index, item in enumerate(encoded):
        shape = tuple(sorted((name, tuple(t.shape)) for name, t in item.tensors.items()))
        shapes[len(item), shape].append(index)
    batches = []
    for (length, _), indices in sorted(shapes.items(), key=lambda pair: pair[0]):
        size = min(max(1, batch_tokens // length), max_size or len(indices))
        indices.sort(key=lambda i: encoded[i].probe.id)
        batches += [indices[start : start + size] for start in range(0, len(indices), size)]
    return batches


def in_order(
    batches: Sequence[Sequence[int]], capture: Callable[[Sequence[int]], Sequence[Captured]]
) -> Iterator[Captured]:
    """Yield what `capture` gives for each index of `batches`, in the order of the indices."""
    ready: dict[int, Captured] = {}
    cursor = 0
    for indices in batches:
        ready |= dict(zip(indices, capture(indices), strict=True))
        while cursor in ready:
            yield ready.pop(cursor)
            cursor += 1


def stack(encoded: Sequence[Encoded]) -> dict[str, Tensor]:
    """Join the tensors of one batch along the batch axis."""
    return {name: torch.cat([item.tensors[name] for item in encoded]) for name in encoded[0].tensors}


def valid_positions(tensors: Mapping[str, Tensor], size: int, length: int) -> Tensor:
    """Return which positions are no pads: bool (batch, position)."""
    mask = tensors.get("attention_mask")
    if mask is None or mask.shape != (size, length):
        device = next(iter(tensors.values())).device
        return torch.ones(size, length, dtype=torch.bool, device=device)
    return mask.bool()


LONGEST_CHECK = 256
"""Longer text is cut to this before checks that keep whole weights."""


def beginning(item: Encoded, least: int = 0) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of the beginning of a long text, or of the whole input, and its length.

    Whether positions mix by other ways than attention is a matter of the modules, not of the length, as long
    as it is `least` or more.
    """
    n, size, tensors = len(item), max(LONGEST_CHECK, least), dict(item.tensors)
    if n <= size or any(tuple(t.shape) != (1, n) for t in tensors.values()):
        return tensors, n
    return {name: t[:, :size] for name, t in tensors.items()}, size
