"""What was compared, what the predictions did, and the caveats, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from audit.records import STRONG_KINDS, Comparison, Policy, RunRef, Verdict
from audit.report.context import ReportContext
from audit.report.rows import by_size, full_sentence, other_shifts
from audit.report.wording import clip, count, finite, number, quantity

VALUE_WIDTH = 120
UNJUDGED_SHOWN = 4
_COUNTS = {
    "changed": "changed class",
    "newly_wrong": "became wrong",
    "fixed": "became right",
}


def checkpoint(ref: RunRef | None, fallback: str) -> str:
    """Return the name of a run's checkpoint."""
    return clip(short(ref.checkpoint), VALUE_WIDTH) if ref is not None else fallback


def short(ref: str) -> str:
    """Return the last two parts of an absolute path, anything else as it is; the report's end has all.

    Examples
    --------
    >>> short("/srv/models/reviews/release-7"), short("acme/reviews")
    ('…/reviews/release-7', 'acme/reviews')
    """
    parts = PurePath(ref).parts
    return f"…/{'/'.join(parts[-2:])}" if len(parts) > 3 and PurePath(ref).is_absolute() else ref


def replicates(comparison: Comparison) -> str:
    """Return number and kinds of the replicates, with a warning for weak kinds.

    Examples
    --------
    >>> replicates(Comparison("paired", (), 0.05, 10, replicate_kinds=("seed", "seed", "tail")))
    '3 replicates (2 seed, 1 tail; tail understates the spread)'
    """
    kinds = comparison.replicate_kinds or tuple(ref.kind or "seed" for ref in comparison.replicates)
    most = max([len(kinds), *(len(cell.replicates) for cell in comparison.cells)], default=0)
    if not most:
        return "no replicates: no noise floor"
    tally = [f"{kinds.count(kind)} {clip(kind, 20)}" for kind in dict.fromkeys(kinds)]
    weak = [clip(kind, 20) for kind in dict.fromkeys(kinds) if kind not in STRONG_KINDS]
    verb = "understates" if len(weak) == 1 else "understate"
    note = f"; {', '.join(weak)} {verb} the spread" if weak else ""
    return count(most, "replicate") + (f" ({', '.join(tally)}{note})" if tally else "")


def compared(comparison: Comparison | None) -> str:
    """Return one line: which checkpoints, how many probes, method and replicates."""
    if comparison is None:
        return "No comparison was made."
    groups = f" in {count(comparison.n_clusters, 'group')}" if comparison.n_clusters is not None else ""
    pair = f"{checkpoint(comparison.before, 'before')} → {checkpoint(comparison.after, 'after')}"
    return (
        f"{pair}: {count(comparison.n_probes, 'probe')}{groups}, {comparison.kind}, "
        f"method {clip(comparison.method, VALUE_WIDTH)}, {replicates(comparison)}"
    )


def level(comparison: Comparison | None, verdict: Verdict | None) -> str:
    """Return the level of the intervals, 1 - 2 alpha, as per cent.

    Examples
    --------
    >>> from audit.records import Outcome, Policy
    >>> level(None, Verdict(Outcome.PASS, (), "", 0, Policy((), alpha=0.05)))
    '90%'
    """
    policy = verdict.policy if verdict is not None else Policy(())
    alpha = comparison.alpha if comparison is not None else policy.alpha
    return f"{100 * (1 - 2 * alpha):.4g}%"


def units(comparison: Comparison | None, verdict: Verdict | None) -> str:
    """Return how to read the numbers of the tables."""
    power = (verdict.policy if verdict is not None else Policy(())).power
    return (
        "Shares and shifts are fractions of the content mass (.05 is 5%), those of 'special' and 'first' of "
        f"the whole mass; {level(comparison, verdict)} intervals in brackets. Noise floor: mean ± SD of the "
        f"replicates. Detectable: smallest shift that the replicates can reveal at {100 * power:.3g}% power."
    )


def predictions(comparison: Comparison | None) -> list[str]:
    """Return what happened to the predictions, one line a fact.

    ``n``, ``changed``, ``newly_wrong``, ``fixed``, ``accuracy_before`` and ``accuracy_after``
    are put into sentences; other plain values are listed by their names.

    Examples
    --------
    >>> facts = {"n": 400, "changed": 12, "accuracy_before": 0.95, "accuracy_after": 0.98}
    >>> predictions(Comparison("paired", (), 0.05, 400, predictions=facts))
    ['12 of 400 predictions changed class.', 'Accuracy .950 → .980.']
    """
    facts = comparison.predictions if comparison is not None else {}
    lines = _counted(facts)
    if "accuracy_before" in facts or "accuracy_after" in facts:
        lines.append(
            f"Accuracy {_share(facts.get('accuracy_before'))} → {_share(facts.get('accuracy_after'))}."
        )
    known = {"n", *_COUNTS, "accuracy_before", "accuracy_after"}
    rest = [(k, v) for k, v in facts.items() if k not in known and isinstance(v, str | int | float)]
    return lines + [clip(f"{key.replace('_', ' ')}: {plain(value)}", VALUE_WIDTH) for key, value in rest[:12]]


