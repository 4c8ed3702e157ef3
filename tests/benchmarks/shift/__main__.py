"""Run the benchmark: `python -m tests.benchmarks.shift`; what is in the cache is not computed again."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from audit.report.measured import RATES
from tests.benchmarks.shift import text, vision
from tests.benchmarks.shift.collect import collect
from tests.benchmarks.shift.page import to_page, write_rates
from tests.benchmarks.shift.run import measure

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
    results = collect(families, given.cache, heading())
    PAGE.write_text(to_page(results), encoding="utf-8")
    write_rates(results.both, RATES, results.heading)
    print(PAGE)


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
