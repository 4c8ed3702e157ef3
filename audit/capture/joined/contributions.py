"""Value-aware methods on images with text or in windows: what each position adds, in every stack.

Each layer of each stack is split as one of a single stack is (:mod:`audit.capture.engines.contributions`):
layers within windows window by window, since nothing passes between them; layers of latents over the context
and the latents that they attend to. The stacks' rollouts are then composed as those of attention are.
"""

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
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.attention.threads import own_thread
from audit.capture.engines import contributions
from audit.capture.engines.blocks import Block, first_output, nearest_block, refuse_hooks
from audit.capture.engines.contributions import LayerParts, LayerWatch
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import MEASURED
from audit.capture.inputs.encoded import core_model
from audit.capture.joined.fold import JoinedFold
from audit.capture.joined.windowed import spread_windows
from audit.errors import CaptureError
from audit.methods.fusion import fuse_heads_counted
from audit.methods.value_aware import identity_where_empty, value_zeroing_distances


class ContributionFold(JoinedFold):
    """The rollout of each stack of one probe, of matrices that are made of more than attention weights."""

    def valid_of(self, path: str) -> tuple[Tensor, Tensor]:
        """Return which queries and keys of a call are no pads: bool (batch, query), (batch, key)."""
        stack = self._layers[path].stack
        sequences, length = self.front.sizes[stack]
        if path in self.slots:
            here = self.slots[path] >= 0
            return here, torch.ones_like(here)
        valid = torch.ones(sequences, length, dtype=torch.bool, device=self.read.device)
        beside = self.front.contexts.get(stack, (0, 0))[1]
        return valid, torch.nn.functional.pad(valid, (0, beside), value=True)

    def check(self, call: AttentionCall) -> None:
        """Check the weights of one call, and note whether the last stack sees what comes later.

        Raises
        ------
        CaptureError
        """
        queries, keys = self.valid_of(call.path)
        check_rows(call, queries, keys)
        if self.verify:
            check_values(call, queries)
        if call.sink:
            raise CaptureError(
                f"attention layer {call.path} has a learned sink, which is not supported beside an image"
            )
        if self._layers[call.path].stack == self.plan.stacks[-1] and call.path not in self.slots:
            self._fold(call.path).note_causal(call.weights)

    def arranged(self, path: str, states: Tensor) -> Tensor:
        """Return states of a stack in the order of a layer's call: (batch, query, dim)."""
        if path in self.slots:
            return states.reshape(-1, states.shape[-1])[self.slots[path].clamp_min(0)]
        return states.reshape(*self.front.sizes[self._layers[path].stack], states.shape[-1])

    def push(self, path: str, matrix: Tensor) -> None:
        """Take the matrix of a layer in the order of its call (batch, query, key), its residual in it.

        Rows need not sum to 1; one without mass becomes an identity row.
        """
        stack, fold = self._layers[path].stack, self._fold(path)
        square = matrix
        if path in self.slots:
            call = AttentionCall(path, matrix[:, None], matrix)
            square = spread_windows(call, self.slots[path], *self.front.sizes[stack])[:, 0]
        elif stack in self.front.contexts:
            own, beside = self.front.sizes[stack][1], self.front.contexts[stack][1]
            square = torch.eye(own + beside, dtype=matrix.dtype, device=matrix.device)
            square = square.repeat(len(matrix), 1, 1)
            square[:, :own, :own], square[:, :own, own:] = matrix[..., beside:], matrix[..., :beside]
        square = square / square.sum(-1, keepdim=True).clamp_min(torch.finfo(square.dtype).tiny)
        square, empty = identity_where_empty(square)
        fold.empty_rows += empty
        fold.push(square)
        self._keep(stack, fold)

    def push_measured(self, call: AttentionCall, residual: Tensor) -> None:
        """Take the weights of a layer and its measured residual (batch, query), in the order of its call."""
        path, fold = call.path, self._fold(call.path)
        stack = self._layers[path].stack
        if stack in self.front.contexts:
            beside = self.front.contexts[stack][1]
            fused, _ = fuse_heads_counted(call.weights.detach(), query_offset=beside, **self.settings.fusion)
            matrix = (1 - residual[..., None]) * fused
            matrix.diagonal(beside, 1, 2).add_(residual)
            self.push(path, matrix)
            return
        weights = call.weights
        if path in self.slots:
            weights = spread_windows(call, self.slots[path], *self.front.sizes[stack])
            known, rho = self.slots[path] >= 0, residual.new_zeros(weights.shape[0] * weights.shape[-1])
            rho[self.slots[path][known]] = residual[known]
            residual = rho.reshape(len(weights), -1)
        fold.fold(weights, residual=residual)
        self._keep(stack, fold)

    def _fold(self, path: str) -> BatchFold:
        found = self.folds[self._layers[path].stack]
        if self._layers[path].kind == "cross" or not isinstance(found, BatchFold):
            raise CaptureError(
                f"attention layer {path} attends to another stack, beside which nothing is split; use the "
                "method rollout with one residual"
            )
        return found

    def diagnostics(self) -> dict[str, float]:
        """Return ``empty_rows``, of all layers of all stacks."""
        folds = (fold for fold in self.folds.values() if isinstance(fold, BatchFold))
        return {"empty_rows": float(sum(int(fold.empty_rows.sum()) for fold in folds))}


