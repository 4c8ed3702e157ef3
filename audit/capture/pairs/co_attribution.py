"""Attributions of an answer's logit to the tokens and the image regions of LXMERT, both on one scale.

A region is removed by features of zero; its box stays where it is. LXMERT has met such regions in training,
where features were masked by zeros as tokens by the mask token (Tan & Bansal, EMNLP 2019, arXiv 1908.07490,
section 3.1.2), and zeros do not depend on what else the detector found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.layers import CapturePlan
from audit.capture.attributions.grad_cam import activation_map, check_layer, kept_inputs
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.region_inputs import FEATURES
from audit.capture.joined.attribution import attributed_parts
from audit.capture.joined.front import Front
from audit.capture.joined.question import JoinedQuestion
from audit.capture.outputs.scores import Score
from audit.capture.pairs.co_attention import crosses
from audit.capture.pairs.co_relevance import answer_logits
from audit.capture.pairs.multi import StreamRows
from audit.records import Checkpoint

Sizes = tuple[Tensor, Tensor]
"""Of each token, and of each region."""


@dataclass(frozen=True)
class RegionQuestion(JoinedQuestion):
    """One probe of text and features of regions; see :class:`JoinedQuestion`."""

    constants: ClassVar[tuple[str, ...]] = ("visual_pos",)

    @property
    def argument(self) -> str:
        """Return the argument of the model that holds the features."""
        return FEATURES

    def grey(self) -> Tensor:
        """Return what takes the place of removed features: zeros."""
        return torch.zeros_like(self.item.tensors[FEATURES])

    def score(self, outputs: Any, targets: Mapping[str, Score]) -> Tensor:
        """Return the answer's logit, a scalar."""
        return targets[self.item.probe.id].of(answer_logits(outputs)).sum()


def region_question(checkpoint: Checkpoint, item: Encoded) -> RegionQuestion:
    """Return what is asked of one probe; every region may be removed."""
    features = item.tensors[FEATURES]
    owner = np.broadcast_to(np.arange(features.shape[1])[None, :, None], tuple(features.shape))
    front = Front({}, {}, np.arange(len(item)), owner)
    read = torch.zeros(1, len(item))
    return RegionQuestion(checkpoint, item, front, read, np.ones(features.shape[1], np.bool_))


def region_attributions(
    checkpoint: Checkpoint,
    plan: CapturePlan,
    settings: FoldSettings,
    batch: Sequence[Encoded],
    targets: Mapping[str, Score],
) -> tuple[StreamRows, StreamRows]:
    """Return the maps of text and image by an attribution method.

    Parts of the logit share one scale, so that both maps together sum to 1; the class activation maps of
    Grad-CAM have none, and each sums to 1 by itself.

    Parameters
    ----------
    checkpoint, plan, settings
    batch : sequence of Encoded
    targets : mapping of probe id to Score
        Over the logits of the answers.

    Raises
    ------
    ConfigError
        When Grad-CAM's layer does not exist.
    CaptureError
        When a sum that must hold does not.
    """
    sizes, numbers = list[Sizes](), list[dict[str, float]]()
    for item in batch:
        asked = region_question(checkpoint, item)
        if settings.method == "grad_cam":
            found, extra = _class_activation(asked, plan, targets, settings.layer), dict[str, float]()
        else:
            (tokens, regions), extra = attributed_parts(asked, targets, settings)
            found = torch.from_numpy(tokens), torch.from_numpy(regions)
        sizes.append(found)
        numbers.append(extra)
    each = [torch.stack([one[i] for one in sizes]) for i in (0, 1)]
    totals = [one.sum(dim=1, keepdim=True) for one in each]
    if settings.method != "grad_cam":
        totals = [totals[0] + totals[1]] * 2
    free = torch.zeros(len(batch), dtype=torch.bool)
    said = {name: torch.tensor([one[name] for one in numbers]) for name in numbers[0]}
    text, image = (
        StreamRows(torch.where(total > 0, one / total.clamp_min(1e-300), 0.0), [], free, said)
        for one, total in zip(each, totals, strict=True)
    )
    return text, image


def _class_activation(
    asked: RegionQuestion, plan: CapturePlan, targets: Mapping[str, Score], layer: int
) -> Sizes:
    """Return Grad-CAM of each stream at what a cross-modality layer takes.

    The self-attention above the last of them reaches the answer from the text alone.
    """
    crossing = {x.module: None for x in plan.layers if crosses(x.path)}
    own = asked.own(targets)
    with kept_inputs(crossing) as seen, asked.scored(*asked.inputs(), targets, own) as (score, _):
        index = check_layer(layer, len(seen) // 2)  # each is called by the text, then by the image
        text, image = (
            activation_map(score, features, torch.arange(features.shape[1])).cpu()
            for features in seen[2 * index : 2 * index + 2]
        )
    return text, image
