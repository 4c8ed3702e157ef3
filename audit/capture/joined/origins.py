"""Which parts of the image each position that a text model reads stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from audit.capture.joined.front import KEYS, Depth, Front, context_of
from audit.errors import CaptureError


@dataclass(frozen=True)
class Origins:
    """The connectors between stacks, and the stacks before the last one, as one matrix.

    Parameters
    ----------
    stacks : sequence of str
        In the order in which they run; rows are read from the last.
    front : Front
        What feeds what between them.
    device : torch.device
    states : mapping of Depth to Tensor (sequence, position, position), optional
        How far each position of a stack at a depth draws on each of its input, such as its rollout.
        Without it a position stands for itself, at every depth.
    """

    stacks: Sequence[str]
    front: Front
    device: torch.device
    states: Mapping[Depth, Tensor] | None = None

    def matrix(self) -> Tensor:
        """Return which image positions each position of the last stack stands for.

        A position that several patches were merged into stands for each of them alike, and so it does for
        the layers of a tower where the connector reads several.

        Returns
        -------
        Tensor (position, image position)
            Rows sum to 1 where those of the states do; to 0 where a position stands for no part of the
            image. Keys of cross-attention stand behind the positions.
        """
        first = self.stacks[0]
        size = self.front.sizes[first][0] * self.front.sizes[first][1]
        columns = size + latent_count(self.front)
        known = {first: torch.eye(size, columns, dtype=torch.float64, device=self.device)}
        if len(self.stacks) == 1:
            seen = torch.from_numpy(np.unique(self.front.pixels[self.front.pixels >= 0])).to(self.device)
            own = torch.zeros_like(known[first])
            own[seen, seen] = 1
            return own
        for stack in self.stacks[1:]:
            if stack in self.front.contexts:
                known[stack] = self._of_latents(stack, known, size)
                size += int(np.prod(self.front.sizes[stack]))
                continue
            known[stack] = self._made_of(stack, known)
            whole = bool((known[stack].sum(dim=1) > 0).all())
            if stack != self.stacks[-1] and not whole:
                raise CaptureError(
                    f"{stack} has positions of its own beside those of the image; its map cannot be composed"
                )
        last = known[self.stacks[-1]]
        if KEYS not in self.front.sizes:
            return last
        keys = self._made_of(KEYS, known)
        if not bool((keys.sum(dim=1) > 0).all()):
            raise CaptureError(
                "cross-attention has keys beside those of the image; its map cannot be composed"
            )
        return torch.cat([last, keys])

    def _of_latents(self, stack: str, known: Mapping[str, Tensor], start: int) -> Tensor:
        """Return what latents, which stand for themselves, and their context are made of, by sequences."""
        sequences, own = self.front.sizes[stack]
        context = self._made_of(context_of(stack), known)
        if not bool((context.sum(dim=1) > 0).all()):
            raise CaptureError(f"{stack} attends to positions beside those of the image; not supported")
        latents = context.new_zeros(sequences, own, context.shape[1])
        index = torch.arange(sequences * own, device=context.device)
        latents.view(-1, context.shape[1])[index, start + index] = 1.0
        beside = context.reshape(sequences, -1, context.shape[1])
        return torch.cat([latents, beside], dim=1).flatten(0, 1)

    def _made_of(self, stack: str, known: Mapping[str, Tensor]) -> Tensor:
        contexts = {context_of(name): size for name, size in self.front.contexts.items()}
        count = int(np.prod(contexts[stack] if stack in contexts else self.front.sizes[stack]))
        image = known[self.stacks[0]]
        total, times = image.new_zeros(count, image.shape[1]), image.new_zeros(count, 1)
        for depth, fed in self.front.sources[stack].items():
            taken = merging(torch.from_numpy(fed), count).to(self.device)
            total += self._rolled(taken, depth) @ known[depth[0]]
            times += (taken.sum(dim=1, keepdim=True) > 0).to(taken.dtype)
        return total / times.clamp_min(1.0)

    def _rolled(self, rows: Tensor, depth: Depth) -> Tensor:
        """Return rows (row, position) times the state of a stack at a depth, sequence by sequence."""
        beside = self.front.contexts.get(depth[0], (0, 0))[1]
        if self.states is None:
            cut = rows.reshape(len(rows), self.front.sizes[depth[0]][0], -1)
            return torch.nn.functional.pad(cut, (0, beside)).flatten(1)
        if depth[1] == 0 and not beside:
            return rows
        if depth not in self.states:
            raise CaptureError(
                f"block {depth[1] - 1} of {depth[0]} is read, but not every block has one attention layer; "
                "this architecture is not supported"
            )
        matrix = self.states[depth].to(rows.dtype)
        cut = torch.nn.functional.pad(rows.reshape(len(rows), len(matrix), -1), (0, beside))
        return torch.einsum("rsq,sqk->rsk", cut, matrix).reshape(len(rows), -1)


def latent_count(front: Front) -> int:
    """Return how many learned latents stand between the image and the last stack."""
    return sum(int(np.prod(front.sizes[stack])) for stack in front.contexts)


def merging(fed: Tensor, count: int) -> Tensor:
    """Return a matrix whose row i is even over the earlier positions that feed position i.

    Examples
    --------
    >>> merging(torch.tensor([1, 1, -1, 0]), 2).tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.0, 0.0]]
    """
    matrix = torch.zeros(count, len(fed), dtype=torch.float64)
    known = (fed >= 0).nonzero()[:, 0]
    matrix[fed[known], known] = 1.0
    return matrix / matrix.sum(dim=1, keepdim=True).clamp_min(1.0)
