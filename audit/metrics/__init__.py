"""Measures of one map against another, and of one map alone.

Maps run along the last axis and sum to 1; leading axes are broadcast and give the shape of the result
(a float for a single pair). ``p`` is before, ``q`` after. Sums are taken in float64.

What no measure here can tell: whether a position mattered to the output. They compare maps.
"""

from audit.metrics.alone import depth_collapse, entropy, sink_share
from audit.metrics.carry import resample_grid, spread_to_words
from audit.metrics.pairs import (
    cosine_similarity,
    hellinger,
    js_distance,
    js_divergence,
    kl_divergence,
    spearman,
    top_k_overlap,
    total_variation,
)
from audit.metrics.positions import (
    center_of_mass,
    center_of_mass_shift,
    earth_mover_distance,
    energy_distance,
    wasserstein,
)

__all__ = [
    "center_of_mass",
    "center_of_mass_shift",
    "cosine_similarity",
    "depth_collapse",
    "earth_mover_distance",
    "energy_distance",
    "entropy",
    "hellinger",
    "js_distance",
    "js_divergence",
    "kl_divergence",
    "resample_grid",
    "sink_share",
    "spearman",
    "spread_to_words",
    "top_k_overlap",
    "total_variation",
    "wasserstein",
]
