"""From the cache to the rows of the page, and the choice of the best method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from audit.records import Method
from tests.benchmarks.shift.families import Family
from tests.benchmarks.shift.findings import Findings, findings_of
from tests.benchmarks.shift.maps import METHODS, Judged
from tests.benchmarks.shift.page import BOTH, Results
from tests.benchmarks.shift.run import FROZEN, SCORED, bases_of
from tests.benchmarks.shift.summary import Summary, missed_goals, over_families, summarise

Found = Mapping[str, list[Findings]]


def collect(families: Sequence[Family], cache: Path, heading: str) -> Results:
    """Return the rows of everything that the cache holds."""
    scored: list[Summary] = []
    both: list[Summary] = []
    frozen: list[Summary] = []
    counts: dict[str, int] = {}
    for method in METHODS:
        counted = _found(families, cache, method, range(SCORED), gate=True)
        held = _found(families, cache, method, range(SCORED, SCORED + FROZEN), gate=False)
        rows = [
            summarise(method.label, name, some, frozen=held.get(name, [])) for name, some in counted.items()
        ]
        scored += rows
        counts = {name: len(some) for name, some in held.items()} if method is METHODS[0] else counts
        both += _joined(method, counted, rows)
        frozen += _joined(method, held, [summarise(method.label, name, some) for name, some in held.items()])
    chosen = choose(frozen) if frozen else "undecided"
    return Results(heading, scored, both, frozen, counts, chosen, Method.name)


def _found(families: Sequence[Family], cache: Path, method: Judged, numbers: range, *, gate: bool) -> Found:
    """Return the findings of a method by family, without families that have none."""
    found = {}
    for family in families:
        bases = [one for one in bases_of(family, cache, numbers) if one.has(method) and one.has_truths()]
        if bases:
            found[family.name] = [
                findings_of(family, one.shares(method), one.truths(), gate=gate, sink_gain=one.sink_gain())
                for one in bases
            ]
    return found


def _joined(method: Judged, found: Found, rows: Sequence[Summary]) -> list[Summary]:
    """Return the row over all families, where more than one was measured."""
    if len(rows) < 2:
        return []
    every = list(chain.from_iterable(found.values()))
    return [over_families(summarise(method.label, BOTH, every), rows)]


def choose(rows: Sequence[Summary]) -> str:
    """Return, of the methods with most bases, the one that misses fewest goals, then the best localised."""
    most = max(row.bases for row in rows)
    return min(
        (row for row in rows if row.bases == most),
        key=lambda row: (
            len(missed_goals(row)),
            -round(row.located.value, 2),
            -round(row.correlation, 2),
            -row.power["seed"].value,
        ),
    ).method
