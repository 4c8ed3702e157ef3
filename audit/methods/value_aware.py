"""Value-aware attention: what each position really contributes, not only how it is weighted.

The functions take the transformed vectors T_i(x_j) of one layer, or of a block of its queries, and
return a matrix whose rows sum to 1 and which already contains the residual connection. Fold these with
:func:`audit.methods.rollout.rollout_step`; no identity is added.
"""

from __future__ import annotations

import torch

from audit.methods._arrays import (
    AnyArray,
    Array,
    as_working,
    check_finite,
    fill_empty_rows,
    normalize_rows,
    restore,
)


def transformed_vectors(
    attention: Array,
    values: Array,
    output_weight: Array,
    hidden: Array | None = None,
    *,
    query_offset: int = 0,
) -> Array:
    r"""Return what each key contributes to each query's attention block.

    .. math:: T_i(x_j) = \sum_h A^h_{ij} W_O^h v^h_j + [i = j]\, x_i

    (Kobayashi et al., EMNLP 2021, arXiv 2109.07152, equations 2 to 4).

    Parameters
    ----------
    attention : (batch, head, query, key)
        Weights of one layer, or of a block of its queries.
    values : (batch, head, key, head_dim)
        Value vectors, their bias included (rows sum to 1, so it passes through).
    output_weight : (head, head_dim, dim)
        The output projection, cut by heads; its bias belongs to no key.
    hidden : (batch, query, dim), optional
        What the residual connection adds to each query; left out where there is none.
    query_offset : int
        Position of the first query among the keys.

    Returns
    -------
    (batch, query, key, dim)
        Summed over keys: the block's output before its layer norm, less the output bias.

    Raises
    ------
    ValueError
        When shapes contradict each other.

    Examples
    --------
    >>> import torch
    >>> attention, values = torch.tensor([[[[.5, .5]]]]), torch.tensor([[[[1., 0.], [0., 2.]]]])
    >>> transformed_vectors(attention, values, torch.eye(2)[None])
    tensor([[[[0.5000, 0.0000],
              [0.0000, 1.0000]]]])
    """
    weights, vectors, projection = (
        as_working("attention", attention),
        as_working("values", values),
        as_working("output_weight", output_weight),
    )
    _check_projection(weights, vectors, projection)
    written = torch.einsum("bhkd,hdm->bhkm", vectors, projection)
    transformed = torch.einsum("bhqk,bhkm->bqkm", weights, written)
    if hidden is not None:
        residual = as_working("hidden", hidden)
        if residual.shape != transformed[:, :, 0].shape:
            raise ValueError(
                f"hidden: expected (batch, query, dim) = {tuple(transformed[:, :, 0].shape)}, "
                f"got {tuple(residual.shape)}"
            )
        transformed.diagonal(query_offset, 1, 2).add_(residual.transpose(1, 2))
    return restore(transformed, attention)


def linearized_layer_norm(vectors: Array, weight: Array, deviation: AnyArray) -> Array:
    r"""Return g(z) = γ ⊙ (z - mean z)/σ for each contribution to a position.

    The layer norm of the sum is the sum of g over the contributions, plus its bias, when σ is that of
    the sum (Kobayashi et al., EMNLP 2021, arXiv 2109.07152, equation 6).

    Parameters
    ----------
    vectors : (batch, query, key, dim)
        Contributions to each query.
    weight : (dim,)
        γ of the layer norm.
    deviation : (batch, query)
        σ, root of the variance of the *sum* over keys plus the layer norm's ε.

    Returns
    -------
    (batch, query, key, dim)

    Raises
    ------
    ValueError
        When shapes contradict each other or a deviation is not positive.

    Examples
    --------
    >>> import torch
    >>> linearized_layer_norm(torch.tensor([[[[3., 1.]]]]), torch.ones(2), torch.tensor([[2.]]))
    tensor([[[[ 0.5000, -0.5000]]]])
    """
    tensor, gamma = as_working("vectors", vectors), as_working("weight", weight)
    sigma = as_working("deviation", deviation)
    if tensor.ndim != 4 or tuple(sigma.shape) != tuple(tensor.shape[:2]) or gamma.shape != tensor.shape[-1:]:
        raise ValueError(
            f"vectors: expected (batch, query, key, dim) with weight (dim,) and deviation (batch, query), "
            f"got {tuple(tensor.shape)}, {tuple(gamma.shape)} and {tuple(sigma.shape)}"
        )
    if not bool((sigma > 0).all()):
        raise ValueError(f"deviation: expected values > 0, got {float(sigma.min()):.6g}")
    centred = tensor - tensor.mean(-1, keepdim=True)
    return restore(gamma * centred / sigma[..., None, None], vectors)


