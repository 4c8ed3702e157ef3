"""Approvals and log: who accepted what, every verdict in order, and whether the log is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from audit.report.wording import count
from dashboards import blocks, data


def page() -> None:
    """Draw approvals, verdicts and the log."""
    st.title("Approvals & log", anchor=False)
    entries: Sequence[Mapping[str, Any]] = ()
    with blocks.section():
        entries = data.store().log()
    _approvals()
    _verdicts(entries)
    _chain(entries)
    blocks.share_link()


def _approvals() -> None:
    with blocks.section(
        "Approvals", "A named person accepted a shift, for these exact checkpoints and until a date."
    ):
        listing = data.approvals()
        for problem in listing.problems:
            blocks.warn(problem)
        if not listing.manifests:
            blocks.note(
                "Nothing has been approved. The dashboard only reads; an approval is given on the "
                "command line, "
                "with a name and a reason."
            )
            return
        hidden = {"schema_version", "digest", "seal", "provenance"}
        body = []
        for one in reversed(listing.manifests[-50:]):
            details = "; ".join(f"{k}: {v}" for k, v in one.items() if k not in hidden | {"approval_id"})
            body.append(
                (
                    blocks.text(blocks.when(one["provenance"]["time"])),
                    blocks.text(one["approval_id"]),
                    blocks.text(details, 500),
                )
            )
        blocks.html(blocks.table(("given", "approval", "what was accepted"), body))


def verdicts(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return every logged verdict, newest first, with what changed since the one before on the same pair."""
    found: list[dict[str, Any]] = []
    last: dict[str, str] = {}
    for entry in entries:
        if entry["kind"] != "verdict":
            continue
        payload = entry["payload"]
        subject, policy = str(payload.get("subject")), str(payload.get("policy"))
        remarks = []
        if int(payload.get("attempt") or 1) > 1:
            remarks.append(f"attempt {payload['attempt']} on this pair")
        if subject in last and last[subject] != policy:
            remarks.append("another policy than the time before")
        last[subject] = policy
        found.append(
            {
                "time": blocks.moment(entry["time"]),
                "outcome": payload.get("outcome"),
                "comparison": payload.get("comparison_id"),
                "attempt": payload.get("attempt"),
                "policy": policy[:12],
                "remark": "; ".join(remarks),
            }
        )
    return found[::-1]


def _verdicts(entries: Sequence[Mapping[str, Any]]) -> None:
    import polars as pl

    with blocks.section("Verdicts", "Every judgement, in the order it was made; none can be taken back."):
        found = verdicts(entries)
        if not found:
            blocks.note("No verdict has been logged yet.")
            return
        frame = pl.DataFrame(found, infer_schema_length=None)
        st.dataframe(frame, hide_index=True, height=min(420, 38 + 35 * len(frame)))
        blocks.downloads("verdicts", frame)
        for one in [row for row in found if row["outcome"] == "FAIL"][:5]:
            label = f"Open the failed comparison {one['comparison']} of {blocks.when(one['time'])}"
            blocks.link("compare", label, ":material/compare_arrows:", comparison=str(one["comparison"]))


def _chain(entries: Sequence[Mapping[str, Any]]) -> None:
    with blocks.section(
        "The log", "Each entry holds the digest of the one before: a change anywhere is seen."
    ):
        problems = data.store().verify_log()
        if problems:
            for problem in problems[:10]:
                st.error(blocks.plain(problem), icon=":material/gpp_bad:")
        elif entries:
            st.success(
                f"The chain of {count(len(entries), 'entry').replace('entrys', 'entries')} is whole.",
                icon=":material/verified:",
            )
        if entries:
            blocks.html(
                blocks.facts(
                    [("head", data.store().log_head()), ("last entry", blocks.when(entries[-1]["time"]))]
                )
            )
            blocks.note(
                "A report prints the head, so that a log which was cut short is seen by comparing the two."
            )
        else:
            blocks.note("The log is empty.")
