"""The next item is made while one is in use, in order, and never more than one ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from audit.capture.inputs.prefetch import prefetched


def test_prefetched_makes_one_item_ahead_in_another_thread():
    made, threads, ready = [], set(), threading.Semaphore(0)

    def items() -> Iterator[int]:
        for i in range(5):
            made.append(i)
            threads.add(threading.get_ident())
            ready.release()
            yield i

    for i in prefetched(items()):
        for _ in range(2 if i == 0 else int(i < 4)):
            assert ready.acquire(timeout=10)  # the next one comes without being asked for
        assert made == list(range(min(i + 2, 5)))
    assert threading.get_ident() not in threads


def test_prefetched_raises_an_error_in_its_place():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the second")

    found = prefetched(items())
    assert next(found) == 1
    with pytest.raises(ValueError, match="the second"):
        next(found)


def test_prefetched_stops_with_its_reader():
    made = []

    def items() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            yield i

    found = prefetched(items())
    next(found)
    found.close()
    assert len(made) <= 2
    assert not [one for one in threading.enumerate() if one.name.startswith("prefetch")]
