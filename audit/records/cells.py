"""What is measured on two runs: columns of shares, and one cell for each measure of a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from audit.records.maps import FloatArray

Effect = Literal["model", "data", "model_on_domain", "interaction"]


@dataclass(frozen=True)
class Column:
    """What a column of numbers over probes measures. `layer` None is the whole stack."""

    region: str
    stream: str = "input"
    layer: int | None = None


@dataclass(frozen=True)
class ShareTable:
    """Reliance of one run as a matrix; NaN marks a missing region and never leaves memory.

    `values` is float64 (probe, column); a column is one region of one stream at one layer.
    """

    probe_ids: tuple[str, ...]
    columns: tuple[Column, ...]
    values: FloatArray


@dataclass(frozen=True)
class ReplicateTest:
    """Result of :func:`audit.replicate_test`; fields are None with a `reason` where undefined.

    `interval` covers the excess shift with level 1 - 2 alpha.
    """

    excess: float | None
    statistic: float | None
    pvalue: float | None
    interval: tuple[float, float] | None
    minimum_detectable_shift: float | None
    n_replicates: int
    sd: float | None = None
    df: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Cell:
    """Everything known about one measure of one column: the unit of every table and rule.

    Attributes
    ----------
    measure : str
        ``shift``, ``level``, ``ratio``, ``js_distance``, ``wasserstein``, ... Level is the mean
        share after, ratio the mean share after divided by the mean share before.
    region : str
        ``*`` for measures of the whole map.
    value : float or None
        Mean over probes; None with a `reason` when undefined.
    interval : (low, high) or None
        Level 1 - 2 alpha over probes, or over groups where probes have them.
    pvalue : float or None
        "Did the maps on these probes change?" Shown, never gates.
    adjusted_pvalue, wilcoxon_pvalue : float or None
        `pvalue` adjusted for looking at many cells (max-T, or Benjamini–Hochberg over segments and
        unpaired cells), and the signed-rank test's; both for exploring.
    replicates : tuple of float
        The measure for each replicate, in the comparison's order of replicates.
    probe_variance : float or None
        v of STATISTICS.md: variance over probes (clusters) of x_p - mean_i s_ip, divided by their
        number; on the log scale for distances.
    """

    measure: str
    region: str
    stream: str = "input"
    layer: int | None = None
    effect: Effect = "model"
    segment: str | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    before: float | None = None
    after: float | None = None
    sd: float | None = None
    effect_size: float | None = None
    size: float | None = None
    pvalue: float | None = None
    n_probes: int = 0
    n_missing: int = 0
    n_clusters: int | None = None
    replicates: tuple[float, ...] = ()
    probe_variance: float | None = None
    excess: ReplicateTest | None = None
    reason: str | None = None
    adjusted_pvalue: float | None = None
    wilcoxon_pvalue: float | None = None