class _Watch(LayerWatch):
    """Folds each layer of each stack when it ends."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, Block], fold: ContributionFold) -> None:
        super().__init__(model, blocks, fold.settings, fold.verify)
        self.fold = fold

    def receive(self, call: AttentionCall) -> None:
        self.fold.check(call)
        self.note(call)

    def take(self, found: LayerParts, call: AttentionCall, block: Block) -> None:
        """Fold the layer by its contributions, or by its attention with the measured residual."""
        added, valid = found.added, self.fold.valid_of(call.path)[0]
        found = found.arranged(lambda part: self.fold.arranged(call.path, part))
        if added is not None and block.scale is None:  # as the projection gave it
            found.added = added.reshape(found.hidden.shape)
        if self.settings.residual == MEASURED:
            self.fold.push_measured(call, found.residual())
        else:
            self.fold.push(call.path, self.split(found, call, block, valid))


class _Zeroing:
    """Runs every layer again without the value of one position, for each position.

    In windows, of one position of each: they do not see each other.
    """

    def __init__(self, model: nn.Module, fold: ContributionFold) -> None:
        self.fold, self.modules = fold, dict(model.named_modules())
        self.paths = {nearest_block(layer.path): layer.path for layer in fold.plan.layers}
        self.seen = Counter[str]()
        self.zeroed: int | None = None
        self.sizes = list[int]()
        self.offset = 0

    def attend(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        self.seen[call.path] += 1
        if self.zeroed is not None:
            return self._without(call, self.zeroed)
        output, weights = call.run()
        sink = call.options.get("s_aux") is not None
        seen = call.weights() if weights is None or sink else weights
        self._check(AttentionCall(call.path, seen, output, call.value, sink))
        return output, weights

    def _check(self, call: AttentionCall) -> None:
        if call.path not in self.fold.plan.pieces:
            self.fold.check(call)
            return
        valid = torch.ones(1, call.weights.shape[-2], dtype=torch.bool, device=call.weights.device)
        check_rows(call, valid)
        if self.fold.verify:
            check_values(call, valid)
        self.sizes.append(valid.shape[1])

    def _without(self, call: KernelCall, key: int) -> tuple[Tensor, Tensor | None]:
        if call.path in self.fold.plan.pieces:  # which follow one another
            key, self.offset = key - self.offset, self.offset + call.value.shape[2]
        if not 0 <= key < call.value.shape[2]:
            return call.run()
        value = call.value.clone()
        value[:, :, key] = 0
        return replace(call, value=value).run()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, attention in self.paths.items():
                end = own_thread(self._ending(attention))
                stack.callback(self.modules[path].register_forward_hook(end, with_kwargs=True).remove)
            yield

    def _ending(self, path: str) -> Any:
        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            whole = first_output(output)
            if whole is None:
                raise CaptureError(
                    f"{type(module).__name__} returns no hidden states; use the method rollout"
                )
            matrix = self._distances(path, module, args, kwargs, self.fold.arranged(path, whole))
            if self.sizes:
                self._check_pieces(path, matrix)
            self.sizes = []
            self.fold.push(path, matrix)

        return end

    def _distances(self, path: str, module: nn.Module, args: Any, kwargs: Any, whole: Tensor) -> Tensor:
        """Return how far each query of a layer turns without each key: (batch, query, key)."""
        keys = range(self.fold.valid_of(path)[1].shape[1])
        size = max(1, contributions.BLOCK_ENTRIES // whole.numel())
        found = []
        try:
            for start in range(0, len(keys), size):
                without = [self._again(path, module, args, kwargs, key) for key in keys[start : start + size]]
                found.append(value_zeroing_distances(whole, torch.stack(without, dim=2)))
        finally:
            self.zeroed = None
        return torch.cat(found, dim=-1)

    def _again(self, path: str, module: nn.Module, args: Any, kwargs: Any, key: int) -> Tensor:
        self.zeroed, self.offset = key, 0
        output = first_output(module.forward(*args, **kwargs))
        if output is None:
            raise CaptureError(f"attention layer {path}: its block returns no hidden states")
        return self.fold.arranged(path, output)

    def _check_pieces(self, path: str, matrix: Tensor) -> None:
        """Check that the pieces of a layer stand in the order of its positions."""
        piece = torch.repeat_interleave(torch.tensor(self.sizes, device=matrix.device))
        if bool((matrix[0] * (piece[:, None] != piece)).any()):
            raise CaptureError(
                f"attention layer {path} attends in pieces that do not follow one another; such attention is "
                "not supported"
            )


def contribute_joined(
    model: nn.Module, tensors: Mapping[str, Tensor], fold: ContributionFold, blocks: Mapping[str, Block]
) -> Any:
    """Run one probe and fold what each position adds, or attention with the measured residual.

    Parameters
    ----------
    model, tensors
    fold : ContributionFold
        Filled. Its settings name ``norms``, ``globenc``, ``alti``, ``value_zeroing``, or rollout with a
        measured residual.
    blocks : mapping of attention path to Block
        From :func:`audit.capture.engines.blocks.find_blocks`; value zeroing needs none.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed, its weights are not what it used, or its parts do not add up.
    """
    core, plan = core_model(model), fold.plan
    if fold.settings.method != "value_zeroing":
        watch = _Watch(core, blocks, fold)
        with exclusive(model, plan.configs), watch.hooks(), watched(plan, watch.receive, None):
            return run_model(model, tensors, attentions=plan.has_hooks, keep_logits=True)
    refuse_hooks(plan)
    run = _Zeroing(core, fold)
    with exclusive(model, plan.configs), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        stack.enter_context(interface_capture(plan.modules(), plan.configs, Replacing(run.attend)))
        stack.enter_context(run.hooks())
        outputs = run_model(model, tensors, keep_logits=True)
    for path in plan.pieces:
        run.seen[path] = called[path]  # more calls of its kernel than of the layer
    check_counts(plan, called, run.seen, None)
    return outputs
