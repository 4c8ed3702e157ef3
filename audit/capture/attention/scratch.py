"""Memory that is used again from batch to batch: fresh pages cost more than the numbers that fill them."""

from __future__ import annotations

import torch
from torch import Tensor

from audit.capture.attention.weights import attention_weights

HEAD_BY_HEAD = 4
"""From so many samples on, a product for each head, which reads queries and keys where the model has laid
them; smaller batches take one product of all heads, which copies them first but keeps all threads busy."""


class Scratch:
    """Room for the weights of one attention call at a time, and for what is kept of a batch under a name.

    Who takes weights from here is done with them before the next call's are asked for. The room grows to
    the largest call and stays, head by head, so that weights are a view with its first axes exchanged; one
    thread uses it.
    """

    def __init__(self) -> None:
        self._room: dict[tuple[str, torch.dtype], Tensor] = {}

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        mask: Tensor | None = None,
        *,
        scaling: float | None = None,
        is_causal: bool = False,
        softcap: float | None = None,
        position_bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return what :mod:`audit.capture.attention.weights` computes, good until the next call.

        Soft-capped scores, position bias, sinks and devices other than the CPU, whose allocators keep
        their memory, get fresh memory.

        Examples
        --------
        >>> Scratch().weights(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), is_causal=True)[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
        """
        if query.device.type != "cpu" or any(x is not None for x in (softcap, position_bias, sinks)):
            return attention_weights(
                query,
                key,
                mask,
                scaling=scaling,
                is_causal=is_causal,
                softcap=softcap,
                position_bias=position_bias,
                sinks=sinks,
            )
        room = self._scores(query, key, query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = room.transpose(0, 1)
        hide(scores, mask, is_causal=is_causal)
        empty = None if mask is None else torch.isneginf(scores.amax(dim=-1, keepdim=True))
        torch.softmax(room, dim=-1, out=room)
        if empty is not None and bool(empty.any()):
            scores.masked_fill_(empty, 0.0)
        return scores

    @property
    def nbytes(self) -> int:
        """Return how many bytes the room takes."""
        return sum(room.nbytes for room in self._room.values())

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor, good until the next one of this name is kept.

        Other devices than the CPU, whose allocators keep their memory, get the tensor as it is.

        Examples
        --------
        >>> scratch = Scratch()
        >>> first = scratch.keep("key 0", torch.zeros(2, 3))
        >>> scratch.keep("key 0", torch.ones(3, 2).T).data_ptr() == first.data_ptr()
        True
        """
        if tensor.device.type != "cpu":
            return tensor
        return self._take(name, tensor.shape, tensor.dtype).copy_(tensor)

    def _scores(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """Return scale · QKᵀ: (head, batch, query, key)."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(dtype).transpose(0, 1), key.to(dtype).transpose(0, 1)
        heads, batch, queries, _ = query.shape
        group = heads // len(key)
        room = self._take("weights", torch.Size((heads, batch, queries, key.shape[2])), dtype)
        if batch < HEAD_BY_HEAD or key.mT.is_contiguous():  # laid out already, as blocks of queries have it
            key = key.repeat_interleave(group, dim=0) if group > 1 else key
            rows, columns, flat = (t.reshape(-1, *t.shape[2:]) for t in (query, key, room))
            torch.baddbmm(flat, rows, columns.transpose(1, 2), beta=0, alpha=scale, out=flat)
            return room
        for head, part in enumerate(room):
            columns = key[head // group].transpose(1, 2)
            torch.baddbmm(part, query[head], columns, beta=0, alpha=scale, out=part)
        return room

    def _take(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size, room = shape.numel(), self._room.get((name, dtype))
        if room is None or room.numel() < size:
            room = self._room[name, dtype] = torch.empty(size, dtype=dtype)
        return room[:size].view(shape)


def hide(scores: Tensor, mask: Tensor | None, *, is_causal: bool) -> None:
    """Take from the scores, in place, the keys that a mask or causality hides.

    The arguments mean what they mean to :func:`audit.capture.attention.weights.attention_weights`.
    """
    queries, keys = scores.shape[-2:]
    if mask is not None:
        mask = mask[..., :keys]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, float("-inf"))
        else:
            scores.add_(mask.to(scores.dtype))
    elif is_causal and queries > 1:
        later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, float("-inf"))
