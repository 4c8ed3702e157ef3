"""What was measured of the maps' faithfulness, as sentences and as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

from audit.records import Advantage, Comparison, Faithfulness
from audit.report.wording import MISSING, clip, count, finite, number, quantity, span

NAME_WIDTH = 80
SENTENCE_WIDTH = 600
PARTS = ("1 %", "5 %", "10 %", "20 %", "50 %")


@dataclass(frozen=True)
class FaithfulRow:
    """One method on one checkpoint, as it is printed."""

    checkpoint: str
    method: str
    verdict: str
    deletion: str
    insertion: str
    comprehensiveness: str
    sufficiency: str
    agreement: str
    shuffled: str
    diagnostics: str
    probes: str


def faithful_rows(comparison: Comparison | None) -> list[FaithfulRow]:
    """Return a row for each method on each checkpoint, the audited method first."""
    return [_row(one) for one in _ordered(comparison)]


def faithful_sentences(comparison: Comparison | None) -> list[str]:
    """Return a sentence about the audited method on each checkpoint.

    Examples
    --------
    >>> one = Faithfulness("after", "rollout", True, True, deletion=Advantage(2.0, 1.5, 0.5, (0.4, 0.6)))
    >>> faithful_sentences(Comparison("paired", (), 0.05, 9, faithfulness=(one,)))[0][:70]
    'After: the map of rollout orders positions better than chance (deletio'
    """
    return [clip(_sentence(one), SENTENCE_WIDTH) for one in _ordered(comparison) if one.audited]


def _ordered(comparison: Comparison | None) -> list[Faithfulness]:
    found = () if comparison is None else comparison.faithfulness
    return sorted(found, key=lambda one: (not one.audited, one.method))


def _sentence(one: Faithfulness) -> str:
    name = clip(one.method, NAME_WIDTH)
    head = (
        f"the map of {name} orders positions better than chance"
        if one.faithful
        else f"the map of {name} is not shown to be faithful: {one.reason}"
    )
    facts = [
        f"{kind} {_gain(getattr(one, kind))}" for kind in ("deletion", "insertion") if getattr(one, kind)
    ]
    if one.spearman:
        facts.append(f"rank correlation with {_agreement(one)}")
    if one.randomised:
        facts.append(f"with its map of shuffled weights {_shuffled(one)}")
    if diagnostics := _diagnostics(one):
        facts.append(diagnostics)
    facts.append(count(one.n_probes, "probe"))
    return f"{one.role.capitalize()}: {head} ({'; '.join(facts)})."


def _row(one: Faithfulness) -> FaithfulRow:
    return FaithfulRow(
        checkpoint=one.role,
        method=clip(one.method, NAME_WIDTH) + (" (audited)" if one.audited else ""),
        verdict="better than chance" if one.faithful else clip(one.reason or "not shown", SENTENCE_WIDTH),
        deletion=_areas(one.deletion),
        insertion=_areas(one.insertion),
        comprehensiveness=_against(one.comprehensiveness, one.random_comprehensiveness),
        sufficiency=_against(one.sufficiency, one.random_sufficiency),
        agreement=_agreement(one) or MISSING,
        shuffled=_shuffled(one) or MISSING,
        diagnostics=_diagnostics(one) or MISSING,
        probes=f"{one.n_probes:,}" + (f" ({one.n_missing:,} missing)" if one.n_missing else ""),
    )


def _gain(found: Advantage) -> str:
    gain = quantity("logit", found.value, like=found.interval)
    return f"{gain} {span('logit', found.interval)} over random orders".replace("  ", " ")


def _areas(found: Advantage | None) -> str:
    if found is None:
        return MISSING
    return f"{number(found.area, 2)} against {number(found.random, 2)}: {_gain(found)}"


def _against(own: tuple[float | None, ...], chance: tuple[float | None, ...]) -> str:
    parts = [
        f"{part}: {number(one, 2)} ({number(two, 2)})"
        for part, one, two in zip(PARTS, own, chance, strict=False)
        if finite(one) and finite(two)
    ]
    return ", ".join(parts) or MISSING


def _agreement(one: Faithfulness) -> str:
    known = [(name, value) for name, value in one.spearman.items() if finite(value)]
    return ", ".join(f"{clip(name, NAME_WIDTH)} {number(value, 2)}" for name, value in known)


def _shuffled(one: Faithfulness) -> str:
    return ", ".join(number(value, 2) if finite(value) else MISSING for value in one.randomised)


def _diagnostics(one: Faithfulness) -> str:
    parts = [
        f"sink {number(one.sink)}" if finite(one.sink) else "",
        f"depth collapse {number(one.depth_collapse)} bits" if finite(one.depth_collapse) else "",
    ]
    return ", ".join(part for part in parts if part)
