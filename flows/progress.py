"""Hand the caller's progress bars to tasks: Prefect copies context variables into its threads."""

from __future__ import annotations

from contextvars import ContextVar

from audit.pipeline import Progress

PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)
