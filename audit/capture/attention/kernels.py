"""Layers whose attention is a method of their own, between projections that are no modules: XLNet's.

The method runs as it is; what it takes and returns is seen on the way.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.interface import AttentionCall, Receiver

_METHODS = {"XLNetRelativeAttention": "rel_attn_core"}


def has_kernel(module: nn.Module) -> bool:
    """Return whether a layer attends in a method of its own that is known here."""
    return type(module).__name__ in _METHODS


@contextmanager
def kernel_capture(path: str, module: nn.Module, receive: Receiver) -> Iterator[None]:
    """Send the calls of a layer's own method for this thread to `receive`.

    Parameters
    ----------
    path : str
    module : nn.Module
        For which :func:`has_kernel` holds.
    receive : function of an AttentionCall
    """
    thread, name = threading.get_ident(), _METHODS[type(module).__name__]
    kernel, before = getattr(module, name), module.__dict__.get(name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        if threading.get_ident() != thread:
            return result
        given = inspect.signature(kernel).bind(*args, **kwargs).arguments
        return _handed_on(path, given, result, receive)

    module.__dict__[name] = seen
    try:
        yield
    finally:
        module.__dict__.pop(name)
        if before is not None:
            module.__dict__[name] = before


def _handed_on(path: str, given: Mapping[str, Any], result: Any, receive: Receiver) -> Any:
    """Receive one call of ``rel_attn_core`` of XLNet (Yang et al., arXiv 1906.08237, appendix A.2).

    It takes and gives (position, batch, head, dim), and its weights as (query, key, batch, head).
    """
    output, weights = result
    weights = weights.permute(2, 3, 0, 1)
    value = given["v_head_h"].permute(1, 2, 0, 3)
    replaced = receive(AttentionCall(path, weights, output.transpose(0, 1), value))
    if replaced is not None:
        output = replaced.transpose(0, 1)
    elif weights.requires_grad:  # the weights that were received are a copy of those that made the output
        again = torch.einsum("bnij,bnjd->ibnd", weights, value)
        output = output.detach() + (again - again.detach())
    return output, _empty(result[1])


def _empty(weights: Tensor) -> Tensor:
    return weights.new_empty((0, *weights.shape[1:]))
