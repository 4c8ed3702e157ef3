"""Runs that differ only in regions or annotations share their maps: nothing is captured twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from audit.records import Captured, Map, Prediction, Reliance, RunSpec
from audit.serialize import from_json
from audit.store._reader import Files, iter_maps, read_frame, read_predictions
from audit.store._writer import RunWriter

_FIXED_ROWS = ("auto", "cls", "mean", "last", "mask", "eot")


def relinkable(runs: Files, spec: RunSpec) -> str | None:
    """Return a run with maps that differs from `spec` only in what does not decide them."""
    wanted = _maps_identity(spec)
    for manifest in runs.manifests():
        other = from_json(RunSpec, manifest["spec"])
        has_maps = any(entry["table"] == "maps" for entry in manifest["files"])
        if manifest["run_id"] != spec.id and has_maps and _maps_identity(other) == wanted:
            return str(manifest["run_id"])
    return None


def relink(
    runs: Files,
    source: dict[str, Any],
    spec: RunSpec,
    measure: Callable[[Map], Iterable[Reliance]],
    annotate: Callable[[Prediction], Prediction] | None,
) -> RunWriter:
    """Return the writer of the run of `spec`, each shard written from the maps of the manifest `source`."""
    writer = RunWriter(runs.directory.parent, spec, source["n_shards"], source).open()
    predictions = read_predictions(runs.paths(source, "predictions"))
    for index in sorted(set(range(source["n_shards"])) - writer.finished_shards()):
        maps = runs.shard(source, "maps", index)
        ids = read_frame(maps, "maps")["probe_id"].unique(maintain_order=True)
        stored = (predictions[probe_id] for probe_id in ids)
        answers = (Captured((), annotate(one) if annotate else one) for one in stored)
        found = iter_maps(maps, runs.shard(source, "layer_maps", index))
        writer.write_shard(index, answers, (one for item in found for one in measure(item)))
    return writer


def _maps_identity(spec: RunSpec) -> dict[str, Any]:
    """Return what decides the maps of a run: everything but regions, and annotations where unused."""
    row = spec.method.row
    fixed = row in _FIXED_ROWS or row.startswith(("token:", "decoder:"))
    return {
        "checkpoint": spec.checkpoint.digest,
        "inputs": spec.inputs_digest,
        "annotations": None if fixed else spec.annotations_digest,
        "target": [spec.target, spec.targets_digest],
        "method": [spec.method.name, row, dict(spec.method.params)],
        "settings": vars(spec.settings),
        "versions": dict(spec.versions),
    }
