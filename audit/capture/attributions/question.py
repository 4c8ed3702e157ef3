"""What an attribution asks of the model, and the pieces that its methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.passes import run_model
from audit.capture.attributions.embedded import check_copies, check_own, embedded
from audit.capture.attributions.occlusion import occluded, replacement_token
from audit.capture.inputs.batches import stack
from audit.capture.inputs.cells import cells_of
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import class_logits
from audit.errors import CaptureError
from audit.records import Checkpoint

CONVERGED = 0.05
"""Largest error of a sum that the parts of an attribution must give, as a part of the sum of sizes."""


@dataclass(frozen=True)
class Question:
    """What is asked of the model: the batch, its tensors, its targets, its output rows.

    `alone` says that the model takes one sequence at a time.
    """

    checkpoint: Checkpoint
    batch: Sequence[Encoded]
    targets: Mapping[str, Score]
    read: Tensor
    budget: int
    keep_logits: bool = False
    alone: bool = False

    def one(self, index: int) -> Question:
        """Return the question for a single probe of the batch."""
        return replace(self, batch=[self.batch[index]], read=self.read[index : index + 1])

    def rows_at_once(self, length: int) -> int:
        """Return how many copies of a probe go through the model together."""
        return 1 if self.alone else max(1, self.budget // length)

    def score(self, outputs: Any, copies: int, *, precise: bool = False) -> Tensor:
        """Return the score of the first probe's target in each of `copies` of it: (copy,)."""
        logits = class_logits(outputs, self.read.expand(copies, -1), self.checkpoint.task)
        return self.targets[self.batch[0].probe.id].of(logits.double() if precise else logits)

    def scores(self, items: Sequence[Encoded]) -> Tensor:
        """Return the score of the first probe's target for variants of it, in float64: (variant,)."""
        outputs = run_model(self.checkpoint.model, stack(items), keep_logits=self.keep_logits)
        return self.score(outputs, len(items), precise=True)

    def own(self) -> tuple[float, float]:
        """Return the score of the first probe's target in the model's own pass, and its size."""
        with torch.no_grad():
            outputs = run_model(self.checkpoint.model, stack(self.batch[:1]), keep_logits=self.keep_logits)
            logits = class_logits(outputs, self.read[:1], self.checkpoint.task).double()
        target = self.targets[self.batch[0].probe.id]
        return float(target.of(logits)[0]), float(target.size(logits)[0])


def differentiable(
    question: Question,
) -> tuple[Tensor, Tensor, Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return the inputs as a leaf, their baseline, the target logit as their function, the other inputs.

    Pixels of images, samples or spectrograms of sound, embeddings of text. The baseline is what occlusion
    makes of the inputs when it takes every position: special positions keep theirs, so they get no part of
    the difference. Called with the leaf, the function checks that it gives the model's own logit.

    Raises
    ------
    CaptureError
        By the function, when the inputs cannot be replaced in this model.
    """
    core, (item,) = core_model(question.checkpoint.model), question.batch
    tensors = {name: t.to(core.device) for name, t in item.tensors.items()}
    _, token = replacement_token(question.checkpoint, [item])
    bare, cells = occluded(item, np.ones(len(item)), token).tensors, cells_of(item)
    name = None if cells is None else cells.name
    if name is not None:
        inputs, baseline = (t.to(core.device, core.dtype) for t in (tensors.pop(name), bare[name]))
    else:
        table = core.get_input_embeddings()
        inputs, baseline = table(tensors["input_ids"]), table(bare["input_ids"].to(core.device))
    names = list(tensors)
    own = question.own()
    leaf = inputs.detach().clone().requires_grad_()

    def forward(given: Tensor, *others: Tensor) -> Tensor:
        feed = dict(zip(names, others, strict=True))
        with _put(core, given, feed, name):
            outputs = run_model(question.checkpoint.model, feed, keep_logits=question.keep_logits)
        found = question.score(outputs, len(given))
        check_copies(item.probe.id, found, len(given))
        if len(given) == 1 and torch.equal(given, leaf):
            check_own(item.probe.id, found, *own, core.dtype)
        return found

    return leaf, baseline.detach(), forward, tuple(tensors.values())


def _put(core: Any, given: Tensor, feed: dict[str, Tensor], name: str | None) -> AbstractContextManager[None]:
    """Put `given` in the place of an argument, or of what the table of embeddings returns."""
    if name is None:
        return embedded(core.get_input_embeddings(), given, feed["input_ids"])
    feed[name] = given
    return nullcontext()


def by_position(parts: Tensor, item: Encoded) -> Tensor:
    """Return |sum of the parts| of each position: (position,)."""
    cells = cells_of(item)
    summed = parts[0].double().sum(dim=-1) if cells is None else cells.summed(parts, len(item))
    return summed.abs()


def require_captum() -> None:
    """Raise CaptureError where Captum is not installed."""
    try:
        import captum  # noqa: F401
    except ImportError:
        raise CaptureError("this method needs captum; pip install 'rollout-audit[attribution]'") from None
