"""The runs of one audit as data: shares, groups and identity, from the store or from a frozen floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from audit._method_parameters import TARGETED
from audit.errors import StoreError
from audit.pipeline.targets import PREDICTION
from audit.records import Map, RunRef, RunSpec, ShareTable
from audit.store import Store


@dataclass(frozen=True)
class RunData:
    """One run as the statistics see it.

    `layer_shares` and `store` are None for a run that was read from a floor: it has shares of the
    whole stack, but no maps; `frozen_with` is then the id of the floor's baseline, whose identity stands for
    all of its runs. `sizes` holds the share that uniform maps would give each (region, stream).
    """

    ref: RunRef
    inputs_digest: str
    regions_digest: str
    identity: Mapping[str, str]
    shares: ShareTable
    layer_shares: ShareTable | None = None
    groups: tuple[str | None, ...] = ()
    segments: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    store: Store | None = None
    sizes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    frozen_with: str | None = None

    def read(self) -> RunData:
        """Return the run itself: it is read already."""
        return self

    def sizes_of(self, table: ShareTable) -> list[float | None]:
        """Return the size of each column of a table, None where it is unknown."""
        return [self.sizes.get((column.region, column.stream)) for column in table.columns]

    def maps(self) -> Iterator[Map]:
        """Yield the maps in the order of the probes."""
        if self.store is None:
            raise StoreError(f"{self.ref.checkpoint} comes from a floor, which holds no maps; capture it")
        return iter(self.store.iter_maps(self.ref.run_id))


@dataclass(frozen=True)
class StoredRun:
    """A run of the store of which only the manifest has been read."""

    ref: RunRef
    spec: RunSpec
    store: Store

    frozen_with: None = None

    @property
    def identity(self) -> Mapping[str, str]:
        """Return the settings in which two runs must agree to be comparable."""
        return identity(self.spec)

    def read(self) -> RunData:
        """Return the run with its shares; see :func:`read_run`."""
        return read_run(self.store, self.ref.run_id, kind=self.ref.kind)


def find_run(store: Store, run_id: str, *, kind: str | None = None) -> StoredRun:
    """Return a stored run without reading its shares.

    Raises
    ------
    StoreError
        When the run is missing, unfinished or its manifest is damaged.
    """
    spec = store.spec(run_id)
    return StoredRun(run_ref(run_id, spec, kind), spec, store)


def read_run(store: Store, run_id: str, *, kind: str | None = None, layers: bool = True) -> RunData:
    """Return a stored run.

    Parameters
    ----------
    store : Store
    run_id : str
    kind : str, optional
        Kind of replicate, when the run serves as one.
    layers : bool
        Read the shares of each layer too.

    Returns
    -------
    RunData

    Raises
    ------
    StoreError
        When the run is missing, unfinished or damaged.
    """
    spec = store.spec(run_id)
    groups, segments = read_annotations(store, run_id)
    return RunData(
        ref=run_ref(run_id, spec, kind),
        inputs_digest=spec.inputs_digest,
        regions_digest=spec.regions_digest,
        identity=identity(spec),
        shares=store.share_table(run_id),
        layer_shares=_layers_only(store.share_table(run_id, layers=True)) if layers else None,
        groups=groups,
        segments=segments,
        store=store,
        sizes=_sizes(store, run_id),
    )


def _sizes(store: Store, run_id: str) -> dict[tuple[str, str], float]:
    """Return the mean size of each region over the probes that have it."""
    import polars as pl

    means = store.reliance(run_id).group_by("region", "stream").agg(pl.col("size").mean())
    return {
        (row["region"], row["stream"]): row["size"] for row in means.to_dicts() if row["size"] is not None
    }


def _layers_only(table: ShareTable) -> ShareTable:
    keep = [i for i, column in enumerate(table.columns) if column.layer is not None]
    return ShareTable(table.probe_ids, tuple(table.columns[i] for i in keep), table.values[:, keep])


def run_ref(run_id: str, spec: RunSpec, kind: str | None = None) -> RunRef:
    """Return how a comparison names a run."""
    checkpoint = spec.checkpoint
    return RunRef(run_id, checkpoint.ref, checkpoint.digest, checkpoint.weights_digest, kind)


def identity(spec: RunSpec) -> dict[str, str]:
    """Return the settings in which two runs must agree to be comparable."""
    transformers = spec.versions.get("transformers", "unknown")
    asked = spec.target == PREDICTION and spec.method.name in TARGETED
    answers = {"target": f"predictions of {spec.targets_digest[:12]}"} if asked else {}
    return answers | {
        "method": " ".join([spec.method.name, *(f"{k}={v}" for k, v in sorted(spec.method.params.items()))]),
        "row": spec.method.row,
        "dtype": spec.settings.dtype,
        "attention implementation": spec.settings.attention_implementation,
        "device type": spec.settings.device_type,
        "transformers": ".".join(transformers.split(".")[:2]),
    }


def mismatches(*runs: RunData | StoredRun) -> tuple[str, ...]:
    """Return one line for each setting in which the runs differ."""
    first = runs[0]
    found: dict[str, None] = {}
    for other in runs[1:]:
        for name in dict.fromkeys((*first.identity, *other.identity)):
            one, two = (run.identity.get(name, "not set") for run in (first, other))
            if one != two:
                found[f"{name}: {one} against {two}"] = None
    return tuple(found)


def other_model(before: RunData, after: RunData) -> str | None:
    """Return how two runs are of different models, None where they are of one or a run tells neither.

    A run that was read from a floor, or whose maps were made elsewhere, knows no architecture.
    """
    if before.store is None or after.store is None:
        return None
    one, two = (run.store.spec(run.ref.run_id).checkpoint for run in (before, after) if run.store)
    if one.architecture and two.architecture and one.architecture != two.architecture:
        return f"{one.architecture} and {two.architecture}"
    tokenizers = (one.tokenizer_digest, two.tokenizer_digest)
    return "their tokenizers or processors differ" if all(tokenizers) and len(set(tokenizers)) > 1 else None


def read_annotations(
    store: Store, run_id: str
) -> tuple[tuple[str | None, ...], dict[str, tuple[str | None, ...]]]:
    """Return the group of each probe (empty when no probe has one) and each segment's values."""
    rows = store.predictions(run_id).select("group", "segments").to_dicts()
    groups = tuple(row["group"] for row in rows)
    per_probe = [_as_mapping(row["segments"]) for row in rows]
    keys = sorted({key for segments in per_probe for key in segments})
    segments = {key: tuple(one.get(key) for one in per_probe) for key in keys}
    return (groups if any(group is not None for group in groups) else ()), segments


def _as_mapping(value: Any) -> dict[str, str]:
    """Return Parquet's map column, which polars reads as a list of key–value structs, as a dict."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {key: item for key, item in value.items() if item is not None}
    return {item["key"]: item["value"] for item in value}
