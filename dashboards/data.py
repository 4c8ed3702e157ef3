"""What the pages show, read from the store once and kept for as long as its files are the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from audit.errors import AuditError, StoreError
from audit.records import Cell, Comparison, Map, Outcome, Verdict
from audit.store import Store
from dashboards import naming

if TYPE_CHECKING:
    import polars as pl

    from audit.pipeline.trend import Trend
    from dashboards.selection import Selected

STORE_VARIABLE = "ROLLOUT_AUDIT_STORE"
DEFAULT_STORE = "data/store"
RESAMPLES = 999
"""For selections: enough to look at; the verdict's own intervals use the policy's number."""


@dataclass(frozen=True)
class Listing:
    """Manifests, oldest first, and one line for each that cannot be read."""

    manifests: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...] = ()


def store() -> Store:
    """Return the store that this dashboard was started on."""
    return _open(os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


@st.cache_resource(max_entries=4, show_spinner=False)
def _open(url: str) -> Store:
    return Store(url)


def comparisons() -> Listing:
    """Return the manifests of comparisons as they are read today; a damaged one hides no other.

    `outcome` and `sentence` are those with the approvals that count, `accepted` tells who accepted which
    rules, and `changed` why a comparison is not the one that was logged; its outcome is ERROR then.
    """
    where = store()
    found = _listing(where.comparisons, where.comparison_ids, where.comparison_manifest)
    return Listing(tuple(_as_read(one) for one in found.manifests), (*found.problems, *log().problems))


def _as_read(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(manifest["comparison_id"])
    why = _changed(name, "verdict")
    if why is None and (manifest["outcome"] != Outcome.FAIL.value or not approvals().manifests):
        return manifest
    try:
        found = verdict(name)
    except AuditError as error:
        why = why or (str(error) if _changed(name, "comparison", "verdict") else None)
        found = None
    if why is not None:
        return {**manifest, "outcome": Outcome.ERROR.value, "sentence": f"Changed since it was logged: {why}",
                "changed": why}  # fmt: skip
    if found is None:  # what is wrong with the approvals or the log is told beside the verdicts
        return manifest
    return {
        **manifest,
        "outcome": found.status,
        "sentence": found.sentence,
        "accepted": naming.accepted(found),
    }


def _changed(name: str, *tables: str) -> str | None:
    return store().changed(name, tables, _recorded().get(name, ()))


def _require_logged(name: str, *tables: str) -> None:
    if (why := _changed(name, *tables)) is not None:
        raise StoreError(f"changed since it was logged: {why}")


def _recorded() -> dict[str, set[str]]:
    return _seals(str(store().root), _stamp(store().root / "log"))


@st.cache_resource(max_entries=2, show_spinner=False)
def _seals(root: str, stamp: tuple[int, int, int]) -> dict[str, set[str]]:  # noqa: ARG001 (part of the cache's key)
    """Return the seals that the log recorded of each comparison; it only grows, so its folder tells when."""
    found: dict[str, set[str]] = {}
    for entry in _open(root).log(intact=True):
        if entry["kind"] == "comparison":
            found.setdefault(entry["payload"]["comparison_id"], set()).add(entry["payload"]["seal"])
    return found


def log() -> Listing:
    """Return the entries of the log before the first that was changed, and what is wrong with it."""
    return _log(str(store().root), _stamps_in(store().root / "log"))


@st.cache_resource(max_entries=2, show_spinner=False)
def _log(root: str, stamp: str) -> Listing:  # noqa: ARG001 (part of the cache's key)
    return Listing(tuple(_open(root).log(intact=True)), tuple(_open(root).verify_log()))


def runs() -> Listing:
    """Return the manifests of runs; a damaged one hides no other."""
    where = store()
    return _listing(where.runs, where.run_ids, where.manifest)


def missing(run_id: str) -> str:
    """Return why a run cannot be shown: damaged, unfinished, or not there; without a full stop."""
    where = store()
    if where.has_run(run_id):
        try:
            where.manifest(run_id)
        except AuditError as error:
            return f"which is damaged: {error}"
    folder = where.root / "runs" / Path(run_id).name
    if run_id.startswith("run-") and folder.is_dir():
        return "which is unfinished or has lost its manifest: run its command again, or restore manifest.json"
    return "which is not in this store (it may have been removed)"


def _listing(
    every: Callable[[], list[dict[str, Any]]],
    ids: Callable[[], list[str]],
    one: Callable[[str], dict[str, Any]],
) -> Listing:
    try:
        return Listing(tuple(every()))
    except AuditError:
        pass
    found, problems = [], []
    for name in ids():
        try:
            found.append(one(name))
        except AuditError as error:
            problems.append(str(error))
    return Listing(tuple(sorted(found, key=lambda m: str(m["provenance"]["time"]))), tuple(problems))


def approvals() -> Listing:
    """Return the approvals, and what cannot be read of them."""
    try:
        return _approvals(str(store().root), _stamps_in(store().root / "approvals"))
    except AuditError as error:
        return Listing((), (str(error),))


def comparison(name: str) -> Comparison:
    """Return a stored comparison with every cell."""
    _require_logged(name, "comparison")
    return _comparison(str(store().root), name, _key([name], "comparison"))


def stored_verdict(name: str) -> Verdict | None:
    """Return the verdict of a comparison as it was stored, without approvals."""
    _require_logged(name, "verdict")
    return _verdict(str(store().root), name, _key([name], "verdict"))


def verdict(name: str) -> Verdict | None:
    """Return the verdict of a stored comparison with today's approvals, None where no policy was judged."""
    found = stored_verdict(name)
    if found is None or found.outcome is not Outcome.FAIL:
        return found
    given = _approvals(str(store().root), _stamps_in(store().root / "approvals")).manifests
    after = store().comparison_manifest(name)["after"] if given else None
    digest = (after or {}).get("digest")
    if all((one.get("bound") or {}).get("after") != digest for one in given):
        # Spares reading the log and every cell of the comparison, which an overview does not need.
        return found
    allowed = signers(comparison(name))
    stamps = [_stamps_in(store().root / part) for part in ("approvals", "log")]
    key = (_key([name], "comparison", "verdict"), *stamps, str(allowed and (allowed, _stamp(allowed.path))))
    return _applied(str(store().root), name, key, datetime.now(UTC).date(), allowed)


