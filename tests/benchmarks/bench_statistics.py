"""Statistics over many probes, regions and layers, in time and memory."""

from __future__ import annotations

import numpy as np

from audit.compare import compare_tables
from audit.records import Column, ShareTable
from tests.benchmarks.measuring import SHARED, Section, watched

STATISTICS = Section("Statistics over probes")
PROBES, REGIONS, LAYERS, REPLICATES, RESAMPLES = 10_000, 50, 12, 5, 10_000
SECONDS, MEGABYTES = 60, 2048


def tables(layers: int) -> list[ShareTable]:
    """Return before, after and replicates: shares that move a little from run to run."""
    rng = np.random.default_rng(0)
    columns = tuple(Column(f"region-{r:02d}", layer=layer) for layer in range(layers) for r in range(REGIONS))
    base = rng.beta(2, 98, (PROBES, len(columns)))
    ids = tuple(f"p-{i}" for i in range(PROBES))
    runs = range(2 + REPLICATES)
    return [ShareTable(ids, columns, base + 1e-3 * rng.standard_normal(base.shape)) for _ in runs]


def test_statistics_of_all_regions_and_layers():
    before, after, *replicates = tables(LAYERS)
    cells: list[object] = []
    seconds, memory = watched(
        lambda: cells.extend(compare_tables(before, after, replicates, resamples=RESAMPLES))
    )
    assert len(cells) == 3 * REGIONS * LAYERS
    STATISTICS.note(
        f"- {PROBES:,} probes × {REGIONS} regions × {LAYERS} layers × {RESAMPLES:,} resamples, {REPLICATES} "
        f"replicates: {seconds:.1f} s and {memory:,.0f} MB above the tables (goal < {SECONDS} s, "
        f"< {MEGABYTES:,} MB in all)"
    )
    whole = memory + sum(one.values.nbytes for one in (before, after, *replicates)) / 2**20
    assert whole < MEGABYTES
    assert SHARED or seconds < SECONDS


def test_statistics_of_unpaired_regions():
    before, after = tables(1)[:2]
    seconds, memory = watched(
        lambda: compare_tables(before, after, paired=False, effect="data", resamples=RESAMPLES)
    )
    STATISTICS.note(
        f"- unpaired, {PROBES:,} probes on either side × {REGIONS} regions × {RESAMPLES:,} resamples: "
        f"{seconds:.1f} s and {memory:,.0f} MB above the tables"
    )
