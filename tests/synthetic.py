"""A store of runs with known reliance, written as a capture would write them, without any model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from audit.probes import read_probes
from audit.records import (
    Captured,
    CaptureSettings,
    CheckpointInfo,
    Map,
    Method,
    Positions,
    Prediction,
    Probe,
    ProbeSet,
    RunSpec,
    digest,
)
from audit.regions import expand_regions, parse_regions, reliance
from audit.store import Store

REGIONS = {"opening": {"quantile": [0.0, 0.25]}, "ending": {"quantile": [0.75, 1.0]}}
RULES = """
[[gate.rules]]
region = "opening"
kind = "limit"
fail = {fail}
[[gate.rules]]
region = "*"
kind = "excess"
within = 0.02
"""
CONFIG = """
[store]
url = "store"
[checkpoints.before]
{before}
[checkpoints.after]
run = "{after}"
{replicates}
[probes]
path = "probes.jsonl"
[regions]
opening = {{ quantile = [0.0, 0.25] }}
ending = {{ quantile = [0.75, 1.0] }}
[statistics]
resamples = 199
"""


def publish_run(
    store: Store, name: str, probes: ProbeSet, regions: Mapping[str, Any], captured: Sequence[Captured]
) -> str:
    """Publish the run of a checkpoint `name` that gave one of `captured` for each probe; return its id."""
    wanted = expand_regions(parse_regions(regions), probes.probes)
    spec = RunSpec(
        checkpoint=CheckpointInfo(name, digest(name), digest([name]), "c" * 64),
        inputs_digest=probes.inputs_digest,
        annotations_digest=probes.annotations_digest,
        regions=wanted,
        target="auto",
        targets_digest="",
        method=Method(),
        settings=CaptureSettings(),
        versions={"capture": "1", "transformers": "5.24.0"},
    )
    pairs = zip(captured, probes, strict=True)
    found = [one for item, probe in pairs for map_ in item.maps for one in reliance(map_, probe, wanted)]
    writer = store.begin_run(spec, 1)
    writer.write_shard(0, captured, found)
    return str(writer.publish(counts={"probes": len(probes)}, diagnostics={})["run_id"])


@dataclass
class World:
    """A folder with a probe file, a store, and runs that are added as a test needs them."""

    root: Path
    n: int = 40

    def __post_init__(self) -> None:
        rows = [
            {"id": f"p-{i:03d}", "text": "one two three four five six seven eight", "label": "a",
             "segments": {"language": "en" if i % 2 else "de"}}
            for i in range(self.n)
        ]  # fmt: skip
        self.root.mkdir(parents=True, exist_ok=True)
        self.probes.write_text("\n".join(map(json.dumps, rows)) + "\n")

    @property
    def probes(self) -> Path:
        return self.root / "probes.jsonl"

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    def run(self, name: str, opening: float, *, noise: float = 0.01, **changes: object) -> str:
        """Publish the run of a checkpoint whose maps have `opening` of their mass on the first quarter."""
        probes = read_probes(self.probes)
        random = np.random.default_rng([*name.encode()])
        shares = np.clip(opening + noise * random.standard_normal(self.n), 0.01, 0.9)
        captured = [_captured(probe, share) for probe, share in zip(probes, shares, strict=True)]
        return publish_run(self.store, name, probes, REGIONS, captured)

    def config(self, before: str, after: str, replicates: Sequence[str] = (), *, fail: float = 0.02,
               name: str = "audit.toml", extra: str = "", rules: str = RULES) -> Path:  # fmt: skip
        """Write a configuration that compares stored runs; `before` may be ``approved``."""
        first = "approved = true" if before == "approved" else f'run = "{before}"'
        blocks = "\n".join(f'[[replicates]]\nrun = "{one}"' for one in replicates)
        text = CONFIG.format(before=first, after=after, replicates=blocks) + rules.format(fail=fail) + extra
        path = self.root / name
        path.write_text(text)
        return path


def _captured(probe: Probe, opening: float) -> Captured:
    places = np.arange(8, dtype=np.int32)
    positions = Positions(
        "token",
        np.zeros(8, dtype=bool),
        starts=places * 4,
        ends=places * 4 + 3,
        parts=np.zeros(8, dtype=np.int8),
    )
    weights = np.array([opening / 2] * 2 + [(1 - opening) / 6] * 6, dtype=np.float32)
    prediction = Prediction(
        probe.id, predicted="a", label="a", group=probe.group, segments=dict(probe.segments)
    )
    return Captured((Map(probe.id, weights, positions, layers=weights[None]),), prediction)


def release(world: World) -> tuple[str, str, list[str]]:
    """Publish a base, a candidate that moved by .05, and five harmless re-trainings."""
    replicates = [world.run(f"seed-{i}", 0.25 + 0.001 * i) for i in range(-2, 3)]
    return world.run("base", 0.25), world.run("release-1", 0.30), replicates