@st.cache_resource(max_entries=1024, show_spinner=False)
def _applied(
    root: str,
    name: str,
    key: tuple[str, ...],  # noqa: ARG001 (stands for the files)
    today: date,
    _signers: Any,
) -> Verdict | None:
    from audit.pipeline import read_verdict

    return read_verdict(_open(root), name, signers=_signers, today=today)


def signers(whole: Comparison) -> Any:
    """Return whose signatures count for a comparison that demands them, None for any other."""
    from audit.config import load_config
    from audit.pipeline import signers_of
    from dashboards.content import CONFIGS_VARIABLE

    if whole.settings.get("approvals") != "signed":
        return None
    for path in filter(None, os.environ.get(CONFIGS_VARIABLE, "").split(os.pathsep)):
        with contextlib.suppress(AuditError):
            found = signers_of(load_config(path))
            if found is not None:
                return found
    return None


def trends(name: str) -> list[Trend]:
    """Return the trend of each region over the history of a comparison, up to it."""
    return _trends(str(store().root), name, _key(store().comparison_ids(), "comparison", "verdict"))


def probe_rows(name: str) -> pl.DataFrame:
    """Return the comparison's rows per probe × stream × region."""
    return _probe_rows(str(store().root), name, _key([name], "probes"))


def answers(before: str, after: str) -> pl.DataFrame:
    """Return what both checkpoints answered, one row a probe, in the order of the probes.

    Columns: ``probe_id, label, group, segments, predicted_before, predicted_after,
    confidence_before, confidence_after, change``; change is ``same``, ``changed``, ``newly wrong``,
    ``fixed`` or null where nothing is predicted.
    """
    return _answers(str(store().root), before, after, _key([before, after], "predictions"))


def subset(name: str, chosen: Selected, crossed: Selected | None = None) -> tuple[Cell, ...]:
    """Return the cells of a selection of probes; with `crossed`, of the whole 2×2.

    Parameters
    ----------
    name : str
        A comparison.
    chosen : Selected
    crossed : Selected or None
        What the same filters leave of the second probe set.
    """
    whole = comparison(name)
    sides = [one.run_id for one in (whole.before, whole.after, *whole.replicates) if one is not None]
    runs = [*sides, *map(str, whole.settings.get("domain") or ())]
    stamp = _key([name, *runs], "comparison", "predictions", "reliance", "layers")
    key = (stamp, crossed is not None, *chosen.filters)
    return _subset(str(store().root), name, key, chosen.ids, crossed.ids if crossed else None)


def map_of(run_id: str, probe_id: str, stream: str) -> Map:
    """Return one stored map."""
    return _map_of(str(store().root), run_id, probe_id, stream, _key([run_id], "maps", "layer_maps"))


def aggregate(run_id: str) -> pl.DataFrame:
    """Return mean and SD of each region of one run."""
    return _aggregate(str(store().root), run_id, _key([run_id], "aggregate", "reliance", "layers"))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _stamps_in(directory: Path) -> str:
    """Return what changes when any file of a directory is changed, added or removed."""
    names = sorted(directory.iterdir()) if os.path.isdir(directory) else []  # noqa: PTH112 (a name that is too long is no error)
    return _short([(one.name, _stamp(one)) for one in names])


def _key(names: Sequence[str], *tables: str) -> str:
    """Return what changes when a manifest, or a listed file of these tables, does; read anew then."""
    return _short([store().stamps(one, tables) for one in names])


