"""Relevance of an encoder-decoder in step with the backward pass: one layer's heads alive at a time.

Backward reaches the decoder's layers first, then the encoder's, each stack from its last layer down. Each
layer's weights are computed again and fused with their gradient to Ā, a block of queries at a time. The
encoder's layers are multiplied into one matrix as they come; the decoder's Ā, of steps × steps and
steps × source without heads, wait until backward is done, since a cross step needs the normalised
relevance of the decoder layers *below* it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import check_counts
from audit.capture.attention.hooks import counted_calls, hook_capture
from audit.capture.attention.interface import AttentionCall, KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.attention.threads import own_thread
from audit.capture.engines.gradient import _attend, _detached, _hooked
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.scores import Score
from audit.capture.pairs.multi import StreamRows
from audit.capture.pairs.targets import next_token_scores, pair_scores
from audit.errors import CaptureError
from audit.methods.gradient import gradient_map, weigh_by_gradient
from audit.methods.two_stream import Relevances, cross_step, identity_relevances, self_step
from audit.records import Checkpoint


class RelevanceFold:
    """What :func:`audit.methods.encoder_decoder_relevance` needs, taken layer by layer from the last one.

    Parameters
    ----------
    plan : CapturePlan
        Its first stack is the encoder.
    valid : two bool Tensors (batch, position)
        Of source and prefix.
    read : float Tensor (batch, step)
        The output row, as weights over the decoder's rows.
    """

    def __init__(self, plan: CapturePlan, valid: tuple[Tensor, Tensor], read: Tensor) -> None:
        self.valid, self.read = valid, read
        self.layers = {layer.path: layer for layer in plan.layers}
        self.encoder_stack = plan.stacks[0]
        self.targets: dict[str, Score] = {}
        self.calls = 0
        self.order: list[str] = []
        self.causal = torch.ones(len(read), dtype=torch.bool, device=read.device)
        self._weighted: list[Tensor] = []
        self._left: list[int] = []
        self._below: Tensor | None = None
        self._decoder: dict[int, Tensor] = {}

    def streams_of(self, path: str) -> tuple[Tensor, Tensor | None]:
        """Return the valid queries of a layer, and its valid keys where they are of the other stream."""
        layer = self.layers[path]
        if layer.stack == self.encoder_stack:
            return self.valid[0], None
        return self.valid[1], self.valid[0] if layer.kind == "cross" else None

    def start_layer(self, layer: int) -> None:
        """Begin a layer; those of the encoder come from the last one down."""
        inside = [i for i in self._left if self.layers[self.order[i]].stack == self.encoder_stack]
        if inside and self.layers[self.order[layer]].stack == self.encoder_stack and layer > inside[-1]:
            raise CaptureError(
                f"gradients of attention layer {self.order[layer]} arrived out of order; use the method "
                "rollout"
            )
        self._left.append(layer)
        self._weighted = []

    def block(self, start: int, weights: Tensor, gradient: Tensor) -> None:
        """Take a block of the layer's queries: (batch, head, query of the block, key)."""
        try:
            weighted = weigh_by_gradient(weights, gradient)
        except ValueError as error:
            raise CaptureError(f"gradient rollout: {error}; load the checkpoint in float32") from None
        path = self.order[self._left[-1]]
        if self.layers[path].stack != self.encoder_stack and self.layers[path].kind == "self":
            later = weights.amax(dim=1).triu(1 + start)
            self.causal &= (later == 0).flatten(1).all(dim=1)
        self._weighted.append(weighted.double())

    def finish_layer(self, layer: int) -> None:
        """Take the layer's blocks together."""
        weighted = torch.cat(self._weighted, dim=1)
        if self.layers[self.order[layer]].stack != self.encoder_stack:
            self._decoder[layer] = weighted
        elif self._below is None:
            self._below = weighted
        else:  # R − I of the layers above, times I + Ā of this one
            self._below = self._below + weighted + self._below @ weighted

    def relevances(self) -> Relevances:
        """Return the relevances of prefix (first) and source (second) in float64.

        Raises
        ------
        CaptureError
            When gradients did not reach every layer.
        """
        if self._below is None or len(self._left) != self.calls:
            raise CaptureError(
                f"gradients reached {len(self._left)} of {self.calls} attention layers; the target does not "
                "depend on the others"
            )
        steps, source = self.valid[1].shape[1], self.valid[0].shape[1]
        found = identity_relevances(self._below, steps, source)
        found = found._replace(second_second=found.second_second + self._below)
        for layer in sorted(self._decoder):
            if self.layers[self.order[layer]].kind == "cross":
                found = cross_step(found, self._decoder[layer])
            else:
                found = self_step(found, "first", self._decoder[layer])
        return found

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return the maps of source and prefix, each a distribution or all zero.

        Cross relevance is read as it is; of the prefix's self relevance the identity is taken off.
        """
        found, read = self.relevances(), self.read.double()
        source = torch.einsum("bq,bqk->bk", read, found.first_second)
        eye = torch.eye(found.first_first.shape[1], dtype=torch.float64, device=read.device)
        prefix = torch.einsum("bq,bqk->bk", read, found.first_first - eye)
        free = torch.zeros_like(self.causal)
        return (
            StreamRows(gradient_map(source)[0], [], free, {"relevance": source.sum(dim=1)}),
            StreamRows(gradient_map(prefix)[0], [], self.causal, {"relevance": prefix.sum(dim=1)}),
        )


def relevance_batch(
    checkpoint: Checkpoint,
    plan: CapturePlan,
    batch: Sequence[Encoded],
    tensors: Mapping[str, Tensor],
    fold: RelevanceFold,
    *,
    wanted: Mapping[str, Any],
    verify: bool = False,
) -> Any:
    """Run one batch forward and backward, and fold its attention on the way back.

    Parameters
    ----------
    checkpoint : Checkpoint
        Its parameters get no ``.grad``.
    plan : CapturePlan
    batch : sequence of Encoded
    tensors : their tensors, stacked
    fold : RelevanceFold
    wanted : mapping of probe id to target token; None = the token that follows the row
    verify : bool

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer cannot be reached, or its weights are not what it used.
    """
    model, seen = checkpoint.model, Counter[str]()

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        fold.order.append(call.path)
        valid, keys = fold.streams_of(call.path)
        return _attend(call, fold, seen, valid if verify else None, keys)

    def hooked(call: AttentionCall) -> None:
        fold.order.append(call.path)
        _hooked(call, fold, seen, *fold.streams_of(call.path))

    with exclusive(model, plan.configs), torch.enable_grad(), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        leaves = stack.enter_context(stack_leaves(core_model(model), plan.stacks))
        stack.enter_context(interface_capture(plan.modules("interface"), plan.configs, Replacing(attend)))
        stack.enter_context(hook_capture(plan.modules("hook"), hooked))
        outputs = run_model(model, tensors, attentions=plan.has_hooks, keep_logits=True)
        check_counts(plan, called, seen, None)
        fold.targets = next_token_scores(checkpoint, batch, outputs, wanted, fold.read)
        scores = pair_scores(batch, outputs, fold.targets)
        torch.autograd.grad(scores.sum(), [leaves[name] for name in plan.stacks], allow_unused=True)
    return _detached(outputs)


@contextmanager
def stack_leaves(model: nn.Module, stacks: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Make what the first block of each stack takes a leaf of the graph, and yield the leaves by stack.

    All attention lies after it, and what lies before (embeddings, one table for two stacks perhaps) is
    not in the graph.

    Raises
    ------
    CaptureError
        When a stack's blocks take no hidden states.
    """
    leaves: dict[str, Tensor] = {}

    def mark(stack: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if stack in leaves:
            return None
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        where = next((k for k, v in given.items() if isinstance(v, Tensor) and v.is_floating_point()), None)
        if where is None:
            raise CaptureError(f"the blocks {stack} take no hidden states; use the method rollout")
        leaves[stack] = given[where] = given[where].detach().requires_grad_()
        return tuple(given[i] for i in range(len(args))), {k: given[k] for k in kwargs}

    with ExitStack() as hooks:
        for stack in stacks:
            first = next(iter(model.get_submodule(stack).children()))
            hook = own_thread(lambda _module, args, kwargs, stack=stack: mark(stack, args, kwargs))
            hooks.callback(first.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield leaves
