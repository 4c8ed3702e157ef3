"""Where an audit's checkpoints and probes are read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from audit.config import AuditConfig, CheckpointSection, ReplicateSection
from audit.errors import CheckpointError, ConfigError
from audit.models import checkpoint_info
from audit.probes import content_digest, read_probes
from audit.records import Probe, ProbeSet


@dataclass(frozen=True)
class CheckpointSource:
    """Where a checkpoint is loaded from."""

    ref: str
    revision: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ProbeSource:
    """Where a probe set is read from; `stamp` tells an edited file from the one that was read before."""

    path: str
    columns: tuple[tuple[str, str], ...] = ()
    stamp: tuple[int, ...] = ()


def sources(config: AuditConfig) -> Iterator[tuple[str, CheckpointSection | ReplicateSection]]:
    """Yield (role, section) for before, after and every replicate that is a checkpoint or a run."""
    for role in ("before", "after"):
        if role in config.checkpoints:
            yield role, config.checkpoints[role]
    for i, section in enumerate(config.replicates):
        if section.floor is None:
            yield f"replicate-{i}", section


def checkpoint_source(config: AuditConfig, role: str) -> CheckpointSource:
    """Return where the checkpoint of a role is loaded from.

    Raises
    ------
    ConfigError
        When the audit has no such role, or names a stored run for it.
    """
    section = dict(sources(config)).get(role)
    if section is None or section.path is None:
        raise ConfigError(
            f"this audit captures no checkpoint as {role!r}; give it a path in the configuration"
        )
    if isinstance(section, ReplicateSection) and section.command and not Path(section.path).exists():
        raise CheckpointError(f"{section.path} is not trained yet; `audit replicate` trains it")
    return CheckpointSource(section.path, section.revision, section.adapter, section.trust_remote_code)


def frozen_elsewhere(config: AuditConfig) -> bool:
    """Return whether the baseline is not on this machine, and a floor stands in for it."""
    section = config.checkpoints["before"]
    if section.path is None or all(one.floor is None for one in config.replicates):
        return False
    try:
        checkpoint_info(section.path, revision=section.revision, adapter=section.adapter)
    except CheckpointError:
        return True
    return False


def probe_source(config: AuditConfig, *, domain: bool = False) -> ProbeSource:
    """Return where the audit's probes (or its second probe set) are read from."""
    section = config.probes if not domain else config.domain
    if section is None:
        raise ConfigError("this audit has no [domain]; add [domain] path = … for a second probe set")
    return ProbeSource(section.path, tuple(sorted(section.columns.items())), _stamp(Path(section.path)))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return times and sizes that change whenever a file, or a file of a folder, does."""
    try:
        states = [entry.stat() for entry in [path, *(path.rglob("*") if path.is_dir() else ())]]
    except OSError:
        return ()  # reading it will say what is wrong
    return (len(states), max(one.st_mtime_ns for one in states), sum(one.st_size for one in states))


@lru_cache(maxsize=4)
def load_probes(source: ProbeSource) -> ProbeSet:
    """Read a probe set once per process; see :func:`audit.probes.read_probes`."""
    return read_probes(source.path, columns=dict(source.columns) or None)


def is_unchanged(probe: Probe, digest: str) -> bool:
    """Return whether what goes into the model still is what the `digest` of a probe's content was taken of.

    Raises
    ------
    ProbeError
        When an image, features or a sound can no longer be read.
    """
    return content_digest(probe) == digest