def _short(stamps: Sequence[Any]) -> str:
    return hashlib.sha256(repr(stamps).encode()).hexdigest()


@st.cache_resource(max_entries=2, show_spinner=False)
def _approvals(root: str, stamp: str) -> Listing:  # noqa: ARG001 (part of the cache's key)
    return Listing(tuple(_open(root).approvals()))


@st.cache_resource(max_entries=32, show_spinner="Following the audits …")
def _trends(root: str, name: str, stamp: str) -> list[Trend]:  # noqa: ARG001 (part of the cache's key)
    from audit.pipeline import trends

    return trends(_open(root), name)


@st.cache_resource(max_entries=64, show_spinner=False)
def _aggregate(root: str, run_id: str, stamp: str) -> pl.DataFrame:  # noqa: ARG001 (part of the cache's key)
    return _open(root).aggregate([run_id])


@st.cache_resource(max_entries=128, show_spinner=False)
def _comparison(root: str, name: str, stamp: str) -> Comparison:  # noqa: ARG001 (part of the cache's key)
    return _open(root).comparison(name)


@st.cache_resource(max_entries=1024, show_spinner=False)
def _verdict(root: str, name: str, stamp: str) -> Verdict | None:  # noqa: ARG001 (part of the cache's key)
    return _open(root).verdict(name)


@st.cache_resource(max_entries=8, show_spinner=False)
def _probe_rows(root: str, name: str, stamp: str) -> pl.DataFrame:  # noqa: ARG001 (part of the cache's key)
    return _open(root).comparison_probes(name)


@st.cache_resource(max_entries=64, show_spinner=False)
def _map_of(root: str, run_id: str, probe_id: str, stream: str, stamp: str) -> Map:  # noqa: ARG001 (part of the cache's key)
    return _open(root).map_of(run_id, probe_id, stream)


@st.cache_resource(max_entries=32, show_spinner="Comparing the selected probes …")
def _subset(
    root: str,
    name: str,
    key: tuple[Any, ...],  # noqa: ARG001 (stands for the ids, which are slow to hash)
    _ids: Sequence[str],
    _domain_ids: Sequence[str] | None,
) -> tuple[Cell, ...]:
    from audit.pipeline import compare_subset, subset_crossing
    from audit.pipeline.compare import Statistics

    whole = _open(root).comparison(name)
    statistics = Statistics(alpha=whole.alpha, resamples=RESAMPLES)
    if _domain_ids is None:
        return compare_subset(_open(root), whole, _ids, statistics=statistics)
    return subset_crossing(_open(root), whole, _ids, _domain_ids, statistics=statistics)


@st.cache_resource(max_entries=8, show_spinner=False)
def _answers(root: str, before: str, after: str, stamp: str) -> pl.DataFrame:  # noqa: ARG001 (part of the cache's key)
    import polars as pl

    where = _open(root)
    one, two = (_answered(where.predictions(run)) for run in (before, after))
    kept = one.select("probe_id", "label", "group", "segments", "predicted", "confidence")
    both = kept.join(
        two.select("probe_id", "predicted", "confidence"),
        on="probe_id",
        suffix="_after",
        maintain_order="left",
    ).rename({"predicted": "predicted_before", "confidence": "confidence_before"})
    right_before, right_after = (
        pl.col(f"predicted_{side}") == pl.col("label") for side in ("before", "after")
    )
    change = (
        pl.when(pl.col("predicted_before").is_null() | pl.col("predicted_after").is_null())
        .then(None)
        .when(right_before & ~right_after)
        .then(pl.lit("newly wrong"))
        .when(~right_before & right_after)
        .then(pl.lit("fixed"))
        .when(pl.col("predicted_before") != pl.col("predicted_after"))
        .then(pl.lit("changed"))
        .otherwise(pl.lit("same"))
    )
    return both.with_columns(change.alias("change"))


def _answered(rows: pl.DataFrame) -> pl.DataFrame:
    """Add the softmax share of the predicted class, and segments as plain mappings."""
    import numpy as np
    import polars as pl

    def confidence(logits: Sequence[float] | None) -> float | None:
        if logits is None or len(logits) < 2:
            return None
        shares = np.exp(np.asarray(logits) - np.max(logits))
        return float(shares.max() / shares.sum())

    shares = [confidence(logits) for logits in rows["logits"].to_list()]
    segments = [_as_text(value) for value in rows["segments"].to_list()]
    return rows.with_columns(
        pl.Series("confidence", shares, dtype=pl.Float64),
        pl.Series("segments", segments, dtype=pl.List(pl.String)),
    )


def _as_text(value: Any) -> list[str]:
    pairs = value.items() if isinstance(value, Mapping) else [(v["key"], v["value"]) for v in value or ()]
    return [f"{key}={item}" for key, item in pairs if item is not None]
