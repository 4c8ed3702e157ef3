"""Relevance through two streams that attend to each other, from the gradients of an answer's logit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.hooks import counted_calls, hook_capture
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model
from audit.capture.engines.gradient import _detached
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.predictions import class_score
from audit.capture.outputs.scores import Score
from audit.capture.pairs.co_attention import Step, ends_of, input_stacks, step_of
from audit.capture.pairs.gradient import stack_leaves
from audit.capture.pairs.multi import StreamRows, check_call
from audit.errors import CaptureError
from audit.methods.gradient import gradient_map
from audit.methods.two_stream import CoAttention, SelfAttention, two_stream_relevance


class CoRelevanceFold:
    """The layers of one batch with the gradients of its targets, for :func:`audit.two_stream_relevance`."""

    def __init__(self, valid: tuple[Tensor, Tensor], read: Tensor, *, verify: bool = False) -> None:
        self.valid, self.read, self.verify = valid, read, verify
        self.targets: dict[str, Score] = {}
        self.layers: list[tuple[Step, Tensor]] = []
        self.gradients: dict[int, Tensor] = {}
        self._calls = Counter[str]()

    def receive(self, call: AttentionCall) -> None:
        """Take one call of one layer; its gradient comes with the backward pass."""
        step, index = step_of(call.path, self._calls[call.path]), len(self.layers)
        self._calls[call.path] += 1
        queries, keys = (self.valid[0 if end == "first" else 1] for end in ends_of(step))
        detached = AttentionCall(
            call.path,
            call.weights.detach(),
            call.output.detach(),
            None if call.value is None else call.value.detach(),
        )
        check_call(detached, queries, None if "_" not in step else keys, verify=self.verify)
        self.layers.append((step, call.weights.detach()))
        if call.weights.requires_grad:
            take = partial(self.gradients.__setitem__, index)
            call.weights.register_hook(take)  # type: ignore[no-untyped-call]

    def steps(self) -> list[SelfAttention | CoAttention]:
        """Return the layers in the order of the forward pass; those without a gradient say nothing."""
        found: list[SelfAttention | CoAttention] = []
        waiting: tuple[Tensor, Tensor] | None = None
        for index, (step, given) in enumerate(self.layers):
            weights = given.double()
            gradient = self.gradients.get(index, torch.zeros_like(weights)).double()
            if step == "first_second":
                waiting = weights, gradient
            elif step == "second_first" and waiting is not None:
                found.append(CoAttention(*waiting, weights, gradient))
            elif step in ("first", "second"):
                found.append(SelfAttention(ends_of(step)[0], weights, gradient))
        return found

    def streams(self) -> tuple[StreamRows, StreamRows]:
        """Return the maps of text and image for the output row, each a distribution or all zero."""
        found, read = two_stream_relevance(self.steps()), self.read.double()
        eye = torch.eye(read.shape[1], dtype=torch.float64, device=read.device)
        text = torch.einsum("bq,bqk->bk", read, found.first_first - eye)
        image = torch.einsum("bq,bqk->bk", read, found.first_second)
        free = torch.zeros(len(read), dtype=torch.bool, device=read.device)
        return (
            StreamRows(gradient_map(text)[0], [], free, {"relevance": text.sum(dim=1)}),
            StreamRows(gradient_map(image)[0], [], free, {"relevance": image.sum(dim=1)}),
        )


def co_relevance_batch(
    model: nn.Module,
    plan: CapturePlan,
    batch: Sequence[Encoded],
    tensors: Mapping[str, Tensor],
    fold: CoRelevanceFold,
    *,
    wanted: Mapping[str, Any],
) -> Any:
    """Run one batch forward and backward from the logit of each probe's answer.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When the model has no answers to explain.
    """
    seen = Counter[str]()

    def receive(call: AttentionCall) -> None:
        seen[call.path] += 1
        fold.receive(call)

    with exclusive(model, plan.configs), torch.enable_grad(), ExitStack() as stack:
        stack.enter_context(counted_calls(plan.modules()))
        leaves = stack.enter_context(stack_leaves(core_model(model), input_stacks(plan)))
        stack.enter_context(hook_capture(plan.modules("hook"), receive))
        outputs = run_model(model, tensors, attentions=True)
        logits = answer_logits(outputs)
        fold.targets = answer_targets(batch, logits.detach(), wanted)
        scores = [fold.targets[item.probe.id].of(logits[i : i + 1]) for i, item in enumerate(batch)]
        torch.autograd.grad(torch.cat(scores).sum(), list(leaves.values()), allow_unused=True)
    return _detached(outputs)


def answer_logits(outputs: Any) -> Tensor:
    """Return the logits of the answers: (batch, answer).

    Raises
    ------
    CaptureError
        When the model has none.
    """
    found = getattr(outputs, "question_answering_score", None)
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise CaptureError(
            f"{type(outputs).__name__} has no logits of answers to explain; audit the checkpoint with its "
            "question answering head, or use the method rollout"
        )
    return found


def answer_targets(batch: Sequence[Encoded], logits: Tensor, wanted: Mapping[str, Any]) -> dict[str, Score]:
    """Return what is explained for each probe id: the wanted answer, or the likeliest."""
    names = [str(i) for i in range(logits.shape[1])]
    found = {}
    for item, row in zip(batch, logits, strict=True):
        best = int(row.argmax())
        score = class_score(wanted.get(item.probe.id), names, item.probe)
        found[item.probe.id] = score or Score.single(names[best], best)
    return found
