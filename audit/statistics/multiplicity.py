"""Many looks at once: Holm, Benjamini–Hochberg, joint sign flips, and the e-process for trends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from audit.statistics.resampling import collapse, encode_groups, sign_flip_max_pvalues

Array = NDArray[np.float64]


def _pvalues(pvalues: ArrayLike) -> Array:
    array = np.asarray(pvalues, dtype=np.float64)
    if array.ndim != 1 or not ((array >= 0) & (array <= 1)).all():
        raise ValueError(f"pvalues: expected a 1-D sequence of numbers in [0, 1], got {pvalues!r}")
    return array


def holm(pvalues: ArrayLike) -> Array:
    """Return p-values adjusted by Holm (Scand. J. Stat. 6 (1979) 65), in the order given.

    Examples
    --------
    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = _pvalues(pvalues)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)) if len(p) else p
    return np.minimum(adjusted, 1.0)


def benjamini_hochberg(pvalues: ArrayLike) -> Array:
    """Return p-values adjusted by Benjamini and Hochberg (JRSS B 57 (1995) 289), in the order given.

    Examples
    --------
    >>> benjamini_hochberg([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.04, 0.04]
    """
    p = _pvalues(pvalues)
    order = np.argsort(-p, kind="stable")
    adjusted = np.empty_like(p)
    ranks = np.arange(len(p), 0, -1)
    adjusted[order] = np.minimum.accumulate(p[order] * len(p) / ranks) if len(p) else p
    return np.minimum(adjusted, 1.0)


def sign_flip_max_t(
    shifts: ArrayLike, *, groups: Sequence[str | None] | None = None, resamples: int = 9999, seed: int = 0
) -> Array:
    """Return p-values adjusted for looking at many cells, by joint sign flips (exploring only).

    Every column is flipped with the same signs, and each |Σ x| / √(Σ x²) is compared with the largest
    over columns (Westfall and Young, Resampling-Based Multiple Testing, 1993, section 2.5, single step).

    Parameters
    ----------
    shifts : array_like (probe, column)
        Paired differences; NaN marks a missing one.
    groups : sequence of str, optional
        Group of each probe: whole groups are flipped.

    Returns
    -------
    float64 array (column,)

    Examples
    --------
    >>> shifts = np.array([[1.0, 0.1], [1.2, -0.1], [0.9, 0.2], [1.1, -0.2], [1.0, 0.0], [0.8, 0.1]])
    >>> sign_flip_max_t(shifts).round(2).tolist()
    [0.03, 1.0]
    """
    values = np.asarray(shifts, dtype=np.float64)
    if values.ndim != 2 or not len(values):
        raise ValueError(f"shifts: expected an array (probe, column) with a probe, got shape {values.shape}")
    units = collapse(values, encode_groups(groups, len(values)))
    return sign_flip_max_pvalues(units, resamples=resamples, seed=[seed, 3])


def e_process(differences: ArrayLike, *, scale: float = 1.0) -> Array:
    """Return the evidence against "no trend" after each look; alarm at 20 or more.

    With running sum S and sum of squares Q of symmetric differences and τ = 1/scale:
    E = (1+τ²Q)^−½ · exp(τ²S² / (2(1+τ²Q))), the normal mixture of exp(λS − λ²Q/2) (de la Peña, Ann.
    Probab. 27 (1999) 537). The chance that E ever reaches 1/α is at most α, however often one looks.

    Parameters
    ----------
    differences : array_like (look,)
        One difference a scheduled audit, oldest first.
    scale : float
        Size of a difference that would matter, fixed before looking (for example the floor's SD).

    Returns
    -------
    float64 array (look,)

    Examples
    --------
    >>> e_process([1.0] * 12).round(1)[[3, 11]].tolist()
    [2.2, 70.5]
    """
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale: expected a number > 0, got {scale!r}")
    steps = np.asarray(differences, dtype=np.float64) / scale
    if steps.ndim != 1 or not np.isfinite(steps).all():
        raise ValueError(f"differences: expected a 1-D sequence of finite numbers, got {differences!r}")
    total, squares = np.cumsum(steps), np.cumsum(steps**2)
    log_evidence = -np.log1p(squares) / 2 + total**2 / (2 * (1 + squares))
    return np.asarray(np.exp(np.minimum(log_evidence, 700.0)))
