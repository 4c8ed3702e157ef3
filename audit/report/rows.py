"""Verdict and comparison as rows of strings, shared by every table for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from audit.records import Cell, Comparison, Confirmation, Outcome, RuleVerdict, Verdict
from audit.report import wording
from audit.report.wording import MISSING, change, clip, count, finite, noise, quantity, span

COMPARED = "COMPARED"
"""Stands where an outcome would, for a comparison that no policy judged."""
_ORDER = [Outcome.ERROR, Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS]
NAME_WIDTH = 80
SENTENCE_WIDTH = 600


@dataclass(frozen=True)
class RuleRow:
    """One rule's verdict as it is printed; "–" stands where there is no number."""

    outcome: str
    where: str
    condition: str
    levels: str
    value: str
    interval: str
    excess: str
    limit: str
    warn: str
    floor: str
    replicates: str
    detectable: str
    probes: str
    sentence: str
    notes: tuple[str, ...]

    @property
    def limits(self) -> str:
        """Return the limit with its warning limit, on one line."""
        return f"{self.limit} ({self.warn})" if self.warn else self.limit

    @property
    def noise(self) -> str:
        """Return the noise floor with the number of replicates, on one line."""
        return f"{self.floor} ({self.replicates})" if self.replicates else self.floor


@dataclass(frozen=True)
class CellRow:
    """One cell of the comparison as it is printed."""

    where: str
    measure: str
    levels: str
    value: str
    interval: str
    floor: str
    detectable: str
    pvalue: str
    probes: str
    outcome: str
    reason: str
    exploring: str = ""


def shown_outcome(found: RuleVerdict) -> str:
    """Return the outcome as it is printed: a pass over the `warn` limit reads WARN."""
    return "WARN" if found.outcome is Outcome.PASS and found.warned else found.outcome.value


def status(verdict: Verdict | None) -> str:
    """Return the outcome in capitals; COMPARED without a verdict."""
    return verdict.status if verdict is not None else COMPARED


def rules_of(verdict: Verdict | None) -> tuple[RuleVerdict, ...]:
    """Return the verdicts of the rules, in the policy's order."""
    return verdict.rules if verdict is not None else ()


def headline(comparison: Comparison | None, verdict: Verdict | None) -> str:
    """Return the verdict's sentence without the outcome in front, which stands beside it.

    Examples
    --------
    >>> from audit.records import Policy
    >>> headline(None, Verdict(Outcome.FAIL, (), "FAIL: the attention map moved", 3, Policy(())))
    'The attention map moved'
    >>> headline(Comparison("paired", (Cell("shift", "corner", value=0.05),), 0.05, 9), None)
    'No policy was judged; the largest shift is corner, +.050'
    """
    if verdict is None:
        largest = next((c for c in other_shifts(comparison, None) if c.value is not None), None)
        shift = (
            f"; the largest shift is {where_cell(largest)}, {quantity('shift', largest.value)}"
            if largest
            else ""
        )
        return f"No policy was judged{shift}"
    sentence = verdict.sentence.strip() or verdict.reason or "no sentence was given"
    text = sentence.removeprefix(verdict.status).lstrip(" :–—-.") or sentence
    named = any(text.startswith(found.region) for found in verdict.rules)
    return text if named else text[:1].upper() + text[1:]


def sentence_of(found: RuleVerdict) -> str:
    """Return the rule's sentence without the outcome in front, with capital and full stop."""
    text = found.sentence.strip().removeprefix(found.outcome.value).lstrip(" :–—-.") or (found.reason or "")
    return full_sentence(text, found.region)


def full_sentence(text: str, name: str = "") -> str:
    """Return `text` with a capital, unless it starts with a region's name or an address, and a full stop.

    Examples
    --------
    >>> full_sentence("the interval crosses the limit"), full_sentence("rest is empty.", "rest")
    ('The interval crosses the limit.', 'rest is empty.')
    >>> full_sentence("nina@example.org until 2027-01-31")
    'nina@example.org until 2027-01-31.'
    """
    text = text.strip()
    if not (name and text.startswith(name)) and "@" not in text.partition(" ")[0]:
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?", "…")) else f"{text}."


def split_headline(text: str, longest: int = 200) -> tuple[str, str]:
    """Return the statement of a headline, and the numbers that it gives after a colon.

    Examples
    --------
    >>> split_headline("The attention map moved: share .053 → .104")
    ('The attention map moved', 'Share .053 → .104.')
    """
    head, colon, rest = text.partition(": ")
    if not colon or not rest.strip() or len(head) > longest:
        return text, ""
    return head, full_sentence(rest)


def worst_first(rules: Iterable[RuleVerdict]) -> list[RuleVerdict]:
    """Return the rules with errors and failures first, warnings before quiet passes."""
    return sorted(rules, key=lambda found: (_ORDER.index(found.outcome), not found.warned))


