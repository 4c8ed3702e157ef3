"""Gradient-weighted rollout: attention that raises the target's logit, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from audit.methods._arrays import (
    AnyArray,
    Array,
    as_layers,
    as_working,
    check_finite,
    check_square,
    normalize_rows,
    restore,
)

Form = Literal["relevance", "product"]


def gradient_rollout(
    attentions: Sequence[Array] | Array,
    gradients: Sequence[Array] | Mapping[int, Array] | Array,
    *,
    form: Form = "relevance",
) -> Array:
    r"""Return how the positions bear on one target logit, through all layers.

    .. math:: \bar A_l = \operatorname{mean}_h (\nabla A_l \odot A_l)^+

    ``relevance``: R ← R + Ā_l R from R = I (Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679, equations
    5 and 6). ``product``: R ← (I + Ā_l)/rowsum · R (Chefer, Gur & Wolf, CVPR 2021, arXiv 2012.09838,
    without LRP).

    Parameters
    ----------
    attentions : sequence of (batch, head, query, key), or (layer, batch, head, query, key)
        Attention weights, layer 0 next to the input.
    gradients : the same, or a mapping from layer to (batch, head, query, key)
        Gradient of one logit with respect to each layer's attention, **in the order of the layers**.
        Backward hooks see the last layer first: key them by layer and pass the mapping.
    form : {"relevance", "product"}

    Returns
    -------
    (batch, query, key), float32 or float64
        ``relevance``: not normalised; the map is row of R - I. ``product``: rows sum to 1; the map is
        the row of R. :func:`gradient_map` reads either.

    Raises
    ------
    ValueError
        When shapes differ, a layer's gradient is missing, or values are NaN.

    Notes
    -----
    It tells which positions the attention paths that favour *this* class start from; the same class
    must be used for both checkpoints. It cannot tell evidence against the class (the negative part is
    dropped), and sees values and feed-forward layers only through the gradient at one point.

    Examples
    --------
    >>> import numpy as np
    >>> attention = np.array([[[[[.5, .5], [0., 1.]]]]])
    >>> gradient_rollout(attention, np.ones_like(attention))[0]
    array([[1.5, 0.5],
           [0. , 2. ]])
    >>> gradient_rollout(attention, np.ones_like(attention), form="product")[0]
    array([[0.75, 0.25],
           [0.  , 1.  ]])
    """
    if form not in ("relevance", "product"):
        raise ValueError(f"form: expected 'relevance' or 'product', got {form!r}")
    layers = as_layers("attentions", attentions)
    check_square("attentions", layers)
    paired = gradients_by_layer(gradients, layers)
    rollout: torch.Tensor | None = None
    for attention, gradient in zip(layers, paired, strict=True):
        weighted = as_working("attentions", weigh_by_gradient(attention, gradient))
        rollout = (
            relevance_step(rollout, weighted) if form == "relevance" else product_step(rollout, weighted)
        )
    return restore(rollout, layers[0]) if rollout is not None else layers[0]


def weigh_by_gradient(attention: Array, gradient: Array) -> Array:
    r"""Return Ā = mean over heads of the positive part of ∇A ⊙ A.

    Parameters
    ----------
    attention, gradient : (batch, head, query, key)
        One layer, or a block of its queries.

    Returns
    -------
    (batch, query, key)
        Non-negative; rows need not sum to anything.

    Raises
    ------
    ValueError
        When the shapes differ or values are NaN or infinite.

    Examples
    --------
    >>> import torch
    >>> weigh_by_gradient(torch.tensor([[[[.5, .5]]]]), torch.tensor([[[[-1., 2.]]]]))
    tensor([[[0., 1.]]])
    """
    weights, slope = as_working("attention", attention), as_working("gradient", gradient)
    if weights.ndim != 4 or weights.shape != slope.shape:
        raise ValueError(
            f"gradient: expected (batch, head, query, key) like the attention, {tuple(weights.shape)}, "
            f"got shape {tuple(slope.shape)}"
        )
    weighted = (weights * slope.to(device=weights.device)).clamp_min_(0).mean(1)
    check_finite("attention and gradient", weighted)
    return restore(weighted, attention)


def relevance_step(relevance: Array | None, weighted: Array) -> Array:
    """Return R + Ā·R; None stands for R = I.

    Parameters
    ----------
    relevance : (batch, query, key) or None
    weighted : (batch, query, key)
        Ā of the next layer up.

    Returns
    -------
    (batch, query, key)

    Examples
    --------
    >>> import torch
    >>> relevance_step(None, torch.tensor([[[0., 1.], [0., 0.]]]))
    tensor([[[1., 1.],
             [0., 1.]]])
    """
    layer = as_working("weighted", weighted)
    below = _identity_like(layer) if relevance is None else as_working("relevance", relevance)
    return restore(below + layer @ below.to(layer.device), weighted)


def product_step(rollout: Array | None, weighted: Array) -> Array:
    """Return (I + Ā)/rowsum · R; None stands for R = I.

    Parameters
    ----------
    rollout : (batch, query, key) or None
    weighted : (batch, query, key)
        Ā of the next layer up.

    Returns
    -------
    (batch, query, key)
        Rows sum to 1.

    Examples
    --------
    >>> import torch
    >>> product_step(None, torch.tensor([[[0., 1.], [0., 0.]]]))
    tensor([[[0.5000, 0.5000],
             [0.0000, 1.0000]]])
    """
    layer = as_working("weighted", weighted)
    step = normalize_rows(layer + _identity_like(layer))
    return restore(
        step if rollout is None else step @ as_working("rollout", rollout).to(step.device), weighted
    )


def gradient_row_step(
    row: Array, weighted: Array, *, start: AnyArray | None = None, form: Form = "relevance"
) -> Array:
    """Return the row vector one layer further down, from the last layer to layer 0.

    ``relevance``: r + r·Ā. ``product``: (r/s) + (r/s)·Ā with s the row sums of I + Ā. This is the
    order in which backward visits the layers.

    Parameters
    ----------
    row : (batch, query)
        Starts as the identity's row at the last layer. With `start`, it is the row of R - I and starts
        as zero: small gradients then keep their precision beside the 1 of the identity.
    weighted : (batch, query, key)
        Ā of this layer.
    start : (batch, query), optional
        The identity's row, or the mean of several; ``relevance`` only.
    form : {"relevance", "product"}

    Returns
    -------
    (batch, key)

    Raises
    ------
    ValueError
        When `form` is unknown, or `start` is given for ``product``.

    Examples
    --------
    >>> import torch
    >>> first, weighted = torch.tensor([[1., 0.]]), torch.tensor([[[0., 1.], [0., 0.]]])
    >>> gradient_row_step(first, weighted)
    tensor([[1., 1.]])
    >>> gradient_row_step(torch.zeros(1, 2), weighted, start=first)
    tensor([[0., 1.]])
    """
    layer = as_working("weighted", weighted)
    vector = as_working("row", row).to(layer.device)
    if form not in ("relevance", "product") or (form == "product" and start is not None):
        raise ValueError(f"form: expected 'relevance', or 'product' without start, got {form!r}")
    if form == "product":
        vector = vector / (1 + layer.sum(-1))
    source = vector
    if start is not None:
        source = vector + torch.as_tensor(start, dtype=vector.dtype, device=layer.device)
    return restore(vector + (source[:, None] @ layer)[:, 0], row)


def gradient_map(row: Array, start: AnyArray | None = None) -> tuple[Array, Array]:
    """Return the map that a row of a gradient rollout stands for, and where it is defined.

    Parameters
    ----------
    row : (batch, key)
        Output row of R, or the mean of several.
    start : (batch, key), optional
        The identity's row, or the mean of the same several: it is subtracted, as the relevance form
        wants. Leave it out for the product form, and for a row of R - I.

    Returns
    -------
    map : (batch, key)
        Sums to 1 where defined, else all zero.
    defined : bool (batch,)
        False where no attention favours the target: the map has no mass.

    Raises
    ------
    ValueError
        When `start` has another shape than `row`.

    Examples
    --------
    >>> import numpy as np
    >>> rows, first = np.array([[1.5, .5], [1., 0.]]), np.array([[1., 0.], [1., 0.]])
    >>> weights, defined = gradient_map(rows, first)
    >>> weights.tolist(), defined.tolist()
    ([[0.5, 0.5], [0.0, 0.0]], [True, False])
    """
    vector = as_working("row", row)
    if start is not None:
        if tuple(start.shape) != tuple(vector.shape):
            raise ValueError(f"start: expected shape {tuple(vector.shape)}, got {tuple(start.shape)}")
        vector = (vector - torch.as_tensor(start, dtype=vector.dtype, device=vector.device)).clamp_min(0)
    defined = vector.sum(-1) >= torch.finfo(vector.dtype).tiny
    weights = torch.where(defined[..., None], normalize_rows(vector), torch.zeros_like(vector))
    return restore(weights, row), restore(defined, row)


def gradients_by_layer(
    gradients: Sequence[Array] | Mapping[int, Array] | Array, layers: Sequence[Array], name: str = "gradients"
) -> list[Array]:
    """Return the gradients in the order of `layers`, one for each, or raise ValueError."""
    if isinstance(gradients, Mapping):
        missing = sorted(set(range(len(layers))) - set(gradients))
        if missing or len(gradients) != len(layers):
            raise ValueError(
                f"{name}: expected layers 0…{len(layers) - 1}, got {sorted(gradients)} (missing {missing})"
            )
        gradients = [gradients[index] for index in range(len(layers))]
    found = as_layers(name, gradients)
    if len(found) != len(layers):
        raise ValueError(f"{name}: expected {len(layers)} layers like the attentions, got {len(found)}")
    for index, (gradient, layer) in enumerate(zip(found, layers, strict=True)):
        if tuple(gradient.shape) != tuple(layer.shape):
            raise ValueError(
                f"{name}[{index}]: expected shape {tuple(layer.shape)} like its attention, "
                f"got {tuple(gradient.shape)}"
            )
    return found


def _identity_like(matrix: torch.Tensor) -> torch.Tensor:
    return torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
