"""Relative paths of a configuration, resolved against the folder of its file."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from audit.config.document import AuditConfig
from audit.config.sources import CheckpointSection, ReplicateSection
from audit.errors import ConfigError


def resolve_paths(config: AuditConfig, base: Path) -> AuditConfig:
    """Return `config` with relative paths made absolute against `base`."""
    updates: dict[str, Any] = {
        "store": config.store.model_copy(update={"url": _store_url(config.store.url, base)}),
        "probes": config.probes.model_copy(update={"path": _inside(config.probes.path, base)}),
        "checkpoints": {
            role: source.model_copy(update=_model_paths(source, base))
            for role, source in config.checkpoints.items()
        },
        "replicates": [
            expanded for source in config.replicates for expanded in _expand_replicates(source, base)
        ],
    }
    if config.approvals.allowed_signers is not None:
        signers = _inside(config.approvals.allowed_signers, base)
        updates["approvals"] = config.approvals.model_copy(update={"allowed_signers": signers})
    if config.domain is not None:
        updates["domain"] = config.domain.model_copy(update={"path": _inside(config.domain.path, base)})
    return config.model_copy(update=updates)


def _inside(path: str, base: Path) -> str:
    return str((base / Path(path).expanduser()).resolve())


def _store_url(url: str, base: Path) -> str:
    return url if "://" in url else _inside(url, base)


def _model_ref(ref: str | None, base: Path) -> str | None:
    """Return a local directory as an absolute path; anything else may be a hub id and stays as it is."""
    if ref is None:
        return None
    looks_local = ref.startswith((".", "/", "~")) or ref.count("/") > 1
    if looks_local or (base / ref).exists():
        return _inside(ref, base)
    return ref


def _model_paths(source: CheckpointSection | ReplicateSection, base: Path) -> dict[str, Any]:
    return {"path": _model_ref(source.path, base), "adapter": _model_ref(source.adapter, base)}


def _expand_replicates(source: ReplicateSection, base: Path) -> list[ReplicateSection]:
    if source.floor is not None:
        return [source.model_copy(update={"floor": _inside(source.floor, base)})]
    if source.command is not None and source.path is not None:
        seeds = source.seeds if isinstance(source.seeds, list) else list(range(1, source.seeds + 1))
        return [
            source.model_copy(
                update={"path": _inside(source.path.replace("{seed}", str(seed)), base), "seeds": [seed]}
            )
            for seed in seeds
        ]
    if source.path is None or not glob.has_magic(source.path):
        return [source.model_copy(update=_model_paths(source, base))]
    found = sorted(glob.glob(str(base / Path(source.path).expanduser())))  # noqa: PTH207 (absolute patterns)
    if not found:
        raise ConfigError(f'replicates.path = "{source.path}" matches nothing below {base}; train them first')
    return [
        source.model_copy(
            update=_model_paths(source.model_copy(update={"path": str(Path(match).resolve())}), base)
        )
        for match in found
    ]
