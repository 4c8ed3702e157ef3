"""Names of the measures, and what kind of number each is."""

from __future__ import annotations

from typing import Literal, get_args

MapMeasure = Literal[
    "js_distance",
    "js_divergence",
    "kl_divergence",
    "total_variation",
    "hellinger",
    "wasserstein",
    "energy_distance",
    "earth_mover_distance",
    "cosine_similarity",
    "spearman",
    "top_k_overlap",
    "center_of_mass_shift",
    "entropy_change",
    "sink_change",
]
"""Measures of whole maps."""

MAP_MEASURES: frozenset[str] = frozenset(get_args(MapMeasure))
"""The same names at run time; every other measure is one of a region."""

DISTANCES: frozenset[str] = frozenset(
    {
        "js_distance",
        "js_divergence",
        "kl_divergence",
        "total_variation",
        "hellinger",
        "wasserstein",
        "energy_distance",
        "earth_mover_distance",
    }
)
"""Measures that are never negative: judged one-sided, on the log scale."""

SIMILARITIES: frozenset[str] = frozenset({"cosine_similarity", "spearman", "top_k_overlap"})
"""Measures that are largest for equal maps: their limit is a lower one."""

SIGNED: frozenset[str] = frozenset({"shift", "center_of_mass_shift", "entropy_change", "sink_change"})
"""Measures that tell a direction: their limit holds for both, unless the rule names one."""

RANGES: dict[str, tuple[float, float]] = {
    "shift": (-1.0, 1.0),
    "sink_change": (-1.0, 1.0),
    "level": (0.0, 1.0),
    "js_distance": (0.0, 1.0),
    "js_divergence": (0.0, 1.0),
    "total_variation": (0.0, 1.0),
    "hellinger": (0.0, 1.0),
    "cosine_similarity": (0.0, 1.0),
    "spearman": (-1.0, 1.0),
    "top_k_overlap": (0.0, 1.0),
}
"""Least and largest value of the measures that have both; a limit outside can never be crossed."""
