"""Approvals and log: who accepted what, every verdict in order, and whether the log is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import streamlit as st

from audit.errors import AuditError
from audit.pipeline.approvals import Approval, binding, objection, read_approvals
from audit.report.wording import count
from dashboards import blocks, data, downloads, naming

if TYPE_CHECKING:
    import polars as pl


def page() -> None:
    """Draw approvals, verdicts and the log."""
    st.title("Approvals & log", anchor=False)
    logged = data.log()
    if logged.problems:
        blocks.warn(
            f"The log is damaged; below stand the {len(logged.manifests)} entries before the damage. "
            "What is wrong is told under “The log”."
        )
    _approvals()
    _verdicts(logged)
    _chain(logged)


def _approvals() -> None:
    with blocks.section(
        "Approvals", "A named person accepted a shift, for these exact checkpoints and until a date."
    ):
        listing = data.approvals()
        for problem in listing.problems:
            blocks.warn(problem)
        if not listing.manifests:
            blocks.note(
                "Nothing has been approved. The dashboard only reads; the page of a failed comparison shows "
                "the command that accepts its shift, with a name and a reason."
            )
            return
        given = list(reversed(list(read_approvals(data.store()))))
        blocks.html(
            blocks.table(
                ("given", "accepted", "by", "until", "why", "today"), [_approval(one) for one in given[:50]]
            )
        )
        downloads.table("approvals", _approvals_frame(given))
        unlogged = {one["approval_id"] for one in listing.manifests} - {one.id for one in given}
        if unlogged:
            blocks.warn(f"Not in the log, so they count for nothing: {', '.join(sorted(unlogged)[:5])}.")
        for name in list(dict.fromkeys(one.comparison_id for one in given))[:5]:
            blocks.link("compare", f"Open {name}", ":material/compare_arrows:", comparison=name)


def _approval(one: Approval) -> tuple[str, ...]:
    what = "; ".join(sorted({f"{s['rule']} on {s['region']}" for s in one.scope})) or "the release"
    obstacle = standing(one)
    today = '<span class="soft">counts</span>' if obstacle is None else blocks.text(f"no: {obstacle}", 200)
    return (
        blocks.text(one.created),
        f"{blocks.text(what, 200)}<small>{blocks.text(one.comparison_id)}</small>",
        f"{blocks.text(one.by, 80)}<small>{'signed' if one.signature else 'not signed'}</small>",
        blocks.text(one.expires.isoformat() if one.expires else "no end"),
        blocks.text(one.reason, 200),
        today,
    )


def _approvals_frame(given: Sequence[Approval]) -> pl.DataFrame:
    import polars as pl

    return pl.DataFrame(
        [
            {
                "approval": one.id,
                "given": str(one.created),
                "comparison": one.comparison_id,
                "by": one.by,
                "signed": bool(one.signature),
                "until": one.expires.isoformat() if one.expires else None,
                "reason": one.reason,
                "scope": [f"{part['rule']} on {part['region']}" for part in one.scope],
                "obstacle_today": standing(one),
            }
            for one in given
        ],
        infer_schema_length=None,
    )


def standing(one: Approval) -> str | None:
    """Return why an approval does not count today for the comparison it was given to, None when it does."""
    try:
        comparison = data.comparison(one.comparison_id)
        judged = data.stored_verdict(one.comparison_id)
        if judged is None:
            return "its comparison has no verdict"
        bound = binding(data.store(), comparison, judged.policy)
        today = datetime.now(UTC).date()
        return objection(
            data.store(), one, bound, comparison=comparison, signers=data.signers(comparison), today=today
        )
    except AuditError as error:
        return str(error)


def verdicts(
    entries: Sequence[Mapping[str, Any]],
    loosening: Callable[[str, str], Sequence[str]] = lambda _old, _new: (),
) -> list[dict[str, Any]]:
    """Return every logged verdict, newest first, with what changed since the one before on the same pair.

    Parameters
    ----------
    entries : sequence of mapping
        The log.
    loosening : callable
        Two comparison ids → in what the policy of the second is more permissive than that of the first.
    """
    found: list[dict[str, Any]] = []
    last: dict[str, tuple[str, str]] = {}
    for entry in entries:
        if entry["kind"] != "verdict":
            continue
        payload = entry["payload"]
        subject, policy = str(payload.get("subject")), str(payload.get("policy"))
        name = str(payload.get("comparison_id"))
        remarks = []
        if int(payload.get("attempt") or 1) > 1:
            remarks.append(f"attempt {payload['attempt']} on this pair")
        if subject in last and last[subject][1] != policy:
            looser = loosening(last[subject][0], name)
            remarks.append(
                f"policy loosened: {'; '.join(looser)}" if looser else "another policy than the time before"
            )
        last[subject] = name, policy
        found.append(
            {
                "time": blocks.moment(entry["time"]),
                "outcome": payload.get("outcome"),
                "remark": "; ".join(remarks),
                "comparison": name,
                "policy": policy[:12],
            }
        )
    return found[::-1]


def _loosening(old: str, new: str) -> list[str]:
    from audit.pipeline.history import loosened

    try:
        one, two = data.stored_verdict(old), data.stored_verdict(new)
    except AuditError:
        return []
    return loosened(one.policy, two.policy) if one is not None and two is not None else []


def _verdicts(logged: data.Listing) -> None:
    import polars as pl

    with blocks.section("Verdicts", "Every judgement, in the order it was made; none can be taken back."):
        found = verdicts(logged.manifests, _loosening)
        if not found:
            damaged = "No verdict stands before the damage of the log."
            blocks.note(damaged if logged.problems else "No verdict has been logged yet.")
            return
        frame = pl.DataFrame(found, infer_schema_length=None)
        st.dataframe(
            frame,
            hide_index=True,
            height=min(420, 38 + 35 * len(frame)),
            column_config={
                "time": blocks.TIME,
                "outcome": st.column_config.TextColumn(width=130),
                "remark": st.column_config.TextColumn(
                    width="large", help="A repeated attempt on the same pair, or a policy that changed."
                ),
                "policy": st.column_config.TextColumn(help="The first digits of the digest of all rules."),
            },
        )
        downloads.table("verdicts", frame)
        manifests = {str(one["comparison_id"]): one for one in data.comparisons().manifests}
        pairs = naming.pair_names(manifests.values())
        failed = [row for row in found if row["outcome"] == "FAIL" and row["comparison"] in manifests]
        for one in failed[:5]:
            pair = pairs[naming.pair_of(manifests[str(one["comparison"])])]
            label = f"Open the failed comparison {one['comparison']} of {blocks.when(one['time'])}: {pair}"
            blocks.link("compare", label, ":material/compare_arrows:", comparison=str(one["comparison"]))


def _chain(logged: data.Listing) -> None:
    with blocks.section(
        "The log", "Each entry holds the digest of the one before: a change of an entry is seen."
    ):
        entries = logged.manifests
        for problem in logged.problems[:10]:
            st.error(blocks.plain(problem), icon=":material/gpp_bad:")
        if entries and not logged.problems:
            st.success(
                f"{count(len(entries), 'entry').replace('entrys', 'entries')} follow one another. Whether "
                "the stored files match them is what “Verify everything” on Runs & provenance tells.",
                icon=":material/verified:",
            )
        if entries:
            head = "last intact entry" if logged.problems else "log head"
            blocks.html(
                blocks.facts(
                    [(head, entries[-1]["digest"]), ("last entry", blocks.when(entries[-1]["time"]))]
                )
            )
            blocks.note(
                "A report prints the head, so that a log which was cut short is seen by comparing the two."
            )
        elif not logged.problems:
            blocks.note("The log is empty.")
