"""Value-aware methods where blocks attend to an image: what each position adds, block by block.

Every block of the decoder and of the tower is taken apart as one of an encoder-decoder is
(:mod:`audit.capture.pairs.contributions`). A gate is a factor of what attention adds: closed, a block
draws on nothing but its own position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import AttentionLayer
from audit.capture.attention.passes import exclusive
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.cross import KeyedFold
from audit.capture.joined.fold import JoinedFold
from audit.capture.pairs.contributions import PartWatch, run_parts
from audit.capture.pairs.parts import Part, find_parts


class CrossedContributions(JoinedFold):
    """The rollout of each stack of one probe, of matrices that are made of more than attention weights."""

    def valid_of(self, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
        """Return the positions of a layer's stack, and the keys of cross-attention: all are valid."""
        fold = self.folds[layer.stack]
        if isinstance(fold, KeyedFold):
            return fold.own, fold.keys if layer.kind == "cross" else None
        return fold.valid, None

    def push(self, layer: AttentionLayer, matrix: Tensor) -> None:
        """Take contributions (sequence, query, key); cross-attention has one more key: the residual."""
        fold = self.folds[layer.stack]
        if isinstance(fold, KeyedFold):
            fold.push(layer, matrix)
            return
        fold.push(matrix)
        self._keep(layer.stack, fold)

    def push_measured(self, layer: AttentionLayer, weights: Tensor, residual: Tensor) -> None:
        """Take attention with its measured residual (sequence, query)."""
        fold = self.folds[layer.stack]
        if isinstance(fold, KeyedFold):
            fold.take(layer, weights, residual)
            return
        fold.fold(weights, residual=residual)
        self._keep(layer.stack, fold)


class _Watch(PartWatch):
    """Hands the parts of every stack to the fold of one probe."""

    def __init__(self, model: nn.Module, parts: Mapping[str, Part], fold: CrossedContributions) -> None:
        super().__init__(model, parts, fold.settings, verify=fold.verify)
        self.fold = fold

    def valid(self, layer: AttentionLayer) -> tuple[Tensor, Tensor | None]:
        """Return a layer's queries, and its keys where they are others."""
        return self.fold.valid_of(layer)

    def push(self, call: AttentionCall, layer: AttentionLayer, matrix: Tensor) -> None:  # noqa: ARG002
        """Take contributions."""
        self.fold.push(layer, matrix)

    def push_measured(self, call: AttentionCall, layer: AttentionLayer, residual: Tensor) -> None:
        """Take attention with its measured residual."""
        self.fold.push_measured(layer, call.weights.detach(), residual)


def contribute_crossed(
    model: nn.Module, tensors: Mapping[str, Tensor], fold: CrossedContributions, parts: dict[str, Part]
) -> Any:
    """Run one probe and fold what each position adds, or attention with the measured residual.

    Parameters
    ----------
    model, tensors
    fold : CrossedContributions
        Of a model whose last stack attends to keys; its settings name ``norms`` or ``alti``, or have a
        measured residual.
    parts : dict of attention path to Part
        Of all stacks; filled from this probe where it is empty.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed, or its parts do not add up to what it computes.
    """
    if not parts:
        with exclusive(model, fold.plan.configs):
            parts.update(find_parts(core_model(model), fold.plan, tensors))
    return run_parts(model, fold.plan, tensors, _Watch(core_model(model), parts, fold))
