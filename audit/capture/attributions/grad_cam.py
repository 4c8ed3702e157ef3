"""Grad-CAM at the input of an attention layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.banded import padded_length
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.threads import own_thread
from audit.capture.attributions.question import Question, differentiable
from audit.capture.inputs.encoded import core_model
from audit.errors import CaptureError, ConfigError


def grad_cam(question: Question, layer: int) -> Tensor:
    r"""Return the class activation map of one probe at the input of an attention layer: (position,).

    .. math:: M_j = \Big( \sum_k \alpha_k H_{jk} \Big)^+, \qquad \alpha_k = \frac{1}{n} \sum_j
        \frac{\partial f}{\partial H_{jk}}

    (Selvaraju et al., ICCV 2017, eqs. 1 and 2), with the features H (position, feature) that the layer's
    attention takes in the place of feature maps of a convolution: the last place at which every position
    of a transformer still speaks to the output. One forward and one backward pass.

    Can tell which positions look, by that depth, like the direction that favours the target. Cannot tell
    what single positions say where their gradients differ, since α is one for all; positions of a late
    layer no longer stand for the input position they are named by.

    Raises
    ------
    ConfigError
        When there is no such layer.
    CaptureError
        When the layer does not take one row of features for each position.
    """
    inputs, _, forward, others = differentiable(question)
    (item,) = question.batch
    layers = list(plan_capture(core_model(question.checkpoint.model)).modules().values())
    with torch.enable_grad(), kept_inputs(layers) as seen:
        score = forward(inputs, *others)
        index = check_layer(layer, len(seen))
        features = seen[index]
        padded = padded_length(layers[index], len(item)) if len(seen) == len(layers) else len(item)
        expected = (1, padded), (len(item), 1)  # XLNet's positions come first
        if features.dim() != 3 or features.shape[:2] not in expected or not features.requires_grad:
            raise CaptureError(
                f"attention layer {layer} takes features of shape {tuple(features.shape)} for {len(item)} "
                "positions, so Grad-CAM has no map; use another method"
            )
        places = torch.arange(features[..., 0].numel())
        places[len(item) :] = -1  # padding, added behind
        return activation_map(score.sum(), features, places)[: len(item)]


def check_layer(layer: int, count: int) -> int:
    """Return the index of an attention layer, of which there are `count`.

    Raises
    ------
    ConfigError
        When there is no such layer.
    """
    if not -count <= layer < count:
        raise ConfigError(
            f"[method] layer = {layer}, but the checkpoint has {count} attention layers; give one of them"
        )
    return layer % count


def activation_map(score: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """Return the class activation map of one probe: (position,).

    Parameters
    ----------
    score : scalar Tensor
        Computed from the features.
    features : Tensor (…, feature)
    places : int64 Tensor (row,)
        Position of each row of the features, negative where it has none.
    """
    (gradient,) = torch.autograd.grad(score, features, retain_graph=True)  # another tower may follow
    places = places.to(features.device)
    own = places >= 0
    rows, slopes = (x.detach().double().flatten(0, -2)[own] for x in (features, gradient))
    found = torch.zeros_like(rows[:, 0])
    found[places[own]] = (rows @ slopes.mean(dim=0)).clamp_min(0)
    return found


@contextmanager
def kept_inputs(layers: Iterable[nn.Module]) -> Iterator[list[Tensor]]:
    """Keep what each attention layer takes, call by call."""
    seen: list[Tensor] = []

    def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)))

    with ExitStack() as stack:
        for module in layers:
            handle = module.register_forward_pre_hook(own_thread(note), with_kwargs=True)
            stack.callback(handle.remove)
        yield seen
