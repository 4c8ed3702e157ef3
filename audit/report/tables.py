"""Tables of several verdicts, and the listing of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from audit.records import Verdict
from audit.report import rows
from audit.report.facts import short
from audit.report.terminal import console, table, written
from audit.report.wording import MISSING, clean, clip, noise, quantity, span

NAME_WIDTH = 60


@dataclass(frozen=True)
class VerdictRow:
    """One line of :func:`compare_table`; numbers are fractions, as in the records."""

    name: str
    outcome: str
    region: str = ""
    measure: str = "shift"
    value: float | None = None
    interval: tuple[float, float] | None = None
    floor: tuple[float, float] | None = None
    n_replicates: int = 0
    minimum_detectable_shift: float | None = None
    report: str | None = None


def verdict_row(name: str, verdict: Verdict, *, report: str | None = None) -> VerdictRow:
    """Return the row of a verdict: the numbers of its worst rule, the policy's first among equals.

    Examples
    --------
    >>> from audit.records import Outcome, Policy
    >>> verdict_row("vision", Verdict(Outcome.PASS, (), "", 0, Policy(()))).outcome
    'PASS'
    """
    if not verdict.rules:
        return VerdictRow(name, verdict.status, report=report)
    worst = rows.worst_first(verdict.rules)[0]
    return VerdictRow(
        name=name,
        outcome=verdict.status,
        region=rows.where_rule(worst),
        measure=worst.rule.measure,
        value=worst.value,
        interval=worst.interval,
        floor=worst.floor,
        n_replicates=worst.n_replicates,
        minimum_detectable_shift=worst.minimum_detectable_shift,
        report=report,
    )


def _as_row(row: VerdictRow | Mapping[str, Any]) -> VerdictRow:
    if isinstance(row, VerdictRow):
        return row
    return verdict_row(str(row["name"]), row["verdict"], report=row.get("report"))


def compare_table(
    rows: Sequence[VerdictRow | Mapping[str, Any]], *, width: int = 100, color: bool = False
) -> str:
    """Return several verdicts as one table, with the paths of their reports beneath.

    Parameters
    ----------
    rows : sequence of VerdictRow, or of mappings with ``name``, ``verdict`` and perhaps ``report``
    width : int
        Columns of the terminal.
    color : bool
        Whether to colour the outcomes.

    Returns
    -------
    str
        The paths stand on lines of their own, unwrapped, so that they can be copied.

    Examples
    --------
    >>> print(compare_table([VerdictRow("vision", "FAIL", "corner", value=0.0512)]), end="")
    Audit   Verdict  Region  Shift  Interval  Noise floor  Detectable
    ─────────────────────────────────────────────────────────────────
    vision  FAIL     corner  +.051            –            –
    """
    headers = ["Audit", "Verdict", "Region", "Shift", "Interval", "Noise floor", "Detectable"]
    found = [_as_row(row) for row in rows]
    screen = console(width, color)
    screen.print(table(headers, [_line(row) for row in found], outcome=1))
    if any(row.report for row in found):
        screen.print("\nReports")
    for row in found:
        if row.report:
            screen.print(f"  {clip(row.name, NAME_WIDTH)}: {clean(row.report)}", soft_wrap=True)
    return written(screen).strip("\n") + "\n"


def _line(row: VerdictRow) -> list[str]:
    return [
        clip(row.name, NAME_WIDTH),
        str(row.outcome),
        clip(row.region, NAME_WIDTH),
        quantity(row.measure, row.value, like=row.interval),
        span(row.measure, row.interval),
        noise(row.measure, row.floor, row.n_replicates),
        quantity(row.measure, row.minimum_detectable_shift, signed=False),
    ]


def _look(record: Mapping[str, Any], *keys: str) -> str:
    """Return a nested value of a manifest as text; "–" where it is missing."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return MISSING if value is None else clip(str(value), NAME_WIDTH)


def list_table(
    runs: Sequence[Mapping[str, Any]],
    comparisons: Sequence[Mapping[str, Any]] = (),
    *,
    width: int = 100,
    color: bool = False,
) -> str:
    """Return the runs and comparisons of a store as two tables.

    Parameters
    ----------
    runs, comparisons : sequence of manifests
        As :class:`audit.Store` lists them; `accepted` of a comparison is its outcome with approvals,
        where they changed it.
    width : int
        Columns of the terminal.
    color : bool
        Whether to colour the outcomes.

    Examples
    --------
    >>> print(list_table([]), end="")
    Nothing is stored yet.
    >>> print(list_table([{"run_id": "run-1", "n_probes": 400}]), end="")
    Run    Checkpoint  Method  Probes  Made
    ───────────────────────────────────────
    run-1  –           –       400     –
    """
    if not runs and not comparisons:
        return "Nothing is stored yet.\n"
    screen = console(width, color)
    if runs:
        screen.print(table(["Run", "Checkpoint", "Method", "Probes", "Made"], [_run(run) for run in runs]))
    if comparisons:
        screen.print()
        headers = ["Comparison", "Verdict", "Before", "After", "Probes", "Made"]
        screen.print(table(headers, [_comparison(one) for one in comparisons], outcome=1))
    return written(screen).strip("\n") + "\n"


def _run(run: Mapping[str, Any]) -> list[str]:
    made = _look(run, "provenance", "time")
    checkpoint, method = short(_look(run, "spec", "checkpoint", "ref")), _look(run, "spec", "method", "name")
    return [_look(run, "run_id"), checkpoint, method, _look(run, "n_probes"), made[:19]]


def _comparison(one: Mapping[str, Any]) -> list[str]:
    outcome = rows.COMPARED if one.get("outcome") is None else _look(one, "outcome")
    if one.get("accepted") is not None:
        outcome = f"{_look(one, 'accepted')} (approved)"
    before, after = (short(_look(one, role, "checkpoint")) for role in ("before", "after"))
    made = _look(one, "provenance", "time")
    return [_look(one, "comparison_id"), outcome, before, after, _look(one, "n_probes"), made[:19]]
