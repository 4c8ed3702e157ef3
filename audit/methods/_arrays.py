"""What every method does with its arguments: NumPy or torch in, at least float32 inside, like kind out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

Array = TypeVar("Array", torch.Tensor, NDArray[Any])
AnyArray = torch.Tensor | NDArray[Any]
Residual = float | Sequence[float] | AnyArray

ROW_SUM_TOLERANCE = 0.01
"""Softmax rows in bfloat16 miss 1 by up to 0.002; dropout and a wrong axis miss it by far more."""


def to_tensor(name: str, array: AnyArray) -> torch.Tensor:
    """Return `array` as a floating tensor of its own precision, sharing memory where that is possible."""
    if isinstance(array, torch.Tensor):
        return array if array.is_floating_point() else array.to(torch.float64)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name}: expected a torch tensor or NumPy array, got {type(array).__name__}")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: expected real numbers, got dtype {array.dtype}")
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def working_dtype(array: torch.Tensor) -> torch.dtype:
    """Return the precision that sums over `array` are taken in: float32, or float64 when it has that."""
    return torch.float64 if array.dtype == torch.float64 else torch.float32


def as_working(name: str, array: AnyArray) -> torch.Tensor:
    """Return `array` as a float32 or float64 tensor."""
    tensor = to_tensor(name, array)
    return tensor.to(working_dtype(tensor))


def restore(result: torch.Tensor, like: Array) -> Array:
    """Return `result` as the kind of array that `like` is."""
    return result if isinstance(like, torch.Tensor) else result.detach().numpy()


def as_layers(
    name: str, attentions: Sequence[Array] | Array, *, shape: str = "batch, head, query, key"
) -> list[Array]:
    """Return one array (batch, head, query, key) for each layer, with batch, query and key alike in all."""
    layers = _split_layers(name, attentions)
    if not layers:
        raise ValueError(
            f"{name}: expected at least one layer, got none (fused attention kernels return no weights)"
        )
    for index, layer in enumerate(layers):
        found = getattr(layer, "shape", None)
        if found is None or len(found) != 4:
            got = type(layer).__name__ if found is None else f"shape {tuple(found)}"
            raise ValueError(f"{name}[{index}]: expected ({shape}), got {got}")
        if _outer(layer) != _outer(layers[0]):
            raise ValueError(
                f"{name}[{index}]: expected the (batch, query, key) of layer 0, {_outer(layers[0])}, "
                f"got {_outer(layer)}"
            )
    return layers


def _split_layers(name: str, attentions: Sequence[Array] | Array) -> list[Array]:
    if isinstance(attentions, torch.Tensor | np.ndarray) and attentions.ndim != 5:
        raise ValueError(
            f"{name}: expected (layer, batch, head, query, key) or a sequence of layers, "
            f"got shape {tuple(attentions.shape)}"
        )
    return cast("list[Array]", list(attentions))


def _outer(layer: AnyArray) -> tuple[int, int, int]:
    return (layer.shape[0], layer.shape[2], layer.shape[3])


def check_square(name: str, layers: Sequence[AnyArray]) -> None:
    """Raise ValueError unless queries and keys are the same positions."""
    queries, keys = layers[0].shape[-2:]
    if queries != keys:
        raise ValueError(f"{name}: expected as many queries as keys, got {queries} queries and {keys} keys")


def check_weights(name: str, weights: torch.Tensor) -> None:
    """Raise ValueError where `weights` holds NaN, infinity or negative entries."""
    if weights.numel() == 0:
        raise ValueError(f"{name}: expected at least one position, got shape {tuple(weights.shape)}")
    low, high = (float(bound) for bound in torch.aminmax(weights.detach()))
    if not np.isfinite(low) or not np.isfinite(high):
        raise ValueError(f"{name}: expected finite weights, got NaN or infinity")
    if low < 0:
        raise ValueError(f"{name}: expected weights >= 0, got {low:.6g}")


def check_finite(name: str, values: torch.Tensor) -> None:
    """Raise ValueError where `values` holds NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity")


def check_row_sums(name: str, weights: torch.Tensor, *, exact: bool = False) -> None:
    """Raise ValueError where a row holds more than 1 (or, if `exact`, anything but 1)."""
    sums = weights.detach().sum(-1)
    worst = float(sums.max())
    if worst > 1 + ROW_SUM_TOLERANCE:
        raise ValueError(
            f"{name}: expected rows over keys that sum to at most 1, got {worst:.6g} "
            "(dropout still on, or keys not on the last axis)"
        )
    if exact and float(sums.min()) < 1 - ROW_SUM_TOLERANCE:
        raise ValueError(f"{name}: expected rows over keys that sum to 1, got {float(sums.min()):.6g}")


def normalize_rows(weights: torch.Tensor) -> torch.Tensor:
    """Return `weights` with every row divided by its sum; a row without mass stays as it is."""
    sums = weights.sum(-1, keepdim=True)
    return weights / torch.where(sums < torch.finfo(weights.dtype).tiny, torch.ones_like(sums), sums)


def fill_empty_rows(weights: torch.Tensor, *, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the identity row where a row has no mass; return the weights and how many rows (batch,)."""
    empty = weights.detach().sum(-1) < torch.finfo(weights.dtype).tiny
    if bool(empty.any()):
        weights = torch.where(empty[..., None], torch.zeros_like(weights), weights)
        batch, query = empty.nonzero(as_tuple=True)
        weights[batch, query, query + offset] = 1.0
    return weights, empty.sum(-1)


def check_share(name: str, value: torch.Tensor) -> None:
    """Raise ValueError unless all of `value` lies in [0, 1]."""
    low, high = (float(bound) for bound in torch.aminmax(value.detach()))
    if not (low >= 0 and high <= 1):
        raise ValueError(f"{name}: expected weights in [0, 1], got {low if not low >= 0 else high:.6g}")


def residual_per_layer(
    name: str, residual: Residual, layers: int, shape: tuple[int, int]
) -> list[float | torch.Tensor]:
    """Return the residual weight of each layer: floats, or tensors (batch, query).

    `residual` is a float, one weight per layer, or a (layer, batch, query) array; `shape` is
    (batch, query).
    """
    if isinstance(residual, int | float):
        check_share(name, torch.tensor(float(residual), dtype=torch.float64))
        return [float(residual)] * layers
    if isinstance(residual, torch.Tensor | np.ndarray):
        tensor = to_tensor(name, residual)
    else:
        tensor = torch.tensor(list(residual), dtype=torch.float64)
    if tensor.ndim == 0:
        tensor = tensor.expand(layers)
    if tuple(tensor.shape) not in ((layers,), (layers, *shape)):
        raise ValueError(
            f"{name}: expected a float, {layers} weights (one per layer) or a (layer, batch, query) array "
            f"of shape {(layers, *shape)}, got shape {tuple(tensor.shape)}"
        )
    check_share(name, tensor)
    return [float(weight) if weight.ndim == 0 else weight for weight in tensor]
