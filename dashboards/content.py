"""What a probe says or shows, read from its file at the moment of drawing; the store never holds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import streamlit as st

from audit.errors import AuditError
from audit.records import Probe

CONFIGS_VARIABLE = "ROLLOUT_AUDIT_CONFIGS"


@dataclass(frozen=True)
class Content:
    """A probe with its content, or the reason why there is none."""

    probe: Probe | None
    reason: str | None = None


@dataclass(frozen=True)
class Source:
    """One probe file as it is now: its digest, probes and their digests, or what is wrong with it."""

    config: str
    digest: str = ""
    probes: Mapping[str, Probe] | None = None
    contents: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


def of_probe(probe_id: str, inputs_digest: str) -> Content:
    """Return the content of a probe from the file whose digest is that of the run."""
    found = sources()
    if not found:
        return Content(
            None,
            "No configuration was given, so probe contents are not shown; start the dashboard with "
            "`audit dashboard --config audit.toml`.",
        )
    for source in found:
        if source.digest == inputs_digest and source.probes is not None:
            return _as_captured(source, probe_id)
    problems = [source.problem for source in found if source.problem]
    if problems:
        return Content(None, f"Contents are not shown: {problems[0]}")
    given = (
        "The given probe file is not" if len(found) == 1 else f"None of the {len(found)} given probe files is"
    )
    return Content(
        None,
        f"{given} the one that was captured (inputs digest "
        f"{inputs_digest[:12]}); it has changed since, or belongs to another configuration.",
    )


def _as_captured(source: Source, probe_id: str) -> Content:
    """Return a probe of a source, unless its image, sound or features changed since the source was read."""
    probe = (source.probes or {}).get(probe_id)
    if probe is None:
        return Content(None, f"The probe file of {source.config} has no {probe_id}.")
    from audit.pipeline.sources import is_unchanged

    try:
        same = is_unchanged(probe, source.contents[probe_id])
    except AuditError as error:
        return Content(None, f"Contents are not shown: {error}")
    if same:
        return Content(probe)
    return Content(
        None,
        f"The content of {probe_id} is not the one that was captured: a file that {source.config} names for "
        "it has changed since, so that the map does not belong to it; restore that file.",
    )


def sources() -> list[Source]:
    """Return every probe file that the given configurations name."""
    paths = [path for path in os.environ.get(CONFIGS_VARIABLE, "").split(os.pathsep) if path]
    return [source for path in paths for source in _read(path, _stamp(path))]


def _stamp(path: str) -> tuple[int, ...]:
    """Return the times of a configuration and of its probe files, so that a change is seen."""
    try:
        return (Path(path).stat().st_mtime_ns, *_probe_times(path, Path(path).stat().st_mtime_ns))
    except (OSError, AuditError):
        return (0,)


def _probe_times(path: str, time: int) -> tuple[int, ...]:
    return tuple(Path(one).stat().st_mtime_ns for one in _probe_paths(path, time))


@st.cache_resource(max_entries=64, show_spinner=False)
def _probe_paths(path: str, time: int) -> tuple[str, ...]:  # noqa: ARG001 (part of the cache's key)
    from audit.config import load_config
    from audit.pipeline.sources import probe_source

    config = load_config(path)
    domains = [False, True] if config.domain is not None else [False]
    return tuple(probe_source(config, domain=domain).path for domain in domains)


@st.cache_resource(max_entries=32, show_spinner="Reading the probe file …")
def _read(path: str, stamp: tuple[int, ...]) -> list[Source]:  # noqa: ARG001 (part of the cache's key)
    from audit.config import load_config
    from audit.pipeline.sources import load_probes, probe_source

    name = Path(path).name
    try:
        config = load_config(path)
        load_probes.cache_clear()  # the file may have changed since it was last read
        found = []
        for domain in [False, True] if config.domain is not None else [False]:
            probes = load_probes(probe_source(config, domain=domain))
            by_id = {probe.id: probe for probe in probes}
            contents = dict(zip(probes.ids, probes.contents, strict=True))
            found.append(Source(name, probes.inputs_digest, by_id, contents))
    except AuditError as error:
        return [Source(name, problem=str(error))]
    return found
