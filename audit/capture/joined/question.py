"""What an attribution asks of a model that reads an image with text, and what may be removed from both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attention.passes import exclusive, place, run_model
from audit.capture.attributions.embedded import check_own, embedded
from audit.capture.attributions.occlusion import replacement_token
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.inputs.pictures import Picture
from audit.capture.joined.front import Front
from audit.capture.joined.gradient import check_differentiable, explained
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError
from audit.records import Checkpoint

Parts = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Of each token, and of each image position."""


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
    picture : Picture, optional
        What places pixels; none where positions come as features.
    """

    checkpoint: Checkpoint
    item: Encoded
    front: Front
    read: Tensor
    removable: NDArray[np.bool_]
    picture: Picture | None = None
    constants: ClassVar[tuple[str, ...]] = ()
    """Inputs that are no positions' own and vary with nothing, such as the places of boxes."""

    @property
    def argument(self) -> str:
        """Return the argument of the model that holds the image."""
        return "pixel_values" if self.picture is None else self.picture.name

    def score(self, outputs: Any, targets: Mapping[str, Score]) -> Tensor:
        """Return what is explained, a scalar."""
        return explained(self.checkpoint, self.item, outputs, self.read, targets)[1]

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
            return float(self.score(outputs, targets))

    def grey(self) -> Tensor:
        """Return the mean colour of the image, of the shape of its pixels.

        Raises
        ------
        CaptureError
            When it cannot be told which colour of the image each number holds.
        """
        pixels = self.item.tensors[self.argument]
        known = self._of(self.removable)
        if pixels.dim() < 4 or pixels.shape[-3] not in (1, 3):
            return self._packed_grey(pixels, known)
        colours = pixels.double().movedim(-3, 0).flatten(1)
        seen = known.movedim(-3, 0).flatten(1)
        mean = (colours * seen).sum(dim=1) / seen.sum(dim=1).clamp_min(1)
        return mean.to(pixels.dtype)[:, None, None].expand_as(pixels)

    def _packed_grey(self, pixels: Tensor, known: Tensor) -> Tensor:
        """Return the mean colour where colours stand side by side in one row, as measured."""
        found = None if self.picture is None else self.picture.colours
        colours = None if found is None else torch.from_numpy(found)
        if colours is None or bool((known & (colours < 0)).any()):
            raise CaptureError(
                f"the processed image ({self.argument}) mixes the colours of the stored one, so that it "
                "has no mean colour to remove patches with; use input_x_gradient or gradient_rollout"
            )
        grey = pixels.clone()
        for colour in range(3):
            own = colours == colour
            grey[own] = pixels[own & known].double().mean().to(pixels.dtype)
        return grey

    def _of(self, chosen: NDArray[np.bool_]) -> Tensor:
        """Return which numbers of the processed image feed the chosen image positions."""
        fed = self.front.pixels
        return torch.from_numpy((fed >= 0) & chosen[np.maximum(fed, 0)])

    def without(
        self, tokens: NDArray[np.int64], patches: NDArray[np.bool_], grey: Tensor, token: int | None
    ) -> dict[str, Tensor]:
        """Return the inputs with tokens replaced and patches turned to the mean colour."""
        tensors = dict(self.item.tensors)
        name = self.argument
        tensors[name] = torch.where(self._of(patches), grey, tensors[name])
        if len(tokens) and token is not None:
            ids = tensors["input_ids"].clone()
            ids[0, torch.from_numpy(tokens)] = token
            tensors["input_ids"] = ids
        return tensors

    def replacement(self) -> int | None:
        """Return what tokens are replaced by; None where there are none."""
        return replacement_token(self.checkpoint, [])[1] if len(self.tokens) else None

    @contextmanager
    def scored(
        self, pixels: Tensor, words: Tensor | None, targets: Mapping[str, Score], own: float | None = None
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the score of pixels and embedded tokens; these and the constants are leaves of its graph.

        Raises
        ------
        CaptureError
            When the inputs cannot be replaced, or the score is not `own` where that is given.
        """
        model = self.checkpoint.model
        core = core_model(model)
        tensors = place(self.item.tensors, core.device, core.dtype)
        leaves = [pixels.to(core.device, core.dtype).detach().requires_grad_()]
        with exclusive(model), torch.enable_grad(), ExitStack() as stack:
            if words is not None:
                leaves.append(words.to(core.device, core.dtype).detach().requires_grad_())
                table = core.get_input_embeddings()  # also called for the token that stands for the image
                stack.enter_context(embedded(table, leaves[1], tensors["input_ids"], others=True))
            for name in self.constants:
                tensors[name] = tensors[name].detach().requires_grad_()
                leaves.append(tensors[name])
            outputs = run_model(model, {**tensors, self.argument: leaves[0].clone()}, keep_logits=True)
            score = self.score(outputs, targets)
            check_differentiable(score, outputs)
            if own is not None:
                check_own(self.item.probe.id, score, own, abs(own), core.dtype)
            yield score, leaves

    def own(self, targets: Mapping[str, Score]) -> float:
        """Return the score of the model's own pass, which :meth:`scored` must give at the probe's inputs."""
        return self.value(self.item.tensors, targets)

    def slopes(
        self, pixels: Tensor, words: Tensor | None, targets: Mapping[str, Score], own: float | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the score by pixels and embedded tokens at these."""
        with self.scored(pixels, words, targets, own) as (score, leaves):
            found = torch.autograd.grad(score, leaves, allow_unused=True)
        slopes = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
        return slopes[0].double().cpu(), slopes[1].double().cpu() if len(slopes) > 1 else None

    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """Return the pixels and the embedded tokens of the probe, in float64."""
        words = self.embedded(self.item.tensors["input_ids"]) if len(self.front.words) else None
        return self.item.tensors[self.argument].double(), words

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
