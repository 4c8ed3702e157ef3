"""Value zeroing: every layer runs again without the value of one position, for each position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import check_counts, check_rows, check_values
from audit.capture.attention.hooks import counted_calls
from audit.capture.attention.interface import AttentionCall, KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.attention.threads import own_thread
from audit.capture.engines.blocks import Block, first_output, refuse_hooks
from audit.capture.engines.contributions import BLOCK_ENTRIES
from audit.capture.engines.fold import BatchFold
from audit.capture.inputs.encoded import core_model
from audit.errors import CaptureError
from audit.methods.value_aware import identity_where_empty, value_zeroing_distances


class Zeroing:
    """Runs every layer again without the value of one position, for each position."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, Block], fold: BatchFold, verify: bool) -> None:
        self.modules, self.blocks, self.fold = dict(model.named_modules()), blocks, fold
        self.verify = verify
        self.zeroed: int | None = None
        self.seen = Counter[str]()
        self.again = False

    def attend(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        """Run one attention, without the value of one key where the layer runs again."""
        self.seen[call.path] += 1
        if self.again:
            value = call.value.clone()
            value[:, :, self.zeroed] = 0
            return replace(call, value=value).run()
        output, weights = call.run()
        seen = call.weights() if weights is None else weights
        if call.options.get("s_aux") is None:  # with a sink the rows sum to less
            watched_call = AttentionCall(call.path, seen, output, call.value)
            check_rows(watched_call, self.fold.valid)
            if self.verify:
                check_values(watched_call, self.fold.valid)
        self.fold.note_causal(seen[..., : call.key.shape[-2]])
        return output, weights

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Run every layer again when it ends."""
        with ExitStack() as stack:
            for path in dict.fromkeys(block.layer for block in self.blocks.values()):
                layer = self.modules[path]
                stack.callback(layer.register_forward_hook(own_thread(self._end), with_kwargs=True).remove)
            yield

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        whole = first_output(output)
        if whole is None:
            raise CaptureError(f"{type(module).__name__} returns no hidden states; use the method rollout")
        matrix = self._distances(module, args, kwargs, whole, whole.shape[1])
        matrix = matrix / matrix.sum(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
        matrix, empty = identity_where_empty(torch.where(self.fold.valid[:, :, None], matrix, 0.0))
        self.fold.empty_rows += empty - (~self.fold.valid).sum(dim=1)
        self.fold.push(matrix)

    def _distances(self, module: nn.Module, args: Any, kwargs: Any, whole: Tensor, keys: int) -> Tensor:
        """Return how far each output turns without the value of each of `keys`: (batch, query, key)."""
        size = max(1, BLOCK_ENTRIES // whole.numel())
        distances = [
            value_zeroing_distances(
                whole, self._without(module, args, kwargs, range(keys)[start : start + size])
            )
            for start in range(0, keys, size)
        ]
        return torch.cat(distances, dim=-1)

    def _without(self, module: nn.Module, args: Any, kwargs: Any, keys: range) -> Tensor:
        """Return the layer's output without the value of each key: (batch, query, key, dim)."""
        found = []
        self.again = True
        try:
            for key in keys:
                self.zeroed = key
                output = first_output(module.forward(*args, **kwargs))
                if output is not None:
                    found.append(output)
        finally:
            self.again = False
        return torch.stack(found, dim=2)


def zeroing_batch(
    model: nn.Module,
    plan: CapturePlan,
    blocks: Mapping[str, Block],
    tensors: Mapping[str, Tensor],
    fold: BatchFold,
    *,
    verify: bool = False,
    keep_logits: bool = False,
) -> Any:
    """Run one batch, and every layer of it once more for each position.

    Parameters
    ----------
    model, plan, blocks, tensors, fold, verify, keep_logits
        As in :func:`audit.capture.engines.contributions.contribution_batch`.

    Raises
    ------
    CaptureError
        For layers off the attention interface, whose values cannot be changed.
    """
    refuse_hooks(plan)
    core = core_model(model)
    run = Zeroing(core, blocks, fold, verify)
    with exclusive(model, plan.configs), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        stack.enter_context(interface_capture(plan.modules(), plan.configs, Replacing(run.attend)))
        stack.enter_context(run.hooks())
        outputs = run_model(model, tensors, keep_logits=keep_logits)
    check_counts(plan, called, run.seen, None)
    return outputs