def _counted(facts: Mapping[str, Any]) -> list[str]:
    parts = [f"{int(facts[key]):,} {word}" for key, word in _COUNTS.items() if finite(facts.get(key))]
    if not parts:
        return []
    total = f" of {int(facts['n']):,} predictions" if finite(facts.get("n")) else ""
    number, _, rest = parts[0].partition(" ")
    return [", ".join([f"{number}{total} {rest}", *parts[1:]]) + "."]


def _share(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and finite(value) else "unknown"


def prediction_changes(comparison: Comparison | None) -> list[Mapping[str, Any]]:
    """Return the listed changes: mappings with ``probe_id``, ``before``, ``after`` and ``label``."""
    listed = comparison.predictions.get("changes", ()) if comparison is not None else ()
    return [change for change in listed if isinstance(change, Mapping)]


def plain(value: Any) -> str:
    """Return a setting's value on one line."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def caveats(comparison: Comparison | None, verdict: Verdict | None) -> list[str]:
    """Return what lowers the weight of this verdict: mismatches, allowances, identical maps, gaps."""
    lines = []
    if verdict is not None and verdict.reason and verdict.reason not in verdict.sentence:
        lines.append(verdict.reason)
    if verdict is not None and verdict.allowed:
        lines.append(f"Allowed by the caller: {', '.join(verdict.allowed)}.")
    said = verdict.sentence if verdict is not None else ""
    if comparison is not None and comparison.mismatches and "differ in" not in said:
        lines.append(f"The runs differ in {', '.join(comparison.mismatches)}.")
    if comparison is not None and comparison.identical_maps and "identical" not in said:
        lines.append(_identical(comparison))
    if comparison is not None:
        lines += comparison.alignment
    if verdict is not None and (gap := unjudged(comparison, verdict)):
        lines.append(gap)
    return [clip(full_sentence(line), 600) for line in lines]


def unjudged(comparison: Comparison | None, verdict: Verdict) -> str:
    """Return which regions that no rule judges moved as an excess rule would fail, or nothing.

    The test of an excess rule, with Holm's correction over these regions, only where such a rule could fail:
    enough replicates, all of a strong kind, of runs that do not differ otherwise.
    """
    if comparison is None or not verdict.rules or comparison.mismatches or comparison.alignment:
        return ""
    policy, kinds = verdict.policy, comparison.replicate_kinds
    if len(kinds) < policy.min_replicates or not set(kinds) <= set(STRONG_KINDS):
        return ""
    cells = other_shifts(comparison, verdict)
    tests = [(one, one.excess.pvalue, one.excess.excess) for one in cells if one.excess is not None]
    ordered = sorted(
        ((c, p, x) for c, p, x in tests if p is not None and x is not None), key=lambda one: one[1]
    )
    adjusted = ((c, p * (len(ordered) - rank), x) for rank, (c, p, x) in enumerate(ordered))
    rejected = takewhile(lambda one: one[1] <= policy.alpha, adjusted)
    found = by_size(cell for cell, _, excess in rejected if abs(excess) >= policy.effect_floor)
    named = [f"'{clip(c.region, 40)}' ({quantity('shift', c.value)})" for c in found[:UNJUDGED_SHOWN]]
    if not named:
        return ""
    more = f" and {len(found) - len(named)} more" if len(found) > len(named) else ""
    return (
        f"No rule judges {', '.join(named)}{more}, which moved by more than harmless re-training explains; "
        'an excess rule on region = "*" would.'
    )


def _identical(comparison: Comparison) -> str:
    if comparison.same_weights:
        return "Same checkpoint: the weights are equal, and so are the maps."
    return (
        "Identical maps: nothing that this method can see changed; a changed head, value path or "
        "feed-forward is invisible to attention."
    )


def footer(context: ReportContext | None) -> tuple[str, ...]:
    """Return the log's lines and the notes of the caller."""
    if context is None:
        return ()
    lines = (*context.log_lines, *context.notes)
    return tuple(clip(line, 600) for line in lines[:40])
