"""How tasks and flows end: a user's error is one line, not a traceback; only passing trouble is retried."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Failed

from audit.errors import AuditError

P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = [2.0, 20.0]
"""Seconds before the first and the second retry."""


def step(name: str, run_name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a function as a task that is retried while its trouble may pass, and never cached.

    Parameters
    ----------
    name : str
    run_name : str
        May name parameters of the function: ``"capture {role}"``.

    Returns
    -------
    callable
        A decorator. The decorated function returns and raises what the function does.
    """
    as_task = task(
        name=name,
        task_run_name=run_name,
        cache_policy=NO_CACHE,
        retries=len(RETRY_SECONDS),
        retry_delay_seconds=RETRY_SECONDS,
        retry_condition_fn=is_passing_trouble,
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        made: Any = as_task(fails_in_one_line(function))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, made(*args, **kwargs, return_state=True).result())

        return call

    return decorate


def fails_in_one_line(function: Callable[P, R]) -> Callable[P, R]:
    """Let a task or flow end in state Failed with the message of its AuditError.

    Prefect logs a traceback for an exception that leaves a task; a state that is returned it logs as one
    line. The caller still gets the AuditError itself, which the state holds.
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except AuditError as error:
            return Failed(message=str(error), data=error)  # type: ignore[return-value]

    return wrapper


def is_passing_trouble(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Return whether the same call may succeed a little later: a disk, network or memory that was busy.

    An AuditError needs a person, and any other exception is a bug; neither goes away by itself.
    """
    error = state.result(raise_on_failure=False)
    return isinstance(error, OSError | MemoryError) or type(error).__name__ == "OutOfMemoryError"
