"""Progress bars on standard error, and results on standard output."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from audit.pipeline.plan import Progress


@contextmanager
def progress_bars(*, enabled: bool = True) -> Iterator[Progress | None]:
    """Yield a callback that draws one bar with its ETA for each stage on standard error.

    Where standard error is no terminal, each finished stage is one line instead.
    """
    if not enabled:
        yield None
        return
    if not sys.stderr.isatty():
        yield _line_per_stage(note)
        return
    with _bars() as report:
        yield report


@contextmanager
def _bars() -> Iterator[Progress]:
    """Yield a callback that keeps the bars of running stages below one line for each finished stage."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True))
    running: dict[str, TaskID] = {}
    finish = _line_per_stage(bars.console.print)

    def report(stage: str, done: int, total: int) -> None:
        stage = shown(stage)
        finish(stage, done, total)
        if done < total:
            task = running.get(stage)
            running[stage] = bars.add_task(stage, total=total) if task is None else task
            bars.update(running[stage], completed=done, total=total)
        elif stage in running:
            bars.remove_task(running.pop(stage))

    with bars:
        yield report


def _line_per_stage(print_line: Callable[[str], None]) -> Progress:
    """Return a callback that prints one line, with its seconds, whenever a stage comes to its end."""
    started: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        begun = started.setdefault(stage, time.monotonic())
        if done >= total and begun >= 0:
            started[stage] = -1.0  # its end is told once
            print_line(f"{stage:<36} {total}/{total}  {time.monotonic() - begun:.0f} s")
        elif done < total and begun < 0:
            started[stage] = time.monotonic()

    return report


def shown(text: str) -> str:
    r"""Return `text` with everything that could steer a terminal made visible; lines and tabs stay.

    Texts of approvals, files and child processes reach the terminal through here alone.

    Examples
    --------
    >>> shown("a\x1b[31m\nb\tc")
    'a␛[31m\nb\tc'
    """
    from audit.report.wording import clean

    return "".join(part if part in "\n\t" else clean(part) for part in re.split(r"([\n\t])", text))


def say(text: str) -> None:
    """Print a result on standard output; a reader that has gone away (``| head``) is no error."""
    try:
        print(shown(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print a remark on standard error."""
    print(shown(text), file=sys.stderr, flush=True)


class _Remarks(logging.Handler):
    """Prints what the pipeline logs; looks up standard error anew, so that bars stay below the text."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"audit: {record.getMessage()}")


def show_remarks() -> None:
    """Print what the package logs on standard error, once."""
    log = logging.getLogger("audit")
    if not any(isinstance(handler, _Remarks) for handler in log.handlers):
        log.addHandler(_Remarks())
        log.propagate = False
    log.setLevel(logging.INFO)
