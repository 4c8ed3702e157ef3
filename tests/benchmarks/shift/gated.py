"""The product's own comparison and gate on the benchmark's shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from audit.compare import compare_tables
from audit.gate import evaluate_gate
from audit.records import Column, Comparison, Outcome, Policy, Rule, ShareTable
from tests.benchmarks.shift.bases import BASE, HARMLESS, REPLICATES
from tests.benchmarks.shift.families import Family
from tests.benchmarks.shift.maps import Shares

POLICY = Policy((Rule("*", "excess", within=0.02),))
"""Every cell of the family, Holm over all of them, and the gate's own effect floor."""
RESAMPLES = 199


def gate_outcomes(family: Family, shares: Shares) -> Callable[[Sequence[str]], list[Outcome]]:
    """Return a function that gives the verdict on checkpoints, judged against the first replicates."""
    kept = [shares.column(one) for one in family.cells]
    columns = tuple(Column(one) for one in family.cells)
    ids = tuple(str(i) for i in range(shares.values.shape[1]))

    def table(checkpoint: str) -> ShareTable:
        return ShareTable(ids, columns, shares.values[shares.row(checkpoint)][:, kept])

    before, replicates = table(BASE), [table(one) for one in HARMLESS[:REPLICATES]]

    def judge(checkpoint: str) -> Outcome:
        cells = compare_tables(before, table(checkpoint), replicates, resamples=RESAMPLES)
        comparison = Comparison("paired", cells, alpha=POLICY.alpha, n_probes=len(ids), same_weights=False)
        return evaluate_gate(comparison, POLICY).outcome

    return lambda names: [judge(one) for one in np.asarray(names).tolist()]
