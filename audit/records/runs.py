"""What a run is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from audit.records.checkpoints import CheckpointInfo
from audit.records.digests import digest
from audit.records.inputs import Region


@dataclass(frozen=True)
class Method:
    """How attention becomes a map: a name, its parameters, and the output row that is read."""

    name: str = "rollout"
    row: str = "auto"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureSettings:
    """Everything else about a capture that changes its numbers."""

    dtype: str = "float32"
    attention_implementation: str = "auto"
    device_type: str = "cpu"
    batch_tokens: int = 4096
    max_length: int | None = None
    truncate: bool = False
    truncation_side: str = "right"
    stride: int | None = None
    shard_probes: int = 500
    layer_maps: bool = True


@dataclass(frozen=True)
class RunSpec:
    """What a run is made of; its digest is the run's id."""

    checkpoint: CheckpointInfo
    inputs_digest: str
    annotations_digest: str
    regions: tuple[Region, ...]
    target: str
    targets_digest: str
    method: Method
    settings: CaptureSettings
    versions: Mapping[str, str]

    @property
    def regions_digest(self) -> str:
        """Return the digest of the region definitions."""
        return digest([[r.name, r.kind, dict(r.params)] for r in self.regions])

    @property
    def id(self) -> str:
        """Return ``run-`` and 12 hex digits."""
        content = {
            "checkpoint": self.checkpoint.digest,
            "inputs": self.inputs_digest,
            "annotations": self.annotations_digest,
            "regions": self.regions_digest,
            "targets": [self.target, self.targets_digest],
            "method": [self.method.name, self.method.row, dict(self.method.params)],
            "settings": vars(self.settings),
            "versions": dict(self.versions),
        }
        return f"run-{digest(content)[:12]}"
