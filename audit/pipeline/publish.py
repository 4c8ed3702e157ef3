"""Store a comparison with its verdict and per-probe table, and write its HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from audit.config import DEFAULT_MEASURES, AuditConfig
from audit.faithfulness import Score
from audit.pipeline.agreement import agreement_notes
from audit.pipeline.compare import in_common
from audit.pipeline.examples import example_maps
from audit.pipeline.files import writing
from audit.pipeline.history import attempt_of, loosened_since
from audit.pipeline.map_measures import map_measures
from audit.pipeline.predictions import truncation_note
from audit.pipeline.runs import RunData, read_run
from audit.pipeline.trend import trend_notes
from audit.records import Comparison, Verdict
from audit.report import ReportContext, to_html
from audit.store import Store


def publish(
    store: Store, comparison: Comparison, verdict: Verdict | None, faithfulness: Sequence[Score] = ()
) -> str:
    """Store a comparison, its verdict where there is one, and its tables of single probes; return its id."""
    rows = map(vars, faithfulness)
    return store.write_comparison(comparison, verdict, probe_table(store, comparison), faithfulness=rows)


def write_html(
    store: Store,
    comparison: Comparison,
    verdict: Verdict | None,
    path: Path,
    *,
    config: AuditConfig | None = None,
) -> Path:
    """Write a self-contained HTML report with the probes that moved most; return its path."""
    count = 6 if config is None else config.report.examples
    examples = example_maps(store, comparison, config, count=count)
    text = to_html(comparison, verdict, examples, context=report_context(store, comparison, verdict, config))
    with writing(path):
        path.write_text(text, encoding="utf-8")
    return path


def report_context(
    store: Store, comparison: Comparison, verdict: Verdict | None, config: AuditConfig | None = None
) -> ReportContext:
    """Return the provenance that reports print: digests, versions, log head, attempts.

    With `config`, which names the probe file, also the agreement with annotated regions.
    """
    one, two = (
        store.spec(ref.run_id) if ref is not None and store.has_run(ref.run_id) else None
        for ref in (comparison.before, comparison.after)
    )
    known = two or one
    return ReportContext(
        before=None if one is None else one.checkpoint,
        after=None if two is None else two.checkpoint,
        inputs_digest=None if known is None else known.inputs_digest,
        annotations_digest=None if known is None else known.annotations_digest,
        versions={} if known is None else dict(known.versions),
        log_head=store.log_head(),
        attempt=None if verdict is None else attempt_of(store, comparison.id),
        loosened_since=None if verdict is None else loosened_since(store, comparison, verdict.policy),
        notes=truncation_note(comparison)
        + agreement_notes(store, comparison, config)
        + (() if verdict is None else (*verdict.notes, *trend_notes(store, comparison))),
    )


def probe_table(store: Store, comparison: Comparison) -> dict[str, list[Any]]:
    """Return one row per probe × stream × region: both shares, their shift and the map distances.

    Only runs that are in the store can be shown probe by probe; a floor's baseline gives an empty
    table, as do the two probe sets of an unpaired comparison.

    Returns
    -------
    dict of column name to list
        ``probe_id, stream, region, before, after, shift, js_distance, wasserstein``; None where a region
        is missing.
    """
    names = ("probe_id", "stream", "region", "before", "after", "shift", *DEFAULT_MEASURES)
    table: dict[str, list[Any]] = {name: [] for name in names}
    one, two = comparison.before, comparison.after
    if comparison.kind != "paired" or one is None or two is None or not store.has_run(one.run_id):
        return table
    before = read_run(store, one.run_id, layers=False)
    after = read_run(store, two.run_id, layers=False)
    repeats = _aligned_with(store, comparison)
    distances = {
        (measure, column.stream): values
        for (measure, column), values in map_measures([before, after, *repeats], DEFAULT_MEASURES)
        .paired[0]
        .items()
        if column.layer is None
    }
    before, after = in_common(before, after)
    for index, column in enumerate(before.shares.columns):
        old, new = before.shares.values[:, index], after.shares.values[:, index]
        table["probe_id"] += before.shares.probe_ids
        table["stream"] += [column.stream] * len(old)
        table["region"] += [column.region] * len(old)
        table["before"] += _nullable(old)
        table["after"] += _nullable(new)
        table["shift"] += _nullable(new - old)
        for measure in DEFAULT_MEASURES:
            table[measure] += _nullable(distances[measure, column.stream])
    return table


def _aligned_with(store: Store, comparison: Comparison) -> list[RunData]:
    """Return the replicates where common positions were made of theirs too."""
    if not comparison.alignment or not all(store.has_run(ref.run_id) for ref in comparison.replicates):
        return []
    return [read_run(store, ref.run_id, kind=ref.kind, layers=False) for ref in comparison.replicates]


def _nullable(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
