"""Two runs and their replicates → a :class:`Comparison` with every cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.compare import ROUNDING, compare_interaction, compare_tables
from audit.config import DEFAULT_MEASURES, RESAMPLES
from audit.errors import NothingEvaluatedError, ProbeError
from audit.pipeline.checks import check_replicate_runs
from audit.pipeline.map_cells import map_cells
from audit.pipeline.map_measures import map_measures
from audit.pipeline.predictions import prediction_changes
from audit.pipeline.runs import RunData, StoredRun, mismatches, other_model, read_run
from audit.records import Cell, Column, Comparison, Policy, RunRef, ShareTable
from audit.statistics.domain import compare_distributions
from audit.statistics.resampling import encode_groups
from audit.store import Store

Run = RunData | StoredRun

AUTOMATIC = frozenset({"special", "first", "rest"})
"""Regions that every audit has where the architecture has such positions."""


@dataclass(frozen=True)
class Statistics:
    """Level, resamples and seed of a comparison's intervals, and the measures of whole maps."""

    alpha: float = Policy.alpha
    resamples: int = RESAMPLES
    seed: int = 0
    measures: tuple[str, ...] = DEFAULT_MEASURES

    def settings(self) -> dict[str, Any]:
        """Return what a comparison keeps and its id covers: `measures` only where others are asked for."""
        found = {name: value for name, value in vars(self).items() if name != "measures"}
        return found if self.measures == DEFAULT_MEASURES else {**found, "measures": list(self.measures)}

    @classmethod
    def of(cls, comparison: Comparison) -> Statistics:
        """Return the settings that a stored comparison was made with."""
        kept = comparison.settings
        measures = tuple(kept.get("measures", DEFAULT_MEASURES))
        return cls(comparison.alpha, int(kept["resamples"]), int(kept["seed"]), measures)


def compare_runs(
    before: Run | str,
    after: Run | str,
    *,
    replicates: Sequence[Run | str] = (),
    domain: tuple[Run, Run, Sequence[Run]] | None = None,
    store: Store | None = None,
    paired: bool = True,
    statistics: Statistics | None = None,
) -> Comparison:
    """Compare two runs.

    Parameters
    ----------
    before, after : RunData, StoredRun or run id
        Ids are read from `store`.
    replicates : sequence of RunData, StoredRun or run id
        Harmless re-trainings of the same base on the same probes; a plain id counts as kind ``seed``.
    domain : (before, after, replicates), optional
        The same checkpoints on the second probe set: the 2×2 that tells model drift from data drift.
    store : Store, optional
    paired : bool
        False for one checkpoint on two probe sets.
    statistics : Statistics, optional

    Returns
    -------
    Comparison

    Raises
    ------
    ProbeError
        When a paired comparison's runs have different probes or regions.
    NothingEvaluatedError
        When an unpaired comparison's probe sets are the same.
    ConfigError
        When a replicate has the weights of another one, or of a run that is compared.
    """
    statistics = statistics or Statistics()
    before, after = _as_run(before, store), _as_run(after, store)
    repeats = [_as_run(one, store, kind="seed") for one in replicates]
    check_comparable(before, after, repeats, paired=paired)
    check_replicate_runs([one.ref for one in repeats], {"before": before.ref, "after": after.ref})
    identical, notes = False, layer_notes(before, after) if paired else ()
    before, after, *repeats = in_common(before, after, *repeats)
    if paired:
        cells, identical, aligned = _paired_cells(before, after, repeats, statistics)
        notes = (*aligned, *notes)
    else:
        cells = _unpaired_cells(before, after, statistics)
    if domain is not None:
        cells += _interaction_cells(before, after, repeats, domain, statistics)
    return replace(
        outline(before, after, replicates=repeats, domain=domain, paired=paired, statistics=statistics),
        cells=tuple(cells),
        n_probes=len(after.shares.probe_ids),
        n_clusters=_n_clusters(after) if paired else _smaller(_n_clusters(before), _n_clusters(after)),
        identical_maps=identical,
        predictions=prediction_changes(before, after) if paired else {},
        alignment=notes,
        other_model=other_model(before, after) if paired else None,
    )


