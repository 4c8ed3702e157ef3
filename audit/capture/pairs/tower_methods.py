"""Every method of one stack on each of two towers; gradients are those of the image-text similarity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.folds import FlowFold, PerHeadFold
from audit.capture.engines.gradient import GradientFold, gradient_batch
from audit.capture.engines.method_pass import Engine
from audit.capture.engines.settings import ATTRIBUTION, FLOW, MEASURED, PER_HEAD, VALUE_AWARE, FoldSettings
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.pooling import Pooling, pooled_gradient, pooling_calls, pooling_head, tower_root
from audit.capture.pairs.multi import StackFold, TowersFold, check_call, run_pair
from audit.errors import CaptureError
from audit.methods.gradient import gradient_map
from audit.records import Checkpoint


@dataclass(frozen=True)
class Towers:
    """A method on two towers: what their batches share.

    `pooled` says of each tower whether its output row is that of a pooling head.
    """

    checkpoint: Checkpoint
    plan: CapturePlan
    settings: FoldSettings
    batch_tokens: int

    def run(
        self,
        batch: Sequence[Encoded],
        tensors: Mapping[str, Tensor],
        masks: tuple[Tensor, Tensor],
        reads: tuple[Tensor, Tensor],
        *,
        pooled: tuple[bool, bool],
        verify: bool = False,
    ) -> tuple[TowersFold, Any]:
        """Return the maps of one batch and the model's outputs; both towers in one pass where they can be."""
        each = VALUE_AWARE | ATTRIBUTION | {"gradient_rollout"}
        if self.settings.method not in each and self.settings.residual != MEASURED:
            return self._together(tensors, masks, reads, verify)
        folds: list[StackFold] = []
        outputs: Any = None
        for i in (0, 1):
            one = self._gradient if self.settings.method == "gradient_rollout" else self._engine
            fold, outputs = one(i, batch, tensors, masks[i], reads[i], pooled=pooled[i], verify=verify)
            folds.append(fold)
        return TowersFold((folds[0], folds[1])), outputs

    def _together(
        self,
        tensors: Mapping[str, Tensor],
        masks: tuple[Tensor, Tensor],
        reads: tuple[Tensor, Tensor],
        verify: bool,
    ) -> tuple[TowersFold, Any]:
        kind = {PER_HEAD: PerHeadFold, FLOW: FlowFold}.get(self.settings.method, BatchFold)
        folds = tuple(kind(self.settings, read, valid) for read, valid in zip(reads, masks, strict=True))
        of_stack = dict(zip(self.plan.stacks, folds, strict=True))
        of_path = {layer.path: of_stack[layer.stack] for layer in self.plan.layers}

        def receive(call: AttentionCall) -> None:
            check_call(call, of_path[call.path].valid, verify=verify)
            of_path[call.path].fold(call.weights)

        outputs = run_pair(self.checkpoint.model, self.plan, tensors, receive)
        return TowersFold((folds[0], folds[1])), outputs

    def tower(self, index: int) -> CapturePlan:
        """Return the plan of one tower alone."""
        layers = tuple(x for x in self.plan.layers if x.stack == self.plan.stacks[index])
        return replace(self.plan, layers=layers, narrowed=True, wiring="single")

    def _engine(
        self,
        index: int,
        batch: Sequence[Encoded],
        tensors: Mapping[str, Tensor],
        valid: Tensor,
        read: Tensor,
        *,
        pooled: bool,  # noqa: ARG002
        verify: bool,
    ) -> tuple[StackFold, Any]:
        engine = Engine(
            self.checkpoint, self.tower(index), self.settings, {}, self.batch_tokens, alone=self.plan.alone
        )
        return engine.run(batch, tensors, read, valid, verify=verify)

    def _gradient(
        self,
        index: int,
        batch: Sequence[Encoded],
        tensors: Mapping[str, Tensor],
        valid: Tensor,
        read: Tensor,
        *,
        pooled: bool,
        verify: bool,
    ) -> tuple[StackFold, Any]:
        core, plan = core_model(self.checkpoint.model), self.tower(index)
        root = tower_root(self.plan.stacks[index], self.plan.stacks[1 - index])
        head = pooling_head(core, root) if pooled else None
        fold = (
            GradientFold(self.settings, read, valid)
            if head is None
            else PooledFold(self.settings, read, valid)
        )
        with ExitStack() as stack:
            if head is not None and isinstance(fold, PooledFold):
                stack.enter_context(pooling_calls(head, fold.watch(head[1])))
            outputs = gradient_batch(
                self.checkpoint,
                plan,
                batch,
                tensors,
                fold,
                wanted={},
                verify=verify,
                root=core.get_submodule(root),
            )
        return fold, outputs


class PooledFold(GradientFold):
    """A gradient rollout whose output row is the pooling head's Ā, known when backward has come past it."""

    def watch(self, module: nn.MultiheadAttention) -> Any:
        """Return what takes the call of the pooling head in the forward pass."""

        def receive(call: Pooling) -> None:
            take = lambda upstream: self._begin(pooled_gradient(module, call, upstream))  # noqa: E731
            call.output.register_hook(take)  # type: ignore[no-untyped-call]

        return receive

    def _begin(self, row: Tensor) -> None:
        if self._next is not None:
            raise CaptureError("the pooling head's gradient came after that of its tower's layers")
        self.read = row.to(self.read.dtype)
        self._vector = self.read * 0 if self.relevance else gradient_map(self.read)[0].clone()

    def final_row(self) -> Tensor:
        """Return the map: Ā·R with the identity, since the head adds nothing of its own."""
        super().final_row()  # checks that every layer was reached
        return gradient_map(self._vector + self.read if self.relevance else self._vector)[0]

    def diagnostics(self) -> dict[str, Tensor]:
        """Return ``relevance``, the sum of the row."""
        return {"relevance": (self._vector + self.read if self.relevance else self._vector).sum(dim=1)}
