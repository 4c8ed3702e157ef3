"""Checks that make a wrong map impossible to miss; each failure names the layer."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.errors import CaptureError

# Largest allowed error of row sums and of attention × values, relative to the largest output.
ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Decoders take their softmax in float32 also where the rest is float64.
VALUE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# Half precision included: kernels differ with the size of a batch.
ALONE_TOLERANCE = 0.02


def check_rows(call: AttentionCall, valid: Tensor, keys: Tensor | None = None) -> None:
    """Check that every valid row is finite, sums to 1 and puts nothing on pads.

    Parameters
    ----------
    call : AttentionCall
    valid : bool Tensor (batch, position)
        False at pads.
    keys : bool Tensor (batch, key), optional
        The same of the keys, where they belong to another stream.

    Raises
    ------
    CaptureError
    """
    keys = valid if keys is None else keys
    weights, n = call.weights, keys.shape[1]
    expected = (valid.shape[0], valid.shape[1], n + call.sink)
    if (weights.shape[0], *weights.shape[2:]) != expected:
        raise CaptureError(
            f"attention layer {call.path} has weights of shape {tuple(weights.shape)}, expected "
            "(batch, head, query, "
            f"key) = ({expected[0]}, head, {expected[1]}, {expected[2]}); windowed or pooled "
            "attention is not supported"
        )
    total = weights.sum(dim=-1, dtype=torch.promote_types(weights.dtype, torch.float32))
    error = torch.where(valid[:, None, :], (total - 1).abs(), torch.zeros_like(total)).amax()
    if not torch.isfinite(error):
        raise CaptureError(
            f"attention layer {call.path} has NaN or infinite weights; the checkpoint's weights "
            "are damaged or "
            f"{str(weights.dtype).removeprefix('torch.')} overflows: load it in float32"
        )
    tolerance = ROW_TOLERANCE[call.output.dtype]
    if error > tolerance:
        raise CaptureError(
            f"attention layer {call.path} has rows that sum to 1 ± {float(error):.3g}, expected 1 "
            f"± {tolerance:g}; "
            "this kind of attention is not supported"
        )
    if not bool(keys.all()):
        _check_pads(call, valid, keys)


def _check_pads(call: AttentionCall, valid: Tensor, keys: Tensor) -> None:
    rows = valid[:, None, :, None] & ~keys[:, None, None, :]
    leaked = (call.weights[..., : keys.shape[1]] * rows).amax()
    if leaked > 1e-6:
        raise CaptureError(
            f"attention layer {call.path} attends to padding (weight {float(leaked):.3g}); pass an "
            "attention mask"
        )


def check_values(call: AttentionCall, valid: Tensor) -> None:
    """Check that attention × values gives what the model's own kernel returned.

    Raises
    ------
    CaptureError
        When the largest difference exceeds the tolerance of the dtype.
    """
    if call.value is None:
        return
    weights = call.weights[..., : call.value.shape[-2]].to(
        torch.promote_types(call.value.dtype, torch.float32)
    )
    value = call.value.to(weights.dtype)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    again = (weights @ value).transpose(1, 2)
    rows = valid[:, :, None, None]
    output = call.output.to(weights.dtype).reshape(again.shape)
    error = torch.where(rows, (again - output).abs(), torch.zeros_like(again)).amax()
    scale = torch.where(rows, output.abs(), torch.zeros_like(again)).amax()
    require_close(call.path, error, scale, call.output.dtype)


def require_close(path: str, error: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Raise CaptureError where attention × values is further from a layer's output than rounding allows.

    Parameters
    ----------
    path : str
        Of the layer.
    error, scale : Tensor ()
        Largest difference, and largest output.
    dtype : torch.dtype
        Of the layer's output.
    """
    scale, tolerance = scale.clamp_min(1e-6), VALUE_TOLERANCE[dtype]
    if error <= tolerance * scale:
        return
    name = str(dtype).removeprefix("torch.")
    remedy = f', or {name} rounds too much: set dtype = "float32"' if tolerance > 1e-3 else ""
    raise CaptureError(
        f"attention layer {path}: its weights times its values differ from its own output by "
        f"{float(error / scale):.3g}, allowed {tolerance:g}; its attention is not the one captured{remedy}"
    )


def check_counts(plan: CapturePlan, called: Counter[str], seen: Counter[str], expected: int | None) -> None:
    """Check that every layer ran, that each of its calls was seen, and that the config agrees.

    Raises
    ------
    CaptureError
    """
    for layer in plan.layers:
        if called[layer.path] == 0:
            raise CaptureError(f"attention layer {layer.path} never ran; this architecture is not supported")
        if seen[layer.path] > called[layer.path] > 0:
            raise CaptureError(
                f"attention layer {layer.path} attends {seen[layer.path]} times in {called[layer.path]} "
                "call(s), in windows or parts; such attention is not supported"
            )
        if seen[layer.path] != called[layer.path]:
            raise CaptureError(
                f"attention layer {layer.path} ran {called[layer.path]} times but gave weights "
                f"{seen[layer.path]} times; load the checkpoint with attention_implementation = 'eager'"
            )
    total = sum(seen.values())
    if expected is not None and total != expected:
        raise CaptureError(f"captured {total} attention layers, expected {expected} from the config")


def check_alone(together: Tensor, alone: Tensor) -> None:
    """Check that the row of a batch's last probe does not depend on the others.

    The last, since the first may draw the same random numbers alone.

    Parameters
    ----------
    together, alone : float Tensor (1, position)

    Raises
    ------
    CaptureError
    """
    size = min(together.shape[1], alone.shape[1])
    error = float((together[:, :size].double() - alone[:, :size].double()).abs().max())
    limit = ALONE_TOLERANCE * float(alone.double().abs().max())
    if not error <= max(limit, 1e-6):
        raise CaptureError(
            f"a probe's map depends on the other probes of its batch (by {error:.2g}): the model draws "
            "random numbers or mixes probes; no map can be judged"
        )


def same_tensors(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal to the last bit."""
    # NaN is not equal to itself, yet no sign of randomness; it is reported by its own check.
    return a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
