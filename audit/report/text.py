"""A verdict for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from audit.records import Comparison, Verdict
from audit.report import facts, rows
from audit.report.context import ReportContext
from audit.report.faithful import faithful_sentences
from audit.report.measured import false_alarm_lines
from audit.report.terminal import STYLES, bullets, console, table, written
from audit.report.wording import MISSING, clean, clip

if TYPE_CHECKING:
    from rich.console import Console

OTHERS_SHOWN = 40
ROOM_FOR_NUMBERS = 96
"""Columns of a terminal from which on numbers are not wrapped."""


def _rule_cells(row: rows.RuleRow) -> list[str]:
    what = f"{row.where}\n{row.condition}"
    value = "\n".join(filter(None, [row.value, row.excess, row.interval]))
    limit = "\n".join(filter(None, [row.limit, row.warn]))
    detects = f"detects {row.detectable}" if row.detectable != MISSING else ""
    floor = "\n".join(filter(None, [row.floor, row.replicates, detects]))
    return [row.outcome, what, row.levels, value, limit, floor, row.probes]


def _print_rules(screen: Console, verdict: Verdict | None) -> None:
    headers = ["Outcome", "Rule", "Before → after", "Shift", "Limit", "Noise floor", "Probes"]
    found = [rows.rule_row(rule) for rule in rows.worst_first(rows.rules_of(verdict))]
    if not found:
        screen.print("No rule was evaluated.\n")
        return
    firm = range(2, 6) if screen.width >= ROOM_FOR_NUMBERS else ()
    screen.print(table(headers, [_rule_cells(row) for row in found], outcome=0, firm=firm))
    sentences = [f"{row.outcome} {row.where}: {' '.join([row.sentence, *row.notes])}" for row in found]
    screen.print()
    screen.print(bullets(sentences, "•"))
    screen.print()


def _print_others(screen: Console, comparison: Comparison | None, verdict: Verdict | None) -> None:
    cells = rows.other_shifts(comparison, verdict)
    if not cells:
        return
    screen.print("Regions that no rule judges")
    headers = ["Region", "Before → after", "Shift", "Interval", "Noise floor", "Probes"]
    shown = [rows.cell_row(cell) for cell in cells[:OTHERS_SHOWN]]
    body = [[r.where, r.levels, r.value, r.interval or r.reason, r.floor, r.probes] for r in shown]
    screen.print(table(headers, body))
    if len(cells) > OTHERS_SHOWN:
        screen.print(f"… and {len(cells) - OTHERS_SHOWN:,} smaller shifts, all in the JSON.")
    screen.print()


def _print_list(screen: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        screen.print(title)
        screen.print(bullets(lines))
        screen.print()


def _print_headline(screen: Console, comparison: Comparison | None, verdict: Verdict | None) -> None:
    from rich.text import Text

    status = rows.status(verdict)
    sentence = clip(rows.headline(comparison, verdict), rows.SENTENCE_WIDTH)
    screen.print(Text.assemble((status, f"bold {STYLES[status]}"), f"  {sentence}"))
    screen.print(facts.compared(comparison))
    for line in facts.caveats(comparison, verdict):
        screen.print(line)
    screen.print()


def to_text(
    comparison: Comparison | None,
    verdict: Verdict | None,
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
    verdict : Verdict or None
        None for a comparison that no policy judged.
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
    screen = console(width, color)
    _print_headline(screen, comparison, verdict)
    _print_rules(screen, verdict)
    _print_others(screen, comparison, verdict)
    confirmed = [rows.confirmation_sentence(c) for c in rows.confirmations(comparison, verdict)]
    _print_list(screen, "Confirmation by occlusion", confirmed)
    _print_list(screen, "Faithfulness of the maps", faithful_sentences(comparison))
    _print_list(screen, "Predictions", facts.predictions(comparison))
    settle = [f"{place}: {needed}" for place, needed in rows.to_settle(verdict)]
    _print_list(screen, "What would settle the INCONCLUSIVE rules", settle)
    measured = false_alarm_lines(comparison, verdict)
    _print_list(screen, "How to read it", [facts.units(comparison, verdict), *measured])
    _print_list(screen, "Record", facts.footer(context))
    if context is not None and context.report:
        screen.print(f"Report: {clean(context.report)}", soft_wrap=True)
    return written(screen).strip("\n") + "\n"
