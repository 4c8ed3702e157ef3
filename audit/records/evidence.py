"""Whether a checkpoint's output depends on what its maps say: occlusion and perturbation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Confirmation:
    """Mean absolute change of the target logit when a region is occluded, on both checkpoints.

    `difference` is after - before of that, with its interval (1 - 2 alpha, over probes or
    groups); `confirmed` says whether it points the way of the shift and excludes zero.
    """

    region: str
    occlusion: str
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    confirmed: bool
    n_probes: int


@dataclass(frozen=True)
class Advantage:
    """Mean area under a perturbation curve, by the map's order and by random ones.

    `value` is how much better the map's order is, positive = better, with its interval (1 - 2 alpha, over
    probes or groups); see :mod:`audit.faithfulness`.
    """

    area: float
    random: float
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Faithfulness:
    """How far one method's maps order positions by what a checkpoint's target logit depends on.

    Attributes
    ----------
    role : str
        ``before`` or ``after``.
    audited : bool
        Whether the runs were made with this method.
    faithful : bool
        Whether the order is shown to be better than random ones (deletion's interval lies above 0) and the
        map depends on the weights; else the `reason` says why not.
    comprehensiveness, sufficiency, random_comprehensiveness, random_sufficiency : tuple
        Means at 1, 5, 10, 20 and 50 % of the content positions, in units of the logit.
    spearman : mapping of method to float or None
        Mean rank correlation with the maps of other methods, over content.
    randomised : tuple of float or None
        The same with the maps of the audited method after the weights were shuffled, from the top down to
        all of them.
    sink, depth_collapse : float or None
        Means of the maps' diagnostics.
    """

    role: str
    method: str
    audited: bool
    faithful: bool
    reason: str | None = None
    deletion: Advantage | None = None
    insertion: Advantage | None = None
    comprehensiveness: tuple[float | None, ...] = ()
    sufficiency: tuple[float | None, ...] = ()
    random_comprehensiveness: tuple[float | None, ...] = ()
    random_sufficiency: tuple[float | None, ...] = ()
    spearman: Mapping[str, float | None] = field(default_factory=dict)
    randomised: tuple[float | None, ...] = ()
    sink: float | None = None
    depth_collapse: float | None = None
    n_probes: int = 0
    n_missing: int = 0