def where(
    region: str,
    *,
    stream: str = "input",
    layer: int | None = None,
    effect: str = "model",
    segment: str | None = None,
) -> str:
    """Return which part of the comparison is meant, naming only what is not the default.

    Examples
    --------
    >>> where("corner"), where("*", layer=3, effect="data")
    ('corner', 'whole map · layer 3 · data effect')
    """
    parts = ["whole map" if region == "*" else clip(region, NAME_WIDTH)]
    if stream != "input":
        parts.append(stream)
    if layer is not None:
        parts.append(f"layer {layer}")
    if segment is not None:
        parts.append(clip(segment, NAME_WIDTH))
    if effect != "model":
        parts.append(effect.replace("_", " ") + ("" if effect == "interaction" else " effect"))
    return " · ".join(parts)


def where_cell(cell: Cell) -> str:
    """Return :func:`where` of a cell."""
    return where(cell.region, stream=cell.stream, layer=cell.layer, effect=cell.effect, segment=cell.segment)


def where_rule(found: RuleVerdict) -> str:
    """Return :func:`where` of a rule's verdict."""
    rule = found.rule
    return where(
        found.region, stream=found.stream, layer=rule.layer, effect=found.effect, segment=rule.segment
    )


def probes(n_probes: int, n_missing: int = 0, n_clusters: int | None = None) -> str:
    """Return the number of probes, with groups and missing ones where there are any.

    Examples
    --------
    >>> probes(400, 12, 20)
    '400 (20 groups, 12 missing)'
    """
    extra = [count(n_clusters, "group")] if n_clusters is not None else []
    extra += [f"{n_missing:,} missing"] if n_missing else []
    return f"{n_probes:,}" + (f" ({', '.join(extra)})" if extra else "")


def _notes(found: RuleVerdict) -> tuple[str, ...]:
    notes = []
    if found.reason and found.reason not in found.sentence:
        notes.append(f"Reason: {found.reason.rstrip('.')}.")
    if found.adjusted_pvalue is not None and not re.search(r"\bp [=<] ", found.sentence):
        notes.append(f"Replicate test, Holm-adjusted p {_equals(found.adjusted_pvalue)}.")
    if found.explained is not None and "explain" not in found.sentence:
        notes.append(f"Re-training alone {'could' if found.explained else 'does not'} explain this.")
    if found.confirmation is not None:
        word = "Confirmed" if found.confirmation.confirmed else "Not confirmed"
        notes.append(f"{word} by occlusion.")
    if found.unproven is not None and "reliance unproven" not in found.sentence:
        notes.append(f"Map changed, reliance unproven: {found.unproven}.")
    if found.needed:
        notes.append(f"To settle it: {found.needed.rstrip('.')}.")
    if found.approved_by:
        notes.append(f"Approved by {found.approved_by}.")
    return tuple(clip(note, SENTENCE_WIDTH) for note in notes)


def rule_row(found: RuleVerdict) -> RuleRow:
    """Return one rule's verdict as strings."""
    measure, judged = found.rule.measure, found.excess if found.rule.kind == "excess" else None
    known = judged is not None and judged.excess is not None
    return RuleRow(
        outcome=shown_outcome(found),
        where=where_rule(found),
        condition=clip(f"{found.rule.kind} · {measure.replace('_', ' ')}", NAME_WIDTH),
        levels=change(found.before, found.after),
        value=quantity(measure, found.value, like=found.interval),
        interval=span(measure, judged.interval if judged is not None and known else found.interval),
        excess=f"excess {quantity(measure, judged.excess, signed=True, like=judged.interval)}"
        if judged is not None and known
        else "",
        limit=wording.limit(found),
        warn=_warn(found),
        floor=noise(measure, found.floor),
        replicates=count(found.n_replicates, "replicate") if found.n_replicates else "",
        detectable=quantity(measure, found.minimum_detectable_shift, signed=False),
        probes=probes(found.n_probes, found.n_missing, found.n_clusters),
        sentence=clip(sentence_of(found), SENTENCE_WIDTH),
        notes=_notes(found),
    )


def _warn(found: RuleVerdict) -> str:
    warn = found.rule.warn
    if warn is None or found.rule.kind == "excess":
        return ""
    return f"warn {wording.given(warn)}"


def pvalue(value: float | None) -> str:
    """Return a p-value to three figures; "–" for None.

    Examples
    --------
    >>> pvalue(0.04217), pvalue(1e-9)
    ('.042', '<.0001')
    """
    if not finite(value) or value is None:
        return MISSING
    return "<.0001" if value < 0.0001 else f"{value:.2g}".replace("0.", ".", 1)


def _equals(value: float) -> str:
    text = pvalue(value)
    return f"< {text[1:]}" if text.startswith("<") else f"= {text}"


