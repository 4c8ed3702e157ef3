"""The store: Parquet files and JSON manifests are the truth, DuckDB queries them in memory.

The layout stands in :mod:`audit.schema`. Importing this module, and listing runs, comparisons and
verdicts, needs neither DuckDB nor pyarrow nor polars.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audit.errors import StoreError
from audit.records import (
    Comparison,
    Map,
    Prediction,
    Reliance,
    RunSpec,
    ShareTable,
    Verdict,
    digest,
)
from audit.schema import SCHEMA_VERSION
from audit.serialize import from_json
from audit.store import _comparisons, _log, _relink, _upkeep
from audit.store._comparisons import comparison_id
from audit.store._files import create_file, provenance, read_sealed, resolve_root, seal, writing
from audit.store._reader import Files, find_map, iter_maps, read_frame, share_table
from audit.store._writer import RunWriter

if TYPE_CHECKING:
    import polars as pl

__all__ = ["RunWriter", "Store", "comparison_id"]


class Store:
    """Runs, comparisons, approvals and the log below one directory.

    Parameters
    ----------
    url : str or Path
        A directory or a ``file://`` URL; made when something is first written.

    Raises
    ------
    StoreError
        For any other kind of URL.

    Examples
    --------
    >>> import tempfile
    >>> Store(tempfile.mkdtemp()).run_ids()
    []
    """

    def __init__(self, url: str | Path) -> None:
        self.root = resolve_root(url)
        self._runs = Files(self.root / "runs")
        self._comparisons = Files(self.root / "comparisons")

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    # --- writing runs ---

    def begin_run(self, spec: RunSpec, n_shards: int) -> RunWriter:
        """Return the writer of a run; an unfinished directory is found again, with its shards."""
        if n_shards < 1:
            raise StoreError(
                f"{spec.id}: expected at least one shard, got {n_shards}; the probe set is empty"
            )
        return RunWriter(self.root, spec, n_shards).open()

    def relinkable(self, spec: RunSpec) -> str | None:
        """Return a run that differs from `spec` only in regions and annotations and keeps its maps.

        Annotations may differ only where the output row does not come from them.
        """
        return _relink.relinkable(self._runs, spec)

    def relink_run(
        self,
        spec: RunSpec,
        measure: Callable[[Map], Iterable[Reliance]],
        *,
        annotate: Callable[[Prediction], Prediction] | None = None,
        counts: Mapping[str, Any] | None = None,
        diagnostics: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Make the run of `spec` from the stored maps of one that differs only in regions.

        Parameters
        ----------
        spec : RunSpec
        measure : callable
            Gives the reliance of one map in the regions of `spec`.
        annotate : callable, optional
            Gives a stored prediction the label, group and segments of today's probe set; needed
            where the annotations differ.

        Returns
        -------
        dict or None
            The manifest, whose map files are the other run's and whose predictions are a copy; None
            when no such run is stored.
        """
        name = self.relinkable(spec)
        if name is None:
            return None
        writer = _relink.relink(self._runs, self.manifest(name), spec, measure, annotate)
        return writer.publish(counts=counts or {}, diagnostics=diagnostics or {}, extra=extra)

    # --- finding runs ---

    def has_run(self, run_id: str) -> bool:
        """Return whether the run is published."""
        return self._runs.has(run_id)

    def run_ids(self) -> list[str]:
        """Return the ids of published runs, sorted."""
        return self._runs.ids()

    def runs(self) -> list[dict[str, Any]]:
        """Return the manifests of published runs, oldest first."""
        return self._runs.manifests()

    def manifest(self, run_id: str) -> dict[str, Any]:
        """Return one run's manifest after checking that nothing in it was changed."""
        return self._runs.manifest(run_id)

    def spec(self, run_id: str) -> RunSpec:
        """Return what the run was made of."""
        return from_json(RunSpec, self.manifest(run_id)["spec"])

    def find_runs(
        self,
        *,
        checkpoint: str | None = None,
        inputs: str | None = None,
        method: str | None = None,
        regions: str | None = None,
        annotations: str | None = None,
        device_type: str | None = None,
    ) -> list[str]:
        """Return ids of the runs that fit every given condition, oldest first.

        Parameters
        ----------
        checkpoint : str, optional
            Reference, digest or digest of the weights.
        inputs, annotations, regions : str, optional
            Digests.
        method, device_type : str, optional
            Names.
        """
        return [
            str(manifest["run_id"])
            for manifest in self.runs()
            if _fits(
                checkpoint, *(manifest["spec"]["checkpoint"][k] for k in ("ref", "digest", "weights_digest"))
            )
            and _fits(inputs, manifest["spec"]["inputs_digest"])
            and _fits(annotations, manifest["spec"]["annotations_digest"])
            and _fits(regions, manifest["regions_digest"])
            and _fits(method, manifest["spec"]["method"]["name"])
            and _fits(device_type, manifest["spec"]["settings"]["device_type"])
        ]

    # --- reading runs ---

    def maps(self, run_id: str, probe_ids: Collection[str] | None = None) -> pl.DataFrame:
        """Return the rows of ``maps`` of some probes or all, in the order of the probes."""
        return read_frame(self._paths(run_id, "maps"), "maps", probe_ids)

    def map_of(self, run_id: str, probe_id: str, stream: str = "input") -> Map:
        """Return one map with its positions and layers."""
        found = find_map(self._paths(run_id, "maps"), self._paths(run_id, "layer_maps"), probe_id, stream)
        if found is None:
            raise StoreError(
                f"{run_id} has no map of probe {probe_id}, stream {stream}; ids stand in its predictions"
            )
        return found

    def iter_maps(self, run_id: str, *, shard: int | None = None) -> Iterator[Map]:
        """Yield the maps of a run, or of one shard, without holding them all in memory."""
        return iter_maps(self._shard(run_id, "maps", shard), self._shard(run_id, "layer_maps", shard))

    def reliance(self, run_id: str) -> pl.DataFrame:
        """Return the rows of ``reliance``."""
        return read_frame(self._paths(run_id, "reliance"), "reliance")

    def layers(self, run_id: str) -> pl.DataFrame:
        """Return the rows of ``layers``."""
        return read_frame(self._paths(run_id, "layers"), "layers")

    def predictions(self, run_id: str) -> pl.DataFrame:
        """Return the rows of ``predictions``."""
        return read_frame(self._paths(run_id, "predictions"), "predictions")

    def aggregate(self, run_ids: Collection[str] | None = None) -> pl.DataFrame:
        """Return mean and SD of each region for some runs or all, with ``run_id`` in front."""
        return self.sql("SELECT * FROM aggregate ORDER BY run_id, stream, region, layer NULLS FIRST", run_ids)

    def share_table(self, run_id: str, *, layers: bool = False) -> ShareTable:
        """Return reliance as a matrix of probes × columns; with `layers`, also of each layer."""
        predictions, reliance = (self._paths(run_id, name)[0] for name in ("predictions", "reliance"))
        return share_table(predictions, reliance, self._paths(run_id, "layers")[0] if layers else None)

    def sql(self, query: str, run_ids: Collection[str] | None = None) -> pl.DataFrame:
        """Return the result of one SELECT over the views of some runs or all.

        The views are ``maps``, ``layer_maps``, ``reliance``, ``layers``, ``predictions``,
        ``aggregate`` and ``runs``; each has the columns of :mod:`audit.schema` after ``run_id``.
        Nothing but the files that these runs list can be read, and nothing can be written.

        Raises
        ------
        StoreError
            When the query fails, is not one SELECT, or needs a damaged file.
        """
        from audit.store._query import run_query

        manifests = (
            self.runs() if run_ids is None else [self.manifest(name) for name in dict.fromkeys(run_ids)]
        )
        return run_query(query, self._runs, manifests)

    def _paths(self, run_id: str, table: str) -> list[Path]:
        return self._runs.paths(self.manifest(run_id), table)

    def _shard(self, run_id: str, table: str, shard: int | None) -> list[Path]:
        return self._runs.shard(self.manifest(run_id), table, shard)

    # --- comparisons ---

    def write_comparison(
        self,
        comparison: Comparison,
        verdict: Verdict | None,
        probes: Mapping[str, Any] | pl.DataFrame,
        *,
        faithfulness: Iterable[Mapping[str, Any]] = (),
    ) -> str:
        """Store a comparison with its verdict, log both, and return its id.

        Parameters
        ----------
        comparison : Comparison
        verdict : Verdict or None
            Without approvals, which are applied when a verdict is read.
        probes : mapping of columns, or polars.DataFrame
            One row per probe × stream × region; columns ``probe_id``, ``stream``, ``region`` and any
            measures. Null where a measure is undefined, never NaN.
        faithfulness : iterable of mappings
            Rows of the table ``faithfulness``, where it was measured.

        Raises
        ------
        StoreError
            When a number is NaN or infinite, naming it.
        """
        return _comparisons.write(self.root, comparison, verdict, probes, faithfulness)

    def has_comparison(self, comparison_id: str) -> bool:
        """Return whether the comparison is stored."""
        return self._comparisons.has(comparison_id)

    def comparison_ids(self) -> list[str]:
        """Return the ids of stored comparisons, sorted."""
        return self._comparisons.ids()

    def comparison_manifest(self, comparison_id: str) -> dict[str, Any]:
        """Return one comparison's manifest after checking that nothing in it was changed."""
        return self._comparisons.manifest(comparison_id)

    def comparisons(self) -> list[dict[str, Any]]:
        """Return the manifests of comparisons (runs, outcome, sentence, policy), oldest first."""
        return self._comparisons.manifests()

    def comparison(self, comparison_id: str) -> Comparison:
        """Return a stored comparison with every cell."""
        return _comparisons.read_comparison(self._comparisons, comparison_id)

    def verdict(self, comparison_id: str) -> Verdict | None:
        """Return the stored verdict, or None where the comparison was not judged."""
        return _comparisons.read_verdict(self._comparisons, comparison_id)

    def comparison_probes(self, comparison_id: str) -> pl.DataFrame:
        """Return the comparison's rows per probe × stream × region."""
        manifest = self._comparisons.manifest(comparison_id)
        return read_frame(self._comparisons.paths(manifest, "probes"), "probes")

    def comparison_faithfulness(self, comparison_id: str) -> list[dict[str, Any]]:
        """Return the rows of the table ``faithfulness``; empty where it was not measured."""
        manifest = self._comparisons.manifest(comparison_id)
        return read_frame(self._comparisons.paths(manifest, "faithfulness"), "faithfulness").to_dicts()

    # --- approvals and the log ---

    def write_approval(self, approval: Mapping[str, Any]) -> str:
        """Store an approval (plain JSON values), log it, and return its id."""
        content = {"schema_version": SCHEMA_VERSION, **approval}
        name = f"approval-{digest(content)[:12]}"
        directory = self.root / "approvals"
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if create_file(directory / f"{name}.json", seal({**content, "approval_id": name}, provenance())):
                self.append_log("approval", {"approval_id": name, **approval})
        return name

    def approvals(self) -> list[dict[str, Any]]:
        """Return every approval, after checking that none was changed."""
        return [read_sealed(path) for path in sorted((self.root / "approvals").glob("*.json"))]

    def append_log(self, kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Append one entry to the log and return it, with its digest and the previous one's."""
        return _log.append(self.root / "log", kind, dict(payload))

    def log(self, *, intact: bool = False) -> list[dict[str, Any]]:
        """Return every entry of the log in order; with `intact`, those before the first that was changed."""
        return (_log.read_intact if intact else _log.read)(self.root / "log")

    def log_head(self) -> str:
        """Return the digest of the newest entry; it covers the whole log."""
        return _log.head(self.root / "log")

    def verify_log(self, known_head: str | None = None) -> list[str]:
        """Return what is wrong with the log; `known_head`, from a report, shows a log cut short."""
        return _log.problems(self.root / "log", known_head)

    # --- upkeep ---

    def verify(self, name: str) -> list[str]:
        """Return what is wrong with a run or comparison: missing or changed files, wrong rows."""
        return _upkeep.problems_of(self.root, self._files(name), name)

    def changed(self, name: str, tables: Collection[str], recorded: Collection[str] = ()) -> str | None:
        """Return why a manifest or a file of `tables` is not what was logged (seals `recorded`), or None."""
        return _upkeep.changed(self._files(name), name, tables, recorded)

    def stamps(self, name: str, tables: Collection[str]) -> tuple[tuple[int, int, int], ...]:
        """Return time, size and number of a manifest and its files of `tables`; zeros for a missing one."""
        return self._files(name).stamps(name, tables)

    def _files(self, name: str) -> Files:
        return self._comparisons if name.startswith("cmp-") else self._runs

    def gc(
        self,
        *,
        unfinished_after: timedelta = timedelta(days=7),
        unreferenced_after: timedelta | None = timedelta(days=90),
        keep: Collection[str] = (),
        dry_run: bool = True,
    ) -> list[dict[str, str]]:
        """Remove unfinished directories, and runs that nothing refers to; return what and why.

        Parameters
        ----------
        unfinished_after : timedelta
            Remove unfinished directories in which nothing was written for so long.
        unreferenced_after : timedelta or None
            Remove runs of this age that no comparison, approval or other run needs; None keeps all.
        keep : collection of str
            Runs that stay in any case.
        dry_run : bool
            Only tell what would be removed.
        """
        found = _upkeep.candidates(
            self.root,
            unfinished_after=unfinished_after.total_seconds(),
            unreferenced_after=None if unreferenced_after is None else unreferenced_after.total_seconds(),
            keep=keep,
        )
        if not dry_run:
            for candidate in found:
                _upkeep.remove(self.root, candidate)
            _upkeep.empty_trash(self.root)
        return found

    def kept(self, *, removed: Collection[str] = (), keep: Collection[str] = ()) -> list[dict[str, str]]:
        """Return the runs that stay besides `removed`, and why: ``{"id", "reason"}`` each.

        Parameters
        ----------
        removed : collection of str
            What :meth:`gc` removes.
        keep : collection of str
            As for :meth:`gc`.
        """
        return _upkeep.kept(self.root, removed, keep)


def _fits(wanted: str | None, *values: str) -> bool:
    return wanted is None or wanted in values
