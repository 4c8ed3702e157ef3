r"""Value zeroing on encoder-decoders: every layer runs again without the value of one position.

A decoder layer reads two sets of values: of the positions of its own input, in self-attention, and of the
encoder's output, in cross-attention. How far the whole layer's output turns without any one of them is one
measure for both, so that a row over the two together is divided by its sum (Mohebbi et al., EACL 2023,
arXiv 2301.12971, carried from one set of values to two):

.. math:: D_l = Z^{self} D_{l-1}, \qquad S_l = Z^{self} S_{l-1} + Z^{cross} E

with E the encoder's own product. Neither set of values holds the other, since cross-attention comes after
self-attention and reads the encoder alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from audit.capture.attention.check import check_counts
from audit.capture.attention.hooks import counted_calls
from audit.capture.attention.interface import AttentionCall, KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.attention.threads import own_thread
from audit.capture.engines.blocks import first_output, refuse_hooks
from audit.capture.engines.zeroing import Zeroing
from audit.capture.inputs.encoded import core_model
from audit.capture.pairs.encoder_decoder import CrossFold
from audit.capture.pairs.multi import check_call
from audit.errors import CaptureError
from audit.methods.value_aware import identity_where_empty


class _PairZeroing(Zeroing):
    """Runs the layers of both stacks again without one value."""

    def __init__(self, model: nn.Module, plan: CapturePlan, fold: CrossFold) -> None:
        super().__init__(model, {}, fold.encoder, fold.verify)
        self.pair, self.layers = fold, {layer.path: layer for layer in plan.layers}
        self.encoder = plan.stacks[0]
        self.kind: Literal["self", "cross"] = "self"

    def attend(self, call: KernelCall) -> tuple[Tensor, Tensor | None]:
        """Run one attention, without the value of one key where the layer runs again."""
        layer = self.layers[call.path]
        self.seen[call.path] += 1
        if self.again:
            if layer.kind != self.kind:
                return call.run()
            value = call.value.clone()
            value[:, :, self.zeroed] = 0
            return replace(call, value=value).run()
        output, weights = call.run()
        source, prefix = self.pair.valid
        inside = layer.stack == self.encoder
        seen = AttentionCall(call.path, call.weights() if weights is None else weights, output, call.value)
        keys = source if layer.kind == "cross" else None
        check_call(seen, source if inside else prefix, keys, verify=self.verify)
        if inside:
            self.pair.encoder.note_causal(seen.weights)
        return output, weights

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Run every layer again when it ends."""
        blocks = {f"{layer.stack}.{layer.block}": layer.stack for layer in self.layers.values()}
        with ExitStack() as stack:
            for path, of in blocks.items():
                end = self._end if of == self.encoder else self._end_decoder
                handle = self.modules[path].register_forward_hook(own_thread(end), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _end_decoder(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        whole = first_output(output)
        if whole is None:
            raise CaptureError(f"{type(module).__name__} returns no hidden states; use the method rollout")
        (source, prefix), parts = self.pair.valid, []
        each: tuple[tuple[Literal["self", "cross"], Tensor], ...] = (("self", prefix), ("cross", source))
        for self.kind, keys in each:
            parts.append(self._distances(module, args, kwargs, whole, keys.shape[1]))
        self.kind = "self"
        matrix = torch.where(prefix[:, :, None], torch.cat(parts, dim=-1), 0.0)
        matrix = matrix / matrix.sum(-1, keepdim=True).clamp_min(torch.finfo(matrix.dtype).tiny)
        matrix, _ = identity_where_empty(matrix)
        steps = prefix.shape[1]
        self.pair.push_self(matrix[..., :steps])
        self.pair.push_cross(matrix[..., steps:], 1.0)


def pair_zeroing_batch(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], fold: CrossFold
) -> Any:
    """Run one batch, and every layer of both stacks once more for each value that it reads.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        For layers off the attention interface, whose values cannot be changed.
    """
    refuse_hooks(plan)
    run = _PairZeroing(core_model(model), plan, fold)
    with exclusive(model, plan.configs), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        stack.enter_context(interface_capture(plan.modules(), plan.configs, Replacing(run.attend)))
        stack.enter_context(run.hooks())
        outputs = run_model(model, tensors, keep_logits=True)
    check_counts(plan, called, run.seen, None)
    return outputs
