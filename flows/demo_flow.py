"""The demo as one Prefect flow: train, plant a shortcut, audit, and show the verdicts."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow

from audit.config import load_config
from audit.pipeline import Progress, write_html
from audit.report import compare_table
from audit.store import Store
from flows.audit_flow import audit_flow, stored_verdict
from flows.outcomes import fails_in_one_line, step
from flows.progress import PROGRESS, quiet_console, run_progress
from flows.server import prefect_api

STORIES = ("vision", "vision-benign", "vision-domain", "text", "text-benign", "text-domain")
"""Audits of the demo, in the order of the final table; each has data/demo/<name>.toml."""


@dataclass(frozen=True)
class DemoSummary:
    """What the demo ends with."""

    rows: tuple[dict[str, Any], ...]
    lines: tuple[str, ...]
    seconds: float
    store: str

    def as_text(self) -> str:
        """Return the final table and where to look next."""
        table = compare_table(self.rows)
        return "\n".join([table, *self.lines])

    def as_dict(self) -> dict[str, Any]:
        """Return the same as JSON-able values."""
        return {
            "audits": [
                {
                    "name": row["name"],
                    "outcome": str(row["verdict"].outcome),
                    "sentence": row["verdict"].sentence,
                    "comparison": row["verdict"].comparison_id,
                    "report": row["report"],
                }
                for row in self.rows
            ],
            "seconds": self.seconds,
            "store": self.store,
        }


@step("train checkpoints", "train {modality}")
def train_task(modality: str, root: str) -> tuple[str, ...]:
    """Train or reuse the checkpoints of one modality, write its configurations, and tell its story."""
    from audit import demo

    ensure = {"vision": demo.ensure_vision, "text": demo.ensure_text}[modality]
    trained = ensure(Path(root), progress=run_progress())
    demo.write_configs(trained, Path(root) / "demo")
    return trained.story_lines()


@flow(name="rollout-audit-demo", flow_run_name="demo", persist_result=False)
@fails_in_one_line
def demo_flow(root: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Train both modalities, then run every audit of :data:`STORIES` as a sub-flow.

    Returns
    -------
    comparisons : dict
        Name of the audit → id of its comparison.
    story : tuple of str
        What was trained, line by line.
    """
    story = train_task("vision", root) + train_task("text", root)
    return {name: _audit(Path(root), name) for name in STORIES}, story


def _audit(root: Path, name: str) -> str:
    """Run one audit with its name before each stage; return the id of its comparison."""
    progress = PROGRESS.get()
    if progress is None:
        return audit_flow(str(config_of(root, name)))
    token = PROGRESS.set(lambda stage, done, total: progress(f"{name}: {stage}", done, total))
    try:
        return audit_flow(str(config_of(root, name)))
    finally:
        PROGRESS.reset(token)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: for models this small a second one only waits for the first."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def config_of(root: Path, name: str) -> Path:
    """Return where the configuration of one audit of the demo is."""
    return root.resolve() / "demo" / f"{name}.toml"


def run_demo(root: Path, *, progress: Progress | None = None) -> DemoSummary:
    """Run the demo below `root` and return what a user should see.

    Parameters
    ----------
    root : Path
        Holds ``demo/`` (configurations, probes, reports) and ``store/`` (runs, cached checkpoints).
    progress : callable, optional

    Returns
    -------
    DemoSummary
    """
    started = time.monotonic()
    store = Store(root.resolve() / "store")
    known = set(store.run_ids())
    token = PROGRESS.set(progress)
    try:
        with quiet_console(), prefect_api(), _one_thread():
            comparisons, story = demo_flow(str(root.resolve()))
    finally:
        PROGRESS.reset(token)
    rows = tuple(_row(root, name, identifier) for name, identifier in comparisons.items())
    seconds = time.monotonic() - started
    lines = (*story, _runs_line(known, set(store.run_ids())), *_next_steps(root, seconds))
    return DemoSummary(rows=rows, lines=lines, seconds=seconds, store=str(root / "store"))


def _row(root: Path, name: str, identifier: str) -> dict[str, Any]:
    config = load_config(config_of(root, name))
    store = Store(config.store.url)
    comparison, verdict = store.comparison(identifier), stored_verdict(store, identifier)
    path = write_html(store, comparison, verdict, root / "demo" / "reports" / f"{name}.html", config=config)
    return {"name": name, "verdict": verdict, "comparison": comparison, "report": str(path)}


def _runs_line(before: set[str], after: set[str]) -> str:
    new = len(after - before)
    return (
        f"audits: captured {new} runs, reused {len(before)}"
        if new
        else f"audits: reused all {len(after)} runs"
    )


def command() -> str:
    """Return how the command is called from here: by its name where the shell finds it, else by its path."""
    beside = Path(sys.executable).with_name("audit")
    if shutil.which("audit") or not beside.exists():
        return "audit"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def _next_steps(root: Path, seconds: float) -> tuple[str, ...]:
    audit = command()
    return (
        "",
        f"Reports:    {root}/demo/reports/*.html",
        f"By hand:    {audit} run {root}/demo/vision.toml",
        f"Dashboard:  {audit} dashboard --store {root}/store --config {root}/demo/vision.toml "
        f"--config {root}/demo/text.toml",
        f"Took {seconds:.0f} s.",
    )
