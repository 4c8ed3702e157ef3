"""Attribution methods beside attention: input × gradient, integrated gradients, occlusion.

They look at no attention at all, which is why they can say whether a shift of the attention map goes
with a shift of what the target logit depends on. The signs of the parts are dropped: a map says how
much a position matters to the target, not for or against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.capture.batches import stack
from audit.capture.engine import BatchFold
from audit.capture.inputs import Encoded, core_model
from audit.capture.occlusion import first_patch, occluded, replacement_token
from audit.capture.passes import exclusive, run_model
from audit.capture.scores import Score
from audit.capture.settings import FoldSettings
from audit.capture.targets import class_logits
from audit.capture.threads import own_thread
from audit.errors import CaptureError
from audit.records import Checkpoint

CONVERGED = 0.05
"""Largest error of completeness of integrated gradients, as a part of the sum of sizes."""
MOST_DOUBLINGS = 3


class AttributionFold:
    """A map that was computed beside attention; `inner` is the rollout of the same pass."""

    layers_reason = "this method attributes to the inputs, not to layers"
    sink = False

    def __init__(self, settings: FoldSettings, inner: BatchFold) -> None:
        self.settings, self.inner = settings, inner
        self.read, self.valid = inner.read, inner.valid
        self.rows: list[Tensor] = []
        self.targets: dict[str, Score] = {}
        self.sizes = torch.zeros_like(inner.read, dtype=torch.float64)
        self.extra: dict[str, Tensor] = {}

    @property
    def causal(self) -> Tensor:
        """Return which probes have no position that attends beyond itself: bool (batch,)."""
        return self.inner.causal

    def final_row(self) -> Tensor:
        """Return the map (batch, position); all zero where nothing moves the target."""
        total = self.sizes.sum(dim=1, keepdim=True)
        return torch.where(total > 0, self.sizes / total.clamp_min(1e-300), 0.0)

    def diagnostics(self) -> dict[str, Tensor]:
        """Return numbers that go with the maps: name to (batch,)."""
        return dict(self.extra)


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


def attribute(question: Question, fold: AttributionFold) -> None:
    """Fill `fold` with the map of its method.

    Raises
    ------
    CaptureError
        When integrated gradients do not add up, or Captum is not installed.
    """
    method = fold.settings.method
    with exclusive(question.checkpoint.model):
        for i in range(len(question.batch)):
            if method == "occlusion":
                fold.sizes[i] = _occlusion(question.one(i))
            elif method == "input_x_gradient":
                fold.sizes[i] = _input_x_gradient(question.one(i))
            else:
                fold.sizes[i], error = _integrated_gradients(question.one(i), fold.settings.steps)
                fold.extra.setdefault("completeness_error", torch.zeros(len(question.batch)))[i] = error
    fold.sizes *= fold.valid


# --- occlusion --------------------------------------------------------------------------------


def _occlusion(question: Question) -> Tensor:
    """Return by how much the target logit moves when each position is occluded: (position,)."""
    (item,) = question.batch
    _, token = replacement_token(question.checkpoint, [item])
    places = np.flatnonzero(~item.positions.special)
    without = [occluded(item, np.eye(len(item))[place], token) for place in places]
    size = question.rows_at_once(len(item))
    scores = [_scores(question, [item])]
    scores += [_scores(question, without[i : i + size]) for i in range(0, len(without), size)]
    found = torch.cat(scores)
    moved = question.read.new_zeros(len(item), dtype=torch.float64)
    moved[torch.from_numpy(places).to(moved.device)] = (found[1:] - found[0]).abs()
    return moved


def _scores(question: Question, items: Sequence[Encoded]) -> Tensor:
    outputs = run_model(question.checkpoint.model, stack(items), keep_logits=question.keep_logits)
    return question.score(outputs, len(items), precise=True)


# --- gradients of the inputs ------------------------------------------------------------------


def _input_x_gradient(question: Question) -> Tensor:
    from captum.attr import InputXGradient

    inputs, _, forward, others = _differentiable(question)
    with torch.enable_grad():
        parts = InputXGradient(forward).attribute(inputs, additional_forward_args=others)
    return _by_position(parts.detach(), question.batch[0])


def _integrated_gradients(question: Question, steps: int) -> tuple[Tensor, float]:
    """Return the parts of F(x) − F(baseline), and their error of completeness as a share."""
    from captum.attr import IntegratedGradients

    inputs, baseline, forward, others = _differentiable(question)
    method = IntegratedGradients(forward)
    item, error = question.batch[0], 1.0
    for doubling in range(MOST_DOUBLINGS + 1):
        with torch.enable_grad():
            parts, delta = method.attribute(
                inputs,
                baselines=baseline,
                additional_forward_args=others,
                n_steps=steps * 2**doubling,
                internal_batch_size=question.rows_at_once(len(item)),
                return_convergence_delta=True,
            )
        error = float(delta.abs()[0] / parts.detach().abs().sum().clamp_min(1e-30))
        if error <= CONVERGED:
            return _by_position(parts.detach(), item), error
    raise CaptureError(
        f"probe {item.probe.id}: integrated gradients miss their sum by {error:.1%} after "
        f"{steps * 2**MOST_DOUBLINGS} steps, allowed {CONVERGED:.0%}; raise [method] steps"
    )


def _differentiable(
    question: Question,
) -> tuple[Tensor, Tensor, Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return the inputs as a leaf, their baseline, the target logit as their function, the other inputs.

    Pixels of images, whose baseline is the image's mean colour; embeddings of text, whose baseline is
    the token that occlusion uses (special positions keep theirs, so they get no part of the sum).
    """
    _require_captum()
    core, (item,) = core_model(question.checkpoint.model), question.batch
    tensors = {name: t.to(core.device) for name, t in item.tensors.items()}
    if "pixel_values" in tensors:
        inputs = tensors.pop("pixel_values").to(core.dtype)
        baseline = inputs.mean(dim=(-2, -1), keepdim=True).expand_as(inputs).contiguous()
    else:
        _, token = replacement_token(question.checkpoint, [item])
        everywhere = (~item.positions.special).astype(float)
        masked = occluded(item, everywhere, token).tensors["input_ids"].to(core.device)
        table = core.get_input_embeddings()
        inputs, baseline = table(tensors["input_ids"]), table(masked)
    names = list(tensors)

    def forward(given: Tensor, *others: Tensor) -> Tensor:
        feed = dict(zip(names, others, strict=True))
        with _embedded(core, given, feed):
            outputs = run_model(question.checkpoint.model, feed, keep_logits=question.keep_logits)
        return question.score(outputs, len(given))

    leaf = inputs.detach().clone().requires_grad_()
    return leaf, baseline.detach(), forward, tuple(tensors.values())


@contextmanager
def _embedded(core: Any, given: Tensor, feed: dict[str, Tensor]) -> Iterator[None]:
    """Put `given` in the place of the pixels, or of what the table of embeddings returns."""
    if "input_ids" not in feed:
        feed["pixel_values"] = given
        yield
        return
    hook = own_thread(lambda _module, _args, _output: given)
    handle = core.get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _by_position(parts: Tensor, item: Encoded) -> Tensor:
    """Return |sum of the parts| of each position: (position,)."""
    if parts.dim() == 3:  # embeddings
        return parts[0].double().sum(dim=-1).abs()
    rows, columns = item.positions.grid or (1, 1)
    height, width = parts.shape[-2] // rows, parts.shape[-1] // columns
    cut = parts[0].double().sum(dim=0)[: rows * height, : columns * width]
    patches = cut.reshape(rows, height, columns, width).sum(dim=(1, 3)).abs().flatten()
    found = patches.new_zeros(len(item))
    found[first_patch(item) : first_patch(item) + len(patches)] = patches
    return found


def _require_captum() -> None:
    try:
        import captum  # noqa: F401
    except ImportError:
        raise CaptureError(
            "gradients of the inputs need captum; pip install 'rollout-audit[attribution]'"
        ) from None