def _n_clusters(run: RunData) -> int | None:
    """Return the number of groups, a probe without one being its own; None where no probe has one."""
    codes = encode_groups(run.groups, len(run.groups)) if run.groups else None
    return None if codes is None else len(np.unique(codes))


def _smaller(one: int | None, other: int | None) -> int | None:
    """Return the smaller number of groups of two probe sets, which count only where both have them."""
    return None if one is None or other is None else min(one, other)


def outline(
    before: Run,
    after: Run,
    *,
    replicates: Sequence[Run] = (),
    domain: tuple[Run, Run, Sequence[Run]] | None = None,
    paired: bool = True,
    statistics: Statistics,
) -> Comparison:
    """Return a comparison without its cells: all that its id covers, for which no share is read."""
    settings = statistics.settings()
    if domain is not None:
        runs = [domain[0], domain[1], *domain[2]]
        settings = {**settings, "domain": [run.ref.run_id for run in runs]}
    frozen = {one.ref.run_id: one.frozen_with for one in (before, *replicates) if one.frozen_with}
    if frozen:  # a floor rounds shares, so that its numbers are not those of the stored runs
        settings = {**settings, "frozen": frozen}
    return Comparison(
        kind="paired" if paired else "unpaired",
        cells=(),
        alpha=statistics.alpha,
        n_probes=0,
        before=before.ref,
        after=after.ref,
        replicates=tuple(one.ref for one in replicates),
        replicate_kinds=tuple(one.ref.kind or "seed" for one in replicates),
        same_weights=_same_weights(before.ref, after.ref) if paired else None,
        mismatches=mismatches(before, after, *replicates),
        method=after.identity["method"].split(" ")[0],
        settings=settings,
    )


def _same_weights(before: RunRef, after: RunRef) -> bool | None:
    """Return whether two runs are of one checkpoint; None where the maps were made elsewhere."""
    if not (before.weights_digest and after.weights_digest):
        return None
    return before.weights_digest == after.weights_digest


def compare_subset(
    store: Store, comparison: Comparison, probe_ids: Iterable[str], *, statistics: Statistics | None = None
) -> tuple[Cell, ...]:
    """Return the cells of a selection of a stored comparison's probes; nothing is written.

    Replicates that are still in the store are taken along. Of two probe sets the selection may name
    probes of both.

    Raises
    ------
    NothingEvaluatedError
        When no probe is selected (on either side), or a run is not in the store.
    """
    statistics = statistics or Statistics(alpha=comparison.alpha)
    before, after = _stored_pair(store, comparison)
    wanted, paired = set(probe_ids), comparison.kind == "paired"
    repeats = [
        read_run(store, ref.run_id, kind=ref.kind)
        for ref in (comparison.replicates if paired else ())
        if store.has_run(ref.run_id)
    ]
    chosen = [_select(run, wanted) for run in in_common(before, after, *repeats)]
    if any(not run.shares.probe_ids for run in chosen[:2]):
        where = "" if paired else " on one of the two probe sets"
        raise NothingEvaluatedError(f"the selection holds no probe{where}; widen the filter")
    if paired:
        return tuple(_table_cells(chosen[0], chosen[1], chosen[2:], statistics))
    return tuple(_unpaired_cells(chosen[0], chosen[1], statistics))


def _stored_pair(store: Store, comparison: Comparison) -> tuple[RunData, RunData]:
    """Return both runs of a comparison from the store."""
    found = []
    for name, ref in (("before", comparison.before), ("after", comparison.after)):
        if ref is None or not store.has_run(ref.run_id):
            run = "" if ref is None else f" {ref.run_id}"
            raise NothingEvaluatedError(
                f"the run{run} {name} is not in this store (a floor holds no probes); capture it here"
            )
        found.append(read_run(store, ref.run_id, kind=ref.kind))
    return found[0], found[1]


