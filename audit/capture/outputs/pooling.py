"""Attention pooling: a head that reads the positions of a tower through one more attention (SigLIP).

A learned probe is the only query of a torch MultiheadAttention over the tower's last states, with no
residual connection around it: what the head reads is exactly these weights times the values. They are
therefore the output row of the tower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.check import VALUE_TOLERANCE
from audit.capture.attention.threads import own_thread
from audit.errors import CaptureError
from audit.methods.gradient import weigh_by_gradient


@dataclass(frozen=True)
class Pooling:
    """One call of a pooling head.

    Attributes
    ----------
    weights : Tensor (batch, head, 1, position)
        Rows sum to 1.
    value : Tensor (batch, head, position, dim)
    keys : Tensor (batch, position, dim)
        The states that are pooled, as the head takes them.
    output : Tensor (batch, 1, dim)
        What the head made of them, with the model's own graph.
    """

    weights: Tensor
    value: Tensor
    keys: Tensor
    output: Tensor


def pooling_head(model: nn.Module, root: str) -> tuple[str, nn.MultiheadAttention] | None:
    """Return path and module of the one attention under `root` that may pool, None where there is none."""
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and path.startswith(f"{root}.")
    ]
    return found[0] if len(found) == 1 else None


def tower_root(stack: str, other: str) -> str:
    """Return the module that holds one tower and nothing of the other.

    Examples
    --------
    >>> tower_root("owlvit.text_model.encoder.layers", "owlvit.vision_model.encoder.layers")
    'owlvit.text_model'
    """
    parts = zip(stack.split("."), other.split("."), strict=False)
    shared = next((i for i, (one, two) in enumerate(parts) if one != two), 0)
    return ".".join(stack.split(".")[: shared + 1])


@contextmanager
def pooling_calls(
    head: tuple[str, nn.MultiheadAttention], receive: Callable[[Pooling], Tensor | None]
) -> Iterator[None]:
    """Send each call of a pooling head to `receive`, which may return what it is to give on instead."""
    path, module = head

    def hook(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        replaced = receive(_observed(path, module, args, kwargs, output[0]))
        return None if replaced is None else (replaced, *output[1:])

    handle = module.register_forward_hook(own_thread(hook), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _observed(
    path: str, module: nn.MultiheadAttention, args: Any, kwargs: dict[str, Any], output: Tensor
) -> Pooling:
    """Compute the weights of each head again, and check that times the values they give the output."""
    given = {**dict(zip(("query", "key", "value", "key_padding_mask"), args, strict=False)), **kwargs}
    query, keys = given["query"], given["key"]
    plain = module.batch_first and module._qkv_same_embed_dim and module.bias_k is None
    if (
        not plain
        or query.shape[1] != 1
        or given["value"] is not keys
        or given.get("key_padding_mask") is not None
    ):
        raise CaptureError(f"pooling head {path} is not a probe over the positions; set [method] row")
    with torch.no_grad():
        weights, value = _weights(module, query, keys, given.get("attn_mask"))
        mixed = (weights @ value).transpose(1, 2).flatten(2).to(output.dtype)
        again = nn.functional.linear(mixed, module.out_proj.weight, module.out_proj.bias)
        error, scale = (again - output).abs().amax(), output.abs().amax().clamp_min(1e-6)
    if not error <= VALUE_TOLERANCE[output.dtype] * scale:
        raise CaptureError(
            f"pooling head {path}: its weights times values differ from its output by "
            f"{float(error / scale):.3g}; set [method] row"
        )
    return Pooling(weights, value, keys, output)


def _weights(
    module: nn.MultiheadAttention, query: Tensor, keys: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    work = torch.promote_types(keys.dtype, torch.float32)
    parts = module.in_proj_weight.to(work).chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.to(work).chunk(3)
    split = [
        nn.functional.linear(x.to(work), part, bias)
        .view(len(keys), -1, module.num_heads, module.head_dim)
        .transpose(1, 2)
        for x, part, bias in zip((query, keys, keys), parts, biases, strict=True)
    ]
    scores = split[0] @ split[1].transpose(-1, -2) * module.head_dim**-0.5
    if mask is not None:
        shaped = mask.view(len(keys), -1, *mask.shape[-2:]) if mask.dim() == 3 else mask
        scores = scores.masked_fill(shaped, -torch.inf) if shaped.dtype == torch.bool else scores + shaped
    return scores.softmax(dim=-1), split[2]


def pooled_gradient(module: nn.MultiheadAttention, call: Pooling, upstream: Tensor) -> Tensor:
    """Return Ā of the pooling attention (batch, position) from the gradient of its output (batch, 1, dim).

    ∇A of a head is the gradient of what it gives, times its values.
    """
    back = upstream.to(call.value.dtype) @ module.out_proj.weight.detach().to(call.value.dtype)
    heads = back.view(len(back), 1, module.num_heads, module.head_dim).transpose(1, 2)
    weighted: Tensor = weigh_by_gradient(call.weights, heads @ call.value.transpose(-1, -2))[:, 0]
    return weighted


def check_pooled(call: Pooling, state: Tensor, stack: str) -> None:
    """Check that a tower is read by its pooling head alone, and each of its positions by itself.

    Parameters
    ----------
    call : Pooling
        Of a pass in which its output was cut off the graph.
    state : Tensor (batch, position, dim)
        What the tower's last block gave, a leaf after the backward pass.
    stack : str

    Raises
    ------
    CaptureError
    """
    if state.grad is not None and bool(state.grad.any()):
        raise CaptureError(f"the head over {stack} reads its rows past its attention; set [method] row")
    last = call.keys.shape[1] - 1
    for place in {0, last}:
        (slope,) = torch.autograd.grad(call.keys[:, place].sum(), state, retain_graph=True)
        others = torch.arange(last + 1, device=slope.device) != place
        if call.keys.shape[1] != state.shape[1] or bool(slope[:, others].any()):
            raise CaptureError(f"positions of {stack} mix before its pooling head; set [method] row")
