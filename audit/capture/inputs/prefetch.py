"""Prepare the next probes while the model is at work on these."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def prefetched(items: Iterator[Item]) -> Iterator[Item]:
    """Yield `items` in order, each made in another thread while the one before is in use.

    Decoding of images and sound, tokenizers and tensor operations leave the interpreter's lock, so that
    they cost little time beside a model that is at work. One item is made ahead, never more.

    Parameters
    ----------
    items : iterator
        Not used by anyone else meanwhile. What it raises is raised here, in its place.

    Examples
    --------
    >>> list(prefetched(iter([1, 2, 3])))
    [1, 2, 3]
    """
    end = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as pool:
        ahead = pool.submit(next, items, end)
        while (item := ahead.result()) is not end:
            ahead = pool.submit(next, items, end)
            yield item  # type: ignore[misc]
