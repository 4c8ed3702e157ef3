"""A verdict as one self-contained HTML file: no scripts, no external resources, under 1 MB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from audit.records import Cell, CheckpointInfo, Comparison, RunRef, Verdict
from audit.report import facts, rows
from audit.report.context import ReportContext
from audit.report.examples import Example
from audit.report.faithful import faithful_rows
from audit.report.forest import forests
from audit.report.heat import heat_map
from audit.report.maps import drawing
from audit.report.measured import false_alarm_lines
from audit.report.wording import clean, clip, count, quantity, span

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

SIZE_LIMIT = 1_000_000
"""Bytes that a report never reaches."""
_EXAMPLE_RESERVE = 150_000
_CAPS = ((400, 1200), (200, 500), (80, 150), (20, 40))
ENTRIES_SHOWN = 60


@dataclass(frozen=True)
class _Side:
    """One checkpoint as the page shows it."""

    role: str
    name: str
    facts: tuple[tuple[str, str], ...]


def _finalize(value: Any) -> Any:
    """Make every expression of the templates safe to read; escaping comes after."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return clean(value)
    return value


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("audit.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _side(role: str, ref: RunRef | None, info: CheckpointInfo | None) -> _Side:
    found = []
    if info is not None:
        found += [("Revision", info.revision), ("Adapter", info.adapter), ("Architecture", info.architecture)]
    identity = ref or info
    if ref is not None:
        found.append(("Run", ref.run_id))
    if identity is not None:
        found += [("Checkpoint", identity.digest[:16]), ("Weights", identity.weights_digest[:16])]
    name = ref.checkpoint if ref is not None else info.ref if info is not None else "not named"
    shown = tuple((label, clip(value, 120)) for label, value in found if value)
    return _Side(role, clip(name, 120), shown)


def _setup(
    comparison: Comparison | None, verdict: Verdict | None, context: ReportContext
) -> list[tuple[str, str]]:
    """Return what was compared and how, as (term, description)."""
    if comparison is None:
        return [("Comparison", "none was made")]
    groups = f" in {count(comparison.n_clusters, 'group')}" if comparison.n_clusters is not None else ""
    found = [
        ("Probes", f"{comparison.n_probes:,}{groups}, {comparison.kind}"),
        ("Probe set", context.probes),
        ("Second probe set", context.domain),
        ("Method", comparison.method),
        ("Replicates", facts.replicates(comparison)),
        ("Intervals", f"{facts.level(comparison, verdict)}, over probes" + (" grouped" if groups else "")),
    ]
    found += [
        (key.replace("_", " "), facts.plain(value))
        for key, value in comparison.settings.items()
        if key != "occlusion" or comparison.confirmations  # it was asked for; a note says why there is none
    ]
    return [(clip(term, 40), clip(value, 300)) for term, value in found[:ENTRIES_SHOWN] if value]


def _identifier(comparison: Comparison | None, verdict: Verdict | None) -> str | None:
    named = verdict.comparison_id if verdict is not None else None
    return named or (comparison.id if comparison is not None else None)


def _provenance(
    comparison: Comparison | None, verdict: Verdict | None, context: ReportContext
) -> list[tuple[str, str]]:
    found = [
        ("Comparison", _identifier(comparison, verdict)),
        ("Policy digest", verdict.policy.digest if verdict is not None else None),
        ("Inputs digest", context.inputs_digest),
        ("Annotations digest", context.annotations_digest),
        ("Log head", context.log_head),
        ("Attempt", str(context.attempt) if context.attempt else None),
        ("Policy loosened since", context.loosened_since),
        ("Exit code", str(int(verdict.exit_code)) if verdict is not None else None),
    ]
    found += _runs(comparison) if comparison is not None else []
    found += [
        (f"{name} version", version) for name, version in list(context.versions.items())[:ENTRIES_SHOWN]
    ]
    return [(clip(term, 60), clip(value, 300)) for term, value in found if value]


def _runs(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return every run with its full digests."""
    roles = [("Before", comparison.before), ("After", comparison.after)]
    roles += [(f"Replicate {i}", ref) for i, ref in enumerate(comparison.replicates[:ENTRIES_SHOWN], start=1)]
    return [
        (
            f"{role} ({ref.kind})" if ref.kind else role,
            f"{ref.run_id} · {ref.digest} · weights {ref.weights_digest}",
        )
        for role, ref in roles
        if ref is not None
    ]


def _cells(comparison: Comparison | None, verdict: Verdict | None, cap: int) -> dict[str, Any]:
    """Return the rows of the table of all values: the whole stack first, then layers and segments."""
    cells = comparison.cells if comparison is not None else ()
    whole = [c for c in cells if c.layer is None and c.segment is None]
    parts = [c for c in cells if c.layer is not None or c.segment is not None]
    judged = rows.judged_by(verdict)

    def row(cell: Cell) -> rows.CellRow:
        found = judged.get(rows.cell_key(cell))
        return rows.cell_row(cell, rows.shown_outcome(found[0]) if found else "")

    shown_parts = parts[: max(0, cap - len(whole))]
    return {
        "whole": [row(cell) for cell in whole[:cap]],
        "parts": [row(cell) for cell in shown_parts],
        "left_out": len(cells) - min(cap, len(whole)) - len(shown_parts),
    }


def _confirmations(comparison: Comparison | None, verdict: Verdict | None) -> list[dict[str, Any]]:
    return [
        {
            "region": clip(found.region, rows.NAME_WIDTH),
            "occlusion": clip(found.occlusion, rows.NAME_WIDTH),
            "before": quantity("logit", found.before, signed=False),
            "after": quantity("logit", found.after, signed=False),
            "difference": quantity("logit", found.difference, like=found.interval),
            "interval": span("logit", found.interval),
            "confirmed": found.confirmed,
            "probes": f"{found.n_probes:,}",
        }
        for found in rows.confirmations(comparison, verdict)[:ENTRIES_SHOWN]
    ]


def _changes(comparison: Comparison | None) -> list[tuple[str, ...]]:
    keys = ("probe_id", "before", "after", "label")
    listed = facts.prediction_changes(comparison)[:ENTRIES_SHOWN]
    return [tuple(clip(facts.plain(change.get(key)), 60) for key in keys) for change in listed]


def _page(
    comparison: Comparison | None,
    verdict: Verdict | None,
    context: ReportContext,
    rule_cap: int,
    cell_cap: int,
) -> dict[str, Any]:
    """Return everything that the page shows, the examples aside."""
    outcome = rows.status(verdict)
    head, detail = rows.split_headline(rows.headline(comparison, verdict))
    plots = forests(comparison, verdict) if comparison is not None else []
    ordered = rows.worst_first(rows.rules_of(verdict))
    rule_rows = [rows.rule_row(found) for found in ordered[:rule_cap]]
    return {
        "outcome": outcome,
        "accent": rule_rows[0].outcome if rule_rows and outcome == "PASS" else outcome,
        "headline": clip(head, 240),
        "detail": clip(detail, rows.SENTENCE_WIDTH),
        "title": clip(context.title or _identifier(comparison, verdict) or "comparison", 80),
        "created": clip(context.created or "", 60),
        "compared": facts.compared(comparison),
        "caveats": facts.caveats(comparison, verdict),
        "rules": rule_rows,
        "rules_left_out": len(ordered) - len(rule_rows),
        "settle": rows.to_settle(verdict)[:ENTRIES_SHOWN],
        "measured": false_alarm_lines(comparison, verdict),
        "sides": _sides(comparison, context),
        "setup": _setup(comparison, verdict, context),
        "forests": plots,
        "legend": {bound.kind for plot in plots for row in plot.rows for bound in row.bounds},
        "noise": any(row.replicates for plot in plots for row in plot.rows),
        "heat": heat_map(comparison) if comparison is not None else None,
        "cells": _cells(comparison, verdict, cell_cap),
        "confirmations": _confirmations(comparison, verdict),
        "faithful": faithful_rows(comparison)[:ENTRIES_SHOWN],
        "predictions": facts.predictions(comparison),
        "changes": _changes(comparison),
        "provenance": _provenance(comparison, verdict, context),
        "log_lines": facts.footer(context),
        "units": facts.units(comparison, verdict),
        "method": clip(comparison.method if comparison is not None else "rollout", 60),
    }


def _sides(comparison: Comparison | None, context: ReportContext) -> list[_Side]:
    before, after = (comparison.before, comparison.after) if comparison is not None else (None, None)
    return [_side("Before", before, context.before), _side("After", after, context.after)]


def _examples(examples: Sequence[Example], room: int) -> tuple[list[Markup], int]:
    """Return the examples that fit into `room` bytes, in order, and how many were left out."""
    from markupsafe import Markup

    template = _environment().get_template("example.html.j2")
    kept: list[Markup] = []
    for index, example in enumerate(examples):
        block = Markup(template.render(example=drawing(example), index=index))
        room -= len(block.encode())
        if room < 0:
            return kept, len(examples) - index
        kept.append(block)
    return kept, 0


def to_html(
    comparison: Comparison | None,
    verdict: Verdict | None,
    examples: Sequence[Example] = (),
    *,
    context: ReportContext | None = None,
) -> str:
    """Return the verdict as one HTML file that needs nothing else.

    Parameters
    ----------
    comparison : Comparison or None
        None when an error kept the comparison from being made.
    verdict : Verdict or None
        None for a comparison that no policy judged.
    examples : sequence of Example
        Most telling first; as many are drawn as fit.
    context : ReportContext or None

    Returns
    -------
    str
        Under :data:`SIZE_LIMIT` bytes of UTF-8. Long tables and examples are cut to keep it so, and
        the page says what was left out. Light and dark by the reader's preference; no script.
    """
    template, context = _environment().get_template("report.html.j2"), context or ReportContext()
    for rule_cap, cell_cap in _CAPS:
        page = _page(comparison, verdict, context, rule_cap, cell_cap)
        size = len(template.render(page, examples=[], dropped=0).encode())
        if size < SIZE_LIMIT - _EXAMPLE_RESERVE:
            break
    blocks, dropped = _examples(examples, SIZE_LIMIT - size - 2_000)
    return template.render(page, examples=blocks, dropped=dropped)
