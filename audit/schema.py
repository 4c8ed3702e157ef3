"""The tables of the store: their grain, their columns, and the checks that every row passes.

One description drives writing, checking and the empty views of a store without files. Importing this
module loads no library; pyarrow is imported when a schema is built.

========== ================================================= ==========================================
table      grain (one row per ...)                           file
========== ================================================= ==========================================
maps       probe × stream                                    ``maps/part-00000.parquet`` …, one a shard
layer_maps probe × stream × layer (map of the cumulative     ``layer_maps/part-00000.parquet`` …
           R_l), where the method yields them
reliance   probe × stream × region                           ``reliance.parquet``
layers     probe × stream × layer × region; layer and share  ``layers.parquet``
           null, with a reason, where there is none
predictions probe                                            ``predictions.parquet``
aggregate  stream × region × layer (null: whole stack)       ``aggregate.parquet``
cells      measure × region × stream × layer × effect ×      ``comparisons/<id>/cells.parquet``
           segment
faithful   role × method × probe × measure, where an audit    ``comparisons/<id>/faithfulness.parquet``
           measured faithfulness
========== ================================================= ==========================================

No table holds probe content: ids, offsets, boxes and times only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
"""Raised whenever an older reader would misread what is written."""

ROW_GROUP_ROWS = 2000
"""Rows of a row group of maps: one probe is read in about 0.01 s."""


@dataclass(frozen=True)
class ColumnSpec:
    """One column of a table: name, Arrow type, whether it may be null, and its meaning."""

    name: str
    type: str
    nullable: bool
    meaning: str


def _required(name: str, kind: str, meaning: str) -> ColumnSpec:
    return ColumnSpec(name, kind, False, meaning)


def _optional(name: str, kind: str, meaning: str) -> ColumnSpec:
    return ColumnSpec(name, kind, True, meaning)


_PROBE = _required("probe_id", "string", "id of the probe in its probe set")
_STREAM = _required("stream", "string", "input, source, prefix, image or text")
_REGION = _required("region", "string", "name of the region")
_REASON = _optional("reason", "string", "why the number beside it is null")

TABLES: dict[str, tuple[ColumnSpec, ...]] = {
    "maps": (
        _PROBE,
        _STREAM,
        _required("kind", "string", "token, patch or frame"),
        _required("n_positions", "int32", "number of positions n"),
        _required("n_layers", "int32", "rows of this map in layer_maps; 0 where layers were not kept"),
        _required("share", "float64", "part of the output row's mass that falls on this stream"),
        _required("weights", "list<float32>", "(n,) the map; sums to 1"),
        _required("special", "list<bool>", "(n,) positions without content of the user"),
        _optional("starts", "list<int32>", "(n,) first character of each token; -1 for none"),
        _optional("ends", "list<int32>", "(n,) character after each token; -1 for none"),
        _optional("parts", "list<int8>", "(n,) 0 text, 1 text_pair, -1 neither"),
        _optional("boxes", "list<float32>", "(n * 4,) left, top, right, bottom; fractions of the image"),
        _optional("times", "list<float32>", "(n * 2,) start and end in seconds"),
        _optional("grid_rows", "int32", "rows of the patch grid"),
        _optional("grid_columns", "int32", "columns of the patch grid"),
        _required("causal", "bool", "position i cannot attend beyond i"),
        _required("diagnostics", "map<string,float64>", "entropy / log n, sink, depth_collapse, ..."),
    ),
    "layer_maps": (
        _PROBE,
        _STREAM,
        _required("layer", "int32", "layer, counted from 0"),
        _required("weights", "list<float32>", "(n,) the output row of the cumulative R_l"),
    ),
    "reliance": (
        _PROBE,
        _STREAM,
        _REGION,
        _optional("share", "float64", "share of the map's mass in the region"),
        _optional("size", "float64", "share that a uniform map would give"),
        _REASON,
    ),
    "layers": (
        _PROBE,
        _STREAM,
        _optional("layer", "int32", "layer, counted from 0; null where no layer was yielded"),
        _REGION,
        _optional("share", "float64", "share of the cumulative R_l in the region"),
        _REASON,
    ),
    "predictions": (
        _PROBE,
        _optional("logits", "list<float32>", "logits, or the top k of them"),
        _optional("predicted", "string", "class that the checkpoint answers"),
        _optional("target", "string", "class whose logit gradient methods explain"),
        _optional("target_logit", "float64", "logit of the target"),
        _optional("label", "string", "class that the probe set says is right"),
        _optional("tokens", "int32", "number of positions the model saw"),
        _required("truncated", "bool", "whether the probe was cut to the model's limit"),
        _optional("group", "string", "template or cluster of the probe"),
        _required("segments", "map<string,string>", "key and value of each segment of the probe"),
    ),
    "aggregate": (
        _STREAM,
        _REGION,
        _optional("layer", "int32", "layer, counted from 0; null for the whole stack"),
        _optional("mean", "float64", "mean share over probes"),
        _optional("sd", "float64", "standard deviation over probes (n - 1); null below two probes"),
        _required("n", "int64", "probes with a share"),
        _required("n_missing", "int64", "probes in which the region has no position"),
    ),
    "cells": (
        _required("measure", "string", "shift, level, ratio, js_distance, ..."),
        _REGION,
        _STREAM,
        _optional("layer", "int32", "layer, counted from 0; null for the whole stack"),
        _required("effect", "string", "model, data, model_on_domain or interaction"),
        _optional("segment", "string", "segment of the probe set; null for all probes"),
        _optional("value", "float64", "mean over probes"),
        _optional("low", "float64", "lower end of the 1 - 2 alpha interval"),
        _optional("high", "float64", "upper end of the 1 - 2 alpha interval"),
        _optional("before", "float64", "mean before"),
        _optional("after", "float64", "mean after"),
        _optional("sd", "float64", "standard deviation over probes"),
        _optional("effect_size", "float64", "d_z"),
        _optional("size", "float64", "share that a uniform map would give"),
        _optional("pvalue", "float64", "did the maps on these probes change? never gates"),
        _optional("adjusted_pvalue", "float64", "pvalue adjusted for looking at many cells"),
        _optional("wilcoxon_pvalue", "float64", "signed-rank test of ungrouped probes"),
        _required("n_probes", "int64", "probes with a value"),
        _required("n_missing", "int64", "probes without one"),
        _optional("n_clusters", "int64", "groups of probes"),
        _required("replicates", "list<float64>", "the measure for each replicate"),
        _optional("probe_variance", "float64", "variance over probes of the excess, divided by their number"),
        _optional("excess", "float64", "value minus the replicates' mean"),
        _optional("excess_low", "float64", "lower end of the excess shift's interval"),
        _optional("excess_high", "float64", "upper end of the excess shift's interval"),
        _optional("excess_pvalue", "float64", "replicate test"),
        _optional("minimum_detectable_shift", "float64", "excess shift found with the wanted power"),
        _REASON,
    ),
    "faithfulness": (
        _required("role", "string", "before or after"),
        _required("method", "string", "name of the method whose map is judged"),
        _PROBE,
        _required("measure", "string", "deletion, insertion, comprehensiveness_10, spearman:occlusion, ..."),
        _optional("value", "float64", "see audit.faithfulness; null where it is undefined"),
    ),
}

RUN_COLUMNS: tuple[ColumnSpec, ...] = (
    _required("run_id", "string", "run- and 12 hex digits"),
    _required("checkpoint", "string", "directory or hub id"),
    _required("checkpoint_digest", "string", "SHA-256 of weights, config and tokenizer"),
    _required("weights_digest", "string", "SHA-256 of the weights"),
    _required("inputs_digest", "string", "SHA-256 of probe ids and contents"),
    _required("annotations_digest", "string", "SHA-256 of labels, groups, segments and regions"),
    _required("regions_digest", "string", "SHA-256 of the region definitions"),
    _required("target", "string", "how the target class is chosen"),
    _required("method", "string", "name of the method"),
    _required("output_row", "string", "which row of the rollout matrix is read"),
    _required("dtype", "string", "number format of the model"),
    _required("attention_implementation", "string", "kernel that was audited"),
    _required("device_type", "string", "cpu or cuda"),
    _required("n_probes", "int64", "probes of the run"),
    _required("created", "string", "time of publication, UTC"),
)
"""Columns of the view ``runs``; one row per published run."""


def arrow_schema(table: str, *, run_id: bool = False) -> pa.Schema:
    """Return the Arrow schema of a table of :data:`TABLES`, or of ``runs``.

    Parameters
    ----------
    table : str
    run_id : bool
        Put the column ``run_id`` of the views in front.

    Raises
    ------
    ValueError
        When the table is unknown.

    Examples
    --------
    >>> arrow_schema("reliance").names
    ['probe_id', 'stream', 'region', 'share', 'size', 'reason']
    """
    import pyarrow as pa

    columns = RUN_COLUMNS if table == "runs" else TABLES.get(table)
    if columns is None:
        raise ValueError(f"table: expected one of {', '.join(TABLES)} or runs, got {table!r}")
    listed = (*(RUN_COLUMNS[:1] if run_id else ()), *columns)
    return pa.schema([pa.field(c.name, _arrow_type(c.type), nullable=c.nullable) for c in listed])


def _arrow_type(text: str) -> Any:
    import pyarrow as pa

    if text.startswith("list<"):
        return pa.list_(_arrow_type(text[5:-1]))
    if text.startswith("map<"):
        key, value = text[4:-1].split(",")
        return pa.map_(_arrow_type(key), _arrow_type(value))
    return pa.type_for_alias(text)


def check_values(table: Any, *, schema: pa.Schema | None = None) -> None:
    """Refuse NaN and infinity in any column, and null where `schema` does not allow it.

    Raises
    ------
    ValueError
        Naming the column and the number of bad values.
    """
    for name in table.column_names:
        column = table.column(name)
        if schema is not None and not schema.field(name).nullable and column.null_count:
            raise ValueError(f"column {name!r}: expected a value in every row, got {column.null_count} nulls")
        for chunk in column.chunks:
            _check_finite(name, chunk)


def _check_finite(name: str, array: Any) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_map(kind):
        _check_finite(name, array.items)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _check_finite(name, array.flatten())
    elif pa.types.is_floating(kind):
        bad = pc.sum(pc.invert(pc.is_finite(array))).as_py() or 0
        if bad:
            raise ValueError(
                f"column {name!r}: expected finite numbers or null, got {bad} NaN or infinite values"
            )
