"""What is decided once for all batches of a model of two streams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from audit.capture.attention.layers import CapturePlan
from audit.capture.engines.settings import ATTRIBUTION, FLOW, FoldSettings
from audit.capture.inputs.batches import length_batches
from audit.capture.inputs.encoded import Encoded
from audit.capture.pairs.parts import Part
from audit.errors import CaptureError
from audit.records import CaptureSettings, Checkpoint, Positions
from audit.records import Stream as StreamName

_IMAGE = re.compile(r"vision|visual|image", re.IGNORECASE)


@dataclass(frozen=True)
class PairSession:
    """A checkpoint with two streams and everything that is decided once for all of its batches.

    `parts` fills with the residual connections of an encoder-decoder, found in the first batch.
    """

    checkpoint: Checkpoint
    settings: CaptureSettings
    fold: FoldSettings
    plan: CapturePlan
    row: str
    wanted: dict[str, Any]
    parts: dict[str, Part] = field(default_factory=dict)

    def checking(self) -> PairSession:
        """Return the session whose passes are compared, without what is explained beside attention."""
        beside = self.fold.method == FLOW or self.fold.method in ATTRIBUTION
        return replace(self, fold=FoldSettings()) if beside else self

    @property
    def names(self) -> tuple[StreamName, StreamName]:
        """Return the streams of the two stacks, in the order of the stacks."""
        if self.plan.wiring == "encoder-decoder":
            return ("source", "prefix")
        if self.plan.wiring == "co-attention":
            return ("text", "image")
        first, second = (_IMAGE.search(name) is not None for name in self.plan.stacks)
        if first == second:
            raise CaptureError(
                f"cannot tell the text tower from the image tower among {', '.join(self.plan.stacks)}; "
                "only pairs of text and image are supported"
            )
        return ("image", "text") if first else ("text", "image")

    def batches(self, window: Sequence[Encoded]) -> list[list[int]]:
        """Cut a window into batches, as indices into it."""
        size = 1 if self.plan.alone else None
        return length_batches(window, self.settings.batch_tokens, max_size=size)

    def positions(self, item: Encoded) -> tuple[Positions, Positions]:
        """Return the positions of a probe in the order of the stacks."""
        if item.second is None:
            raise CaptureError(f"probe {item.probe.id} has one stream, but the model has two")
        if self.names == ("image", "text"):
            return item.second, item.positions
        return item.positions, item.second