def _as_run(run: Run | str, store: Store | None, *, kind: str | None = None) -> RunData:
    if not isinstance(run, str):
        return run.read()
    if store is None:
        raise ValueError(f"store: expected a Store to read {run!r} from, got None")
    return read_run(store, run, kind=kind)


def check_comparable(before: RunData, after: RunData, repeats: Sequence[RunData], *, paired: bool) -> None:
    """Refuse runs of other probes or regions, and one probe set as its own domain."""
    if not paired and before.inputs_digest == after.inputs_digest:
        raise NothingEvaluatedError(
            f"both probe sets of {before.ref.run_id} are the same; name another one as [domain]"
        )
    others = [after, *repeats] if paired else []
    for other in others:
        if other.inputs_digest != before.inputs_digest:
            raise ProbeError(
                f"{before.ref.run_id} and {other.ref.run_id} were captured on different probe sets "
                f"({before.inputs_digest[:12]} and {other.inputs_digest[:12]}); capture both on one, "
                "or name the second as [domain]"
            )
    for other in [after, *repeats]:
        odd = {column.region for column in set(other.shares.columns) ^ set(before.shares.columns)} - AUTOMATIC
        if odd:
            raise ProbeError(
                f"{before.ref.run_id} and {other.ref.run_id} have different regions "
                f"({', '.join(sorted(odd))}); capture both with one [regions]"
            )


def in_common(*runs: RunData) -> tuple[RunData, ...]:
    """Return the runs with the columns that all of them have, in one order.

    Layers are kept only where all runs have equally many: layer 3 of 6 is no counterpart of layer 3 of 12.
    """
    shares = [column for column in runs[0].shares.columns if all(column in r.shares.columns for r in runs)]
    layered = [run.layer_shares for run in runs]
    depths = {_n_layers(run) for run in runs}
    layers = [
        column
        for column in (layered[0].columns if layered[0] is not None and len(depths) == 1 else ())
        if all(table is not None and column in table.columns for table in layered)
    ]
    return tuple(
        replace(
            run,
            shares=_columns(run.shares, shares),
            layer_shares=None if run.layer_shares is None else _columns(run.layer_shares, layers),
        )
        for run in runs
    )


def layer_notes(before: RunData, after: RunData) -> tuple[str, ...]:
    """Return the line that says why layers are not compared, where both runs have some."""
    one, two = _n_layers(before), _n_layers(after)
    if one == two or not (one and two):
        return ()
    return (f"the checkpoints have {one} and {two} layers, so that nothing is compared layer by layer",)


def _n_layers(run: RunData) -> int:
    columns = () if run.layer_shares is None else run.layer_shares.columns
    return 1 + max((column.layer or 0 for column in columns), default=-1)


def _columns(table: ShareTable, wanted: Sequence[Column]) -> ShareTable:
    place = {column: i for i, column in enumerate(table.columns)}
    return ShareTable(table.probe_ids, tuple(wanted), table.values[:, [place[c] for c in wanted]])


def _select(run: RunData, wanted: set[str]) -> RunData:
    keep = [i for i, probe_id in enumerate(run.shares.probe_ids) if probe_id in wanted]
    return replace(
        run,
        shares=_rows(run.shares, keep),
        layer_shares=None if run.layer_shares is None else _rows(run.layer_shares, keep),
        groups=tuple(run.groups[i] for i in keep) if run.groups else (),
        segments={key: tuple(values[i] for i in keep) for key, values in run.segments.items()},
    )


def _rows(table: ShareTable, keep: list[int]) -> ShareTable:
    return ShareTable(tuple(table.probe_ids[i] for i in keep), table.columns, table.values[keep])


def _options(before: RunData, repeats: Sequence[RunData], statistics: Statistics) -> dict[str, Any]:
    return {
        "groups": list(before.groups) or None,
        "alpha": statistics.alpha,
        "resamples": statistics.resamples,
        "seed": statistics.seed,
        "replicate_kinds": tuple(one.ref.kind or "seed" for one in repeats),
    }


