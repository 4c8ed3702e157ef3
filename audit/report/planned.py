"""The plan of an audit's sensitivity as a table for the terminal."""

from __future__ import annotations

from audit.report.terminal import bullets, console, table, written
from audit.report.wording import MISSING, clip, number
from audit.statistics.sensitivity import Chances, PlannedRule, Sensitivity


def plan_table(plan: Sensitivity, *, width: int = 110) -> str:
    """Return what each rule can find and needs, a line for each region, and how to read it."""
    unit = plan.unit.capitalize() + "s"
    headers = ["Rule", "Region", "Shift", "Seed SD", "Detects", "Replicates", unit, "Harmless candidate"]
    screen = console(width, color=False)
    screen.print(table(headers, [_row(one) for one in plan.rules], firm=range(2, 7)))
    screen.print(bullets(_lines(plan)))
    return written(screen).rstrip() + "\n"


def _row(one: PlannedRule) -> list[str]:
    unit = " SD" if one.in_sd else ""
    return [
        clip(one.rule, 40),
        clip(one.region, 40),
        MISSING if one.shift is None else number(one.shift) + unit,
        MISSING if one.spread.seed_sd is None else number(one.spread.seed_sd, 4),
        MISSING if one.detectable is None else number(one.detectable, 2 if one.in_sd else 4) + unit,
        _have(one.spread.replicates, one.replicates_needed),
        _have(one.spread.units, one.probes_needed),
        _chances(one.harmless),
    ]


def _have(there: int, needed: int | None) -> str:
    return f"{there:,}" if needed is None else f"{there:,} of {needed:,}"


def _chances(chances: Chances | None) -> str:
    if chances is None:
        return MISSING
    return f"{chances.passes:.0%} PASS, {chances.inconclusive:.0%} INCONCLUSIVE, {chances.fails:.0%} FAIL"


def _lines(plan: Sensitivity) -> list[str]:
    lines = [
        f"Shift: what must be found (its own limit where none is given). Detects: the smallest excess shift "
        f"found with power {plan.power:g}.",
        f"Replicates and {plan.unit}s: at hand, of those needed for the shift; for a limit rule that is a "
        "shift beyond the limit, for an excess rule one beyond harmless re-training.",
        f"Level {plan.alpha:g}, shared by {plan.tests} excess tests."
        if plan.tests > 1
        else f"Level {plan.alpha:g}.",
    ]
    if plan.inconclusive is not None:
        lines.append(
            f"At least one rule stays INCONCLUSIVE for {plan.inconclusive:.0%} of harmless candidates."
        )
    notes = [f"{one.rule} on {one.region}: {one.note}." for one in plan.rules if one.note]
    return [*lines, *dict.fromkeys(notes), *(f"{note[:1].upper()}{note[1:]}." for note in plan.notes)]
