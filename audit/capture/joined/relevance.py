"""LRP and Grad-CAM of an image with text: the answer's logit through all stacks and what joins them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive
from audit.capture.attributions.grad_cam import activation_map, check_layer, kept_inputs
from audit.capture.attributions.relevance import conservation_error, conserving, only_added, relevances
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.origins import Origins
from audit.capture.joined.question import JoinedQuestion, Parts
from audit.capture.joined.windowed import Slots
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError


def relevance_parts(asked: JoinedQuestion, targets: Mapping[str, Score]) -> tuple[Parts, float]:
    """Return |relevance| of each token and each image position, and the error of the conserved sum.

    The rules of :mod:`audit.capture.attributions.relevance`, through the language model, the connector and
    the tower at once: one forward and one backward pass down to pixels and embedded tokens. Nothing is
    assumed of how patches are merged, since the network's own sums carry the relevance.

    Raises
    ------
    CaptureError
        When relevances and added constants do not give the score: some step has no rule.
    """
    core = core_model(asked.checkpoint.model)
    (pixels, words), own = asked.inputs(), asked.own(targets)
    with (
        exclusive(asked.checkpoint.model),
        only_added(core) as added,
        conserving(core),
        asked.scored(pixels, words, targets, own) as (score, leaves),
    ):
        found, total = relevances(score, leaves, added)
    parts = asked.summed(found[0].cpu(), found[1].cpu() if len(found) > 1 else None)
    sizes = float(parts[0].sum() + parts[1].sum())
    return parts, conservation_error(asked.item.probe.id, core, score, total, sizes)


def class_activation(
    asked: JoinedQuestion, plan: CapturePlan, slots: Slots, targets: Mapping[str, Score], layer: int
) -> tuple[Tensor, Tensor]:
    """Return Grad-CAM at an attention layer of the last stack: of each of its positions, and of the image.

    See :func:`audit.capture.attributions.grad_cam.grad_cam`. A position that several patches were merged
    into shares its part evenly among them, as in rollout; the tower below has no other part in it.

    Returns
    -------
    (position,) and (image position,) Tensors; the first holds the image's positions, too

    Raises
    ------
    ConfigError
        When the last stack has no such layer.
    CaptureError
        When its positions stand for no patches, or the layer takes no row of features for each.
    """
    last, name = plan.stacks[-1], type(core_model(asked.checkpoint.model)).__name__
    layers = [one for one in plan.layers if one.stack == last]
    origins = Origins(plan.stacks, asked.front, torch.device("cpu")).matrix()
    if any(one.kind == "cross" for one in layers) or asked.front.contexts:
        raise CaptureError(
            f"{name} reads its image through cross-attention or learned latents, so no position of {last} "
            "has the features of patches and Grad-CAM has no map of them; use occlusion, lrp or shap"
        )
    modules = {one.module: None for one in layers}  # once each, where layers share theirs
    own = asked.own(targets)
    with kept_inputs(modules) as seen, asked.scored(*asked.inputs(), targets, own) as (score, _):
        index = check_layer(layer, len(seen))
        windows = slots.get(layers[index].path) if len(seen) == len(layers) else None
        found = activation_map(score, seen[index], _places(seen[index], windows, asked, last))
    found = found.cpu()
    return found, found @ origins


def _places(features: Tensor, slots: Tensor | None, asked: JoinedQuestion, stack: str) -> Tensor:
    """Return the position of each row of the features, flat; negative at the padding of windows."""
    count = int(np.prod(asked.front.sizes[stack]))
    places = torch.arange(count) if slots is None else slots.flatten().cpu()
    if features[..., 0].numel() != len(places):
        raise CaptureError(
            f"an attention layer of {stack} takes features of shape {tuple(features.shape)} for {count} "
            "positions, so Grad-CAM has no map; use another method"
        )
    return places
