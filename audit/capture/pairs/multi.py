"""What a batch gives on a model of two streams, and the pass that two separate towers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from audit.capture.attention.check import check_rows, check_values
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError


@dataclass
class StreamRows:
    """What the output row of one batch draws on in one stream.

    Attributes
    ----------
    final : Tensor (batch, position)
        With the mass that falls on this stream; see `share`.
    layers : sequence of Tensor (batch, position)
        The same after each layer of the stack that is read; empty where the method has none.
    causal : bool Tensor (batch,)
    diagnostics : mapping of name to Tensor (batch,)
    """

    final: Tensor
    layers: Sequence[Tensor]
    causal: Tensor
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def share(self) -> Tensor:
        """Return the row's mass on this stream: (batch,)."""
        return self.final.sum(dim=1)


class PairFold(Protocol):
    """What one batch came to."""

    @property
    def targets(self) -> dict[str, Score]:
        """Return what was explained for each probe id, if anything was."""

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return what the output rows draw on in both streams."""


class StackFold(Protocol):
    """What a method makes of one stack; see :class:`audit.capture.engines.fold.BatchFold`."""

    rows: list[Tensor]
    valid: Tensor
    targets: dict[str, Score]

    @property
    def causal(self) -> Tensor:
        """Return which probes have no position that attends beyond itself: bool (batch,)."""

    def final_row(self) -> Tensor:
        """Return the output row: (batch, position)."""

    def diagnostics(self) -> dict[str, Tensor]:
        """Return numbers that go with the maps: name to (batch,)."""


@dataclass
class TowersFold:
    """Two stacks that do not see each other, each with a fold of its own.

    Parameters
    ----------
    folds : two folds, in the order of the stacks
    """

    folds: tuple[StackFold, StackFold]

    @property
    def targets(self) -> dict[str, Score]:
        """Return what was explained for each probe id."""
        return self.folds[0].targets

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return what the output row of each tower draws on."""
        first, second = (
            StreamRows(fold.final_row(), fold.rows, fold.causal, fold.diagnostics()) for fold in self.folds
        )
        return first, second


def check_call(call: AttentionCall, valid: Tensor, keys: Tensor | None = None, *, verify: bool) -> None:
    """Check rows, and with `verify` values, of one call in a model of several stacks.

    Raises
    ------
    CaptureError
        Also for learned sinks, which have no place among two streams.
    """
    check_rows(call, valid, keys)
    if verify:
        check_values(call, valid)
    if call.sink:
        raise CaptureError(
            f"attention layer {call.path} has a learned sink, which is not supported in a model with two "
            "stacks"
        )


def run_pair(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], receive: Any) -> Any:
    """Run one batch and send the attention of every layer to `receive`.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed or its weights are not what it used.
    """
    with exclusive(model, plan.configs), watched(plan, receive, None):
        return run_model(model, tensors, attentions=plan.has_hooks, keep_logits=True)
