"""Attributions of one logit to patches and tokens of an image with text, both on the logit's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.capture.attributions.question import CONVERGED
from audit.capture.attributions.rounding import above, rounding
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.fold import JoinedFold
from audit.capture.joined.gradient import explained
from audit.capture.joined.question import JoinedQuestion, Parts
from audit.capture.joined.relevance import class_activation, relevance_parts
from audit.capture.joined.sampling import players_of, sampled_parts
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError

MOST_DOUBLINGS = 3


@dataclass
class JoinedAttribution:
    """A map that was computed beside attention; see :class:`audit.capture.joined.fold.JoinedFold`.

    Parameters
    ----------
    inner : JoinedFold
        The rollout of the same probe, which tells what each position stands for.
    words : Tensor (position,)
        What the logit owes to each position of the last stack; zero where it stands for the image.
    patches : Tensor (image position,)
    targets : mapping of probe id to Score
    extra : diagnostics
    """

    inner: JoinedFold
    words: Tensor
    patches: Tensor
    targets: dict[str, Score]
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Return whether no position of the last stack attends beyond itself."""
        return self.inner.causal

    def rows(self) -> list[Tensor]:
        """Return no rows: inputs are explained, not layers."""
        return []

    def row(self) -> Tensor:
        """Return the part of the text: (position,)."""
        return self.words

    def image(self, rows: Tensor) -> Tensor:
        """Return the part of the image for the one row that there is: (1, image position)."""
        return self.patches.expand(len(rows), -1)

    def origins(self) -> Tensor:
        """Return which image positions each position of the last stack stands for."""
        return self.inner.origins()

    def diagnostics(self) -> dict[str, float]:
        """Return numbers that go with the map."""
        return self.extra


def attribute_joined(
    asked: JoinedQuestion, settings: FoldSettings, inner: JoinedFold, outputs: Any, wanted: Mapping[str, Any]
) -> JoinedAttribution:
    """Return the map of an attribution method.

    Raises
    ------
    CaptureError
        When integrated gradients, Shapley values or relevances do not add up, patches cannot be removed, or
        positions stand for no patches.
    """
    targets, _ = explained(asked.checkpoint, asked.item, outputs, asked.read, wanted)
    if settings.method == "grad_cam":
        found = class_activation(asked, inner.plan, inner.slots, targets, settings.layer)
        return JoinedAttribution(inner, *found, targets)
    (tokens, patches), extra = attributed_parts(asked, targets, settings)
    words = np.zeros(len(inner.row()))
    known = asked.front.words >= 0
    np.add.at(words, asked.front.words[known], tokens[known])
    return JoinedAttribution(inner, torch.from_numpy(words), torch.from_numpy(patches), targets, extra)


def attributed_parts(
    asked: JoinedQuestion, targets: Mapping[str, Score], settings: FoldSettings
) -> tuple[Parts, dict[str, float]]:
    """Return what the score owes to each token and each patch, and diagnostics."""
    if settings.method in ("shap", "lime"):
        return sampled_parts(asked, targets, settings)
    if settings.method == "occlusion":
        return _occlusion(asked, targets), {}
    if settings.method == "input_x_gradient":
        return _input_x_gradient(asked, targets), {}
    if settings.method == "lrp":
        parts, error = relevance_parts(asked, targets)
        return parts, {"conservation_error": error}
    parts, error = _integrated(asked, targets, settings.steps)
    return parts, {"completeness_error": error}


def _occlusion(asked: JoinedQuestion, targets: Mapping[str, Score]) -> Parts:
    """Return |change of the score| when each token or patch is replaced."""
    grey, token = asked.grey(), asked.replacement()
    none, nowhere = np.zeros(0, np.int64), np.zeros_like(asked.removable)
    intact = asked.value(asked.item.tensors, targets)
    tokens, patches = np.zeros(len(asked.front.words)), np.zeros(len(asked.removable))
    words, places = players_of(asked, grey, token)
    for at in words:
        tokens[at] = asked.value(asked.without(np.array([at]), nowhere, grey, token), targets) - intact
    for at in places:
        one = np.arange(len(nowhere)) == at
        patches[at] = asked.value(asked.without(none, one, grey, token), targets) - intact
    return _spoken((tokens, patches), rounding(core_model(asked.checkpoint.model).dtype, intact))


def _spoken(parts: Parts, least: float) -> Parts:
    """Return the sizes of the parts that are above rounding, 0 for the others."""
    tokens, patches = (above(torch.from_numpy(part), least).abs().numpy() for part in parts)
    return tokens, patches


def _input_x_gradient(asked: JoinedQuestion, targets: Mapping[str, Score]) -> Parts:
    """Return |Σ input · gradient| of each token and patch."""
    pixels, words = asked.inputs()
    by_pixel, by_word = asked.slopes(pixels, words, targets, asked.own(targets))
    return asked.summed(pixels * by_pixel, None if words is None or by_word is None else words * by_word)


def _integrated(asked: JoinedQuestion, targets: Mapping[str, Score], steps: int) -> tuple[Parts, float]:
    """Return the parts of F(x) − F(baseline), tokens and patches removed together, and their error.

    Captum's takes inputs with one batch axis, which tiles of an image have not; the rule is its default,
    Gauss–Legendre.
    """
    item, name = asked.item, asked.argument
    removed = asked.without(asked.tokens, asked.removable, asked.grey(), asked.replacement())
    pixels, base = item.tensors[name].double(), removed[name].double()
    words = wordless = None
    if len(asked.front.words):
        words, wordless = asked.embedded(item.tensors["input_ids"]), asked.embedded(removed["input_ids"])
    ends, error = (asked.value(item.tensors, targets), asked.value(removed, targets)), 1.0
    total, least = ends[0] - ends[1], rounding(core_model(asked.checkpoint.model).dtype, *ends)
    for doubling in range(MOST_DOUBLINGS + 1):
        nodes, weights = np.polynomial.legendre.leggauss(steps * 2**doubling)
        by_pixel = torch.zeros_like(pixels)
        by_word = None if words is None else torch.zeros_like(words)
        for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            at = None if words is None or wordless is None else torch.lerp(wordless, words, float(node))
            slopes = asked.slopes(torch.lerp(base, pixels, float(node)), at, targets)
            by_pixel += weight * slopes[0]
            if by_word is not None and slopes[1] is not None:
                by_word += weight * slopes[1]
        parts = (pixels - base) * by_pixel
        spoken = (
            None if by_word is None or words is None or wordless is None else (words - wordless) * by_word
        )
        found = float(parts.sum()) + (0.0 if spoken is None else float(spoken.sum()))
        size = float(parts.abs().sum()) + (0.0 if spoken is None else float(spoken.abs().sum()))
        sizes = _spoken(asked.summed(parts, spoken), least)
        if not (sizes[0].any() or sizes[1].any()) and abs(total) <= least:
            return sizes, 0.0
        error = abs(found - total) / max(size, 1e-30)
        if error <= CONVERGED:
            return sizes, error
    raise CaptureError(
        f"probe {item.probe.id}: integrated gradients miss their sum by {error:.1%} after "
        f"{steps * 2**MOST_DOUBLINGS} steps, allowed {CONVERGED:.0%}; raise [method] steps"
    )