def norm_contributions(vectors: Array) -> Array:
    r"""Return ‖T_i(x_j)‖₂ with each row divided by its sum.

    Parameters
    ----------
    vectors : (batch, query, key, dim)
        Contributions after the linearised layer norm of the attention block (Kobayashi et al., EMNLP
        2021, arXiv 2109.07152), and after that of the feed-forward block as well for GlobEnc
        (Modarressi et al., NAACL 2022, arXiv 2205.03286), which skips the feed-forward layer itself.

    Returns
    -------
    (batch, query, key)
        Rows sum to 1; a row of zeros stays zero, see :func:`identity_where_empty`.

    Raises
    ------
    ValueError
        When the shape is wrong or vectors are NaN.

    Notes
    -----
    It tells how large each contribution is. It cannot tell whether contributions cancel, nor whether
    the model uses the direction they point in.

    Examples
    --------
    >>> import torch
    >>> norm_contributions(torch.tensor([[[[2., 0.], [1., 1.]]]]))
    tensor([[[0.5858, 0.4142]]])
    """
    tensor = _checked_vectors(vectors)
    return restore(normalize_rows(torch.linalg.vector_norm(tensor, dim=-1)), vectors)


def alti_contributions(vectors: Array, output: Array | None = None) -> Array:
    r"""Return how much nearer each contribution brings the output, row-normalised.

    .. math:: c_{ij} = \max(0, \|y_i\|_1 - \|y_i - T_i(x_j)\|_1)

    (ALTI: Ferrando, Gállego & Costa-jussà, EMNLP 2022, arXiv 2203.04212, equations 8 and 9).

    Parameters
    ----------
    vectors : (batch, query, key, dim)
        Contributions to each query, through the linearised layer norm where there is one.
    output : (batch, query, dim), optional
        y_i, what they add up to; their sum over keys by default. Give it for blocks of keys, or to
        include biases.

    Returns
    -------
    (batch, query, key)
        Rows sum to 1; a row in which nothing helps is all zero, see :func:`identity_where_empty`.

    Raises
    ------
    ValueError
        When shapes contradict each other or vectors are NaN.

    Notes
    -----
    It tells which contributions the output is made of, cancelling ones aside. It cannot tell what
    the layers above do with that output.

    Examples
    --------
    >>> import torch
    >>> alti_contributions(torch.tensor([[[[2., 0.], [1., 1.]]]]))
    tensor([[[0.5000, 0.5000]]])
    """
    tensor = _checked_vectors(vectors)
    total = tensor.sum(2) if output is None else as_working("output", output)
    if total.shape != tensor[:, :, 0].shape:
        raise ValueError(
            f"output: expected (batch, query, dim) = {tuple(tensor[:, :, 0].shape)}, got {tuple(total.shape)}"
        )
    check_finite("output", total)
    distance = torch.linalg.vector_norm(total[:, :, None] - tensor, ord=1, dim=-1)
    gain = torch.linalg.vector_norm(total, ord=1, dim=-1)[..., None] - distance
    return restore(normalize_rows(gain.clamp_min(0)), vectors)


