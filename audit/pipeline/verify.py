"""Check everything that is stored: hashes, the chain of the log, and the statistics themselves.

A comparison is computed again from the stored Parquet files, with its own seed and resamples, and judged
again by its own policy; a number that differs is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from audit.errors import AuditError, NothingEvaluatedError, StoreError
from audit.faithfulness import Score
from audit.gate import evaluate_gate
from audit.pipeline.compare import Statistics, compare_runs
from audit.pipeline.faithfulness import summary_of
from audit.pipeline.floor import as_frozen
from audit.pipeline.runs import RunData, read_run
from audit.records import Cell, Comparison, RunRef, Verdict
from audit.serialize import to_json
from audit.store import Store

TOLERANCE = 1e-9
"""Relative and absolute difference that another machine's rounding may leave."""

_SHOWN = 3

_RECOMPUTED = (
    "identical_maps",
    "same_weights",
    "mismatches",
    "predictions",
    "n_probes",
    "n_clusters",
    "alignment",
    "other_model",
)


@dataclass(frozen=True)
class Verification:
    """What was checked, what is wrong, and what could not be computed again here.

    Attributes
    ----------
    checked : tuple of str
        Runs and comparisons.
    recomputed : tuple of str
        Comparisons whose statistics and verdict came out as stored.
    problems, notes : tuple of str
        One line each; notes are no problems.
    """

    checked: tuple[str, ...]
    recomputed: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def verify_store(
    store: Store,
    names: Sequence[str] = (),
    *,
    recompute: bool = True,
    known_head: str | None = None,
) -> Verification:
    """Check runs and comparisons, the approvals and the log.

    Parameters
    ----------
    store : Store
    names : sequence of str
        Runs and comparisons; all when empty.
    recompute : bool
        Compute every comparison and its verdict again; False checks hashes alone.
    known_head : str, optional
        Digest of the log's head from a report: shows a log that was cut short.

    Returns
    -------
    Verification

    Raises
    ------
    NothingEvaluatedError
        When there is no store.
    """
    if not names and not any((store.root / part).is_dir() for part in ("runs", "comparisons", "log")):
        raise NothingEvaluatedError(
            f"{store.root} is no store: it holds no run, comparison or log; mend --store, or capture first"
        )
    names = tuple(names) or (*store.run_ids(), *store.comparison_ids())
    damaged = {name: store.verify(name) for name in names}
    problems = [problem for found in damaged.values() for problem in found]
    problems += _approval_problems(store) + store.verify_log(known_head)
    if not problems:
        problems += _lost(store) + _unlogged(store)
    recomputed, notes = [], []
    for name in names if recompute else ():
        if not name.startswith("cmp-") or damaged[name]:
            continue
        try:
            differences = _differences(store, name)
        except _CannotRecomputeError as reason:
            notes.append(f"{name}: not computed again, {reason}")
            continue
        except AuditError as error:
            differences = [str(error)]
        problems += differences
        recomputed += [name] if not differences else []
    return Verification(tuple(names), tuple(recomputed), tuple(dict.fromkeys(problems)), tuple(notes))


def _approval_problems(store: Store) -> list[str]:
    try:
        store.approvals()
    except StoreError as error:
        return [str(error)]
    return []


def _lost(store: Store) -> list[str]:
    """Return what the log recorded and never removed, but is not there."""
    removed = {e["payload"].get("id") for e in store.log() if e["kind"] == "gc"}
    approvals = {record["approval_id"] for record in store.approvals()}
    there = {"run": store.has_run, "comparison": store.has_comparison, "approval": approvals.__contains__}
    found = []
    for entry in store.log():
        name = entry["payload"].get(f"{entry['kind']}_id")
        if entry["kind"] in there and name not in removed and not there[entry["kind"]](name):
            found.append(f"{name} is recorded in the log but not in the store; restore it from a backup")
    return found


def _unlogged(store: Store) -> list[str]:
    """Return the verdicts that are stored but that the log does not tell of."""
    told = {entry["payload"]["comparison_id"] for entry in store.log() if entry["kind"] == "verdict"}
    return [
        f"{one['comparison_id']}: its verdict is not in the log, since an entry was removed or the audit was "
        "interrupted as it ended; gate it again, or restore the log from a backup"
        for one in store.comparisons()
        if one["outcome"] is not None and one["comparison_id"] not in told
    ]


class _CannotRecomputeError(Exception):
    """Says what is missing for computing a comparison again."""


