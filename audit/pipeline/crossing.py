"""The 2×2 of a selection: two checkpoints, two probe sets, and only the probes that a filter leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from audit.errors import NothingEvaluatedError
from audit.pipeline.compare import Statistics, _interaction_cells, _select, compare_subset, in_common
from audit.pipeline.runs import RunData, read_run
from audit.records import Cell, Comparison
from audit.store import Store


def subset_crossing(
    store: Store,
    comparison: Comparison,
    probe_ids: Iterable[str],
    domain_ids: Iterable[str],
    *,
    statistics: Statistics | None = None,
) -> tuple[Cell, ...]:
    """Return the cells of a stored 2×2 for a selection of probes of both probe sets; nothing is written.

    Parameters
    ----------
    store : Store
    comparison : Comparison
        Names the runs on the second probe set in its settings.
    probe_ids, domain_ids : iterable of str
        Of the first and of the second probe set.
    statistics : Statistics, optional

    Returns
    -------
    tuple of Cell
        Those of :func:`compare_subset`, then the effects ``model_on_domain``, ``data`` and ``interaction``.
        Replicates count of which both runs are still in the store.

    Raises
    ------
    NothingEvaluatedError
        When no probe is selected on either side, or a run is not in the store.
    """
    statistics = statistics or Statistics(alpha=comparison.alpha)
    probe_ids = list(probe_ids)
    cells = compare_subset(store, comparison, probe_ids, statistics=statistics)
    before, after, repeats = _runs(store, comparison)
    first = _chosen((before[0], after[0], *repeats[0]), probe_ids)
    second = _chosen((before[1], after[1], *repeats[1]), domain_ids)
    domain = (second[0], second[1], second[2:])
    return (*cells, *_interaction_cells(first[0], first[1], first[2:], domain, statistics))


Pair = tuple[RunData, RunData]
"""One checkpoint on both probe sets."""


def _runs(store: Store, comparison: Comparison) -> tuple[Pair, Pair, tuple[list[RunData], list[RunData]]]:
    """Return before, after and the replicates, each on both probe sets."""
    names = list(comparison.settings.get("domain") or ())
    refs = (comparison.before, comparison.after, *comparison.replicates)
    pairs = [(one, str(name)) for one, name in zip(refs, names, strict=False) if one is not None]
    stored = [(one, name) for one, name in pairs if store.has_run(one.run_id) and store.has_run(name)]
    if len(pairs) < 2 or stored[:2] != pairs[:2]:
        raise NothingEvaluatedError(
            f"not all runs of the second probe set of {comparison.id} are in this store; capture them here"
        )
    read = [
        (read_run(store, one.run_id, kind=one.kind), read_run(store, name, kind=one.kind))
        for one, name in stored
    ]
    return read[0], read[1], ([one for one, _ in read[2:]], [two for _, two in read[2:]])


def _chosen(runs: Sequence[RunData], ids: Iterable[str]) -> list[RunData]:
    wanted = set(ids)
    found = [_select(run, wanted) for run in in_common(*runs)]
    if not found[0].shares.probe_ids:
        raise NothingEvaluatedError(
            "the selection holds no probe on one of the two probe sets; widen the filter"
        )
    return found
