"""Runs & provenance: what was captured, from which bytes, and whether the files are still as written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import streamlit as st

from audit.report.wording import count
from dashboards import blocks, data, downloads, naming, state

if TYPE_CHECKING:
    import polars as pl

KEYS = ("run",)
COLUMNS = {
    "architecture": blocks.column("architecture"),
    "method": blocks.column("method"),
    "output row": blocks.column("output row"),
    "dtype": blocks.column("dtype"),
    "device": blocks.column("device"),
    "digest": blocks.column("digest"),
    "inputs": blocks.column("inputs digest", "inputs"),
}
SHARES = {
    "stream": blocks.column("stream"),
    "region": blocks.column("region"),
    "layer": st.column_config.TextColumn(
        "up to layer", help=f"{blocks.GLOSSARY['layer']} The whole stack is what is judged."
    ),
    "mean": st.column_config.NumberColumn("mean share", help=blocks.GLOSSARY["share"]),
    "sd": st.column_config.NumberColumn("SD", help="How far single probes lie from the mean."),
    "n": st.column_config.NumberColumn("probes"),
    "n_missing": st.column_config.NumberColumn(
        "without it", help="Probes in which the region has no position."
    ),
}
LINES = 20
"""Problems that are listed; `audit verify` lists all."""
LISTED = 500
"""Runs in the list to choose from; a click on a row of the table chooses any."""


def page() -> None:
    """Draw the list of runs and the chosen one."""
    st.title("Runs & provenance", anchor=False)
    listing = data.runs()
    for problem in listing.problems[:5]:
        blocks.warn(problem)
    manifests = list(reversed(listing.manifests))
    if not manifests:
        st.info(
            "There is no finished run in this store yet; `audit capture` makes one.", icon=":material/inbox:"
        )
        _verify_everything()
        return
    blocks.note(
        "A run is one checkpoint on one probe set with one method. It never changes: its id is the digest of "
        "everything that went into it."
    )
    with blocks.section():
        _table(runs_frame(tuple(str(one["run_id"]) for one in manifests), manifests))
    _verify_everything()
    with blocks.section():
        _run(_choose(manifests))
    state.publish(*KEYS)


def _row(manifest: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    spec = manifest["spec"]
    return {
        "run": manifest["run_id"],
        "time": blocks.moment(manifest["provenance"]["time"]),
        "checkpoint": names[spec["checkpoint"]["ref"]],
        "architecture": spec["checkpoint"]["architecture"],
        "method": spec["method"]["name"],
        "output row": spec["method"]["row"],
        "probes": manifest["n_probes"],
        "dtype": spec["settings"]["dtype"],
        "device": spec["settings"]["device_type"],
        "digest": spec["checkpoint"]["digest"][:12],
        "inputs": spec["inputs_digest"][:12],
    }


@st.cache_resource(max_entries=2, show_spinner=False)
def runs_frame(ids: tuple[str, ...], _manifests: Sequence[Mapping[str, Any]]) -> pl.DataFrame:  # noqa: ARG001
    """Return the runs as a table; a run never changes, so that its id stands for it in the cache."""
    import polars as pl

    names = _names(_manifests)
    return pl.DataFrame([_row(one, names) for one in _manifests], infer_schema_length=None)


def _table(frame: pl.DataFrame) -> None:
    event = st.dataframe(
        frame,
        hide_index=True,
        height=min(300, 38 + 35 * len(frame)),
        on_select="rerun",
        selection_mode="single-row",
        key="runs",
        column_config={"time": blocks.TIME, **COLUMNS},
    )
    picked = event["selection"]["rows"]
    if picked and st.session_state.get("run picked") != picked:
        st.session_state["run picked"] = picked
        state.put(run=str(frame["run"][picked[0]]))
    downloads.table("runs", frame)


def _names(manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    return naming.checkpoint_names([one["spec"]["checkpoint"]["ref"] for one in manifests])


def _choose(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    by_name = {str(one["run_id"]): one for one in manifests}
    asked = state.get("run")
    if asked is not None and asked not in by_name:
        st.warning(
            f"The link asks for {blocks.plain(asked, 40)}, {blocks.plain(data.missing(asked))}. "
            "The newest run is shown instead.",
            icon=":material/link_off:",
        )
        state.put(run=None)
    names = list(by_name)[:LISTED]
    if (chosen := state.get("run")) is not None and chosen not in names:
        names.append(chosen)
    shown = _names([by_name[name] for name in names])
    chosen = state.pick(
        st.selectbox,
        "Run",
        "run",
        names,
        default=names[0],
        format_func=lambda name: f"{shown[by_name[name]['spec']['checkpoint']['ref']]} · {name}",
        help=f"The newest {LISTED}; a click on a row of the table chooses any."
        if len(by_name) > LISTED
        else None,
    )
    return by_name[str(chosen)]


def _run(manifest: Mapping[str, Any]) -> None:
    spec, name = manifest["spec"], str(manifest["run_id"])
    checkpoint, settings = spec["checkpoint"], spec["settings"]
    method = spec["method"]
    made_of = [
        ("from", checkpoint["ref"]),
        ("revision", checkpoint["revision"]),
        ("adapter", checkpoint["adapter"]),
        ("architecture", checkpoint["architecture"]),
        ("parameters", f"{checkpoint['parameters']:,}" if checkpoint["parameters"] else None),
        ("labels", ", ".join(checkpoint["labels"][:12])),
        ("digest", checkpoint["digest"]),
        ("weights", checkpoint["weights_digest"]),
        ("tokenizer", checkpoint["tokenizer_digest"]),
    ]
    captured = [
        ("method", " ".join([method["name"], *(f"{k}={v}" for k, v in method["params"].items())])),
        ("output row", method["row"]),
        ("probes", f"{manifest['n_probes']:,}"),
        ("inputs digest", spec["inputs_digest"]),
        ("annotations", spec["annotations_digest"]),
        ("regions", ", ".join(region["name"] for region in spec["regions"])),
        ("dtype", settings["dtype"]),
        ("attention", settings["attention_implementation"]),
        ("device", settings["device_type"]),
        ("versions", ", ".join(f"{k} {v}" for k, v in spec["versions"].items())),
        ("written", blocks.when(manifest["provenance"]["time"])),
        ("command", manifest["provenance"]["command"]),
        ("git revision", manifest["provenance"]["git_revision"]),
    ]
    halves = (("Checkpoint", made_of), ("Capture", captured))
    content = "".join(f"<section><h2>{title}</h2>{blocks.facts(items)}</section>" for title, items in halves)
    blocks.html(f'<div class="halves">{content}</div>')
    _verify(manifest)
    _used_in(name)
    _shares(name)


def _verify(manifest: Mapping[str, Any]) -> None:
    import polars as pl

    name = str(manifest["run_id"])
    with blocks.section("Files", "Every file of the run with its SHA-256, as listed when it was published."):
        size = sum(entry["bytes"] for entry in manifest["files"])
        blocks.note(f"{count(len(manifest['files']), 'file')}, {size / 1e6:.2f} MB.")
        frame = pl.DataFrame(
            [
                {key: entry[key] for key in ("table", "path", "rows", "bytes", "sha256")}
                for entry in manifest["files"]
            ]
        )
        st.dataframe(frame, hide_index=True, height=min(250, 38 + 35 * len(frame)))
        downloads.table(f"{name}-files", frame)
        if st.button(
            "Verify now", icon=":material/verified:", help="Reads every file and compares its SHA-256."
        ):
            with st.spinner("Reading every file …"):
                problems = data.store().verify(name)
            _tell(problems, "Every file is as it was written.")


def _verify_everything() -> None:
    with blocks.section(
        "The whole store", "Every run, comparison and approval, the log, and the statistics computed again."
    ):
        if not st.button(
            "Verify everything",
            icon=":material/fact_check:",
            help="What `audit verify` does: reads every file, and computes every comparison again.",
        ):
            return
        from audit.pipeline import verify_store

        with st.spinner("Reading every file, and computing every comparison again …"):
            found = verify_store(data.store())
        again = count(len(found.recomputed), "comparison")
        _tell(
            found.problems,
            f"{len(found.checked)} runs and comparisons are as they were logged; {again} came out the same "
            "when computed again.",
        )
        for one in found.notes[:LINES]:
            blocks.note(blocks.text(one, 500))


def _tell(problems: Sequence[str], good: str) -> None:
    for problem in problems[:LINES]:
        st.error(blocks.plain(problem), icon=":material/gpp_bad:")
    if len(problems) > LINES:
        st.error(f"{len(problems) - LINES} more; `audit verify` lists them.", icon=":material/gpp_bad:")
    if not problems:
        st.success(good, icon=":material/verified:")


def _used_in(name: str) -> None:
    with blocks.section("Used in"):
        manifests = data.comparisons().manifests
        pairs = naming.pair_names(manifests)
        found = [
            one
            for one in reversed(manifests)
            if name
            in {(side or {}).get("run_id") for side in (one["before"], one["after"], *one["replicates"])}
            or name in (one.get("settings", {}).get("domain") or ())
        ]
        if not found:
            blocks.note("No comparison uses this run yet.")
        for one in found[:8]:
            label = f"{naming.outcome_of(one)} · {pairs[naming.pair_of(one)]} · {one['comparison_id']}"
            blocks.link("compare", label, ":material/compare_arrows:", comparison=str(one["comparison_id"]))
        if len(found) > 8:
            blocks.note(f"and {len(found) - 8} more.")


def _shares(name: str) -> None:
    with blocks.section("Shares of the regions", "Means over the probes of this run alone."):
        import polars as pl

        frame = data.aggregate(name).drop("run_id")
        shown = frame.with_columns(frame["layer"].cast(pl.String).fill_null("whole stack"))
        st.dataframe(shown, hide_index=True, height=min(300, 38 + 35 * len(frame)), column_config=SHARES)
        downloads.table(f"{name}-regions", frame)