def cell_floor(cell: Cell) -> tuple[float, float] | None:
    """Return mean and SD of the cell's replicates; None with fewer than two."""
    values = [value for value in cell.replicates if finite(value)]
    if len(values) < 2:
        return None
    return float(np.mean(values)), float(np.std(values, ddof=1))


def cell_row(cell: Cell, outcome: str = "") -> CellRow:
    """Return one cell as strings."""
    test = cell.excess
    return CellRow(
        where=where_cell(cell),
        measure=clip(cell.measure.replace("_", " "), NAME_WIDTH),
        levels=change(cell.before, cell.after),
        value=quantity(cell.measure, cell.value, like=cell.interval),
        interval=span(cell.measure, cell.interval),
        floor=noise(cell.measure, cell_floor(cell), len(cell.replicates)),
        detectable=quantity(cell.measure, test.minimum_detectable_shift if test else None, signed=False),
        pvalue=pvalue(cell.pvalue),
        probes=probes(cell.n_probes, cell.n_missing, cell.n_clusters),
        outcome=outcome,
        reason=clip(cell.reason or "", SENTENCE_WIDTH),
        exploring=exploring(cell),
    )


def exploring(cell: Cell) -> str:
    """Return what helps to look around and never gates: adjusted and rank p-values, d_z, lift.

    Examples
    --------
    >>> exploring(Cell("shift", "a", adjusted_pvalue=0.02, effect_size=0.5, after=0.3, size=0.25))
    'adjusted .02, d_z .5, lift 1.2'
    """
    parts = [
        f"adjusted {pvalue(cell.adjusted_pvalue)}" if cell.adjusted_pvalue is not None else "",
        f"Wilcoxon {pvalue(cell.wilcoxon_pvalue)}" if cell.wilcoxon_pvalue is not None else "",
        f"d_z {wording.number(cell.effect_size, 1)}" if finite(cell.effect_size) else "",
    ]
    if cell.measure == "shift" and finite(cell.after) and finite(cell.size) and cell.size > 0:
        parts.append(f"lift {cell.after / cell.size:.1f}")
    return ", ".join(part for part in parts if part)


Key = tuple[str, str, str, str, int | None, str | None]


def cell_key(cell: Cell) -> Key:
    """Return what identifies a cell within its comparison."""
    return (cell.measure, cell.region, cell.stream, cell.effect, cell.layer, cell.segment)


def rule_key(found: RuleVerdict) -> Key:
    """Return the key of the cell that the rule judged."""
    rule = found.rule
    return (rule.measure, found.region, found.stream, found.effect, rule.layer, rule.segment)


def judged_by(verdict: Verdict | None) -> dict[Key, list[RuleVerdict]]:
    """Return the verdicts by the cell that they judged, worst first."""
    judged: dict[Key, list[RuleVerdict]] = {}
    for found in worst_first(rules_of(verdict)):
        judged.setdefault(rule_key(found), []).append(found)
    return judged


def by_size(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells with the largest absolute value first, undefined ones last."""
    return sorted(cells, key=lambda cell: -abs(cell.value) if cell.value is not None else 1.0)


def other_shifts(comparison: Comparison | None, verdict: Verdict | None) -> list[Cell]:
    """Return the whole-stack shifts of regions that no rule judged, largest first."""
    if comparison is None:
        return []
    judged = judged_by(verdict)
    return by_size(
        cell
        for cell in comparison.cells
        if cell.measure == "shift"
        and cell.layer is None
        and cell.segment is None
        and cell_key(cell) not in judged
    )


def confirmation_sentence(found: Confirmation) -> str:
    """Return what occluding a region did to the target logit on both checkpoints."""
    ends = span("logit", found.interval)
    before, after = (quantity("logit", value, signed=False) for value in (found.before, found.after))
    changed = quantity("logit", found.difference, like=found.interval)
    word = "confirmed" if found.confirmed else "not confirmed"
    return (
        f"Occlusion of {clip(found.region, NAME_WIDTH)} ({clip(found.occlusion, NAME_WIDTH)}) moves the "
        f"target logit by {before} before, {after} after, difference {changed} {ends} over "
        f"{count(found.n_probes, 'probe')}: {word}."
    )


def confirmations(comparison: Comparison | None, verdict: Verdict | None) -> list[Confirmation]:
    """Return every confirmation of the comparison and its rules, once."""
    found: Sequence[Confirmation] = comparison.confirmations if comparison else ()
    unique = list(found)
    for rule in rules_of(verdict):
        if rule.confirmation is not None and rule.confirmation not in unique:
            unique.append(rule.confirmation)
    return unique


def to_settle(verdict: Verdict | None) -> list[tuple[str, str]]:
    """Return (where, what is needed) of every INCONCLUSIVE rule that can be settled, each once."""
    needs = (
        (where_rule(found), clip(found.needed, SENTENCE_WIDTH))
        for found in rules_of(verdict)
        if found.outcome is Outcome.INCONCLUSIVE and found.needed
    )
    return list(dict.fromkeys(needs))
