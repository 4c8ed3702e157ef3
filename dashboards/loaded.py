"""Both checkpoints of a comparison in memory: asked for, guarded by a limit, kept for all readers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import streamlit as st

from audit.records import Captured, Comparison, Method, Probe, RunSpec
from dashboards import blocks, data

LIMIT_VARIABLE = "ROLLOUT_AUDIT_LIVE_GB"
DEFAULT_LIMIT = 4.0
LOADED = "live on"


def specs_of(comparison: Comparison) -> tuple[RunSpec, RunSpec] | None:
    """Return what both runs were made of, None where one is no longer in the store."""
    one, two = comparison.before, comparison.after
    where = data.store()
    if one is None or two is None or not (where.has_run(one.run_id) and where.has_run(two.run_id)):
        return None
    return where.spec(one.run_id), where.spec(two.run_id)


def obstacle(specs: Sequence[RunSpec]) -> str | None:
    """Return why the two checkpoints may not be loaded here, None where they may."""
    from audit.pipeline import memory_obstacle

    if _pairs() == [_key(specs)]:
        return None
    found = memory_obstacle(*specs, limit=float(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT))
    return found and f"{found[0].upper()}{found[1:]}; {LIMIT_VARIABLE} sets how much this dashboard may take."


def asked() -> bool:
    """Return whether this reader has allowed checkpoints to be loaded."""
    return bool(st.session_state.get(LOADED))


def ask(specs: Sequence[RunSpec], label: str, *, primary: bool = False) -> bool:
    """Draw the button that allows it, since loading takes memory and some seconds; return whether it is."""
    from audit.pipeline import memory_estimate

    if asked():
        return True
    size = max(0.01, memory_estimate(*specs))
    st.button(
        label,
        icon=":material/bolt:",
        type="primary" if primary else "secondary",
        on_click=_allow,
        help=f"Loads both checkpoints on the machine that runs this dashboard: {size:.2f} GB of memory.",
    )
    return False


def _allow() -> None:
    st.session_state[LOADED] = True


def pair(specs: Sequence[RunSpec]) -> tuple[Any, Any]:
    """Return both checkpoints; those of another comparison are let go first, so that two are held at most.

    Raises
    ------
    CheckpointError
        When one is no longer there, or has changed since.
    """
    if _pairs() and _pairs() != [_key(specs)]:
        _load.clear()
    _pairs()[:] = [_key(specs)]
    one, two = (_load(spec.id, spec.checkpoint.digest) for spec in specs)
    return one, two


Key = tuple[str, ...]


def _key(specs: Sequence[RunSpec]) -> Key:
    return tuple(spec.checkpoint.digest for spec in specs)


@st.cache_resource(show_spinner=False)
def _pairs() -> list[Key]:
    """Return the one pair that is held by this process, empty at first; shared by all readers."""
    return []


@st.cache_resource(max_entries=2, show_spinner="Loading the checkpoint …")
def _load(run_id: str, digest: str) -> Any:  # noqa: ARG001 (part of the cache's key)
    from audit.pipeline import load_run_checkpoint

    return load_run_checkpoint(data.store().spec(run_id))


def capture(
    specs: Sequence[RunSpec], probe: Probe, method: Method | None = None
) -> tuple[Captured, Captured]:
    """Return what both checkpoints make of one input, now or a moment ago.

    Raises
    ------
    AuditError
    """
    chosen = method or specs[0].method
    asked_for = (chosen.name, chosen.row, repr(sorted(chosen.params.items())))
    return _captured((*(spec.id for spec in specs), *asked_for, fingerprint(probe)), specs, probe, method)


@st.cache_resource(max_entries=64, show_spinner=False)
def _captured(
    key: tuple[str, ...],  # noqa: ARG001 (stands for the rest)
    _specs: Sequence[RunSpec],
    _probe: Probe,
    _method: Method | None,
) -> tuple[Captured, Captured]:
    from audit.pipeline import capture_both

    return capture_both(pair(_specs), _specs, _probe, method=_method)


def fingerprint(probe: Probe) -> str:
    """Return the SHA-256 of a probe's content and annotations."""
    found = hashlib.sha256()
    for value in vars(probe).values():
        found.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        found.update(b"\0")
    return found.hexdigest()


def explain(reason: str) -> None:
    """Say why nothing can be computed here."""
    st.info(blocks.plain(reason), icon=":material/memory:")
