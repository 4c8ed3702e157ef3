"""What a rule's verdict says, in one plain sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

from audit.records import Cell, Outcome, ReplicateTest, Rule
from audit.statistics.measures import DISTANCES, SIGNED
from audit.verdicts.floor import Floor, plural

_EFFECTS = {
    "model": "",
    "data": "between the two probe sets ",
    "model_on_domain": "on the second probe set ",
    "interaction": "on the second probe set, compared with the first, ",
}


def decimals_for(*values: float | None) -> int:
    """Return decimals that show at least two figures of the largest value, three where it is a share.

    Examples
    --------
    >>> decimals_for(0.052), decimals_for(0.0006), decimals_for(1.94)
    (3, 5, 2)
    """
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    if largest == 0:
        return 3
    if largest >= 1:
        return 2
    return min(8, max(3, 1 - math.floor(math.log10(largest))))


def number(value: float, decimals: int = 3, *, signed: bool = False) -> str:
    """Return a number without a leading zero, with a true minus sign.

    Examples
    --------
    >>> number(0.0521), number(-0.001, signed=True), number(1.5, 2)
    ('.052', '−.001', '1.50')
    """
    text = f"{abs(value):.{decimals}f}"
    zero = float(text) == 0
    text = text[1:] if text.startswith("0.") else text
    sign = "−" if value < 0 and not zero else "+" if signed and not zero else ""
    return sign + text


def plain(value: float) -> str:
    """Return a limit as its owner wrote it: ".02", "1.5"."""
    text = f"{abs(value):.6g}"
    return ("−" if value < 0 else "") + (text[1:] if text.startswith("0.") else text)


def place(cell: Cell) -> str:
    """Return which cell is meant: region, stream, layer, segment."""
    parts = [] if cell.region == "*" else [f"'{cell.region}'"]
    if cell.stream != "input":
        parts.append(f"({cell.stream})")
    if cell.layer is not None:
        parts.append(f"at layer {cell.layer}")
    if cell.segment is not None:
        parts.append(f"for {cell.segment}")
    return " ".join(parts)


def _at(cell: Cell) -> str:
    """Return "on 'corner'", or the layer and segment alone for the whole map."""
    where = place(cell)
    return f" on {where}" if cell.region != "*" else f" {where}" if where else ""


def movement(cell: Cell) -> str:
    """Return what the map did, judged by its interval alone."""
    effect = _EFFECTS[cell.effect]
    low, high = cell.interval or (-math.inf, math.inf)
    if cell.measure != "shift":
        return f"{effect}the attention map moved{_at(cell)}"
    if low > 0:
        return f"{effect}the attention map moved towards {place(cell)}"
    if high < 0:
        return f"{effect}the attention map moved away from {place(cell)}"
    return f"{effect}the attention map did not measurably move{_at(cell)}"


def _name(measure: str) -> str:
    named = measure.replace("_", " ").replace("js ", "JS ").replace("kl ", "KL ")
    return named.replace("spearman", "Spearman").replace("sink ", "sink share ")


def measured(cell: Cell) -> str:
    """Return the numbers: share before and after, value, interval."""
    if cell.value is None:
        return f"{_name(cell.measure)} is undefined"
    signed = cell.measure in SIGNED
    digits = decimals_for(cell.value, *(cell.interval or ()))
    parts = []
    if cell.before is not None and cell.after is not None and cell.measure != "level":
        ends = decimals_for(cell.before, cell.after)
        one, two = number(cell.before, ends), number(cell.after, ends)
        both = f"shift {one} on the first probe set and {two} on the second"
        ends_of = (
            "share" if cell.measure in ("shift", "ratio") else _name(cell.measure).removesuffix(" change")
        )
        parts.append(both if cell.effect == "interaction" else f"{ends_of} {one} → {two}")
    name = "share after" if cell.measure == "level" else _name(cell.measure)
    name = "difference" if cell.effect == "interaction" and cell.measure == "shift" else name
    text = f"{name} {number(cell.value, digits, signed=signed)}"
    if cell.interval is not None:
        text += " [{}, {}]".format(*(number(v, digits, signed=signed) for v in cell.interval))
    return ", ".join([*parts, text])


def limit_text(low: float, high: float, *, signed: bool = True) -> str:
    """Return the limits as "limit ±.02", "limit +.02", "at most .1", "between .5 and 2"."""
    if signed and low == -high:
        return f"limit ±{plain(high)}"
    if math.isinf(low) or low == -high or (not signed and low == 0):
        return f"limit +{plain(high)}" if signed else f"limit at most {plain(high)}"
    if math.isinf(high):
        return f"limit {plain(low)}" if signed else f"limit at least {plain(low)}"
    return f"limit between {plain(low)} and {plain(high)}"


def retraining(floor: Floor, measure: str) -> str:
    """Return what harmless re-training does to the measure."""
    if floor.mean is None:
        return ""
    digits = decimals_for(floor.mean, floor.sd)
    signed = measure in SIGNED
    verb = "moves it by" if signed or measure in DISTANCES else "gives"
    spread = "" if floor.sd is None else f" ± {number(floor.sd, digits)}"
    return f"harmless re-training {verb} {number(floor.mean, digits, signed=signed)}{spread}"


Bounds = tuple[float, float]


def limit_sentence(
    cell: Cell,
    rule: Rule,
    outcome: Outcome,
    limits: tuple[Bounds, Bounds],
    remark: Sequence[str],
    *,
    warned: bool,
) -> str:
    """Return the sentence of a limit rule; `limits` are the bounds of `fail` and of `warn`."""
    signed = rule.measure in SIGNED
    if outcome is Outcome.FAIL and rule.measure in ("level", "ratio"):
        head = f"{_EFFECTS[cell.effect]}the attention map's share{_at(cell)} is outside the limit"
    elif outcome is Outcome.FAIL:
        head = f"{movement(cell)}, beyond the limit"
    elif rule.fail is None:
        head = movement(cell) if warned else _within(cell, "warn limit", signed=signed)
    elif outcome is Outcome.PASS:
        head = _within(cell, "limit", signed=signed)
    else:
        head = f"{_EFFECTS[cell.effect]}the attention map may or may not be beyond the limit{_at(cell)}"
    named = ", ".join([measured(cell), *_limits(cell, rule, limits, warned=warned)])
    floor = ", ".join(one for one in remark if one)
    return "; ".join(part for part in (f"{head}: {named}", floor) if part)


def _limits(cell: Cell, rule: Rule, limits: tuple[Bounds, Bounds], *, warned: bool) -> list[str]:
    """Return the limit of `fail`, and that of `warn` where it warned or is the only one."""
    fail, warn = limits
    signed = rule.measure in SIGNED
    named = [] if rule.fail is None else [limit_text(*fail, signed=signed)]
    if not warned and rule.fail is not None:
        return named
    low, high = cell.interval or (-math.inf, math.inf)
    beyond = low > warn[1] or high < warn[0]
    how = (
        f", {'beyond which the interval lies' if beyond else 'which the interval crosses'}" if warned else ""
    )
    return [*named, f"warn {limit_text(*warn, signed=signed)}{how}"]


def _within(cell: Cell, limit: str, *, signed: bool) -> str:
    effect = _EFFECTS[cell.effect]
    if signed:
        return f"{movement(cell)}, within the {limit}"
    if cell.measure in ("level", "ratio"):
        return f"{effect}the attention map's share{_at(cell)} is within the {limit}"
    return f"{effect}the attention map stayed within the {limit}{_at(cell)}"


def explanation(explained: bool | None) -> str:
    """Return what the replicates say about a limit rule's value."""
    if explained is None:
        return ""
    return "so re-training alone could explain it" if explained else "so re-training does not explain it"


