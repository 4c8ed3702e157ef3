"""Which model types of transformers can be audited: measured on tiny random models, kept in a JSON file.

Every type that AutoModel knows is built small and put through the real capture, each in a process of
its own with a limit on time and memory. The file is keyed by transformers' version.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Literal

from audit.errors import ConfigError

Status = Literal["supported", "fallback", "refused", "not_buildable"]
STATUSES: tuple[Status, ...] = ("supported", "fallback", "refused", "not_buildable")
RESULTS = Path(__file__).with_name("measured.json")
TIMEOUT = 120.0  # seconds for one type
MEMORY = 6 * 2**30  # bytes for one process
UNEXPECTED = "unexpected "
"""Begins the reason of a type on which capture failed in a way that it does not explain: a bug."""


@dataclass(frozen=True)
class Coverage:
    """What one model type came to.

    Attributes
    ----------
    model_type : str
    status : str
        ``supported``: every attention layer is seen through transformers' attention interface.
        ``fallback``: at least one layer hands on its weights itself, which needs the eager kernels.
        ``refused``: capture says why, in one line. ``not_buildable``: no random model can be made or
        run here.
    reason : str
        How it is captured, or why it is not.
    """

    model_type: str
    status: Status
    reason: str


def known_model_types() -> tuple[str, ...]:
    """Return the model types that AutoModel of the installed transformers knows, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return tuple(sorted(MODEL_MAPPING_NAMES))


def read_coverage(path: Path = RESULTS, *, transformers: str | None = None) -> tuple[Coverage, ...]:
    """Return the kept results for a version of transformers, empty where there are none.

    Parameters
    ----------
    path : Path
    transformers : str, optional
        The version; the installed one when None.
    """
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return tuple(Coverage(**row) for row in kept.get(transformers or version("transformers"), ()))


def write_coverage(results: Iterable[Coverage], path: Path = RESULTS) -> None:
    """Keep results for the installed transformers beside those of other types and versions."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = {row["model_type"]: row for row in kept.get(version("transformers"), ())}
    rows |= {row.model_type: asdict(row) for row in results}
    kept[version("transformers")] = [rows[name] for name in sorted(rows)]
    path.write_text(json.dumps(kept, indent=0, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def measure_coverage(
    model_types: Sequence[str],
    *,
    workers: int = 2,
    timeout: float = TIMEOUT,
) -> Iterator[Coverage]:
    """Examine model types in a pool of processes and yield each result as it comes.

    Parameters
    ----------
    model_types : sequence of str
    workers : int
        Processes at a time.
    timeout : float
        Seconds for one type; a process that takes longer is ended.

    Yields
    ------
    Coverage

    Raises
    ------
    ConfigError
        For a type that transformers does not know.
    """
    known = set(known_model_types())
    for name in model_types:
        if name not in known:
            raise ConfigError(f"model type {name!r} is unknown to transformers {version('transformers')}")
    waiting = list(reversed(model_types))
    pool = [_Worker() for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(worker.model_type for worker in pool):
            for worker in pool:
                if worker.model_type is None and waiting:
                    worker.give(waiting.pop())
            wait([worker.pipe for worker in pool], timeout=1.0)
            for worker in pool:
                result = worker.take(timeout)
                if result is not None:
                    yield result
    finally:
        for worker in pool:
            worker.end()


class _Worker:
    """One process that examines one type at a time; it is replaced when it dies or hangs."""

    def __init__(self) -> None:
        self.model_type: str | None = None
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_examine_all, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def give(self, model_type: str) -> None:
        self.model_type, self.since = model_type, monotonic()
        self.pipe.send(model_type)

    def take(self, timeout: float) -> Coverage | None:
        if self.model_type is None:
            return None
        name, reason = self.model_type, None
        try:
            if self.pipe.poll():
                self.model_type = None
                return Coverage(**self.pipe.recv())
        except (EOFError, OSError):
            reason = "the process died (out of memory?)"
        if monotonic() - self.since > timeout:
            reason = f"takes longer than {timeout:.0f} s"
        if reason is None:
            return None
        self.end()
        self.model_type = None
        self._start()
        return Coverage(name, "not_buildable", reason)

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _examine_all(pipe: Connection) -> None:
    """Answer each model type that comes through `pipe` with its result, in a process of its own."""
    import os
    import resource
    import warnings

    os.nice(10)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    from audit.coverage.checks import examine

    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        pipe.send(asdict(examine(name)))


def summary(results: Sequence[Coverage]) -> Mapping[Status, int]:
    """Return how many types have each status.

    Examples
    --------
    >>> summary([Coverage("bert", "supported", "")])["supported"]
    1
    """
    counts = Counter(row.status for row in results)
    return {status: counts[status] for status in STATUSES}


def coverage_table(results: Sequence[Coverage]) -> str:
    """Return the results as text, one type a line, the counts last."""
    width = max((len(row.model_type) for row in results), default=0)
    lines = [f"{row.model_type:<{width}}  {row.status:<13}  {row.reason}" for row in results]
    counts = ", ".join(f"{count} {status}" for status, count in summary(results).items())
    return "\n".join([*lines, f"{len(results)} model types: {counts}"])


def coverage_page(results: Sequence[Coverage]) -> str:
    """Return the results as a page of the documentation."""
    counts = summary(results)
    lines = [
        _INTRODUCTION.format(
            version=version("transformers"),
            types=len(results),
            **{str(status): n for status, n in counts.items()},
        )
    ]
    lines += [f"| {row.model_type} | {row.status} | {_escaped(row.reason)} |" for row in results]
    return "\n".join([*lines, ""])


_INTRODUCTION = """# Which models can be audited

Written by `make coverage` for transformers {version}; do not edit. For each of the {types} model types that
AutoModel knows, a tiny random model is built and put through the real capture:

| status | types | meaning |
|---|---|---|
| supported | {supported} | every attention layer is seen through transformers' attention interface |
| fallback | {fallback} | at least one layer hands on its weights itself; load with
`attention_implementation = "eager"` where capture asks for it |
| refused | {refused} | capture stops with the line shown (exit 13) |
| not_buildable | {not_buildable} | no random model can be made or run here, so nothing is claimed; a
checkpoint of such a type meets the same checks when it is captured |

Supported and fallback mean that all of this holds for the tiny model: the attention of every layer that ran
was seen, its rows sum to 1 (with the sink's column where there is a learned sink), attention × values gives
the layer's own output, positions mix through nothing but this attention, the model's outputs are the same to
the last bit with and without capture, and a probe's map does not depend on the other probes of its batch nor,
in models of one stack that take an attention mask, on padding (1e-5; capture itself never pads).
The checks on layers, rows, values, mixing and outputs run again on the first probes of
every capture of a real checkpoint.

A type with several parts is run on the plainest input that it takes, mostly text; the last column names the
streams.

| model type | status | how, or why not |
|---|---|---|""".replace(" with\n`", " with `").replace("; a\ncheckpoint", "; a checkpoint")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
