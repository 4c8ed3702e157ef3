"""Rollout of models that read an image and a text in one sequence, composed with what made its positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import check_rows, check_values
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.folds import FlowFold, PerHeadFold
from audit.capture.engines.settings import FLOW, PER_HEAD, RAW, ROLLOUT, FoldSettings
from audit.capture.joined.cross import KeyedFold, check_capacities
from audit.capture.joined.front import KEYS, Depth, Front
from audit.capture.joined.origins import Origins, latent_count
from audit.capture.joined.windowed import Slots, spread_windows
from audit.capture.outputs.scores import Score
from audit.errors import CaptureError
from audit.methods.fusion import fuse_heads


@dataclass
class JoinedFold:
    """The rollout of each stack of one probe, filled while their layers run.

    Parameters
    ----------
    plan : CapturePlan
        Its stacks in the order in which they run; rows are read from the last.
    settings : FoldSettings
    front : Front
        How the inputs of the stacks come about.
    read : float Tensor (1, position)
        The output row, as weights over the rows of the last stack.
    verify : bool
        Also compare attention × values with every layer's own output.
    slots : Slots
        Windows of the layers that attend in windows.
    """

    plan: CapturePlan
    settings: FoldSettings
    front: Front
    read: Tensor
    verify: bool = False
    slots: Slots = field(default_factory=dict)
    folds: dict[str, BatchFold | KeyedFold] = field(init=False)
    states: dict[Depth, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        last, below = self.plan.stacks[-1], replace(self.settings, method=ROLLOUT, start_layer=0)
        self.folds = {stack: BatchFold(below, *self._rows(stack)) for stack in self.plan.stacks}
        self.folds[last] = self._last(last)
        self.targets: dict[str, Score] = {}
        self._layers = {layer.path: layer for layer in self.plan.layers}

    def _last(self, stack: str) -> BatchFold | KeyedFold:
        """Return the fold of the stack whose rows are read."""
        if KEYS in self.front.sizes:
            if self.settings.method == FLOW:
                check_capacities(self.plan, self.front)
            keys = self.front.sizes[KEYS][0] * self.front.sizes[KEYS][1]
            return KeyedFold(self.plan, self.settings, self.read, keys, verify=self.verify)
        kind = {PER_HEAD: PerHeadFold, FLOW: FlowFold}.get(self.settings.method, BatchFold)
        return kind(self.settings, *self._rows(stack))

    def _rows(self, stack: str) -> tuple[Tensor, Tensor]:
        """Return what is read of a stack and which of its positions are no pads: all."""
        sequences, length = self.front.sizes[stack]
        if stack in self.front.contexts:
            length += self.front.contexts[stack][1]
        valid = torch.ones(sequences, length, dtype=torch.bool, device=self.read.device)
        return (self.read if stack == self.plan.stacks[-1] else valid.float() / length), valid

    def receive(self, call: AttentionCall) -> None:
        """Take the attention of one layer."""
        layer = self._layers[call.path]
        stack, fold = layer.stack, self.folds[layer.stack]
        if isinstance(fold, KeyedFold):
            fold.receive(call, layer)
            return
        if stack in self.front.contexts:
            self._latents(call, stack, fold)
            return
        if layer.kind == "cross":
            raise CaptureError(
                f"attention layer {call.path} attends to another stack; this is not supported here"
            )
        windows = self.slots.get(call.path)
        valid = fold.valid if windows is None else torch.ones_like(windows, dtype=torch.bool)
        check_rows(call, valid)
        if self.verify:
            check_values(call, valid)
        if call.sink:
            raise CaptureError(
                f"attention layer {call.path} has a learned sink, which is not supported beside an image"
            )
        whole = call.weights if windows is None else spread_windows(call, windows, *self.front.sizes[stack])
        last = self.folds[self.plan.stacks[-1]]
        if isinstance(last, KeyedFold) and self.settings.method == FLOW:
            last.pair.take_encoder(whole.detach())
        fold.fold(whole)
        self._keep(stack, fold)

    def _latents(self, call: AttentionCall, stack: str, fold: BatchFold) -> None:
        """Take a layer of latents, which attend to a context and one another; the context stands behind."""
        own, beside = self.front.sizes[stack][1], self.front.contexts[stack][1]
        check_rows(call, fold.valid[:, :own], fold.valid)
        if self.verify:
            check_values(call, fold.valid[:, :own])
        rho = self.settings.residual_of(0)
        fused = fuse_heads(call.weights.detach(), query_offset=None, **self.settings.fusion)
        step = torch.eye(own + beside, dtype=fused.dtype, device=fused.device).repeat(len(fused), 1, 1)
        step[:, :own, :own] = rho * step[:, :own, :own] + (1 - rho) * fused[..., beside:]
        step[:, :own, own:] = (1 - rho) * fused[..., :beside]
        fold.push(step)
        self._keep(stack, fold)

    def _keep(self, stack: str, fold: BatchFold) -> None:
        if (stack, fold.layer) in self.front.depths and fold.matrix is not None:
            self.states[stack, fold.layer] = fold.matrix

    def origins(self) -> Tensor:
        """Return which image positions each position of the last stack stands for; see :class:`Origins`."""
        states = None if self.settings.method in (RAW, FLOW) else self.states
        return Origins(self.plan.stacks, self.front, self.read.device, states).matrix()

    @property
    def latents(self) -> int:
        """Return how many learned latents stand between the image and the last stack."""
        return latent_count(self.front)

    def rows(self) -> list[Tensor]:
        """Return the output row of the last stack after each of its layers: (position,)."""
        return [row[0].double() for row in self.folds[self.plan.stacks[-1]].rows]

    def row(self) -> Tensor:
        """Return the output row over the last stack: (position,)."""
        return self.folds[self.plan.stacks[-1]].final_row()[0].double()

    def image(self, rows: Tensor) -> Tensor:
        """Return rows over the last stack as rows over the positions of the image."""
        return rows @ self.origins()

    def diagnostics(self) -> dict[str, float]:
        """Return numbers that go with the map."""
        name = {PER_HEAD: "head_disagreement", FLOW: "saturated"}.get(self.settings.method)
        if name is None:
            return {}
        return {name: float(self.folds[self.plan.stacks[-1]].diagnostics()[name][0])}

    @property
    def causal(self) -> bool:
        """Return whether no position of the last stack attends beyond itself."""
        return bool(self.folds[self.plan.stacks[-1]].causal[0])


def fold_joined(model: nn.Module, tensors: Mapping[str, Tensor], fold: JoinedFold) -> Any:
    """Run one probe and fold the attention of all of its stacks.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed or its weights are not what it used.
    """
    with exclusive(model, fold.plan.configs), watched(fold.plan, fold.receive, None):
        return run_model(model, tensors, attentions=fold.plan.has_hooks, keep_logits=True)
