"""Grad-CAM and LRP of models of two inputs, both in one forward and one backward pass.

What is explained is the similarity of image and text, or logits as a function of source and prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, place, run_model
from audit.capture.attributions.embedded import check_own
from audit.capture.attributions.grad_cam import activation_map, check_layer, kept_inputs
from audit.capture.attributions.question import by_position
from audit.capture.attributions.relevance import conservation_error, conserving, only_added, relevances
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.cells import Cells
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import similarity
from audit.capture.pairs.halves import TOKENS, embedded_in, stack_of
from audit.capture.pairs.multi import StreamRows
from audit.errors import CaptureError
from audit.records import Checkpoint, Positions

Row = tuple[Tensor, dict[str, float]]
"""The map of one stream, and numbers that go with it."""


@dataclass(frozen=True)
class Similarity:
    """The similarity of image and text as a function of both inputs.

    Parameters
    ----------
    checkpoint : Checkpoint
    plan : CapturePlan
        Of two towers.
    settings : FoldSettings
        ``grad_cam`` with its layer, counted in each tower, or ``lrp``.
    names : two str
        The input of each tower, in the order of the stacks.
    tables : two modules or None
        The embeddings of an input that is tokens.
    """

    checkpoint: Checkpoint
    plan: CapturePlan
    settings: FoldSettings
    names: tuple[str, str]
    tables: tuple[Any, Any]

    def streams(
        self,
        batch: Sequence[Encoded],
        positions: Sequence[tuple[Positions, Positions]],
        causal: tuple[Tensor, Tensor],
    ) -> tuple[StreamRows, StreamRows]:
        """Return the maps of both streams; each sums to 1, or to 0 where nothing speaks for the similarity.

        Raises
        ------
        ConfigError
            When a tower has no such layer.
        CaptureError
            For a step without a rule, and for inputs that are neither tokens nor pixels.
        """
        explain = self._relevance if self.settings.method == "lrp" else self._activation
        with exclusive(self.checkpoint.model):
            rows = [explain(item, own) for item, own in zip(batch, positions, strict=True)]
        sizes = [torch.stack([row[i][0] for row in rows]) for i in (0, 1)]
        found = []
        for i, total in enumerate(self._totals(sizes)):
            shares = torch.where(total > 0, sizes[i] / total.clamp_min(1e-300), 0.0)
            numbers = {key: torch.tensor([row[i][1][key] for row in rows]) for key in rows[0][i][1]}
            found.append(StreamRows(shares, [], causal[i], numbers))
        return found[0], found[1]

    def _totals(self, sizes: Sequence[Tensor]) -> list[Tensor]:
        """Return what the sizes of each stream (batch, position) are divided by: (batch, 1)."""
        return [one.sum(dim=1, keepdim=True) for one in sizes]

    def _relevance(self, item: Encoded, positions: tuple[Positions, Positions]) -> tuple[Row, Row]:
        r"""Return |relevance| of each position, by the rules of :mod:`audit.capture.attributions.relevance`.

        The similarity is a product of both embeddings, so that each gets half, and the relevances of both
        inputs and all added constants add up to it. Halves do not change a map of one tower.
        """
        core = core_model(self.checkpoint.model)
        tables = [table for table in self.tables if table is not None]
        own = self._own(item)
        with only_added(core, *tables) as added, conserving(core), self._scored(item, own) as (score, leaves):
            found, total = relevances(score, leaves, added)
        views = [
            Encoded(item.probe, {name: item.tensors[name]}, own, cells=_cells(item, name))
            for name, own in zip(self.names, positions, strict=True)
        ]
        sizes = [by_position(part, view) for part, view in zip(found, views, strict=True)]
        whole = float(sum(one.sum() for one in sizes))
        extra = {"conservation_error": conservation_error(item.probe.id, core, score, total, whole)}
        return (sizes[0], extra), (sizes[1], extra)

    def _activation(self, item: Encoded, positions: tuple[Positions, Positions]) -> tuple[Row, Row]:
        """Return the class activation map of each tower; see :mod:`audit.capture.attributions.grad_cam`."""
        layers = [
            {
                layer.module: None
                for layer in self.plan.layers
                if layer.stack == stack and layer.kind == "self"
            }
            for stack in self.plan.stacks
        ]  # once each, where layers share theirs
        own = self._own(item)
        with (
            kept_inputs(layers[0]) as first,
            kept_inputs(layers[1]) as second,
            self._scored(item, own) as (score, _),
        ):
            maps = [
                self._map(score, seen, len(own), stack)
                for seen, own, stack in zip((first, second), positions, self.plan.stacks, strict=True)
            ]
        return (maps[0], {}), (maps[1], {})

    def _map(self, score: Tensor, seen: Sequence[Tensor], length: int, stack: str) -> Tensor:
        features = seen[check_layer(self.settings.layer, len(seen))]
        if features.dim() != 3 or tuple(features.shape[:2]) != (1, length):
            raise CaptureError(
                f"an attention layer of {stack} takes features of shape {tuple(features.shape)} for {length} "
                "positions, so Grad-CAM has no map; use another method"
            )
        return activation_map(score, features, torch.arange(length))

    def _own(self, item: Encoded) -> float:
        """Return what is explained, of the model's own pass."""
        with torch.no_grad():
            return float(
                self._explained(item, run_model(self.checkpoint.model, item.tensors, keep_logits=True))
            )

    @contextmanager
    def _scored(self, item: Encoded, own: float) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield what is explained, which must be `own`, and both inputs as leaves of its graph."""
        core = core_model(self.checkpoint.model)
        given, leaves = place(item.tensors, core.device, core.dtype), list[Tensor]()
        with torch.enable_grad(), ExitStack() as stack:
            for name, table in zip(self.names, self.tables, strict=True):
                if name not in given or (name in TOKENS and table is None):
                    raise CaptureError(
                        f"[method] name = {self.settings.method!r} explains tokens, pixels and sound, but "
                        f"the checkpoint takes {', '.join(given)}; use gradient_rollout"
                    )
                taken = given[name] if table is None else table(given[name])
                leaves.append(taken.detach().requires_grad_())
                if table is None:
                    given[name] = leaves[-1].clone()
                else:
                    put = embedded_in(stack_of(core, name), table, leaves[-1].clone(), given[name])
                    stack.enter_context(put)
            outputs = run_model(self.checkpoint.model, given, keep_logits=True)
            score = self._explained(item, outputs)
            check_own(item.probe.id, score, own, abs(own), core.dtype)
            if not score.requires_grad:
                raise CaptureError(
                    f"{type(outputs).__name__} gives a score without a gradient; use occlusion, shap or lime"
                )
            yield score, leaves

    def _explained(self, item: Encoded, outputs: Any) -> Tensor:  # noqa: ARG002
        """Return the similarity, a scalar."""
        found = similarity(outputs)
        if found is None:
            raise CaptureError(f"{type(outputs).__name__} gives no similarity of text and image to explain")
        return found.sum()


@dataclass(frozen=True)
class Answer(Similarity):
    """The logits at the decoder's rows as a function of source and prefix.

    Relevances of both, and of all constants, add up to what is explained, so that their shares compare
    source and prefix. Class activation maps have no scale in common. The layers of Grad-CAM are those of
    self-attention, counted in encoder and decoder.

    Parameters
    ----------
    targets : mapping of probe id to Score
        Over the flat logits of one probe.
    """

    targets: Mapping[str, Score] = field(default_factory=dict)

    def _totals(self, sizes: Sequence[Tensor]) -> list[Tensor]:
        if self.settings.method != "lrp":
            return super()._totals(sizes)
        return [torch.cat(list(sizes), dim=1).sum(dim=1, keepdim=True)] * 2

    def _explained(self, item: Encoded, outputs: Any) -> Tensor:
        return self.targets[item.probe.id].of(outputs.logits.flatten(1)).sum()


def _cells(item: Encoded, name: str) -> Cells | None:
    return item.cells if item.cells is not None and item.cells.name == name else None