def _differences(store: Store, name: str) -> list[str]:
    """Return how a comparison computed again differs from the stored one."""
    stored, verdict = store.comparison(name), store.verdict(name)
    again = recompute_comparison(store, stored)
    found = list(_cell_differences(stored.cells, again.cells))
    shown = [f"{name}: {one}" for one in found[:_SHOWN]]
    if len(found) > _SHOWN:
        shown.append(f"{name}: {len(found) - _SHOWN} more numbers differ from those computed again")
    for key in _RECOMPUTED:
        if not _same(to_json(getattr(stored, key)), to_json(getattr(again, key))):
            shown.append(f"{name}: {key} is stored as {getattr(stored, key)}, got {getattr(again, key)}")
    shown += [f"{name}: {one}" for one in _faithfulness_differences(store, name, stored)]
    if verdict is not None:
        shown += [f"{name}: {one}" for one in _verdict_differences(verdict, again)]
    return shown


def recompute_comparison(store: Store, stored: Comparison) -> Comparison:
    """Return a stored comparison computed again from its runs; what occlusion found is taken over."""
    settings = stored.settings
    frozen = settings.get("frozen", {})
    run = [_run(store, ref, frozen) for ref in (stored.before, stored.after, *stored.replicates)]
    domain = [read_run(store, name) for name in _known(store, settings.get("domain", ()))]
    again = compare_runs(
        run[0],
        run[1],
        replicates=run[2:],
        domain=(domain[0], domain[1], domain[2:]) if domain else None,
        paired=stored.kind == "paired",
        statistics=Statistics.of(stored),
    )
    return replace(
        again,
        confirmations=stored.confirmations,
        faithfulness=stored.faithfulness,
        settings=settings,
        id=stored.id,
    )


def _faithfulness_differences(store: Store, name: str, stored: Comparison) -> Iterator[str]:
    """Yield how what is told of faithfulness differs from what its scores of single probes give."""
    scores = [Score(**row) for row in store.comparison_faithfulness(name)]
    again = summary_of(scores, stored, store)
    if len(again) != len(stored.faithfulness):
        yield f"faithfulness of {len(stored.faithfulness)} maps is stored, computed again {len(again)}"
    for one, two in zip(stored.faithfulness, again, strict=False):
        old, new = to_json(one), to_json(two)
        for key in old:
            if not _same(old[key], new[key]):
                where = f"{key} of the faithfulness of {one.method} {one.role}"
                yield f"{where} is stored as {old[key]}, computed again it is {new[key]}"


def _run(store: Store, ref: RunRef | None, frozen: Mapping[str, str]) -> RunData:
    """Return a run of a comparison, with the numbers that a floor holds of it where it came from one."""
    if ref is None:
        raise _CannotRecomputeError("its maps were made elsewhere and are not in this store")
    _known(store, [ref.run_id])
    run = read_run(store, ref.run_id, kind=ref.kind)
    if ref.run_id not in frozen:
        return run
    (baseline,) = _known(store, [frozen[ref.run_id]])
    return as_frozen(run, read_run(store, baseline, layers=False))


def _known(store: Store, run_ids: Sequence[str]) -> Sequence[str]:
    missing = [name for name in run_ids if not store.has_run(name)]
    if missing:
        raise _CannotRecomputeError(
            f"{missing[0]} is not in this store (it came from a floor, or was removed)"
        )
    return run_ids


def _cell_differences(stored: Sequence[Cell], again: Sequence[Cell]) -> Iterator[str]:
    new = {_key(cell): cell for cell in again}
    for cell in stored:
        other = new.pop(_key(cell), None)
        where = " ".join(str(part) for part in _key(cell) if part is not None)
        if other is None:
            yield f"cell {where} is stored but is not computed from the runs"
            continue
        one, two = to_json(cell), to_json(other)
        for name in one:
            if not _same(one[name], two[name]):
                yield f"{name} of cell {where} is stored as {one[name]}, computed again it is {two[name]}"
    for key in new:
        yield f"cell {' '.join(str(part) for part in key if part is not None)} is computed but not stored"


def _key(cell: Cell) -> tuple[Any, ...]:
    return (cell.measure, cell.region, cell.stream, cell.layer, cell.effect, cell.segment)


def _same(one: Any, two: Any) -> bool:
    """Return whether JSON values agree up to rounding."""
    if isinstance(one, float | int) and isinstance(two, float | int):
        return math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[key], two[key]) for key in one)
    return bool(one == two)


def _verdict_differences(stored: Verdict, again: Comparison) -> Iterator[str]:
    judged = evaluate_gate(again, stored.policy)
    if (judged.status, judged.exit_code) != (stored.status, stored.exit_code):
        yield f"the verdict is stored as {stored.status}, judged again it is {judged.status}"
    elif judged.sentence != stored.sentence:
        yield f"the verdict says {stored.sentence!r}, judged again it says {judged.sentence!r}"
    for one, two in zip(stored.rules, judged.rules, strict=False):
        if one.outcome is not two.outcome:
            place = f"'{one.rule.label}' on {one.region}"
            yield f"rule {place} is stored as {one.outcome.value}, judged again it is {two.outcome.value}"
