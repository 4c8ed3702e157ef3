"""A verdict as GitHub-flavoured Markdown, short enough for a job summary."""

from __future__ import annotations

import re
from collections.abc import Sequence

from audit.records import Comparison, Verdict
from audit.report import facts, rows
from audit.report.context import ReportContext
from audit.report.faithful import faithful_sentences
from audit.report.measured import false_alarm_lines
from audit.report.wording import clean, clip

ROWS_SHOWN = 100
ICONS = {"PASS": "✅", "WARN": "⚠️", "FAIL": "❌", "INCONCLUSIVE": "❔", "ERROR": "🛑", "COMPARED": "ℹ️"}
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"}


def escape(text: str) -> str:
    r"""Return `text` so that GitHub prints it literally, also inside a table.

    Examples
    --------
    >>> escape("a|b <i> *c*")
    'a\\|b &lt;i&gt; \\*c\\*'
    """
    text = re.sub("[&<>@]", lambda found: _ENTITIES[found.group()], clean(text))
    text = re.sub(r"([\\`*_{}\[\]#|~])", r"\\\1", text)
    return text.replace("://", "&#58;//").replace("www.", "www&#46;")


def _table(headers: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *([escape(cell) or " " for cell in line] for line in body)]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def _rules(verdict: Verdict | None) -> list[str]:
    found = rows.worst_first(rows.rules_of(verdict))
    if not found:
        return ["No rule was evaluated.", ""]
    headers = [
        "Outcome",
        "Region",
        "Rule",
        "Before → after",
        "Shift",
        "Limit",
        "Noise floor",
        "Detectable",
        "Probes",
    ]
    shown = [rows.rule_row(rule) for rule in found[:ROWS_SHOWN]]
    body = [
        [
            f"{ICONS[r.outcome]} {r.outcome}",
            r.where,
            r.condition,
            r.levels,
            " ".join(filter(None, [r.value, r.excess, r.interval])),
            r.limits,
            r.noise,
            r.detectable,
            r.probes,
        ]
        for r in shown
    ]
    lines = _table(headers, body)
    lines += [f"- **{r.outcome}** {escape(' '.join([r.where + ':', r.sentence, *r.notes]))}" for r in shown]
    return [*lines, *_left_out(len(found), "rules"), ""]


def _left_out(total: int, noun: str) -> list[str]:
    if total <= ROWS_SHOWN:
        return []
    return ["", f"{total - ROWS_SHOWN:,} more {noun} are in the JSON and the HTML report."]


def _others(comparison: Comparison | None, verdict: Verdict | None) -> list[str]:
    cells = rows.other_shifts(comparison, verdict)
    if not cells:
        return []
    shown = [rows.cell_row(cell) for cell in cells[:ROWS_SHOWN]]
    body = [
        [r.where, r.levels, f"{r.value} {r.interval}".strip(), r.floor, r.probes, r.reason] for r in shown
    ]
    headers = ["Region", "Before → after", "Shift", "Noise floor", "Probes", "Remark"]
    return [
        f"<details><summary>Regions that no rule judges ({len(cells)})</summary>",
        "",
        *_table(headers, body),
        *_left_out(len(cells), "regions"),
        "</details>",
        "",
    ]


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"### {title}", "", *(f"- {escape(line)}" for line in lines), ""] if lines else []


def to_markdown(
    comparison: Comparison | None, verdict: Verdict | None, *, context: ReportContext | None = None
) -> str:
    """Return the verdict as GitHub-flavoured Markdown.

    Parameters
    ----------
    comparison : Comparison or None
    verdict : Verdict or None
        None for a comparison that no policy judged.
    context : ReportContext or None

    Returns
    -------
    str
        Under 1 MiB, the limit of a job summary: long tables are cut, and say so.
    """
    title = f" · {escape(context.title)}" if context is not None and context.title else ""
    sentence = clip(rows.headline(comparison, verdict), rows.SENTENCE_WIDTH)
    lines = [
        f"## {ICONS[rows.status(verdict)]} {rows.status(verdict)}{title}",
        "",
        f"**{escape(sentence)}**",
        "",
    ]
    lines += [escape(facts.compared(comparison)), ""]
    for caveat in facts.caveats(comparison, verdict):
        lines += [f"> {escape(caveat)}", ""]
    lines += _rules(verdict) + _others(comparison, verdict)
    confirmed = rows.confirmations(comparison, verdict)[:ROWS_SHOWN]
    lines += _list("Confirmation by occlusion", [rows.confirmation_sentence(found) for found in confirmed])
    lines += _list("Faithfulness of the maps", faithful_sentences(comparison))
    lines += _list("Predictions", facts.predictions(comparison))
    settle = [f"{place}: {needed}" for place, needed in rows.to_settle(verdict)[:ROWS_SHOWN]]
    lines += _list("What would settle it", settle)
    lines += _list("Record", facts.footer(context))
    if context is not None and context.report:
        lines += [f"Report: {escape(context.report)}", ""]
    reading = [facts.units(comparison, verdict), *false_alarm_lines(comparison, verdict)]
    lines += [f"<sub>{escape(' '.join(reading))}</sub>"]
    return "\n".join(lines) + "\n"