def value_zeroing_contributions(output: Array, zeroed: Array) -> Array:
    r"""Return 1 - cos(x̃_i without v_j, x̃_i), row-normalised.

    (Value zeroing: Mohebbi et al., EACL 2023, arXiv 2301.12971, equations 4 and 5.)

    Parameters
    ----------
    output : (batch, query, dim)
        x̃_i, output of the whole layer.
    zeroed : (batch, query, key, dim)
        The same when the value vector of one key is set to zero.

    Returns
    -------
    (batch, query, key)
        Rows sum to 1; a row that no key moves is all zero, see :func:`identity_where_empty`.

    Raises
    ------
    ValueError
        When shapes contradict each other or outputs are NaN.

    Notes
    -----
    It tells how far the layer's output turns without a key's value, feed-forward layer included. It
    cannot tell changes of length, nor what two keys do together.

    Examples
    --------
    >>> import torch
    >>> output, zeroed = torch.tensor([[[1., 0.]]]), torch.tensor([[[[0., 1.], [1., 0.]]]])
    >>> value_zeroing_contributions(output, zeroed)
    tensor([[[1., 0.]]])
    """
    return restore(normalize_rows(as_working("distances", value_zeroing_distances(output, zeroed))), zeroed)


def value_zeroing_distances(output: Array, zeroed: Array) -> Array:
    """Return 1 - cos(x̃_i without v_j, x̃_i) for a block of keys, not normalised.

    Parameters
    ----------
    output, zeroed
        As in :func:`value_zeroing_contributions`, which divides the rows over all keys by their sums.

    Returns
    -------
    (batch, query, key)
        In [0, 2]; what rounding alone would give is exactly 0.

    Raises
    ------
    ValueError
        When shapes contradict each other or outputs are NaN.

    Examples
    --------
    >>> import torch
    >>> output, zeroed = torch.tensor([[[1., 0.]]]), torch.tensor([[[[0., 1.], [1., 0.]]]])
    >>> value_zeroing_distances(output, zeroed)
    tensor([[[1., 0.]]])
    """
    without, whole = _checked_vectors(zeroed), as_working("output", output)
    if whole.shape != without[:, :, 0].shape:
        raise ValueError(
            f"output: expected (batch, query, dim) = {tuple(without[:, :, 0].shape)}, "
            f"got {tuple(whole.shape)}"
        )
    check_finite("output", whole)
    rounding = 8 * torch.finfo(without.dtype).eps
    # 1 - cos of nearly equal vectors cancels all digits of float32.
    cosine = torch.nn.functional.cosine_similarity(without.double(), whole.double()[:, :, None], dim=-1)
    distance = (1 - cosine).clamp_min(0)
    return restore(torch.where(distance > rounding, distance, 0.0).to(without.dtype), zeroed)


def identity_where_empty(contributions: Array, *, query_offset: int = 0) -> tuple[Array, Array]:
    """Return contributions with identity rows where a row has no mass, and how many there were.

    Parameters
    ----------
    contributions : (batch, query, key)
        From one of the functions above.
    query_offset : int
        Position of the first query among the keys.

    Returns
    -------
    contributions : (batch, query, key)
        Every row sums to 1.
    empty : int (batch,)

    Examples
    --------
    >>> import torch
    >>> rows, empty = identity_where_empty(alti_contributions(torch.tensor([[[[2., 0.], [-1., 1.]]]])))
    >>> rows.tolist(), empty.tolist()
    ([[[1.0, 0.0]]], [1])
    """
    filled, empty = fill_empty_rows(as_working("contributions", contributions), offset=query_offset)
    return restore(filled, contributions), restore(empty, contributions)


def _check_projection(weights: torch.Tensor, values: torch.Tensor, projection: torch.Tensor) -> None:
    batch, heads, _, keys = weights.shape if weights.ndim == 4 else (-1, -1, -1, -1)
    if values.ndim != 4 or tuple(values.shape[:3]) != (batch, heads, keys):
        raise ValueError(
            f"values: expected (batch, head, key, head_dim) for attention of shape {tuple(weights.shape)}, "
            f"got {tuple(values.shape)}"
        )
    if projection.ndim != 3 or tuple(projection.shape[:2]) != (heads, values.shape[3]):
        raise ValueError(
            f"output_weight: expected (head, head_dim, dim) = ({heads}, {values.shape[3]}, dim), "
            f"got {tuple(projection.shape)}"
        )


def _checked_vectors(vectors: AnyArray) -> torch.Tensor:
    tensor = as_working("vectors", vectors)
    if tensor.ndim != 4:
        raise ValueError(f"vectors: expected (batch, query, key, dim), got shape {tuple(tensor.shape)}")
    check_finite("vectors", tensor)
    return tensor
