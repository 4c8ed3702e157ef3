"""The measured rows as SHIFT.md, and the rates that the product prints as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from audit.report.measured import FalseAlarms
from tests.benchmarks.shift.bases import REPLICATES
from tests.benchmarks.shift.maps import METHODS
from tests.benchmarks.shift.rates import LEVEL, Rate
from tests.benchmarks.shift.run import FEW, FULL
from tests.benchmarks.shift.summary import Summary, missed_goals

PRINTED = {"seed": "seed", "release": "release, released candidate", "refresh": "release, released candidate"}
"""Kinds of floor in the product, and which measured rate speaks for them."""
ENOUGH_BASES = 20
BOTH = "both"
"""Family of the rows over all families."""


@dataclass(frozen=True)
class Results:
    """Everything that the page tells.

    Attributes
    ----------
    heading : str
        Date, machine and versions.
    scored : sequence of Summary
        One of each family and method.
    both : sequence of Summary
        The same over the bases of all families.
    frozen : sequence of Summary
        Over the bases of all families on which the best method was chosen and limits were frozen.
    held : mapping of family to number of such bases
    chosen, default : str
        The best method of the frozen bases, and the product's.
    """

    heading: str
    scored: Sequence[Summary]
    both: Sequence[Summary]
    frozen: Sequence[Summary]
    held: Mapping[str, int]
    chosen: str
    default: str


def write_rates(both: Sequence[Summary], path: Path, measured: str) -> None:
    """Write the rates of methods with default parameters that enough bases stand behind, if there are any."""
    names = {one.label: one.name for one in METHODS if one.default}
    rates = [
        _printed(names[row.method], floor, row.false_alarms[kind])
        for row in both
        if row.method in names
        for floor, kind in PRINTED.items()
        if kind in row.false_alarms and row.false_alarms[kind].bases >= ENOUGH_BASES
    ]
    if not rates:
        return
    found = {"measured": measured, "rates": [asdict(one) for one in rates]}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _printed(method: str, floor: str, rate: Rate) -> FalseAlarms:
    value, low, high = (round(one, 4) for one in (rate.value, rate.low, rate.high))
    return FalseAlarms(method, floor, value, low, high, LEVEL, REPLICATES, rate.bases)


def to_page(results: Results) -> str:
    """Return the page."""
    lines = ["# Planted shifts: what a verdict is worth", "", *_introduction(results)]
    shown = _shown(results)
    for title, note, headers, cells in _TABLES:
        rows = [row for row in shown if cells(row)]
        if rows:
            body = [_named(row, cells(row)) for row in rows]
            lines += [f"## {title}", "", note, "", *_table(["method", "family", "bases", *headers], body)]
    lines += ["## Confounds", "", _CONFOUNDS, "", *_confounds(results.scored)]
    return "\n".join([*lines, *_goals(results)]) + "\n"


def _shown(results: Results) -> list[Summary]:
    """Return the rows over all families, then of single ones; a rare method has one row."""
    joined = {row.method for row in results.both}
    rare = {one.label for one in METHODS if one.rare}
    return [*results.both, *(row for row in results.scored if row.method not in rare & joined)]


def _introduction(results: Results) -> list[str]:
    scored = {row.family: row.bases for row in results.scored if row.method == results.default}
    return [
        "Written by `make benchmark-shift` (tests/benchmarks/shift). All trainings are real and small; the "
        "product's own `audit.compute_maps` makes the maps. Rates stand with 95 % bootstrap intervals over "
        "bases.",
        "",
        results.heading,
        "",
        f"Scored bases: {_counts(scored)}; bases on which limits were frozen and the best method was chosen: "
        f"{_counts(results.held)}. Each base has 13 harmless fine-tunings (same recipe, other seeds), one "
        "that learns a shortcut, and five checkpoints on the way there. Rows with fewer bases say so.",
        "",
    ]


def _counts(bases: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {family}" for family, count in bases.items()) or "none"


def _goals(results: Results) -> list[str]:
    lines = ["## Goals", ""]
    lines += [
        "A method meets the goals when its false-alarm interval contains .05 and is narrower than .05, its "
        "power at a causal share of .1 is at least .9, its correlation at least .9 and its localisation at "
        "least .95.",
        "",
    ]
    rare = {one.label for one in METHODS if one.rare}
    for row in (one for one in (*results.both, *results.scored) if one.method not in rare):
        missed = missed_goals(row)
        lines.append(
            f"- {row.method}, {row.family}: {'misses ' + '; '.join(missed) if missed else 'meets all'}"
        )
    return [*lines, "", "## The default method", "", *_choice(results)]


def _choice(results: Results) -> list[str]:
    body = [
        [
            row.method,
            _rate(row.false_alarms["seed"]),
            f"{row.power['seed'].value:.3f}",
            f"{row.correlation:.2f}",
            f"{row.located.value:.3f}",
            "; ".join(missed_goals(row)) or "none",
        ]
        for row in results.frozen
    ]
    return [
        "The best method of the frozen bases (fewest goals missed, then localisation, correlation and "
        f"power) is **{results.chosen}**; the product's default is **{results.default}**.",
        "",
        *_table(["frozen bases", "false alarms", "power", "Spearman", "localised", "goals missed"], body),
    ]


def _table(headers: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *body]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


def _named(row: Summary, cells: Sequence[str]) -> list[str]:
    return [row.method, row.family, str(row.bases), *cells]


def _rate(rate: Rate | None, places: int = 3) -> str:
    if rate is None:
        return "–"
    return f"{rate.value:.{places}f} [{rate.low:.{places}f}, {rate.high:.{places}f}]"


def _alarms(row: Summary) -> list[str]:
    found = row.false_alarms
    open_ = "–" if row.gate_open is None else f"{row.gate_open:.2f}"
    return [*(_rate(found.get(one)) for one in ("seed", "seed, one split", "paired")), _rate(row.gate), open_]


def _finding(row: Summary) -> list[str]:
    return [
        _rate(row.power["seed"], 2),
        _rate(row.weak_power, 2),
        _rate(row.gate_power, 2),
        f"{row.correlation:.2f} ({row.within:.2f})",
        _rate(row.located, 2),
        f"{row.pointed:.2f}",
        _rate(row.early, 2),
    ]


def _floors(row: Summary) -> list[str]:
    kinds = ("seed", "release", "tail", "limit")
    if "tail" not in row.false_alarms:
        return []
    cells = [f"{_rate(row.false_alarms.get(one))} / {_power(row, one)}" for one in kinds]
    others = ("release, released candidate", "seed, released candidate")
    return [*cells, *(_rate(row.false_alarms.get(one)) for one in others)]


def _power(row: Summary, floor: str) -> str:
    return f"{row.power[floor].value:.2f}" if floor in row.power else "–"


def _parts(row: Summary) -> list[str]:
    cells = []
    for part in row.parts.values():
        missed = "none strong" if part.missed is None else f"{_rate(part.missed, 2)} of {part.missed.bases}"
        cells += [f"{part.delta:.2f}", _rate(part.alarms, 2), missed]
    return cells


def _confounds(rows: Sequence[Summary]) -> list[str]:
    """Return a table for each family: a line a confound, a column a method that is not rare."""
    lines: list[str] = []
    for family in dict.fromkeys(row.family for row in rows):
        shown = [row for row in rows if row.family == family and row.bases > FEW]
        names = dict.fromkeys(name for row in shown for name in row.confounds)
        if not names:
            continue
        body = [[name, *(_rate(row.confounds.get(name), 2) for row in shown)] for name in names]
        lines += _table([f"{family}: confound", *(row.method for row in shown)], body)
    return lines


_PARTS = ("head-only", "value-only", "feed-forward-only")
_Cells = Callable[[Summary], list[str]]
_TABLES: tuple[tuple[str, str, list[str], _Cells], ...] = (
    (
        "False alarms on harmless fine-tunings",
        "One region, named before: the corner patch, the name. `all splits`: the unadjusted replicate "
        "test at nominal .05 with five replicates, the mean over every choice of five of the 13 runs (a "
        "complete U-statistic). `one split`: the first five against the other eight, the same rate with a"
        " wider interval. `paired test`: Wilcoxon over the probes of two harmless runs. `gate`: FAIL by "
        "the product's own gate on every region at once (Holm, effect floor .01), and how often it says "
        "INCONCLUSIVE.",
        ["all splits", "one split", "paired test", "gate FAIL", "gate INCONCLUSIVE"],
        _alarms,
    ),
    (
        "Finding the shortcut",
        "Over the checkpoints whose causal share γ of the shortcut grew by at least .1: power of the "
        "replicate test; the same where γ grew by .02 to .1; power of the gate. Spearman of audited excess "
        "and Δγ over all bases of a family (and within a base). `localised`: the planted region gained "
        "more than every other patch, or kind of word. "
        "`probes pointed`: in this part of the probes the single position that gained most is the planted"
        " one. `before accuracy`: the first alarm comes no later than a change of accuracy by 1 %.",
        ["power", "at .02–.1", "gate's power", "Spearman", "localised", "probes pointed", "before accuracy"],
        _finding,
    ),
    (
        "Kinds of floor: false alarms / power",
        f"On {FULL} bases of each family (`seed` and `limit`: all). "
        "`release`: fine-tunings on refreshed draws of the data as replicates; `tail`: five late "
        "checkpoints of one run; `limit`: no replicates, but the size of shift that 5 % of the harmless "
        "runs on the frozen bases exceed. Candidates are harmless runs of other seeds; in the last two "
        "columns they were trained on refreshed data, judged against replicates that were as well, and "
        "that were not.",
        ["seed", "release", "tail", "limit", "released against release", "released against seed"],
        _floors,
    ),
    (
        "Shortcuts learnt by a part of the model",
        f"On {FULL} bases of each family. "
        "Trained on top of a harmless run, everything else frozen. Change of γ; how often the seed "
        "floor's test alarms; how often it misses where γ grew by at least .1 (of how many bases).",
        [f"{part}: {what}" for part in _PARTS for what in ("Δγ", "alarms", "missed")],
        _parts,
    ),
)

_CONFOUNDS = (
    "Rates of alarms on the planted region, unless said otherwise. `below planted`: the share of strong "
    "shortcuts in which another region moved less: a decoy that is as frequent, or every quarter of the "
    "positions (the shortcut is a token, not a place). `label noise`: fine-tuned with 30 % random labels. "
    "`sink drift`: fine-tuned to draw attention to the special tokens, which gained that share of the map."
)
