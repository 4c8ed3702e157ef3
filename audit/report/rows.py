"""Verdict and comparison as rows of strings, shared by every table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from audit.records import Cell, Comparison, Confirmation, Outcome, RuleVerdict, Verdict
from audit.report import wording
from audit.report.wording import MISSING, change, clip, count, finite, noise, quantity, span

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
    limit: str
    floor: str
    detectable: str
    probes: str
    sentence: str
    notes: tuple[str, ...]


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


def shown_outcome(found: RuleVerdict) -> str:
    """Return the outcome as it is printed: a pass over the `warn` limit reads WARN."""
    return "WARN" if found.outcome is Outcome.PASS and found.warned else found.outcome.value


def headline(verdict: Verdict) -> str:
    """Return the verdict's sentence without the outcome in front, which stands beside it.

    Examples
    --------
    >>> from audit.records import Policy
    >>> headline(Verdict(Outcome.FAIL, (), "FAIL: the attention map moved", 3, Policy(())))
    'the attention map moved'
    """
    sentence = verdict.sentence.strip() or verdict.reason or "no sentence was given"
    return sentence.removeprefix(verdict.status).lstrip(" :–—-.") or sentence


def sentence_of(found: RuleVerdict) -> str:
    """Return the rule's sentence without the outcome in front."""
    return found.sentence.strip().removeprefix(found.outcome.value).lstrip(" :–—-.") or (found.reason or "")


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
    return where(
        cell.region, stream=cell.stream, layer=cell.layer, effect=cell.effect, segment=cell.segment
    )


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
        notes.append(f"Reason: {found.reason}.")
    if found.adjusted_pvalue is not None:
        notes.append(f"Replicate test, Holm-adjusted p = {pvalue(found.adjusted_pvalue)}.")
    if found.explained is not None:
        notes.append(f"Re-training alone {'explains' if found.explained else 'does not explain'} this.")
    if found.confirmation is not None:
        notes.append(confirmation_sentence(found.confirmation))
    if found.needed:
        notes.append(f"To settle it: {found.needed.rstrip('.')}.")
    if found.approved_by:
        notes.append(f"Approved by {found.approved_by}.")
    return tuple(clip(note, SENTENCE_WIDTH) for note in notes)


def rule_row(found: RuleVerdict) -> RuleRow:
    """Return one rule's verdict as strings."""
    measure, judged = found.rule.measure, found.excess if found.rule.kind == "excess" else None
    interval = span(measure, found.interval)
    if judged is not None and judged.excess is not None:
        interval = f"excess {quantity(measure, judged.excess, signed=True)} {span(measure, judged.interval)}"
    return RuleRow(
        outcome=shown_outcome(found),
        where=where_rule(found),
        condition=clip(f"{found.rule.kind} · {measure.replace('_', ' ')}", NAME_WIDTH),
        levels=change(measure, found.before, found.after),
        value=quantity(measure, found.value),
        interval=interval.strip(),
        limit=limit_text(found),
        floor=noise(measure, found.floor, found.n_replicates),
        detectable=quantity(measure, found.minimum_detectable_shift, signed=False),
        probes=probes(found.n_probes, found.n_missing, found.n_clusters),
        sentence=clip(sentence_of(found), SENTENCE_WIDTH),
        notes=_notes(found),
    )


def limit_text(found: RuleVerdict) -> str:
    """Return the rule's condition in words, with its warning limit where it has one."""
    text, warn = wording.limit(found), found.rule.warn
    if warn is None or found.rule.kind == "excess":
        return text
    return f"{text} (warn {quantity(found.rule.measure, warn, signed=False)})"


def pvalue(value: float | None) -> str:
    """Return a p-value to three figures; "–" for None.

    Examples
    --------
    >>> pvalue(0.04217), pvalue(1e-9)
    ('0.042', '<0.0001')
    """
    if not finite(value) or value is None:
        return MISSING
    return "<0.0001" if value < 0.0001 else f"{value:.2g}"


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
        levels=change(cell.measure, cell.before, cell.after),
        value=quantity(cell.measure, cell.value),
        interval=span(cell.measure, cell.interval),
        floor=noise(cell.measure, cell_floor(cell), len(cell.replicates)),
        detectable=quantity(cell.measure, test.minimum_detectable_shift if test else None, signed=False),
        pvalue=pvalue(cell.pvalue),
        probes=probes(cell.n_probes, cell.n_missing, cell.n_clusters),
        outcome=outcome,
        reason=clip(cell.reason or "", SENTENCE_WIDTH),
    )


Key = tuple[str, str, str, str, int | None, str | None]


def cell_key(cell: Cell) -> Key:
    """Return what identifies a cell within its comparison."""
    return (cell.measure, cell.region, cell.stream, cell.effect, cell.layer, cell.segment)


def rule_key(found: RuleVerdict) -> Key:
    """Return the key of the cell that the rule judged."""
    rule = found.rule
    return (rule.measure, found.region, found.stream, found.effect, rule.layer, rule.segment)


def judged_by(verdict: Verdict) -> dict[Key, list[RuleVerdict]]:
    """Return the verdicts by the cell that they judged, worst first."""
    judged: dict[Key, list[RuleVerdict]] = {}
    for found in worst_first(verdict.rules):
        judged.setdefault(rule_key(found), []).append(found)
    return judged


def by_size(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells with the largest absolute value first, undefined ones last."""
    return sorted(cells, key=lambda cell: -abs(cell.value) if cell.value is not None else 1.0)


def other_shifts(comparison: Comparison | None, verdict: Verdict) -> list[Cell]:
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
    ends = span("logit_change", found.interval)
    changed = f"{found.before:+.3f} before, {found.after:+.3f} after".replace("-", "−")
    word = "confirmed" if found.confirmed else "not confirmed"
    return (
        f"Occlusion of {clip(found.region, NAME_WIDTH)} ({clip(found.occlusion, NAME_WIDTH)}): target logit "
        f"{changed}, difference {quantity('logit_change', found.difference, signed=True)} {ends} over "
        f"{count(found.n_probes, 'probe')}: {word}."
    )


def confirmations(comparison: Comparison | None, verdict: Verdict) -> list[Confirmation]:
    """Return every confirmation of the comparison and its rules, once."""
    found: Sequence[Confirmation] = comparison.confirmations if comparison else ()
    unique = list(found)
    for rule in verdict.rules:
        if rule.confirmation is not None and rule.confirmation not in unique:
            unique.append(rule.confirmation)
    return unique


def to_settle(verdict: Verdict) -> list[tuple[str, str]]:
    """Return (where, what is needed) of every INCONCLUSIVE rule that can be settled."""
    return [
        (where_rule(found), clip(found.needed, SENTENCE_WIDTH))
        for found in verdict.rules
        if found.outcome is Outcome.INCONCLUSIVE and found.needed
    ]
