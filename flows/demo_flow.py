"""The demo as one Prefect flow: train, plant a shortcut, audit, and show the verdicts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")  # the bars tell the story

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from audit.config import load_config
from audit.pipeline import Progress, write_html
from audit.records import Verdict
from audit.report import compare_table
from audit.store import Store
from flows.audit_flow import audit_flow
from flows.progress import PROGRESS

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


@task(name="train {modality}", task_run_name="train {modality}", cache_policy=NO_CACHE)
def train_task(modality: str, root: Path) -> Any:
    """Train or reuse the checkpoints of one modality and write its configurations."""
    from audit import demo

    ensure: Callable[..., Any] = {"vision": demo.ensure_vision, "text": demo.ensure_text}[modality]
    trained = ensure(root, progress=PROGRESS.get())
    demo.write_configs(trained, root / "demo")
    return trained


@flow(name="rollout-audit-demo", persist_result=False)
def demo_flow(root: Path) -> tuple[dict[str, Verdict], tuple[Any, Any]]:
    """Train both modalities, then run every audit of :data:`STORIES` as a sub-flow."""
    trained = (train_task("vision", root), train_task("text", root))
    verdicts = {name: audit_flow(str((root / "demo" / f"{name}.toml").resolve())) for name in STORIES}
    return verdicts, trained


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
    token = PROGRESS.set(progress)
    try:
        verdicts, trained = demo_flow(root.resolve())
    finally:
        PROGRESS.reset(token)
    rows = tuple(_row(root, name, verdict) for name, verdict in verdicts.items())
    seconds = time.monotonic() - started
    lines = tuple(line for one in trained for line in one.story_lines()) + _next_steps(root, seconds)
    return DemoSummary(rows=rows, lines=lines, seconds=seconds, store=str(root / "store"))


def _row(root: Path, name: str, verdict: Verdict) -> dict[str, Any]:
    config = load_config(root / "demo" / f"{name}.toml")
    store = Store(config.store.url)
    comparison = store.comparison(str(verdict.comparison_id))
    path = write_html(store, comparison, verdict, root / "demo" / "reports" / f"{name}.html", config=config)
    return {"name": name, "verdict": verdict, "comparison": comparison, "report": str(path)}


def _next_steps(root: Path, seconds: float) -> tuple[str, ...]:
    return (
        "",
        f"Reports:    {root}/demo/reports/*.html",
        f"By hand:    audit run {root}/demo/vision.toml",
        f"Dashboard:  audit dashboard --store {root}/store --config {root}/demo/vision.toml "
        f"--config {root}/demo/text.toml",
        f"Took {seconds:.0f} s.",
    )
