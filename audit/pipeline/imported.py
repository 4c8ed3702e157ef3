"""Maps that were computed elsewhere, by any attribution method: read, check, and store them as a run."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.config import AuditConfig
from audit.errors import ProbeError
from audit.pipeline.sources import load_probes, probe_source
from audit.pipeline.specs import audit_regions
from audit.probes import load_annotations, read_probes
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
    Region,
    Reliance,
    RunSpec,
    digest,
)
from audit.regions import check_regions_match, expand_regions, reliance
from audit.store import Store

GIVEN = "given"
IMPORT_VERSION = "1"
SUM_TOLERANCE = 1e-3

FIELDS = ("weights", "layers", "special", "starts", "ends", "parts", "boxes", "times")
"""Arrays of one map; all but ``weights`` may be absent."""

_SCALARS = ("stream", "grid_rows", "grid_columns", "causal")


@dataclass(frozen=True)
class GivenMap:
    """One map as it stands in the file, unchecked."""

    probe_id: str
    arrays: Mapping[str, NDArray[Any]]
    scalars: Mapping[str, Any] = field(default_factory=dict)


def import_maps(
    path: str | Path,
    store: Store,
    probes: ProbeSet,
    regions: Sequence[Region],
    *,
    name: str | None = None,
    method: str = "imported",
    normalize: bool = False,
) -> str:
    """Store the maps of a file as the run of one checkpoint, to be compared and gated like any other.

    Parameters
    ----------
    path : path
        Parquet with a row for each probe (× stream): ``probe_id`` and ``weights`` (list), and optionally
        the columns of the store's table ``maps`` and ``layers`` (list of lists). Or npz with one array
        for each probe id: (n,), or (rows, columns) for a patch grid; beside it optionally
        ``<id>/layers`` (layer, n), ``<id>/special``, ``<id>/starts``, ``<id>/ends``.
    store : Store
    probes : ProbeSet
        The file must hold exactly these probes.
    regions : sequence of Region
    name : str, optional
        How reports call the checkpoint; the file's name when omitted.
    method : str
        Name of the attribution method; runs of different methods are not compared.
    normalize : bool
        Divide each map by its sum; else maps must sum to 1.

    Returns
    -------
    str
        The run's id. What the weights of the checkpoint are is unknown.

    Raises
    ------
    ProbeError
        When the file is unreadable, its probes are not those of the probe set, a map is no
        distribution, or a region matches nothing.
    """
    path = Path(path)
    given = list(read_maps_file(path))
    maps = _in_order(given, probes, path, normalize=normalize)
    try:
        check_regions_match(regions, probes.probes, boxes_in_text=True)
    except ValueError as error:
        raise ProbeError(f"{probes.source or path}: {error}") from None
    spec = _spec(name or path.stem, maps, probes, regions, method)
    if not store.has_run(spec.id):
        captured = [_captured(maps[probe.id], probe) for probe in probes]
        shares = list(_reliance(captured, probes, regions, path))  # before anything is written
        writer = store.begin_run(spec, 1)
        writer.write_shard(0, captured, shares)
        writer.publish(counts={"probes": len(probes)}, diagnostics={}, extra={"imported_from": path.name})
    return spec.id


def import_for(
    config: AuditConfig | None, path: str | Path, store: Store, *, probes: str | Path | None, **given: Any
) -> str:
    """Import maps with the probes and regions of a configuration, or of a probe file alone."""
    if config is not None and probes is None:
        found = load_probes(probe_source(config))
        return import_maps(path, store, found, audit_regions(config, found), **given)
    if probes is None:
        raise ProbeError("nothing says which probes the maps belong to; pass --probes or --config")
    found = read_probes(probes)
    regions = audit_regions(config, found) if config else expand_regions((), found.probes)
    return import_maps(path, store, found, regions, **given)


# --- reading ----------------------------------------------------------------------------------


def read_maps_file(path: Path) -> Iterator[GivenMap]:
    """Yield the maps of a Parquet or npz file as they stand there.

    Raises
    ------
    ProbeError
        When the file is missing, unreadable or of another kind.
    """
    if not path.is_file():
        raise ProbeError(f"maps {path} do not exist; give a .parquet or .npz file")
    if path.suffix == ".npz":
        yield from _read_npz(path)
    elif path.suffix in (".parquet", ".pq"):
        yield from _read_parquet(path)
    else:
        raise ProbeError(f"maps {path}: expected a .parquet or .npz file, got {path.suffix or 'no suffix'}")


def _read_npz(path: Path) -> Iterator[GivenMap]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ProbeError(
            f"maps {path} are not readable ({_line(error)}); save them with numpy.savez"
        ) from None
    extras: dict[str, dict[str, NDArray[Any]]] = {}
    for key, array in arrays.items():
        probe_id, slash, name = key.rpartition("/")
        if slash and name in FIELDS and (probe_id in arrays or f"{probe_id}/weights" in arrays):
            extras.setdefault(probe_id, {})[name] = array
        else:
            extras.setdefault(key, {})["weights"] = array
    for probe_id, found in extras.items():
        weights, scalars = found["weights"], {}
        if weights.ndim == 2:
            scalars = {"grid_rows": weights.shape[0], "grid_columns": weights.shape[1]}
            found["weights"] = weights.reshape(-1)
        yield GivenMap(probe_id, found, scalars)


def _read_parquet(path: Path) -> Iterator[GivenMap]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ProbeError(f"maps {path} are not readable ({_line(error)}); write them as Parquet") from None
    for name in ("probe_id", "weights"):
        if name not in table.column_names:
            raise ProbeError(
                f"maps {path}: column '{name}' is missing; there is {', '.join(table.column_names)}"
            )
    for row in table.to_pylist():
        arrays = {key: np.asarray(row[key]) for key in FIELDS if row.get(key) is not None}
        scalars = {key: row[key] for key in _SCALARS if row.get(key) is not None}
        yield GivenMap(str(row["probe_id"]), arrays, scalars)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


# --- checking ---------------------------------------------------------------------------------


def _in_order(
    given: Sequence[GivenMap], probes: ProbeSet, path: Path, *, normalize: bool
) -> dict[str, tuple[Map, ...]]:
    """Return the checked maps of each probe; exactly the probes of the probe set, each stream once."""
    found: dict[str, list[Map]] = {probe_id: [] for probe_id in probes.ids}
    unknown = [one.probe_id for one in given if one.probe_id not in found]
    if unknown:
        raise ProbeError(f"maps {path}: {_some(unknown)} not in the probe set; take these maps out")
    for one in given:
        made = _map(one, path, normalize=normalize)
        if any(other.stream == made.stream for other in found[one.probe_id]):
            raise ProbeError(
                f"maps {path}: probe {one.probe_id} has two maps of stream {made.stream}; keep one"
            )
        found[one.probe_id].append(made)
    missing = [probe_id for probe_id, maps in found.items() if not maps]
    if missing:
        raise ProbeError(
            f"maps {path}: {_some(missing)} without a map; add {'it' if len(missing) == 1 else 'them'}"
        )
    return {probe_id: tuple(maps) for probe_id, maps in found.items()}


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return f"probe{'' if len(ids) == 1 else 's'} {', '.join(ids[:3])}{more}"


def _map(given: GivenMap, path: Path, *, normalize: bool) -> Map:
    where = f"maps {path}, probe {given.probe_id}"
    weights = _distribution(where, given.arrays["weights"], normalize=normalize)
    layers = given.arrays.get("layers")
    if layers is not None:
        if layers.ndim != 2 or layers.shape[1] != len(weights):
            raise ProbeError(f"{where}: layers must be (layer, {len(weights)}), got shape {layers.shape}")
        layers = np.stack([_distribution(where, row, normalize=normalize) for row in layers])
    return Map(
        given.probe_id,
        weights,
        _positions(where, given, len(weights)),
        stream=given.scalars.get("stream", "input"),
        layers=layers,
    )


def _distribution(where: str, values: NDArray[Any], *, normalize: bool) -> NDArray[np.float32]:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1 or not len(array):
        raise ProbeError(f"{where}: expected one weight for each position, got shape {np.shape(values)}")
    if not np.isfinite(array).all():
        raise ProbeError(f"{where}: weights are NaN or infinite; give finite numbers")
    if (array < 0).any():
        raise ProbeError(f"{where}: weights are negative; give absolute or positive values")
    total = float(array.sum())
    if total <= 0:
        raise ProbeError(f"{where}: all weights are 0; leave this probe out of the probe set")
    if not normalize and abs(total - 1) > SUM_TOLERANCE:
        raise ProbeError(f"{where}: weights sum to {total:.4g}, not 1; pass --normalize to divide by the sum")
    return (array / total).astype(np.float32)


def _positions(where: str, given: GivenMap, n: int) -> Positions:
    arrays, scalars = given.arrays, given.scalars
    rows, columns = scalars.get("grid_rows"), scalars.get("grid_columns")
    grid = None if rows is None or columns is None else (int(rows), int(columns))
    special = _array(where, arrays, "special", n, np.bool_)
    special = np.zeros(n, dtype=bool) if special is None else special
    boxes = _array(where, arrays, "boxes", 4 * n, np.float32)
    if grid is not None and boxes is None:
        if int((~special).sum()) != grid[0] * grid[1]:
            raise ProbeError(
                f"{where}: a {grid[0]} × {grid[1]} grid does not have {int((~special).sum())} patches"
            )
        boxes = _grid_boxes(grid, special)
    times = _array(where, arrays, "times", 2 * n, np.float32)
    starts, ends = (_array(where, arrays, key, n, np.int32) for key in ("starts", "ends"))
    if (starts is None) != (ends is None):
        raise ProbeError(f"{where}: starts and ends belong together; give both")
    parts = _array(where, arrays, "parts", n, np.int8)
    if starts is not None and parts is None:
        parts = np.where(starts < 0, -1, 0).astype(np.int8)
    return Positions(
        kind="patch" if boxes is not None else "frame" if times is not None else "token",
        special=special,
        starts=starts,
        ends=ends,
        parts=parts,
        boxes=None if boxes is None else boxes.reshape(-1, 4),
        grid=grid,
        times=None if times is None else times.reshape(-1, 2),
        causal=bool(scalars.get("causal", False)),
    )


def _array(
    where: str, arrays: Mapping[str, NDArray[Any]], name: str, size: int, kind: type[np.generic]
) -> NDArray[Any] | None:
    if name not in arrays:
        return None
    array = np.asarray(arrays[name]).reshape(-1)
    if len(array) != size:
        raise ProbeError(f"{where}: {name} must have {size} entries, got {len(array)}")
    return array.astype(kind)


def _grid_boxes(grid: tuple[int, int], special: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the boxes of a patch grid, row by row, zeros at special positions; (n * 4,)."""
    rows, columns = grid
    top, left = (axis.reshape(-1) for axis in np.mgrid[0:rows, 0:columns])
    boxes = np.zeros((len(special), 4), dtype=np.float32)
    patches = [left / columns, top / rows, (left + 1) / columns, (top + 1) / rows]
    boxes[~special] = np.stack(patches, axis=1)
    return boxes.reshape(-1)


