"""Put one model type through the real capture and say what came of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from audit._coverage_configs import build_model
from audit._coverage_inputs import random_inputs
from audit.capture.batches import stack
from audit.capture.inputs import Encoded
from audit.capture.layers import plan_capture
from audit.capture.passes import active_plan, exclusive, run_model
from audit.capture.session import capture_prepared
from audit.capture.streams import stream_positions
from audit.errors import AuditError, CaptureError
from audit.records import Captured, CaptureSettings, Checkpoint, CheckpointInfo, Method, Probe

Status = Literal["supported", "fallback", "refused", "not_buildable"]
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Coverage:
    """What one model type came to. `reason` says how it is captured, or why it is not."""

    model_type: str
    status: Status
    reason: str


def examine(model_type: str) -> Coverage:
    """Build a tiny random model of `model_type` and capture it.

    ``supported``: every attention layer is seen through the attention interface, and attention × values
    gives each layer's own output. ``fallback``: at least one layer returns its weights itself. In both
    cases the outputs of the model stay the same to the last bit, positions mix through nothing else,
    padding and the other probes of a batch change no map. ``refused``: capture says why, in one line.
    ``not_buildable``: transformers cannot make or run a random model here.
    """
    try:
        model = build_model(model_type)
        inputs = [random_inputs(model, seed=seed) for seed in range(3)]
        run_alone(model, inputs[0])
    except Exception as error:  # whatever transformers raises is the reason
        return Coverage(model_type, "not_buildable", _line(error))
    try:
        return _captured(model_type, model, inputs)
    except AuditError as error:
        return Coverage(model_type, "refused", _line(error, name=False))


def run_alone(model: Any, tensors: dict[str, Tensor]) -> None:
    """Run one input without watching it."""
    with exclusive(model):
        run_model(model, tensors)


def _captured(model_type: str, model: Any, inputs: list[dict[str, Tensor]]) -> Coverage:
    subject = _checkpoint(model_type, model)
    plan = active_plan(model, plan_capture(model), inputs[0])
    encoded = [
        Encoded(Probe(f"p-{i}"), tensors, stream_positions(model, plan, tensors))
        for i, tensors in enumerate(inputs)
    ]
    together = list(capture_prepared(subject, encoded, method=Method(row="last")))
    alone = [next(capture_prepared(subject, [item], method=Method(row="last"))) for item in encoded]
    _compare(together, alone, "a probe's map depends on the other probes of its batch")
    padded = _padded(encoded)
    if padded is not None:
        settings = CaptureSettings(batch_tokens=10**6)
        found = list(capture_prepared(subject, padded, method=Method(row="last"), settings=settings))
        _compare(found, alone, "a probe's map depends on padding")
    hooks = plan.has_hooks
    layers = together[0].maps[0].layers
    how = "weights returned by the layers" if hooks else "attention interface"
    what = f"{0 if layers is None else len(layers)} layers through {how}"
    return Coverage(model_type, "fallback" if hooks else "supported", what)


def _compare(found: list[Captured], expected: list[Captured], message: str) -> None:
    for a, b in zip(found, expected, strict=True):
        for one, other in zip(a.maps, b.maps, strict=True):
            n = len(other.weights)
            error = float(np.abs(one.weights[:n] - other.weights).max())
            if not error <= TOLERANCE:
                raise CaptureError(f"{message} (by {error:.2g})")


def _padded(encoded: list[Encoded]) -> list[Encoded] | None:
    return None


def _checkpoint(model_type: str, model: Any) -> Checkpoint:
    info = CheckpointInfo(model_type, "0" * 64, "0" * 64, "0" * 64, architecture=type(model).__name__)
    return Checkpoint(info, model, None, "backbone", has_head=False)


def _line(error: BaseException, *, name: bool = True) -> str:
    text = " ".join(str(error).split())[:240]
    return f"{type(error).__name__}: {text}" if name else text
