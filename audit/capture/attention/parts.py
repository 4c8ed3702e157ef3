"""Find, inside a layer that returns its weights itself, the values that the weights were applied to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
Inner = Mapping[str, tuple[Tensor, Tensor]]
"""Input and output of each projection of a layer."""


def values_and_output(
    weights: Tensor, context: Tensor, inner: Inner, module: nn.Module, hidden: Tensor | None
) -> tuple[Tensor, Tensor, str] | None:
    """Return the values of a layer and what its attention made of them, None where they are not found.

    A pair is taken only if weights × values gives the output, up to a bias that is the same for every
    query (rows sum to 1, so a bias of the values comes out unchanged).

    Parameters
    ----------
    weights : Tensor (batch, head, query, key)
    context : Tensor
        What the layer returns.
    inner : mapping of a projection's name to its input and output
    module : nn.Module
        The layer, for projections whose weights it uses without calling them.
    hidden : Tensor (batch, key, dim) or None
        The layer's input.

    Returns
    -------
    value : Tensor (batch, head, key, dim)
    output : Tensor (batch, query, head, dim)
    projection : str
        Name of the projection that took the output, empty where the layer itself returns it.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    for value in _values(weights, inner, module, hidden):
        mixed = (wide @ value.to(wide.dtype)).transpose(1, 2)
        for name, output in _outputs(weights, context, inner):
            if output.shape != mixed.shape:
                continue
            difference = output.to(mixed.dtype) - mixed
            bias = difference.mean(dim=1, keepdim=True)
            scale = output.abs().amax().clamp_min(1e-6)
            if (difference - bias).abs().amax() <= TOLERANCE[context.dtype] * scale:
                return value + bias.transpose(1, 2).to(value.dtype), output, name
        if _gives(module, mixed, context):
            return value, mixed.to(context.dtype), ""
    return None


def _values(weights: Tensor, inner: Inner, module: nn.Module, hidden: Tensor | None) -> Iterator[Tensor]:
    batch, heads, _, keys = weights.shape
    for projected in [*(after for _, after in inner.values()), *_uncalled(inner, module, hidden)]:
        if projected.dim() != 3 or projected.shape[:2] != (batch, keys):
            continue
        width = projected.shape[2]
        if width % heads == 0:
            yield projected.view(batch, keys, heads, -1).transpose(1, 2)
        if width % (3 * heads) == 0:
            yield projected.chunk(3, dim=2)[2].reshape(batch, keys, heads, -1).transpose(1, 2)
            yield projected.view(batch, keys, heads, -1).chunk(3, dim=3)[2].transpose(1, 2)
        for groups in (g for g in range(1, heads) if heads % g == 0 and width % (heads + 2 * g) == 0):
            shared = projected.view(batch, keys, groups, heads // groups + 2, -1)[:, :, :, -1]
            yield shared.transpose(1, 2).repeat_interleave(heads // groups, dim=1)


def _uncalled(inner: Inner, module: nn.Module, hidden: Tensor | None) -> Iterator[Tensor]:
    """Apply the value projection of a layer that hands its weights to a fused function."""
    projection = getattr(module, "v_proj", None)
    if "v_proj" not in inner and isinstance(projection, nn.Linear) and hidden is not None:
        yield nn.functional.linear(hidden, projection.weight, projection.bias)


def _outputs(weights: Tensor, context: Tensor, inner: Inner) -> Iterator[tuple[str, Tensor]]:
    batch, heads, queries, _ = weights.shape
    for name, mixed in [("", context), *((name, before) for name, (before, _) in inner.items())]:
        if mixed.dim() == 3 and mixed.shape[:2] == (batch, queries) and mixed.shape[2] % heads == 0:
            yield name, mixed.reshape(batch, queries, heads, -1)


def _gives(module: nn.Module, mixed: Tensor, context: Tensor) -> bool:
    """Tell whether the layer's uncalled output projection makes `context` of `mixed`."""
    projection = getattr(module, "out_proj", None)
    if not isinstance(projection, nn.Linear) or mixed[0, 0].numel() != projection.in_features:
        return False
    again = nn.functional.linear(mixed.flatten(2).to(context.dtype), projection.weight, projection.bias)
    if again.shape != context.shape:
        return False
    error, scale = (again - context).abs().amax(), context.abs().amax().clamp_min(1e-6)
    return bool(error <= TOLERANCE[context.dtype] * scale)
