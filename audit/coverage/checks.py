"""Put one model type through the real capture and say what came of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from audit.capture.attention.layers import CapturePlan, plan_capture
from audit.capture.attention.passes import active_plan, exclusive, fold_batch, run_model
from audit.capture.attention.streams import stream_positions
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import Encoded
from audit.capture.inputs.pictures import Picture
from audit.capture.joined.windowed import has_windows
from audit.capture.outputs.predictions import first_tensor
from audit.capture.session import capture_prepared
from audit.coverage import UNEXPECTED, Coverage
from audit.coverage.configs import build_model
from audit.coverage.inputs import random_inputs
from audit.errors import AuditError, CaptureError
from audit.records import Captured, Checkpoint, CheckpointInfo, Map, Method, Positions, Probe

TOLERANCE = 1e-5
PADS = 3


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
        inputs = runnable_inputs(model)
    except Exception as error:  # whatever transformers raises is the reason
        return Coverage(model_type, "not_buildable", _line(error))
    try:
        return _captured(model_type, model, inputs)
    except AuditError as error:
        if "implementation = 'eager'" not in str(error):
            return Coverage(model_type, "refused", _line(error, name=False))
    except Exception as error:  # a bug: capture must explain itself
        return Coverage(model_type, "refused", UNEXPECTED + _line(error))
    try:  # as a user would load it who reads the message
        return _captured(model_type, build_model(model_type, attention="eager"), inputs)
    except AuditError as error:
        return Coverage(model_type, "refused", _line(error, name=False))
    except Exception as error:
        return Coverage(model_type, "refused", UNEXPECTED + _line(error))


def runnable_inputs(model: Any, count: int = 3) -> list[dict[str, Tensor]]:
    """Return `count` random inputs of the plainest kind that `model` runs on.

    Raises
    ------
    Exception
        What the model raised on the first kind, when it runs on none.
    """
    failure: Exception | None = None
    for kind, tensors in enumerate(random_inputs(model)):
        try:
            with exclusive(model):
                run_model(model, tensors)
        except Exception as error:  # the next kind may do
            failure = failure or error
            continue
        others = [list(random_inputs(model, seed=seed))[kind] for seed in range(1, count)]
        return [tensors, *others]
    raise failure or ValueError("its forward method takes no text, image or sound")


def _captured(model_type: str, model: Any, inputs: list[dict[str, Tensor]]) -> Coverage:
    subject = _checkpoint(model_type, model)
    plan = active_plan(model, plan_capture(model), inputs[0], joined=has_windows(model.config))
    joined = "pixel_values" in inputs[0] and _is_joined(plan, inputs[0])
    encode = _pictured if joined else _encoded
    encoded = [encode(i, tensors, model, plan) for i, tensors in enumerate(inputs)]
    together = _capture(subject, encoded)
    alone = [_capture(subject, [item])[0] for item in encoded]
    _compare(together, alone, "a probe's map depends on the other probes of its batch")
    note = ""
    if "attention_mask" in inputs[0] and plan.wiring == "single" and not joined:
        note = _compare_padded(model, plan, encoded[0])
    if joined and any(one.diagnostics.get("merged_patches", 1.0) > 1 for one in together[0].maps):
        note = "; windows put together exactly, merging of patches between stages taken as uniform"
    hooks = plan.has_hooks
    how = "weights returned by the layers" if hooks else "attention interface"
    streams = " and ".join(_stream(one) for one in together[0].maps)
    return Coverage(model_type, "fallback" if hooks else "supported", f"{streams} through {how}{note}")


def _is_joined(plan: CapturePlan, tensors: dict[str, Tensor]) -> bool:
    """Tell whether positions must be measured: windows of an image, or an image in one encoder with text."""
    return plan.wiring == "joined" or ("input_ids" in tensors and plan.wiring == "single")


def _pictured(index: int, tensors: dict[str, Tensor], _model: Any, _plan: CapturePlan) -> Encoded:
    """Return an input whose pixels lie where they stand in it, without a processor."""
    pixels = tensors["pixel_values"]
    height, width = pixels.shape[-2:]
    y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    there = (np.broadcast_to(x, pixels.shape), np.broadcast_to(y, pixels.shape))
    words = tensors["input_ids"].shape[1] if "input_ids" in tensors else 1
    positions = Positions("token", np.zeros(words, np.bool_))
    picture = Picture("pixel_values", *there, (height, width))
    return Encoded(Probe(f"p-{index}"), tensors, positions, picture=picture)


def _stream(one: Map) -> str:
    """Return the name of a stream, with its layers where it has some of its own."""
    return one.stream if one.layers is None else f"{len(one.layers)} layers ({one.stream})"


def _encoded(index: int, tensors: dict[str, Tensor], model: Any, plan: CapturePlan) -> Encoded:
    positions = stream_positions(model, plan, tensors)
    if len(positions) == 2 and "vision" in plan.stacks[0]:
        positions = positions[::-1]
    return Encoded(Probe(f"p-{index}"), tensors, positions[0], second=positions[1] if positions[1:] else None)


def _capture(subject: Checkpoint, encoded: list[Encoded]) -> list[Captured]:
    return list(capture_prepared(subject, encoded, method=Method(row="last")))


def _compare(found: list[Captured], expected: list[Captured], message: str) -> None:
    for a, b in zip(found, expected, strict=True):
        for one, other in zip(a.maps, b.maps, strict=True):
            n = len(other.weights)
            error = float(np.abs(one.weights[:n] - other.weights).max())
            if not error <= TOLERANCE:
                raise CaptureError(f"{message} (by {error:.2g})")


def _compare_padded(model: Any, plan: CapturePlan, item: Encoded) -> str:
    """Check that pads behind a probe change nothing that they do not change in the model itself."""
    n, tensors = len(item), item.tensors
    extra = {
        key: t for key, t in tensors.items() if t.dim() >= 2 and t.shape[1] == n and key != "pixel_values"
    }
    padded = {**tensors, **{key: torch.cat([t, t[:, :PADS] * 0], dim=1) for key, t in extra.items()}}
    if tensors["attention_mask"].shape[1] != n:
        return ""
    rows, outputs = [], []
    for inputs, size in ((tensors, n), (padded, n + PADS)):
        read, valid = torch.zeros(1, size), torch.zeros(1, size, dtype=torch.bool)
        read[0, n - 1], valid[0, :n] = 1, True
        fold = BatchFold(FoldSettings(), read, valid)
        outputs.append(first_tensor(fold_batch(model, plan, inputs, fold, keep_logits=True))[0])
        rows.append(fold.final_row()[0, :n])
    error = float((rows[0] - rows[1]).abs().max())
    if error <= TOLERANCE:
        return ""
    own = float((outputs[0] - outputs[1][: len(outputs[0])]).abs().max() / outputs[0].abs().max())
    if own > 100 * TOLERANCE:
        return "; padding changes this model's own outputs, so probes are never padded"
    raise CaptureError(f"a probe's map depends on padding (by {error:.2g})")


def _checkpoint(model_type: str, model: Any) -> Checkpoint:
    info = CheckpointInfo(model_type, "0" * 64, "0" * 64, "0" * 64, architecture=type(model).__name__)
    return Checkpoint(info, model, None, "backbone", has_head=False)


def _line(error: BaseException, *, name: bool = True) -> str:
    text = " ".join(str(error).split())[:240]
    return f"{type(error).__name__}: {text}" if name else text
