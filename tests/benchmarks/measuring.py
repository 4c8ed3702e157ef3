"""What the benchmarks share: clocks, peak memory, and the page that they write."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from audit.capture.attention.scratch import Scratch

RESULTS = Path(__file__).with_name("RESULTS.md")
MEGABYTE = 2**20
SHARED = os.getloadavg()[0] > (os.cpu_count() or 1)
"""Whether the machine is at work on something else, so that time on the wall says little."""
INTRODUCTION = """# Measured speed and memory

Written by `make bench`, a section by each file of tests/benchmarks. Ratios are to the plain fused forward
passes just before and after: medians, with the lowest and highest. Memory is the median peak of the process
above that of these passes, and scatters by some tens of MB; what an engine keeps from one batch to the next
counts, and is there already from the second round on, as from a run's second batch. Random weights, float32.
"""
TABLE = [
    "| case | engine | ratio (lowest–highest) | rounds | memory above plain | goal |",
    "|---|---|---|---|---|---|",
]


class HasScratch(Protocol):
    """What an engine is measured on."""

    scratch: Scratch


Subject = TypeVar("Subject", bound=HasScratch)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes: on the wall, or of this process on a machine that is shared."""
    clock = time.process_time if SHARED else time.perf_counter
    start = clock()
    work()
    return clock() - start


def watched(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that `work` takes, and by how many MB the process's resident memory rises."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = timed(work)
    return seconds, (status("VmHWM") - before) / MEGABYTE


def status(name: str) -> int:
    """Return a number of bytes from the process's status, such as VmHWM, the highest resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def children_time() -> float:
    """Return the CPU seconds of this process's finished children."""
    times = os.times()
    return times.children_user + times.children_system


def exponent(sizes: tuple[int, ...], values: list[float]) -> float:
    """Return p of the power law size^p that fits `values` best on logarithmic scales.

    Examples
    --------
    >>> round(exponent((1, 2, 4), [3.0, 12.0, 48.0]), 9)
    2.0
    """
    slope = statistics.linear_regression(
        [torch.tensor(float(size)).log().item() for size in sizes],
        [torch.tensor(value).log().item() for value in values],
    ).slope
    return float(slope)


def machine() -> str:
    """Return one line that says where and how a section was measured."""
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    shared = (
        "The machine was shared, so times are CPU time of this process."
        if SHARED
        else "Times are time on the wall."
    )
    return (
        f"{date.today()}, {processor}, {torch.get_num_threads()} threads of {os.cpu_count()} processors, "
        f"torch {torch.__version__}, Python {platform.python_version()}; load average at the start "
        f"{os.getloadavg()[0]:.1f}. {shared}"
    )


@dataclass
class Section:
    """One part of the page, written anew as soon as its benchmark notes its first line."""

    title: str
    table: bool = False
    lines: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        """Print a line and put it on the page."""
        if not self.lines:
            self.lines += [machine(), "", *(TABLE if self.table else [])]
        print(line)
        self.lines.append(line)
        page = RESULTS.read_text() if RESULTS.is_file() else ""
        RESULTS.write_text(replaced(page, self.title, "\n".join(self.lines)))

    def measure(
        self,
        name: str,
        one: Subject,
        plain: Callable[[Subject], object],
        engines: dict[str, tuple[Callable[[Subject], object], str]],
        rounds: int,
    ) -> None:
        """Time engines in turns, each between two plain passes, so that a slower minute hits all three."""
        ratios: dict[str, list[float]] = {engine: [] for engine in engines}
        memory: dict[str, list[float]] = {engine: [] for engine in engines}
        rooms = {engine: Scratch() for engine in engines}
        before = watched(lambda: plain(one))
        for _ in range(rounds):
            for engine, (run, _) in engines.items():
                one.scratch = rooms[engine]
                kept = rooms[engine].nbytes / MEGABYTE
                seconds, peak = watched(lambda run=run: run(one))  # type: ignore[misc]
                after = watched(lambda: plain(one))
                ratios[engine].append(2 * seconds / (before[0] + after[0]))
                memory[engine].append(kept + peak - (before[1] + after[1]) / 2)
                before = after
        for engine, (_, goal) in engines.items():
            found = ratios[engine]
            self.note(
                f"| {name} | {engine} | {statistics.median(found):.2f}× ({min(found):.2f}–{max(found):.2f}) "
                f"| {rounds} | {statistics.median(memory[engine]):+,.0f} MB | {goal or '–'} |"
            )


def replaced(page: str, title: str, body: str) -> str:
    """Return the page with the section `title` as `body`; other sections stay as they are.

    Examples
    --------
    >>> page = replaced(replaced("", "A", "one"), "B", "two")
    >>> replaced(page, "A", "three") == replaced(replaced("", "A", "three"), "B", "two")
    True
    """
    sections = dict(re.findall(r"^## (.+?)\n\n(.*?)\s*(?=^## |\Z)", page, flags=re.M | re.S))
    sections[title] = body
    return "\n".join([INTRODUCTION, *(f"## {name}\n\n{text}\n" for name, text in sections.items())])
