"""Rollout of models that read an image and a text in one sequence, composed with what made its positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from audit.capture.check import check_rows, check_values
from audit.capture.engine import BatchFold
from audit.capture.front import KEYS, Depth, Front, context_of
from audit.capture.interface import AttentionCall
from audit.capture.layers import AttentionLayer, CapturePlan
from audit.capture.passes import exclusive, run_model, watched
from audit.capture.settings import FoldSettings
from audit.capture.windowed import Slots, spread_windows
from audit.errors import CaptureError
from audit.methods.fusion import fuse_heads
from audit.methods.rollout import add_residual


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
    folds: dict[str, BatchFold] = field(init=False)
    states: dict[Depth, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folds = {stack: BatchFold(self.settings, *self._rows(stack)) for stack in self.plan.stacks}
        self._layers = {layer.path: layer for layer in self.plan.layers}
        self._block = ""

    def _rows(self, stack: str) -> tuple[Tensor, Tensor]:
        """Return what is read of a stack and which of its positions are no pads: all."""
        sequences, length = self.front.sizes[stack]
        if stack == self.plan.stacks[-1] and KEYS in self.front.sizes:
            keys = self.front.sizes[KEYS][0] * self.front.sizes[KEYS][1]
            read = torch.nn.functional.pad(self.read, (0, keys))
            return read, torch.ones_like(read, dtype=torch.bool)
        if stack in self.front.contexts:
            length += self.front.contexts[stack][1]
        valid = torch.ones(sequences, length, dtype=torch.bool, device=self.read.device)
        return (self.read if stack == self.plan.stacks[-1] else valid.float() / length), valid

    def receive(self, call: AttentionCall) -> None:
        """Take the attention of one layer."""
        layer = self._layers[call.path]
        stack, fold = layer.stack, self.folds[layer.stack]
        if KEYS in self.front.sizes and stack == self.plan.stacks[-1]:
            self._beside_keys(call, layer, fold)
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

    def _beside_keys(self, call: AttentionCall, layer: AttentionLayer, fold: BatchFold) -> None:
        """Take a layer of a stack that also attends to keys: they stand behind its positions, unchanged.

        S ← ÃS, D ← ÃD for self-attention; S ← βS + (1 − β)·C, D ← βD for cross-attention, as one matrix
        over positions and keys (:func:`audit.methods.encoder_decoder_rollout`).
        """
        n, total = self.read.shape[1], fold.read.shape[1]
        own, keys = fold.valid[:, :n], fold.valid[:, n:]
        cross = layer.kind == "cross"
        check_rows(call, own, keys if cross else None)
        if self.verify:
            check_values(call, own)
        rho = self.settings.residual_of(0)
        weights = call.weights.detach()
        step = torch.eye(
            total, dtype=torch.promote_types(weights.dtype, torch.float32), device=weights.device
        )
        if cross:
            fused = fuse_heads(weights, query_offset=None, **self.settings.fusion)
            step[:n, :n] *= rho
            step[:n, n:] = (1 - rho) * fused[0]
        else:
            fold.note_causal(weights)
            step[:n, :n] = add_residual(fuse_heads(weights, **self.settings.fusion), rho)[0]
        fold.push(step[None])
        if cross and self._block == layer.block:  # one row for each block
            fold.rows.pop(-2)
        self._block = layer.block

    def origins(self) -> Tensor:
        """Return which image positions each position of the last stack stands for.

        A position that several patches were merged into stands for each of them alike, and so it does for
        the layers of a tower where the connector reads several.

        Returns
        -------
        Tensor (position, image position)
            Rows sum to 1; to 0 where a position stands for no part of the image. Keys of cross-attention
            stand behind the positions.
        """
        first = self.plan.stacks[0]
        size = self.front.sizes[first][0] * self.front.sizes[first][1]
        columns = size + self.latents
        known = {first: torch.eye(size, columns, dtype=torch.float64, device=self.read.device)}
        if len(self.plan.stacks) == 1:
            seen = torch.from_numpy(np.unique(self.front.pixels[self.front.pixels >= 0])).to(self.read.device)
            own = torch.zeros_like(known[first])
            own[seen, seen] = 1
            return own
        for stack in self.plan.stacks[1:]:
            if stack in self.front.contexts:
                known[stack] = self._of_latents(stack, known, size)
                size += int(np.prod(self.front.sizes[stack]))
                continue
            known[stack] = self._made_of(stack, known)
            whole = bool((known[stack].sum(dim=1) > 0).all())
            if stack != self.plan.stacks[-1] and not whole:
                raise CaptureError(
                    f"{stack} has positions of its own beside those of the image; its map cannot be composed"
                )
        last = known[self.plan.stacks[-1]]
        if KEYS not in self.front.sizes:
            return last
        keys = self._made_of(KEYS, known)
        if not bool((keys.sum(dim=1) > 0).all()):
            raise CaptureError(
                "cross-attention has keys beside those of the image; its map cannot be composed"
            )
        return torch.cat([last, keys])

    @property
    def latents(self) -> int:
        """Return how many learned latents stand between the image and the last stack."""
        return sum(int(np.prod(self.front.sizes[stack])) for stack in self.front.contexts)

    def _of_latents(self, stack: str, known: Mapping[str, Tensor], start: int) -> Tensor:
        """Return what latents, which stand for themselves, and their context are made of, by sequences."""
        sequences, own = self.front.sizes[stack]
        context = self._made_of(context_of(stack), known)
        if not bool((context.sum(dim=1) > 0).all()):
            raise CaptureError(f"{stack} attends to positions beside those of the image; not supported")
        latents = context.new_zeros(sequences, own, context.shape[1])
        index = torch.arange(sequences * own, device=context.device)
        latents.view(-1, context.shape[1])[index, start + index] = 1.0
        beside = context.reshape(sequences, -1, context.shape[1])
        return torch.cat([latents, beside], dim=1).flatten(0, 1)

    def _made_of(self, stack: str, known: Mapping[str, Tensor]) -> Tensor:
        contexts = {context_of(name): size for name, size in self.front.contexts.items()}
        count = int(np.prod(contexts[stack] if stack in contexts else self.front.sizes[stack]))
        image = known[self.plan.stacks[0]]
        total, times = image.new_zeros(count, image.shape[1]), image.new_zeros(count, 1)
        for depth, fed in self.front.sources[stack].items():
            taken = merging(torch.from_numpy(fed), count).to(self.read.device)
            total += self._rolled(taken, depth) @ known[depth[0]]
            times += (taken.sum(dim=1, keepdim=True) > 0).to(taken.dtype)
        return total / times.clamp_min(1.0)

    def _rolled(self, rows: Tensor, depth: Depth) -> Tensor:
        """Return rows (row, position) times the rollout of a stack up to a depth, sequence by sequence."""
        beside = self.front.contexts.get(depth[0], (0, 0))[1]
        if depth[1] == 0 and not beside:
            return rows
        if depth not in self.states:
            raise CaptureError(
                f"block {depth[1] - 1} of {depth[0]} is read, but not every block has one attention layer; "
                "this architecture is not supported"
            )
        matrix = self.states[depth].to(rows.dtype)
        cut = torch.nn.functional.pad(rows.reshape(len(rows), len(matrix), -1), (0, beside))
        return torch.einsum("rsq,sqk->rsk", cut, matrix).reshape(len(rows), -1)

    def rows(self) -> list[Tensor]:
        """Return the output row of the last stack after each of its layers: (position,)."""
        return [row[0].double() for row in self.folds[self.plan.stacks[-1]].rows]

    @property
    def causal(self) -> bool:
        """Return whether no position of the last stack attends beyond itself."""
        return bool(self.folds[self.plan.stacks[-1]].causal[0])


def merging(fed: Tensor, count: int) -> Tensor:
    """Return a matrix whose row i is even over the earlier positions that feed position i.

    Examples
    --------
    >>> merging(torch.tensor([1, 1, -1, 0]), 2).tolist()
    [[0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.0, 0.0]]
    """
    matrix = torch.zeros(count, len(fed), dtype=torch.float64)
    known = (fed >= 0).nonzero()[:, 0]
    matrix[fed[known], known] = 1.0
    return matrix / matrix.sum(dim=1, keepdim=True).clamp_min(1.0)


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
