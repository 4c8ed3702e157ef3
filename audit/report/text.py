"""A verdict, a table of verdicts and a list, for the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from audit.records import Comparison, Outcome, RuleVerdict, Verdict
from audit.report import facts, rows
from audit.report.context import ReportContext
from audit.report.wording import clean, clip, noise, quantity, span

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {"PASS": "green", "WARN": "yellow", "FAIL": "red", "INCONCLUSIVE": "yellow", "ERROR": "magenta"}
OTHERS_SHOWN = 40


def _console(width: int, color: bool) -> Console:
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def _text(console: Console) -> str:
    buffer = console.file
    content = buffer.getvalue() if isinstance(buffer, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in content.split("\n"))


def _table(headers: Sequence[str], body: Sequence[Sequence[str]], *, outcome: int | None = None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold", expand=False)
    for index, header in enumerate(headers):
        table.add_column(Text(header), overflow="fold", no_wrap=index == outcome, vertical="top")
    for line in body:
        cells = [
            Text(cell, style=STYLES.get(cell, "") if i == outcome else "") for i, cell in enumerate(line)
        ]
        table.add_row(*cells)
    return table


def _rule_cells(row: rows.RuleRow) -> list[str]:
    value = f"{row.value}\n{row.interval}" if row.interval else row.value
    what = f"{row.where}\n{row.condition}"
    return [row.outcome, what, row.levels, value, row.limit, row.floor, row.detectable, row.probes]


def _print_rules(console: Console, verdict: Verdict) -> None:
    headers = ["Outcome", "Rule", "Before → after", "Shift", "Limit", "Noise floor", "Detectable", "Probes"]
    found = [rows.rule_row(rule) for rule in rows.worst_first(verdict.rules)]
    if not found:
        console.print("No rule was evaluated.\n")
        return
    console.print(_table(headers, [_rule_cells(row) for row in found], outcome=0))
    for row in found:
        console.print(f"• {row.outcome} {row.where}: {' '.join([row.sentence, *row.notes])}")
    console.print()


def _print_others(console: Console, comparison: Comparison | None, verdict: Verdict) -> None:
    cells = rows.other_shifts(comparison, verdict)
    if not cells:
        return
    console.print("Regions that no rule judges")
    headers = ["Region", "Before → after", "Shift", "Interval", "Noise floor", "Probes"]
    shown = [rows.cell_row(cell) for cell in cells[:OTHERS_SHOWN]]
    body = [[r.where, r.levels, r.value, r.interval or r.reason, r.floor, r.probes] for r in shown]
    console.print(_table(headers, body))
    if len(cells) > OTHERS_SHOWN:
        console.print(f"… and {len(cells) - OTHERS_SHOWN:,} smaller shifts, all in the JSON.")
    console.print()


def _print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(title)
        for line in lines:
            console.print(f"  {line}")
        console.print()


def to_text(
    comparison: Comparison | None,
    verdict: Verdict,
    *,
    width: int = 100,
    color: bool = False,
    context: ReportContext | None = None,
) -> str:
    """Return the verdict for a terminal: one sentence, the table of rules, then what else is known.

    Parameters
    ----------
    comparison : Comparison or None
        None when an error kept the comparison from being made.
    verdict : Verdict
    width : int
        Columns of the terminal.
    color : bool
        Whether to colour the outcomes with ANSI sequences.
    context : ReportContext or None

    Returns
    -------
    str
        Ends with a newline. Untrusted text can neither move the cursor nor reorder a line.
    """
    from rich.text import Text

    console = _console(width, color)
    sentence = clip(rows.headline(verdict), rows.SENTENCE_WIDTH)
    console.print(Text.assemble((verdict.status, f"bold {STYLES[verdict.status]}"), f"  {sentence}"))
    console.print(facts.compared(comparison))
    for line in facts.caveats(comparison, verdict):
        console.print(line)
    console.print()
    _print_rules(console, verdict)
    _print_others(console, comparison, verdict)
    confirmed = [rows.confirmation_sentence(c) for c in rows.confirmations(comparison, verdict)]
    _print_list(console, "Confirmation by occlusion", confirmed)
    _print_list(console, "Predictions", facts.predictions(comparison))
    settle = [f"{place}: {needed}" for place, needed in rows.to_settle(verdict)]
    _print_list(console, "What would settle the INCONCLUSIVE rules", settle)
    _print_list(console, "How to read it", [facts.units(comparison, verdict)])
    _print_list(console, "Record", facts.footer(context))
    if context is not None and context.report:
        console.print(f"Report: {clean(context.report)}", soft_wrap=True)
    return _text(console).rstrip("\n") + "\n"


@dataclass(frozen=True)
class VerdictRow:
    """One line of :func:`compare_table`; numbers are fractions, as in the records."""

    name: str
    outcome: Outcome
    region: str = ""
    measure: str = "shift"
    value: float | None = None
    interval: tuple[float, float] | None = None
    floor: tuple[float, float] | None = None
    n_replicates: int = 0
    minimum_detectable_shift: float | None = None
    report: str | None = None


def verdict_row(name: str, verdict: Verdict, *, report: str | None = None) -> VerdictRow:
    """Return the row of a verdict: the numbers of its worst rule, the largest shift among equals."""
    if not verdict.rules:
        return VerdictRow(name, verdict.outcome, report=report)

    def size(found: RuleVerdict) -> float:
        return -abs(found.value) if found.value is not None else 1.0

    worst = rows.worst_first(sorted(verdict.rules, key=size))[0]
    return VerdictRow(
        name=name,
        outcome=verdict.outcome,
        region=rows.where_rule(worst),
        measure=worst.rule.measure,
        value=worst.value,
        interval=worst.interval,
        floor=worst.floor,
        n_replicates=worst.n_replicates,
        minimum_detectable_shift=worst.minimum_detectable_shift,
        report=report,
    )


def compare_table(rows: Sequence[VerdictRow], *, width: int = 100, color: bool = False) -> str:
    """Return several verdicts as one table, with the paths of their reports beneath.

    The paths stand on lines of their own, unwrapped, so that they can be copied.

    Examples
    --------
    >>> print(compare_table([VerdictRow("vision", Outcome.FAIL, "corner", value=0.0512)]))
    Audit   Verdict  Region  Shift     Interval  Noise floor  Detectable
    ────────────────────────────────────────────────────────────────────
    vision  FAIL     corner  +5.12 pp            –            –
    <BLANKLINE>
    """
    headers = ["Audit", "Verdict", "Region", "Shift", "Interval", "Noise floor", "Detectable"]
    body = [
        [
            clip(row.name, 60),
            row.outcome.value,
            clip(row.region, 60),
            quantity(row.measure, row.value),
            span(row.measure, row.interval),
            noise(row.measure, row.floor, row.n_replicates),
            quantity(row.measure, row.minimum_detectable_shift, signed=False),
        ]
        for row in rows
    ]
    console = _console(width, color)
    console.print(_table(headers, body, outcome=1))
    reports = [row for row in rows if row.report]
    if reports:
        console.print("Reports")
    for row in reports:
        console.print(f"  {clip(row.name, 60)}: {clean(row.report or '')}", soft_wrap=True)
    return _text(console).strip("\n") + "\n"


def list_table(
    headers: Sequence[str],
    body: Sequence[Sequence[object]],
    *,
    width: int = 100,
    color: bool = False,
    empty: str = "Nothing is stored yet.",
) -> str:
    """Return rows of a listing as a table; None prints as "–".

    Examples
    --------
    >>> print(list_table(["Run", "Probes"], [["run-1", 400], ["run-2", None]]))
    Run    Probes
    ─────────────
    run-1  400
    run-2  –
    <BLANKLINE>
    >>> print(list_table(["Run"], []))
    Nothing is stored yet.
    <BLANKLINE>
    """
    if not body:
        return f"{empty}\n"
    console = _console(width, color)
    cells = [["–" if value is None else clip(str(value), 200) for value in line] for line in body]
    outcome = next((i for i, h in enumerate(headers) if h.lower() in {"verdict", "outcome"}), None)
    console.print(_table(headers, cells, outcome=outcome))
    return _text(console).strip("\n") + "\n"
