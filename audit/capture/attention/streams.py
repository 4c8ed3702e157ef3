"""Positions of inputs that come as tensors: how many there are, learned from one pass."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.capture.pairs.co_attention import input_stacks
from audit.errors import CaptureError
from audit.records import Positions


def stream_positions(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]
) -> tuple[Positions, ...]:
    """Return plain positions of one prepared input for each stack that takes one: its first layer's rows.

    Parameters
    ----------
    model : model of transformers
    plan : CapturePlan
        Narrowed to what runs, see :func:`audit.capture.attention.passes.active_plan`.
    tensors : mapping of argument to Tensor

    Raises
    ------
    CaptureError
        When a stack does not show its weights.
    """
    lengths: dict[str, int] = {}
    stacks = {layer.path: layer.stack for layer in plan.layers}

    def receive(call: AttentionCall) -> None:
        lengths.setdefault(stacks[call.path], call.weights.shape[-2])

    with exclusive(model, plan.configs), watched(plan, receive, None):
        run_model(model, tensors, attentions=plan.has_hooks)
    wanted = input_stacks(plan)
    for stack in wanted:
        if stack not in lengths:
            raise CaptureError(f"{type(model).__name__}: no attention layer of {stack} showed its weights")
    return tuple(Positions("token", np.zeros(lengths[stack], np.bool_)) for stack in wanted)