# --- storing ----------------------------------------------------------------------------------


def _spec(
    name: str, maps: Mapping[str, tuple[Map, ...]], probes: ProbeSet, regions: Sequence[Region], method: str
) -> RunSpec:
    return RunSpec(
        checkpoint=CheckpointInfo(name, digest([name, _content_digest(maps)]), "", ""),
        inputs_digest=probes.inputs_digest,
        annotations_digest=probes.annotations_digest,
        regions=tuple(regions),
        target=GIVEN,
        targets_digest="",
        method=Method(method, GIVEN),
        settings=CaptureSettings(dtype=GIVEN, attention_implementation=GIVEN, device_type=GIVEN),
        versions={"import": IMPORT_VERSION},
    )


def _content_digest(maps: Mapping[str, tuple[Map, ...]]) -> str:
    content = hashlib.sha256()
    for probe_id, own in maps.items():
        for one in own:
            content.update(f"{probe_id}\0{one.stream}\0{one.weights.shape}\0".encode())
            arrays = [one.weights, one.layers, *vars(one.positions).values()]
            for array in arrays:
                content.update(array.tobytes() if isinstance(array, np.ndarray) else repr(array).encode())
    return content.hexdigest()


def _captured(maps: tuple[Map, ...], probe: Probe) -> Captured:
    label = None if probe.label is None else str(probe.label)
    prediction = Prediction(probe.id, label=label, group=probe.group, segments=dict(probe.segments))
    return Captured(maps, prediction)


def _reliance(
    captured: Sequence[Captured], probes: ProbeSet, regions: Sequence[Region], path: Path
) -> Iterator[Reliance]:
    for item, probe in zip(captured, probes, strict=True):
        for one in item.maps:
            try:
                yield from reliance(one, load_annotations(probe), regions)
            except ValueError as error:
                raise ProbeError(f"maps {path}, probe {probe.id}: {error}") from None