def excess_sentence(
    cell: Cell, rule: Rule, outcome: Outcome, floor: Floor, *, numbers: str, explained: bool | None = None
) -> str:
    """Return the sentence of an excess rule; `numbers` tells the test and the margin.

    A shift that the replicate test rejects (`explained` False) is never said to be harmless, even where
    the policy allows it.
    """
    if outcome is Outcome.FAIL:
        head = beyond_retraining(cell, floor.test)
    elif outcome is Outcome.PASS:
        allowed = f"{beyond_retraining(cell, floor.test)}, yet within what the policy allows"
        head = allowed if explained is False else _no_further(cell, rule)
    elif explained is False:
        open_end = "whether that is within what the policy allows is open"
        head = f"{beyond_retraining(cell, floor.test)}; {open_end}"
    else:
        head = (
            f"{_EFFECTS[cell.effect]}it is open whether the attention map moved more{_at(cell)} "
            "than harmless re-training does"
        )
    parts = [measured(cell), numbers, retraining(floor, rule.measure)]
    return f"{head}: " + "; ".join(part for part in parts if part)


def beyond_retraining(cell: Cell, test: ReplicateTest | None) -> str:
    """Return how a value that the replicate test rejects differs from harmless re-training."""
    low, high = cell.interval or (-math.inf, math.inf)
    excess = 0.0 if test is None or test.excess is None else test.excess
    if cell.measure != "shift" or (low > 0 and excess > 0) or (high < 0 and excess < 0):
        return f"{movement(cell)}, by more than harmless re-training explains"
    if low > 0 or high < 0:
        return f"{movement(cell)}, but not as far as harmless re-training moves it"
    return (
        f"{_EFFECTS[cell.effect]}the attention map's shift{_at(cell)} differs from that of harmless "
        "re-training by more than chance explains"
    )


def _no_further(cell: Cell, rule: Rule) -> str:
    way = {"increase": "further towards", "decrease": "further away from"}.get(rule.direction)
    if way is None or cell.measure != "shift":
        moved = f"moved no more{_at(cell)}"
    else:
        moved = f"moved no {way} {place(cell)}"
    return f"{_EFFECTS[cell.effect]}the attention map {moved} than harmless re-training does"


def excess_numbers(  # noqa: PLR0917
    test: ReplicateTest,
    within: float,
    rule: Rule,
    adjusted: float | None,
    tests: int,
    failed_from: float | None,
) -> str:
    """Return the excess shift with its interval, what decides about it, and the Holm-adjusted p-value.

    `failed_from` is the effect floor of a rule that failed: then that decided, and not the margin.
    """
    if test.excess is None:
        return ""
    digits = decimals_for(test.excess, *(test.interval or ()))
    text = f"excess {number(test.excess, digits, signed=True)}"
    if test.interval is not None:
        text += " [{}, {}]".format(*(number(v, digits, signed=True) for v in test.interval))
    one_sided = rule.measure in DISTANCES or rule.direction == "increase"
    sign = "+" if one_sided else "−" if rule.direction == "decrease" else "±"
    if failed_from is not None:
        text += f", at least the effect floor of {plain(failed_from)}"
    else:
        text += f", allowed within {sign}{plain(float(f'{within:.3g}'))}"
    if adjusted is not None:
        shown = "p < .0001" if adjusted < 0.0001 else f"p = {plain(float(f'{adjusted:.2g}'))}"
        text += f", {shown}" + (f" (Holm over {plural(tests, 'test')})" if tests > 1 else "")
    if failed_from is not None and test.interval is not None and test.interval[0] <= 0 <= test.interval[1]:
        text += " (p is about these probes; the interval counts other probes too, which could show none)"
    return text
