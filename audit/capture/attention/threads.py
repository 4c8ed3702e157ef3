"""Hooks that act for one thread alone: others may use the same model meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def own_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return `hook` so that it does nothing on any thread but the one that calls this function.

    Examples
    --------
    >>> seen = []
    >>> note = own_thread(seen.append)
    >>> thread = threading.Thread(target=note, args=["other"]); thread.start(); thread.join()
    >>> note("own")
    >>> seen
    ['own']
    """
    thread = threading.get_ident()

    def guarded(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return guarded
