"""Value-aware methods on two streams that attend to each other: what each position adds, sum by sum.

Every attention of LXMERT is followed by a sum with its queries and a norm. Within a stream a sum is split as
in one stack, where streams cross as in a decoder's cross-attention: into the vectors of the other stream's
positions and the residual, which carries all that the query's own position holds. See
:mod:`audit.capture.pairs.contributions`. Where modules stand is known by name, as their streams are; that
the parts add up to what the model computes is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import AttentionLayer, CapturePlan
from audit.capture.inputs.encoded import core_model
from audit.capture.pairs.co_attention import CoFold, Step, crosses
from audit.capture.pairs.contributions import PartWatch, run_parts
from audit.capture.pairs.parts import Part


class _CoWatch(PartWatch):
    """Folds the parts of both streams: where they cross after each call, else when the whole layer ends."""

    def __init__(self, model: nn.Module, plan: CapturePlan, fold: CoFold) -> None:
        parts = {layer.path: _part(layer) for layer in plan.layers}
        super().__init__(model, parts, fold.settings, verify=fold.verify)
        self.fold = fold
        self.steps: dict[str, Step] = {}

    def receive(self, call: AttentionCall) -> None:
        """Keep one call of one layer, checked."""
        self.steps[call.path] = self.fold.next_step(call)
        super().receive(call)

    def valid(self, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
        """Return the valid queries of a layer's last call, and its valid keys where they are others."""
        return self.fold.valid_of(self.steps[layer.path])

    def push(self, call: AttentionCall, layer: AttentionLayer, matrix: Tensor) -> None:
        """Take contributions; see :class:`PartWatch`."""
        step = self.steps[call.path]
        if layer.kind == "cross":
            self.fold.take(step, matrix[..., :-1], matrix[..., -1])
        else:
            self.fold.take(step, matrix)

    def push_measured(self, call: AttentionCall, layer: AttentionLayer, residual: Tensor) -> None:  # noqa: ARG002
        """Take attention with its measured residual."""
        self.fold.take_weights(self.steps[call.path], call.weights.detach(), residual)


def _part(layer: AttentionLayer) -> Part:
    """Return the sum of one attention; where streams cross it ends with each of the two calls."""
    own = layer.path.rpartition(".")[0]
    block, _, name = own.rpartition(".")
    behind = {"lang_self_att": "lang_output", "visn_self_att": "visn_output"}.get(name, "output")
    part = Part(
        layer,
        block,
        projection=f"{own}.output.dense",
        residual=(own, "taken"),
        norm=f"{own}.output.LayerNorm",
        post=True,
        second=f"{block}.{behind}.LayerNorm",
    )
    if not crosses(layer.path):
        return part
    return replace(part, layer=replace(layer, kind="cross"), block=own, second=None, followed=True)


def co_contribution_batch(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], fold: CoFold
) -> Any:
    """Run one batch and fold what each position adds, or attention with the measured residual.

    Parameters
    ----------
    model, plan, tensors
    fold : CoFold
        Its settings name ``norms``, ``globenc`` or ``alti``, or have a measured residual.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When the parts do not add up to what the model computes.
    """
    return run_parts(model, plan, tensors, _CoWatch(core_model(model), plan, fold))
