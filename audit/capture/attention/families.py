"""Families whose layers hand their weights on in a form that says too little; computed again here.

What is computed is verified like everything else: times the values it must give the layer's output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.weights import attention_weights

_TWO_STREAMS = "LxmertAttention"


def attends_both_ways(module: nn.Module) -> bool:
    """Return whether a layer belongs to a model whose two streams attend to each other."""
    return type(module).__name__ == _TWO_STREAMS


def asks_for_weights(module: nn.Module) -> bool:
    """Return whether a layer's model asks it for its weights in some calls alone, so that capture has to."""
    return type(module).__name__ == _TWO_STREAMS


def recomputed_weights(module: nn.Module, hidden: Tensor | None, position_bias: object) -> Tensor | None:
    """Return the weights of each head of a layer that returns only their mean, None for other layers.

    WavLM's attention has a gated relative position bias (Chen et al., "WavLM", arXiv 2110.13900,
    equations 3 to 6) and gives the mean over its heads in the place of each head.

    Parameters
    ----------
    module : nn.Module
    hidden : Tensor (batch, position, dim) or None
        The layer's input.
    position_bias : Tensor (batch * head, query, key) or other
        The bias without its gate, as the layer returns it.

    Returns
    -------
    Tensor (batch, head, query, key) or None
    """
    if type(module).__name__ != "WavLMAttention" or hidden is None or not isinstance(position_bias, Tensor):
        return None
    heads: int = module.num_heads  # type: ignore[assignment]
    batch, size, _ = hidden.shape
    query, key = (
        module.get_submodule(name)(hidden).view(batch, size, heads, -1).transpose(1, 2)
        for name in ("q_proj", "k_proj")
    )
    parts = hidden.view(batch, size, heads, -1).transpose(1, 2)
    gates = module.gru_rel_pos_linear(parts)  # type: ignore[operator]
    first, second = torch.sigmoid(gates.view(batch, heads, size, 2, 4).sum(-1)).chunk(2, dim=-1)
    gate = first * (second * module.gru_rel_pos_const - 1.0) + 2.0  # type: ignore[operator]
    bias = gate * position_bias.view(batch, heads, size, size)
    return attention_weights(query, key, position_bias=bias)


def with_gradient(module: nn.Module, call: AttentionCall) -> Tensor | None:
    """Return what a layer with :func:`recomputed_weights` gives, to the last bit, with their gradient.

    The weights that made its output are others, from which no gradient comes back to these.
    """
    if call.value is None or call.returned is None:
        return None
    mixed = (call.weights @ call.value.to(call.weights.dtype)).transpose(1, 2).flatten(2)
    states = module.get_submodule("out_proj")(mixed.to(call.returned.dtype))
    given: Tensor = call.returned.detach() + (states - states.detach())
    return given
