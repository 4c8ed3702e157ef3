"""Attribution methods beside attention: gradients of the inputs, occlusion, and their kin.

They explain the target logit itself, which is why they can say whether a shift of the attention map goes
with a shift of what the logit depends on. The signs of the parts are dropped: a map says how much a
position matters to the target, not for or against it. SHAP and LIME are in
:mod:`audit.capture.attributions.sampling`, Grad-CAM in :mod:`audit.capture.attributions.grad_cam`, LRP in
:mod:`audit.capture.attributions.relevance`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.passes import exclusive
from audit.capture.attributions.grad_cam import grad_cam
from audit.capture.attributions.occlusion import occluded, removable, replacement_token
from audit.capture.attributions.question import (
    CONVERGED,
    Question,
    by_position,
    differentiable,
    require_captum,
)
from audit.capture.attributions.relevance import relevance
from audit.capture.attributions.rounding import above, rounding
from audit.capture.attributions.sampling import lime, shapley
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import core_model
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError

__all__ = ["AttributionFold", "Question", "attribute"]

MOST_DOUBLINGS = 3


class AttributionFold:
    """A map that was computed beside attention; `inner` is the rollout of the same pass."""

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


def attribute(question: Question, fold: AttributionFold) -> None:
    """Fill `fold` with the map of its method.

    Raises
    ------
    CaptureError
        When integrated gradients, Shapley values or relevances do not add up, or Captum is not installed.
    """
    with exclusive(question.checkpoint.model):
        for i in range(len(question.batch)):
            fold.sizes[i], numbers = _one(question.one(i), fold.settings)
            for name, value in numbers.items():
                fold.extra.setdefault(name, torch.zeros(len(question.batch)))[i] = value
    fold.sizes *= fold.valid


def _one(question: Question, settings: FoldSettings) -> tuple[Tensor, dict[str, float]]:
    """Return the sizes of one probe's positions, and the numbers that go with its map."""
    method = settings.method
    if method == "occlusion":
        return _occlusion(question), {}
    if method == "input_x_gradient":
        return _input_x_gradient(question), {}
    if method == "grad_cam":
        return grad_cam(question, settings.layer), {}
    if method == "lime":
        return lime(question, settings.samples_of(), settings.seed), {}
    if method == "shap":
        found, error = shapley(question, settings.samples_of(), settings.seed)
        return found, {"completeness_error": error}
    if method == "lrp":
        found, error = relevance(question)
        return found, {"conservation_error": error}
    found, error = _integrated_gradients(question, settings.steps)
    return found, {"completeness_error": error}


# --- occlusion --------------------------------------------------------------------------------


def _occlusion(question: Question) -> Tensor:
    """Return by how much the target logit moves when each position is occluded: (position,)."""
    (item,) = question.batch
    _, token = replacement_token(question.checkpoint, [item])
    places = removable(item, token)
    without = [occluded(item, np.eye(len(item))[place], token) for place in places]
    size = question.rows_at_once(len(item))
    scores = [question.scores([item])]
    scores += [question.scores(without[i : i + size]) for i in range(0, len(without), size)]
    found = torch.cat(scores)
    moved = question.read.new_zeros(len(item), dtype=torch.float64)
    least = rounding(core_model(question.checkpoint.model).dtype, float(found[0]))
    moved[torch.from_numpy(places).to(moved.device)] = above(found[1:] - found[0], least).abs()
    return moved


# --- gradients of the inputs ------------------------------------------------------------------


def _input_x_gradient(question: Question) -> Tensor:
    require_captum()
    from captum.attr import InputXGradient

    inputs, _, forward, others = differentiable(question)
    with torch.enable_grad():
        parts = InputXGradient(forward).attribute(inputs, additional_forward_args=others)
    return by_position(parts.detach(), question.batch[0])


def _integrated_gradients(question: Question, steps: int) -> tuple[Tensor, float]:
    """Return the parts of F(x) − F(baseline), and their error of completeness as a share."""
    require_captum()
    from captum.attr import IntegratedGradients

    inputs, baseline, forward, others = differentiable(question)
    method = IntegratedGradients(forward)
    item, error = question.batch[0], 1.0
    with torch.no_grad():
        least = rounding(core_model(question.checkpoint.model).dtype, float(forward(inputs, *others)))
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
        parts = parts.detach()
        sizes = above(by_position(parts, item), least)
        if not sizes.any() and abs(float(parts.sum() - delta[0])) <= least:  # nor does the logit move
            return sizes, 0.0
        error = float(delta.abs()[0] / parts.abs().sum().clamp_min(1e-30))
        if error <= CONVERGED:
            return sizes, error
    raise CaptureError(
        f"probe {item.probe.id}: integrated gradients miss their sum by {error:.1%} after "
        f"{steps * 2**MOST_DOUBLINGS} steps, allowed {CONVERGED:.0%}; raise [method] steps"
    )
