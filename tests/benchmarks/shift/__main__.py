"""Run the benchmark: `python -m tests.benchmarks.shift`; what is in the cache is not computed again."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from audit.config import MethodSection
from audit.report.measured import RATES
from tests.benchmarks.shift import text, vision
from tests.benchmarks.shift.families import Family
from tests.benchmarks.shift.findings import Findings, findings_of
from tests.benchmarks.shift.maps import METHODS, Judged
from tests.benchmarks.shift.page import Results, to_page, write_rates
from tests.benchmarks.shift.run import FROZEN, SCORED, Measured, bases_of, measure
from tests.benchmarks.shift.summary import Summary, missed_goals, summarise

PAGE = Path(__file__).parents[1] / "SHIFT.md"
CACHE = Path(__file__).parents[3] / "data" / "store" / "benchmark-shift"


def main() -> None:
    """Measure what is missing, then write the page and the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--only-tables", action="store_true", help="use what is there, measure nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    families = [vision.make_family(), text.make_family()]
    started = time.monotonic()
    for line in () if given.only_tables else measure(families, given.cache):
        print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr, flush=True)
    results = collect(families, given.cache)
    PAGE.write_text(to_page(results), encoding="utf-8")
    write_rates(results.both, RATES, results.heading)
    print(PAGE)


def collect(families: Sequence[Family], cache: Path) -> Results:
    """Return the rows of everything in the cache."""
    scored, both, frozen = [], [], []
    for method in METHODS:
        kept: list[Findings] = []
        harmless: list[Findings] = []
        for family in families:
            counted = _findings(family, cache, method, range(SCORED), gate=True)
            held = _findings(family, cache, method, range(SCORED, SCORED + FROZEN), gate=False)
            if counted:
                scored.append(summarise(method.label, family.name, counted, frozen=held))
            if held:
                frozen.append(summarise(method.label, family.name, held))
            kept, harmless = kept + counted, harmless + held
        if len(method.families) == len(families) and kept:
            both.append(summarise(method.label, "both", kept))
        if harmless:
            frozen.append(summarise(method.label, "both", harmless))
    chosen = choose([row for row in frozen if row.family == "both"] or both)
    return Results(heading(), scored, both, frozen, chosen, str(MethodSection().name))


def _findings(family: Family, cache: Path, method: Judged, numbers: range, *, gate: bool) -> list[Findings]:
    bases = [one for one in bases_of(family, cache, numbers) if _measured(one, method)]
    return [findings_of(family, one.shares(method), one.truths(), gate=gate) for one in bases]


def _measured(base: Measured, method: Judged) -> bool:
    return base.has(method) and base.has_truths()


def choose(rows: Sequence[Summary]) -> str:
    """Return the method that misses the fewest goals, then the best localised, correlated and powerful."""
    best = min(
        rows,
        key=lambda row: (
            len(missed_goals(row)),
            -round(row.located.value, 2),
            -round(row.correlation, 2),
            -row.power["seed"].value,
        ),
    )
    return best.method


def heading() -> str:
    """Return date, machine and versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "scipy"))
    return (
        f"{date.today()}, {_processor()}, 1 thread of {os.cpu_count()} processors, {versions}, Python "
        f"{platform.python_version()}."
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