def _table_cells(
    before: RunData, after: RunData, repeats: Sequence[RunData], statistics: Statistics, effect: str = "model"
) -> list[Cell]:
    options = {**_options(before, repeats, statistics), "effect": effect}
    cells = list(
        compare_tables(
            before.shares,
            after.shares,
            [one.shares for one in repeats],
            segments=dict(before.segments) or None,
            sizes=before.sizes_of(before.shares),
            **options,
        )
    )
    runs = [before, after, *repeats]
    tables = [one.layer_shares for one in runs if one.layer_shares is not None]
    if len(tables) == len(runs) and tables[0].columns:
        sizes = before.sizes_of(tables[0])
        cells += compare_tables(tables[0], tables[1], tables[2:], sizes=sizes, **options)
    return cells


def _paired_cells(
    before: RunData, after: RunData, repeats: Sequence[RunData], statistics: Statistics
) -> tuple[list[Cell], bool, tuple[str, ...]]:
    """Return the cells, whether no map differs, and how maps were aligned."""
    cells = _table_cells(before, after, repeats, statistics)
    if any(one.store is None for one in (before, after)):
        return cells, _same_shares(before.shares, after.shares), ()
    if any(one.store is None for one in repeats):  # a floor holds no maps, so distances have no null
        repeats = ()
    found = map_measures([before, after, *repeats], needed_measures(statistics))
    options = _options(before, repeats, statistics)
    cells += map_cells(found, segments=before.segments, options=options)
    compared = [values for (name, _), values in found.paired[0].items() if name in DEFAULT_MEASURES]
    return cells, all(_all_zero(values) for values in compared), found.alignment


def needed_measures(statistics: Statistics) -> tuple[str, ...]:
    """Return the measures that a comparison computes: tables and identity need the usual ones."""
    return tuple(dict.fromkeys((*DEFAULT_MEASURES, *statistics.measures)))


def _same_shares(one: ShareTable, other: ShareTable) -> bool:
    """Return whether no share differs by more than rounding, where a floor holds no maps to compare."""
    return np.allclose(one.values, other.values, rtol=0.0, atol=ROUNDING, equal_nan=True)


def _all_zero(values: NDArray[np.float64]) -> bool:
    """Return whether no distance is larger than rounding makes it between equal maps."""
    return bool(np.all(np.abs(values) <= 10 * ROUNDING))


def _interaction_cells(
    before: RunData,
    after: RunData,
    repeats: Sequence[RunData],
    domain: tuple[Run, Run, Sequence[Run]],
    statistics: Statistics,
) -> list[Cell]:
    runs = [one.read() for one in (domain[0], domain[1], *domain[2])]
    before_domain, after_domain, *repeats_domain = in_common(*runs)
    check_comparable(before, before_domain, (), paired=False)
    cells = _table_cells(before_domain, after_domain, repeats_domain, statistics, "model_on_domain")
    cells += _unpaired_cells(before, before_domain, statistics)
    options = _options(before, repeats, statistics)
    del options["groups"]
    cells += compare_interaction(
        before.shares,
        after.shares,
        before_domain.shares,
        after_domain.shares,
        [(one.shares, two.shares) for one, two in zip(repeats, repeats_domain, strict=True)],
        groups=list(before.groups) or None,
        domain_groups=list(before_domain.groups) or None,
        **options,
    )
    return cells


def _unpaired_cells(before: RunData, after: RunData, statistics: Statistics) -> list[Cell]:
    """Return the cells of one checkpoint on two probe sets."""
    options = _options(before, (), statistics)
    del options["groups"]
    groups = (list(before.groups), list(after.groups)) if before.groups and after.groups else None
    sizes = after.sizes_of(before.shares)
    cells = compare_tables(
        before.shares, after.shares, groups=groups, paired=False, effect="data", sizes=sizes, **options
    )
    distributions = compare_distributions(
        before.shares, after.shares, groups=groups, resamples=statistics.resamples, seed=statistics.seed
    )
    return [*cells, *distributions]
