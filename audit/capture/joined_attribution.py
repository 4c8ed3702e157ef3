"""Attributions of one logit to patches and tokens of an image with text, both on the logit's scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.front import Front
from audit.capture.inputs import Encoded, core_model
from audit.capture.joined import JoinedFold
from audit.capture.joined_gradient import check_differentiable, explained
from audit.capture.occlusion import replacement_token
from audit.capture.passes import exclusive, place, run_model
from audit.capture.pictures import Picture
from audit.capture.question import CONVERGED
from audit.capture.scores import Score
from audit.capture.settings import FoldSettings
from audit.capture.threads import own_thread
from audit.errors import CaptureError
from audit.records import Checkpoint

MOST_DOUBLINGS = 3
Parts = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Of each token, and of each image position."""


@dataclass
class JoinedAttribution:
    """A map that was computed beside attention; see :class:`audit.capture.joined.JoinedFold`.

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


@dataclass(frozen=True)
class JoinedQuestion:
    """One probe and what may be removed from it.

    Parameters
    ----------
    checkpoint : Checkpoint
        As what its head is.
    item : Encoded
        Its positions are those of the last stack.
    front : Front
    read : float Tensor (1, position)
    removable : bool array (image position,)
        Patches of the stored image.
    picture : Picture
    """

    checkpoint: Checkpoint
    item: Encoded
    front: Front
    read: Tensor
    removable: NDArray[np.bool_]
    picture: Picture

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Return the tokens of the text that may be removed: those of content."""
        known = np.flatnonzero(self.front.words >= 0)
        return known[~self.item.positions.special[self.front.words[known]]]

    def value(self, tensors: Mapping[str, Tensor], targets: Mapping[str, Score]) -> float:
        """Return the score for changed inputs."""
        model = self.checkpoint.model
        with exclusive(model):
            outputs = run_model(model, tensors, keep_logits=True)
            return float(explained(self.checkpoint, self.item, outputs, self.read, targets)[1])

    def grey(self) -> Tensor:
        """Return the mean colour of the image, of the shape of its pixels.

        Raises
        ------
        CaptureError
            When pixels have no axis of colours, as where they are packed into one row.
        """
        pixels = self.item.tensors[self.picture.name]
        if pixels.dim() < 4 or pixels.shape[-3] not in (1, 3):
            raise CaptureError(
                f"the processed image ({self.picture.name}) packs its colours, so that it has no mean colour "
                "to remove patches with; use input_x_gradient or gradient_rollout"
            )
        known = self._of(self.removable)
        colours = pixels.double().movedim(-3, 0).flatten(1)
        seen = known.movedim(-3, 0).flatten(1)
        mean = (colours * seen).sum(dim=1) / seen.sum(dim=1).clamp_min(1)
        return mean.to(pixels.dtype)[:, None, None].expand_as(pixels)

    def _of(self, chosen: NDArray[np.bool_]) -> Tensor:
        """Return which numbers of the processed image feed the chosen image positions."""
        fed = self.front.pixels
        return torch.from_numpy((fed >= 0) & chosen[np.maximum(fed, 0)])

    def without(
        self, tokens: NDArray[np.int64], patches: NDArray[np.bool_], grey: Tensor, token: int | None
    ) -> dict[str, Tensor]:
        """Return the inputs with tokens replaced and patches turned to the mean colour."""
        tensors = dict(self.item.tensors)
        name = self.picture.name
        tensors[name] = torch.where(self._of(patches), grey, tensors[name])
        if len(tokens) and token is not None:
            ids = tensors["input_ids"].clone()
            ids[0, torch.from_numpy(tokens)] = token
            tensors["input_ids"] = ids
        return tensors

    def replacement(self) -> int | None:
        """Return what tokens are replaced by; None where there are none."""
        return replacement_token(self.checkpoint, [])[1] if len(self.tokens) else None

    def slopes(
        self, pixels: Tensor, words: Tensor | None, targets: Mapping[str, Score]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the score by pixels and embedded tokens at these."""
        model = self.checkpoint.model
        core = core_model(model)
        tensors = place(self.item.tensors, core.device, core.dtype)
        leaves = [pixels.to(core.device, core.dtype).detach().requires_grad_()]
        with exclusive(model), torch.enable_grad(), ExitStack() as stack:
            if words is not None:
                leaves.append(words.to(core.device, core.dtype).detach().requires_grad_())
                stack.enter_context(_embedded(core, leaves[1]))
            outputs = run_model(model, {**tensors, self.picture.name: leaves[0].clone()}, keep_logits=True)
            score = explained(self.checkpoint, self.item, outputs, self.read, targets)[1]
            check_differentiable(score, outputs)
            found = torch.autograd.grad(score, leaves, allow_unused=True)
        slopes = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
        return slopes[0].double().cpu(), slopes[1].double().cpu() if len(slopes) > 1 else None

    def embedded(self, ids: Tensor) -> Tensor | None:
        """Return what the table of embeddings gives for tokens; None for images without a text."""
        if not len(self.front.words):
            return None
        core = core_model(self.checkpoint.model)
        with exclusive(self.checkpoint.model):
            found: Tensor = core.get_input_embeddings()(ids.to(core.device))
        return found.double().cpu()

    def summed(self, pixels: Tensor, words: Tensor | None) -> Parts:
        """Return |sum of the parts| of each token and of each image position."""
        fed, parts = self.front.pixels, pixels.numpy()
        found = np.bincount(fed[fed >= 0], parts[fed >= 0], minlength=len(self.removable))
        tokens = np.zeros(0) if words is None else words[0].sum(dim=-1).numpy()
        return np.abs(tokens), np.abs(found)


@contextmanager
def _embedded(core: Any, given: Tensor) -> Iterator[None]:
    """Put `given` in the place of what the table of embeddings returns for the tokens."""

    def put(_module: Any, _args: Any, output: Any) -> Any:
        return given.clone() if isinstance(output, Tensor) and output.shape == given.shape else None

    handle = core.get_input_embeddings().register_forward_hook(own_thread(put))
    try:
        yield
    finally:
        handle.remove()


def attribute_joined(
    asked: JoinedQuestion, settings: FoldSettings, inner: JoinedFold, outputs: Any, wanted: Mapping[str, Any]
) -> JoinedAttribution:
    """Return the map of occlusion, input × gradient or integrated gradients.

    Raises
    ------
    CaptureError
        When integrated gradients do not add up, or patches cannot be removed.
    """
    targets, _ = explained(asked.checkpoint, asked.item, outputs, asked.read, wanted)
    extra: dict[str, float] = {}
    if settings.method == "occlusion":
        tokens, patches = _occlusion(asked, targets)
    elif settings.method == "input_x_gradient":
        tokens, patches = _input_x_gradient(asked, targets)
    else:
        (tokens, patches), extra["completeness_error"] = _integrated(asked, targets, settings.steps)
    words = np.zeros(len(inner.row()))
    known = asked.front.words >= 0
    np.add.at(words, asked.front.words[known], tokens[known])
    return JoinedAttribution(inner, torch.from_numpy(words), torch.from_numpy(patches), targets, extra)


def _occlusion(asked: JoinedQuestion, targets: Mapping[str, Score]) -> Parts:
    """Return |change of the score| when each token or patch is replaced."""
    grey, token = asked.grey(), asked.replacement()
    none, nowhere = np.zeros(0, np.int64), np.zeros_like(asked.removable)
    intact = asked.value(asked.item.tensors, targets)
    tokens, patches = np.zeros(len(asked.front.words)), np.zeros(len(asked.removable))
    for at in asked.tokens:
        tokens[at] = abs(asked.value(asked.without(np.array([at]), nowhere, grey, token), targets) - intact)
    for at in np.flatnonzero(asked.removable):
        one = np.arange(len(nowhere)) == at
        patches[at] = abs(asked.value(asked.without(none, one, grey, token), targets) - intact)
    return tokens, patches


def _input_x_gradient(asked: JoinedQuestion, targets: Mapping[str, Score]) -> Parts:
    """Return |Σ input · gradient| of each token and patch."""
    pixels = asked.item.tensors[asked.picture.name].double()
    words = asked.embedded(asked.item.tensors["input_ids"]) if len(asked.front.words) else None
    by_pixel, by_word = asked.slopes(pixels, words, targets)
    return asked.summed(pixels * by_pixel, None if words is None or by_word is None else words * by_word)


def _integrated(asked: JoinedQuestion, targets: Mapping[str, Score], steps: int) -> tuple[Parts, float]:
    """Return the parts of F(x) − F(baseline), tokens and patches removed together, and their error.

    Captum's takes inputs with one batch axis, which tiles of an image have not; the rule is its default,
    Gauss–Legendre.
    """
    item, name = asked.item, asked.picture.name
    removed = asked.without(asked.tokens, asked.removable, asked.grey(), asked.replacement())
    pixels, base = item.tensors[name].double(), removed[name].double()
    words = wordless = None
    if len(asked.front.words):
        words, wordless = asked.embedded(item.tensors["input_ids"]), asked.embedded(removed["input_ids"])
    total, error = asked.value(item.tensors, targets) - asked.value(removed, targets), 1.0
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
        error = abs(found - total) / max(size, 1e-30)
        if error <= CONVERGED:
            return asked.summed(parts, spoken), error
    raise CaptureError(
        f"probe {item.probe.id}: integrated gradients miss their sum by {error:.1%} after "
        f"{steps * 2**MOST_DOUBLINGS} steps, allowed {CONVERGED:.0%}; raise [method] steps"
    )


__all__ = ["JoinedAttribution", "JoinedQuestion", "attribute_joined"]
