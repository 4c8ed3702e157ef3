"""Stores of the size that the dashboard must bear, generated without any model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from audit.config import load_config
from audit.pipeline import gate_runs
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
    RunSpec,
    digest,
)
from audit.regions import expand_regions, parse_regions, reliance
from audit.store import Store
from audit.store._files import seal

POSITIONS, LAYERS = 64, 6
REGIONS = {f"part-{i}": {"quantile": [i / 8, (i + 1) / 8]} for i in range(8)}
CLASSES = ("negative", "positive")
CONFIG = """
[store]
url = "store"
[checkpoints.before]
run = "{before}"
[checkpoints.after]
run = "{after}"
{replicates}
[probes]
path = "{probes}"
[regions]
{regions}
[statistics]
resamples = 999
[[gate.rules]]
region = "part-0"
kind = "limit"
fail = 0.02
[[gate.rules]]
region = "*"
kind = "excess"
within = 0.02
"""


def write_probes(path: Path, count: int) -> Path:
    """Write a probe file of `count` texts with labels and two kinds of segments."""
    words = " ".join(f"w{i}" for i in range(POSITIONS))
    rows = [
        {
            "id": f"p-{i:05d}",
            "text": f"{words} {i}",
            "label": CLASSES[i % 2],
            "segments": {"language": ("en", "de", "fr")[i % 3], "source": f"s{i % 10}"},
        }
        for i in range(count)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def publish(store: Store, path: Path, name: str, opening: float) -> str:
    """Publish the run of a checkpoint whose maps have about `opening` of their mass on the first part."""
    probes = read_probes(path)
    regions = expand_regions(parse_regions(REGIONS), probes.probes)
    spec = RunSpec(
        checkpoint=CheckpointInfo(name, digest(name), digest([name]), "c" * 64),
        inputs_digest=probes.inputs_digest,
        annotations_digest=probes.annotations_digest,
        regions=regions,
        target="auto",
        targets_digest="",
        method=Method(),
        settings=CaptureSettings(),
        versions={"capture": "1", "transformers": "5.24.0"},
    )
    rng = np.random.default_rng([*name.encode()])
    captured = [_captured(probe, opening, rng) for probe in probes]
    found = (
        one
        for item, probe in zip(captured, probes, strict=True)
        for one in reliance(item.maps[0], probe, regions)
    )
    writer = store.begin_run(spec, 1)
    writer.write_shard(0, captured, found)
    return str(writer.publish(counts={"probes": len(captured)}, diagnostics={})["run_id"])


def _captured(probe: Probe, opening: float, rng: np.random.Generator) -> Captured:
    places = np.arange(POSITIONS, dtype=np.int32) * 3
    positions = Positions(
        "token",
        np.zeros(POSITIONS, dtype=bool),
        starts=places,
        ends=places + 2,
        parts=np.zeros(POSITIONS, dtype=np.int8),
    )
    layers = rng.gamma(1.0, size=(LAYERS, POSITIONS))
    first = POSITIONS // 8
    share = np.clip(opening + 0.05 * rng.standard_normal((LAYERS, 1)), 0.01, 0.9)
    layers[:, :first] *= share / layers[:, :first].sum(axis=1, keepdims=True)
    layers[:, first:] *= (1 - share) / layers[:, first:].sum(axis=1, keepdims=True)
    weights = layers.astype(np.float32)
    answer = CLASSES[int(rng.random() < 0.5)]
    logits = tuple(float(x) for x in rng.normal(size=2))
    prediction = Prediction(
        probe.id, logits, answer, label=probe.label, group=probe.group, segments=dict(probe.segments)
    )
    return Captured((Map(probe.id, weights[-1], positions, layers=weights),), prediction)


def compare(root: Path, probes: Path, before: str, after: str, replicates: list[str]) -> tuple[Path, str]:
    """Judge two stored runs; return the configuration and the comparison."""
    config = root / f"{after}.toml"
    config.write_text(
        CONFIG.format(
            before=before,
            after=after,
            probes=probes.relative_to(root),
            replicates="\n".join(f'[[replicates]]\nrun = "{one}"' for one in replicates),
            regions="\n".join(
                f"{name} = {json.dumps(one).replace(':', ' =')}" for name, one in REGIONS.items()
            ),
        )
    )
    return config, str(gate_runs(load_config(config)).comparison_id)


def many(root: Path, *, runs: int, probes: int) -> tuple[Path, str]:
    """Write a store of `runs` runs of `probes` probes, each release compared with one base.

    A few runs are written one by one; the others are the same files under ids of their own.
    """
    store, path = Store(root / "store"), write_probes(root / "many.jsonl", probes)
    base = publish(store, path, "/models/reviews/base", 0.125)
    seeds = [publish(store, path, f"/models/reviews/seed-{i}", 0.125 + 0.001 * i) for i in range(3)]
    after = publish(store, path, "/models/reviews/release-0", 0.15)
    config, name = compare(root, path, base, after, seeds)
    for i in range(1, runs - len(store.run_ids()) + 1):
        run = copy_run(store, after, i)
        copy_comparison(store, name, after, run, i)
    return config, name


def copy_run(store: Store, run: str, i: int) -> str:
    """Publish the files of a run again, as those of another checkpoint."""
    manifest = store.manifest(run)
    checkpoint = {
        **manifest["spec"]["checkpoint"],
        "ref": f"/models/reviews/release-{i}",
        "digest": digest(f"release-{i}"),
    }
    name = f"run-{i:012x}"
    own = {"run_id": name, "spec": {**manifest["spec"], "checkpoint": checkpoint}}
    _copy(store.root / "runs", run, name, own, i)
    return name


def copy_comparison(store: Store, comparison: str, after: str, run: str, i: int) -> str:
    """Store a comparison again, as that of another release."""
    manifest = store.comparison_manifest(comparison)
    name = f"cmp-{i:012x}"
    side = {
        **manifest["after"],
        "run_id": run,
        "checkpoint": f"/models/reviews/release-{i}",
        "digest": digest(f"release-{i}"),
    }
    _copy(store.root / "comparisons", comparison, name, {"comparison_id": name, "after": side}, i)
    return name


def _copy(folder: Path, old: str, new: str, changes: dict[str, Any], i: int) -> None:
    for path in (folder / old).rglob("*"):
        target = folder / new / path.relative_to(folder / old)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.name != "manifest.json":
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)
    manifest = json.loads((folder / old / "manifest.json").read_text())
    content = {k: v for k, v in manifest.items() if k not in ("digest", "provenance", "seal")}
    (folder / new).mkdir(parents=True, exist_ok=True)
    time = f"2026-{1 + i // 28 % 12:02d}-{1 + i % 28:02d}T03:00:00+00:00"
    sealed = seal({**content, **changes}, {**manifest["provenance"], "time": time})
    (folder / new / "manifest.json").write_bytes(sealed)


def long(root: Path, *, probes: int) -> tuple[Path, str]:
    """Write one comparison of two runs of `probes` probes into the store of `root`."""
    store, path = Store(root / "store"), write_probes(root / "long.jsonl", probes)
    before, after = (
        publish(store, path, f"/models/long/{name}", share)
        for name, share in (("base", 0.125), ("after", 0.15))
    )
    return compare(root, path, before, after, [])
