"""How an audit will end for a harmless candidate, and what it takes to find a given shift."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from audit.calibrate import Alternative, replicate_power

MOST_REPLICATES = 200
_DRAWS = 20_000


@dataclass(frozen=True)
class Chances:
    """Probabilities of how a rule ends for one more harmless re-training; they add up to 1."""

    passes: float
    inconclusive: float
    fails: float


@dataclass(frozen=True)
class Spread:
    """What stored runs tell of one region: seed-to-seed and probe-to-probe.

    Attributes
    ----------
    mean, seed_sd : float or None
        Of the replicates' mean shifts.
    probe_sd : float or None
        SD of a replicate's shift over probes, or over groups, scaled to their number.
    probe_variance : float
        v of an excess: variance over probes of a replicate against the others, divided by their number.
    units : int
        Probes, or groups where probes have them.
    """

    mean: float | None = None
    seed_sd: float | None = None
    probe_sd: float | None = None
    probe_variance: float = 0.0
    units: int = 0
    replicates: int = 0


@dataclass(frozen=True)
class PlannedRule:
    """One rule on one region: what it can find, and what it needs for a shift of `shift`.

    `detectable` is the smallest excess that the replicates at hand find with the wanted power;
    `shift`, `detectable` and `seed_sd` are shares, or seed-SD (`in_sd`) where no replicate is stored.
    """

    rule: str
    kind: str
    region: str
    alpha: float
    shift: float | None
    in_sd: bool
    spread: Spread
    replicates_needed: int | None
    probes_needed: int | None
    detectable: float | None
    harmless: Chances | None
    note: str | None = None


@dataclass(frozen=True)
class Sensitivity:
    """The plan of an audit: each rule on each region, and how a harmless candidate will end."""

    rules: tuple[PlannedRule, ...]
    tests: int
    power: float
    alpha: float
    unit: str
    inconclusive: float | None
    notes: tuple[str, ...]


def replicates_for(
    shift: float,
    *,
    alpha: float,
    power: float = 0.9,
    alternative: Alternative = "two-sided",
    least: int = 3,
) -> int | None:
    """Return the smallest number of replicates with which the test finds a true excess.

    Parameters
    ----------
    shift : float
        True excess shift in seed-SD.
    alpha : float
        Level of the one test, adjusted for the policy's other tests.
    least : int
        Fewer are not tried.

    Returns
    -------
    int or None
        None when no number suffices: the candidate's own seed spread does not shrink.

    Examples
    --------
    >>> replicates_for(5.0, alpha=0.05), replicates_for(5.0, alpha=0.005), replicates_for(2.0, alpha=0.05)
    (5, 15, None)
    """
    size = abs(shift)

    def found(k: int) -> bool:
        return replicate_power(size, k, alpha=alpha, alternative=alternative) >= power

    if not found(MOST_REPLICATES):
        return None
    low, high = least - 1, MOST_REPLICATES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def probes_for(shift: float, sd: float, *, alpha: float, power: float = 0.9) -> int:
    """Return how many probes (or groups) show on which side of a limit a mean lies, `shift` away from it.

    The interval of level 1 − 2α excludes the limit with the given power:
    n = ((z_{1−α} + z_power)·sd / shift)².

    Parameters
    ----------
    shift : float
        Distance of the true mean from the limit.
    sd : float
        SD over probes.

    Examples
    --------
    >>> probes_for(0.02, 0.1, alpha=0.05)
    215
    """
    if shift == 0 or not math.isfinite(shift):
        raise ValueError(f"shift: expected a finite number other than 0, got {shift!r}")
    z = float(special.ndtri(1 - alpha) + special.ndtri(power))
    return max(2, math.ceil((z * sd / shift) ** 2))


def excess_chances(
    k: int,
    within: float | str,
    *,
    alpha: float,
    rules: int = 1,
    effect_floor: float = 0.0,
    probe_variance: float = 0.0,
    alternative: Alternative = "two-sided",
    seed: int = 0,
) -> Chances:
    """Return how an excess rule ends for one more harmless re-training, by simulation.

    Everything is in seed-SD. Replicates and candidate are drawn from one normal distribution, the rule
    is applied as the gate applies it, with the test at α / `rules`.

    Parameters
    ----------
    k : int
        Number of replicates.
    within : float or "3 sd"
        Margin, in true seed-SD, or in the SD of the replicates at hand.
    probe_variance : float
        Variance of the excess over probes, in seed variances; it widens the interval.

    Examples
    --------
    >>> round(excess_chances(5, "3 sd", alpha=0.05).inconclusive, 1)
    0.5
    """
    random = np.random.default_rng(seed)
    draws = random.standard_normal((_DRAWS, k))
    excess = random.standard_normal(_DRAWS) - draws.mean(axis=1)
    sd = draws.std(axis=1, ddof=1)
    seeds = sd**2 * (1 + 1 / k)
    df = (seeds + probe_variance) ** 2 / (seeds**2 / (k - 1))
    half = special.stdtrit(df, 1 - alpha) * np.sqrt(seeds + probe_variance)
    margin = float(within.partition(" ")[0]) * sd if isinstance(within, str) else np.full(_DRAWS, within)
    rejected = _pvalues(excess / np.sqrt(seeds), k - 1, alternative) <= alpha / rules
    failed = rejected & (np.abs(excess) >= effect_floor)
    inside = np.ones(_DRAWS, dtype=bool)
    if alternative != "less":
        inside &= excess + half <= margin
    if alternative != "greater":
        inside &= excess - half >= -margin
    return _chances(failed, inside & ~failed)


def _pvalues(statistic: NDArray[np.float64], df: int, alternative: Alternative) -> NDArray[np.float64]:
    if alternative == "greater":
        return np.asarray(special.stdtr(df, -statistic))
    if alternative == "less":
        return np.asarray(special.stdtr(df, statistic))
    return np.asarray(2 * special.stdtr(df, -np.abs(statistic)))


def _chances(failed: NDArray[np.bool_], passed: NDArray[np.bool_]) -> Chances:
    fails, passes = float(failed.mean()), float(passed.mean())
    return Chances(passes, max(0.0, 1 - passes - fails), fails)


def limit_chances(mean: float, sd: float, half: float, low: float, high: float) -> Chances:
    """Return how a limit rule ends for one more harmless re-training.

    Parameters
    ----------
    mean, sd : float
        Of the replicates' values.
    half : float
        Half-width of the interval over probes.
    low, high : float
        Lowest and highest allowed value; may be infinite.

    Examples
    --------
    >>> limit_chances(0.0, 0.001, 0.002, -0.02, 0.02).passes
    1.0
    """
    scale = max(sd, 1e-300)

    def below(x: float) -> float:
        return float(special.ndtr((x - mean) / scale))

    passes = max(0.0, below(high - half) - below(low + half))
    fails = 1 - below(high + half) + below(low - half)
    return Chances(passes, max(0.0, 1 - passes - fails), fails)
