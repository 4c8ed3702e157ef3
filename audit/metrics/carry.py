"""Maps carried over to other positions: from tokens to words, from one patch grid to another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from audit.metrics.maps import Result, as_result, checked_map
from audit.metrics.positions import check_grid


def spread_to_words(p: ArrayLike, spans: ArrayLike, words: ArrayLike) -> Result:
    """Return the mass of each word, when each token's mass is spread evenly over its characters.

    Maps of two tokenizers become comparable this way.

    Parameters
    ----------
    p : (..., n)
        Map over tokens; sums to 1.
    spans : int (n, 2)
        Characters [start, end) of each token; an empty or negative span has no characters.
    words : int (m, 2)
        Characters [start, end) of each word.

    Returns
    -------
    (..., m)
        Sums to 1 less what lies on no word: special tokens and characters between words.

    Raises
    ------
    ValueError
        When `p` is not a map, or spans do not have the shape (n, 2).

    Examples
    --------
    >>> spread_to_words([0.5, 0.3, 0.2], [[0, 3], [3, 6], [-1, -1]], [[0, 4], [4, 6]])
    array([0.6, 0.2])
    """
    map_ = checked_map("p", p)
    tokens = _spans("spans", spans, map_.shape[-1])
    return as_result(map_ @ overlap_share(tokens, _spans("words", words, None)))


def resample_grid(p: ArrayLike, grid: tuple[int, int], target: tuple[int, int]) -> Result:
    """Return a map over one patch grid as a map over another, by the area that patches share.

    Parameters
    ----------
    p : (..., rows · columns)
        Map over patches, row by row; sums to 1.
    grid, target : (rows, columns)
        Both cover the same image.

    Returns
    -------
    (..., target rows · target columns)
        Sums to 1.

    Raises
    ------
    ValueError
        When `p` is not a map over `grid`, or `target` is empty.

    Examples
    --------
    >>> resample_grid([1.0, 0.0], (1, 2), (1, 4))
    array([0.5, 0.5, 0. , 0. ])
    """
    map_ = checked_map("p", p)
    check_grid(grid, map_.shape[-1])
    check_grid(target, target[0] * target[1])
    shares = [
        overlap_share(equal_bands(cells), equal_bands(wanted))
        for cells, wanted in zip(grid, target, strict=True)
    ]
    image = map_.reshape(*map_.shape[:-1], *grid)
    resampled = np.einsum("...ij,ik,jl->...kl", image, *shares)
    return as_result(resampled.reshape(*map_.shape[:-1], target[0] * target[1]))


def _spans(name: str, spans: ArrayLike, count: int | None) -> NDArray[np.float64]:
    array = np.asarray(spans, dtype=np.float64)
    if array.ndim != 2 or array.shape[1] != 2 or count not in (None, len(array)):
        raise ValueError(f"{name}: expected ({'m' if count is None else count}, 2), got shape {array.shape}")
    return array


def equal_bands(count: int) -> NDArray[np.float64]:
    """Return `count` equal bands of [0, 1] as (start, end)."""
    return np.array(list(pairwise(np.linspace(0.0, 1.0, count + 1))))


def overlap_share(source: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return which share of each source interval lies in each target interval (source, target)."""
    start = np.maximum(source[:, None, 0], target[None, :, 0])
    end = np.minimum(source[:, None, 1], target[None, :, 1])
    length = source[:, 1] - source[:, 0]
    overlap: NDArray[np.float64] = np.maximum(end - start, 0.0) / np.where(length > 0, length, 1.0)[:, None]
    return np.where(length[:, None] > 0, overlap, 0.0)
