"""Attention flow of an image that comes to a text through a tower: one graph through all stacks.

The layers of the last stack stand above those of the tower; what a position of the last stack stands for
is one edge of capacity 1, and a position that stands for itself (a token, a learned latent) is passed on
below as it is. A position that was merged of several patches has no such edge: how much each of them may
pass would be a choice, and the shares of image and text would be that choice's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.engines.fold import BatchFold
from audit.capture.joined.fold import JoinedFold
from audit.capture.joined.front import Depth, Front, context_of
from audit.capture.joined.origins import Origins
from audit.errors import CaptureError, ConfigError
from audit.methods.flow import layered_flow

INSIDE = ""
"""In the place of a stack: what stands for itself."""


class StepsFold(BatchFold):
    """The matrices of a stack's layers, each by itself: a flow passes through all of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[Tensor] = []

    @property
    def layer(self) -> int:
        """Return the index of the layer that comes next."""
        return len(self.steps)

    def push(self, step: Tensor) -> None:
        """Take the next layer's matrix (batch, query, key), its residual already in it."""
        self.steps.append(step.double().cpu())


class JoinedFlow(JoinedFold):
    """The largest flow from the output row to each patch and token, through every layer of every stack.

    Parameters
    ----------
    plan, settings, front, read, verify, slots : see :class:`audit.capture.joined.fold.JoinedFold`
        One patch for each position of the image.

    Raises
    ------
    ConfigError
        When the connector merges patches or layers.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_capacities(self.front)
        self.steps = {stack: StepsFold(self.settings, *self._rows(stack)) for stack in self.plan.stacks}
        self.folds.update(self.steps)
        self._found: tuple[Tensor, Tensor, float] | None = None

    def rows(self) -> list[Tensor]:
        """Return no rows: each layer would be another max-flow."""
        return []

    def row(self) -> Tensor:
        """Return the normalised flow that ends in the last stack's own positions: (position,)."""
        return self._solved()[0]

    def image(self, rows: Tensor) -> Tensor:  # noqa: ARG002 - the same flow, where the other part of it ends
        """Return the normalised flow into the positions of the image: (1, image position)."""
        return self._solved()[1][None]

    def origins(self) -> Tensor:
        """Return which image positions each position of the last stack stands for."""
        return Origins(self.plan.stacks, self.front, self.read.device).matrix()

    def diagnostics(self) -> dict[str, float]:
        """Return ``saturated``, the share of inputs on the flow's upper bound, and ``empty_rows``."""
        empty = sum(int(fold.empty_rows.sum()) for fold in self.steps.values())
        return {"saturated": self._solved()[2], "empty_rows": float(empty)}

    def _solved(self) -> tuple[Tensor, Tensor, float]:
        if self._found is None:
            self._found = self._flow()
        return self._found

    def _flow(self) -> tuple[Tensor, Tensor, float]:
        graph = _Layers(self)
        read = self.read[0].double().cpu().numpy()
        rows = read.nonzero()[0].tolist()
        try:
            flow, saturated = layered_flow(graph.matrices, rows, max_seconds=self.settings.max_seconds)
        except ValueError as error:
            raise CaptureError(
                f"attention_flow of a probe with {len(graph.inputs)} positions: {error}; use smaller images, "
                "or raise [method] max_seconds"
            ) from None
        whole, share = read[rows] @ flow, float(read[rows] @ saturated.mean(axis=1))
        whole = whole / max(float(whole.sum()), np.finfo(np.float64).tiny)
        text, image = np.zeros(len(read)), np.zeros(graph.image)
        for value, (stack, place) in zip(whole, graph.inputs, strict=True):
            (text if stack == INSIDE else image)[place] = value
        device = self.read.device
        return torch.from_numpy(text).to(device), torch.from_numpy(image).to(device), share


