"""Progress bars on standard error, and results on standard output."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
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
        yield _line_per_stage()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
    stages: dict[str, object] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages[stage] = bars.add_task(stage, total=total)
        bars.update(stages[stage], completed=done, total=total)  # type: ignore[arg-type]

    with bars:
        yield report


def _line_per_stage() -> Progress:
    """Return a callback that prints one line whenever a stage comes to its end."""
    finished: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if done < total:
            finished.discard(stage)
        elif stage not in finished:
            finished.add(stage)
            print(f"{stage}: {total}/{total}", file=sys.stderr, flush=True)

    return report


def say(text: str) -> None:
    """Print a result on standard output; a reader that has gone away (``| head``) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Print a remark on standard error."""
    print(text, file=sys.stderr, flush=True)


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
