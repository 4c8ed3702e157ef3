"""Positions of inputs that come as tensors: how many there are, learned from one pass."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from audit.capture.interface import AttentionCall
from audit.capture.layers import CapturePlan
from audit.capture.passes import exclusive, run_model, watched
from audit.errors import CaptureError
from audit.records import Positions


def stream_positions(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> Positions:
    """Return plain positions for one prepared input: as many as the first layer has rows.

    Parameters
    ----------
    model : model of transformers
    plan : CapturePlan
        Narrowed to what runs, see :func:`audit.capture.passes.active_plan`.
    tensors : mapping of argument to Tensor

    Raises
    ------
    CaptureError
        When no layer shows its weights.
    """
    lengths: list[int] = []

    def receive(call: AttentionCall) -> None:
        lengths.append(call.weights.shape[-2])

    with exclusive(model, plan.configs), watched(plan, receive, None):
        run_model(model, tensors, attentions=plan.has_hooks)
    if not lengths:
        raise CaptureError(f"{type(model).__name__}: no attention layer showed its weights")
    return Positions(kind="token", special=np.zeros(lengths[0], np.bool_))