class _Layers:
    """The layers of the graph, the lowest first, and what its inputs are: (stack or `INSIDE`, place)."""

    def __init__(self, fold: JoinedFlow) -> None:
        self.fold, self.front, stacks = fold, fold.front, fold.plan.stacks
        self.image = int(np.prod(self.front.sizes[stacks[0]])) + fold.latents
        self.ends = list[tuple[str, int]]()
        found = list[Any]()
        stack, depth = stacks[-1], len(fold.steps[stacks[-1]].steps)
        while True:
            found += self._through(stack, depth)
            if stack == stacks[0]:
                break
            step, (stack, depth) = self._down(stack)
            found.append(step)
        self.matrices = found[::-1]
        own = range(int(np.prod(self.front.sizes[stacks[0]])))
        self.inputs = [*((stacks[0], place) for place in own), *self.ends]

    def _through(self, stack: str, depth: int) -> list[Any]:
        """Return the layers of a stack below `depth`, the highest first; what has ended passes on."""
        from scipy.sparse import block_diag, eye_array

        steps = self.fold.steps[stack].steps
        if depth > len(steps):
            raise CaptureError(
                f"block {depth - 1} of {stack} is read, but not every block has one attention layer; this "
                "architecture is not supported"
            )
        ended = [eye_array(len(self.ends))] if self.ends else []
        return [block_diag([*step.numpy(), *ended], format="coo") for step in steps[:depth][::-1]]

    def _down(self, stack: str) -> tuple[Any, Depth]:
        """Return the edges from the input of a stack to the state that it is made of, and what that is."""
        from scipy.sparse import coo_array

        inside = stack in self.front.contexts
        ((below, fed),) = self.front.sources[context_of(stack) if inside else stack].items()
        taken = (fed >= 0).nonzero()[0]
        rows, columns = self._node(stack, fed[taken], context=inside), self._node(below[0], taken)
        count = self._count(stack)
        alone = np.setdiff1d(np.arange(count), rows)
        kept, width = len(self.ends), self._count(below[0])
        self.ends += self._standing(stack, alone)
        added = width + kept + np.arange(len(alone))
        passed = np.arange(kept)
        rows = np.concatenate([rows, alone, count + passed])
        columns = np.concatenate([columns, added, width + passed])
        shape = (count + kept, width + len(self.ends))
        return coo_array((np.ones(len(rows)), (rows, columns)), shape=shape), below

    def _standing(self, stack: str, places: NDArray[np.int64]) -> list[tuple[str, int]]:
        """Return what positions of a stack are that no earlier one feeds: tokens, or learned latents."""
        stacks = self.fold.plan.stacks
        if stack == stacks[-1]:
            return [(INSIDE, int(place)) for place in places]
        if stack not in self.front.contexts:
            raise CaptureError(
                f"{stack} has positions of its own beside those of the image; its map cannot be composed"
            )
        before = [name for name in stacks[: stacks.index(stack)] if name in self.front.contexts]
        start = int(sum(np.prod(self.front.sizes[name]) for name in (stacks[0], *before)))
        return [(stack, start + i) for i in range(len(places))]  # in the order of the latents

    def _count(self, stack: str) -> int:
        sequences, own = self.front.sizes[stack]
        return sequences * (own + self.front.contexts.get(stack, (0, 0))[1])

    def _node(self, stack: str, places: NDArray[np.int64], *, context: bool = False) -> NDArray[np.int64]:
        """Return where positions of a stack, or of its context, are among its nodes: latents come first."""
        own, beside = self.front.sizes[stack][1], self.front.contexts.get(stack, (0, 0))[1]
        sequence, place = np.divmod(places, beside if context else own)
        return sequence * (own + beside) + place + (own if context else 0)


def check_capacities(front: Front) -> None:
    """Check that every position stands for one position of an earlier stack, or for itself.

    Raises
    ------
    ConfigError
    """
    for stack, sources in front.sources.items():
        counts = [np.unique(fed[fed >= 0], return_counts=True)[1].max(initial=1) for fed in sources.values()]
        if len(sources) > 1 or max(counts, default=1) > 1:
            what = f"{max(counts)} patches" if max(counts) > 1 else f"{len(sources)} layers"
            raise ConfigError(
                f"[method] name = 'attention_flow' is not available where a position of {stack} is made of "
                f"{what}: a convention has no capacity; use rollout"
            )
