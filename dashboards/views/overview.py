"""Overview: every model with its latest verdict, and what is still open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import streamlit as st

from audit.records import Verdict
from audit.report import rows
from audit.report.wording import count, quantity, span
from dashboards import blocks, data, downloads, naming, state

if TYPE_CHECKING:
    import polars as pl

PAGE = 12
ORDER = ("ERROR", "FAIL", "INCONCLUSIVE", "PASS", "COMPARED")
EVERY = "all"
CROSSED = "crossed"
KINDS = {"unpaired": "two probe sets", CROSSED: "2×2 with new data"}
WHAT = (
    "Did a model's attention move to other parts of its input, by more than is allowed, or than a harmless "
    "re-training would explain? One card for each kind of audit of a model, with its newest verdict."
)


@dataclass(frozen=True)
class Model:
    """One line of audits: the same pair of checkpoints by name, and all its comparisons in time."""

    name: str
    method: str
    kind: str
    history: tuple[Mapping[str, Any], ...]

    @property
    def latest(self) -> Mapping[str, Any]:
        """Return the manifest of the newest comparison."""
        return self.history[-1]

    @property
    def time(self) -> str:
        """Return when the newest comparison was stored."""
        return str(self.latest["provenance"]["time"])

    @property
    def outcome(self) -> str:
        """Return the newest outcome."""
        return str(self.latest["outcome"] or rows.COMPARED)


def models(manifests: Sequence[Mapping[str, Any]]) -> list[Model]:
    """Return the comparisons by model, the worst newest verdict first."""
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in manifests:
        kind = CROSSED if naming.crossed(one) else one["kind"]
        grouped.setdefault((naming.pair_of(one), one["method"], kind), []).append(one)
    names = naming.pair_names(manifests)
    found = [
        Model(names[pair], method, kind, tuple(history)) for (pair, method, kind), history in grouped.items()
    ]
    newest = sorted(found, key=lambda model: model.time, reverse=True)
    return sorted(newest, key=lambda model: ORDER.index(model.outcome))


def page() -> None:
    """Draw the overview."""
    st.title("Overview", anchor=False)
    listing = data.comparisons()
    _problems(listing.problems)
    if not listing.manifests:
        _empty()
        return
    found = models(listing.manifests)
    blocks.note(WHAT)
    _counts(found)
    _news(listing.manifests)
    shown = _filtered(found)
    state.publish("outcome", "find")
    limit = st.session_state.setdefault("overview shown", PAGE)
    given = approvals_by_pair(listing.manifests)
    for model in shown[:limit]:
        _card(model, given.get(naming.pair_of(model.latest)))
    if not shown:
        st.info("No audit fits this filter.", icon=":material/filter_alt_off:")
    if len(shown) > limit and st.button(f"Show {min(PAGE, len(shown) - limit)} more of {len(shown)}"):
        st.session_state["overview shown"] = limit + PAGE
        st.rerun()
    _table(found)


def _problems(problems: Sequence[str]) -> None:
    for problem in problems[:5]:
        blocks.warn(problem)
    if len(problems) > 5:
        st.warning(f"{len(problems) - 5} more cannot be read; `audit verify` lists them.")


def _empty() -> None:
    n_runs = len(data.runs().manifests)
    st.info(
        f"This store ({blocks.plain(data.store().root.name, 60)}) holds "
        + (f"{count(n_runs, 'run')}, but no comparison yet. " if n_runs else "nothing yet. ")
        + "Run `audit run audit.toml` to compare two checkpoints, or `audit demo` for an example; "
        "the verdict then stands here.",
        icon=":material/inbox:",
    )


def _counts(found: Sequence[Model]) -> None:
    parts = []
    for outcome in ORDER:
        number = sum(model.outcome == outcome for model in found)
        if number:
            parts.append(f'<span class="{outcome}"><b>{number}</b>{outcome}</span>')
    blocks.html(f'<div class="counts" role="group" aria-label="latest verdicts">{"".join(parts)}</div>')


def _news(manifests: Sequence[Mapping[str, Any]]) -> None:
    listing = data.approvals()
    _problems(listing.problems)
    if not listing.manifests:
        blocks.note(f"{count(len(manifests), 'comparison')} in this store; nothing has been approved yet.")
        return
    last = max(listing.manifests, key=lambda one: str(one["provenance"]["time"]))
    time = str(last["provenance"]["time"])
    new = [one for one in manifests if str(one["provenance"]["time"]) > time]
    bad = sum(one["outcome"] in ("FAIL", "ERROR", "INCONCLUSIVE") for one in new)
    what = f"{count(len(new), 'new comparison')}, {bad} of them not passed" if new else "nothing new"
    blocks.note(f"Since the last approval ({blocks.text(blocks.when(time))}): {what}.")


def _filtered(found: Sequence[Model]) -> list[Model]:
    present = [outcome for outcome in ORDER if any(model.outcome == outcome for model in found)]
    if len(found) < 4:
        return list(found)
    with st.container(horizontal=True, vertical_alignment="top"):
        outcome = state.pick(
            st.segmented_control, "Verdict", "outcome", [EVERY, *present], default=EVERY, required=True
        )
        wanted = st.text_input(
            "Find a model", state.get("find") or "", placeholder="part of a name", width=260
        )
    state.put(find=wanted or None)
    return [
        model
        for model in found
        if outcome in (EVERY, None, model.outcome) and wanted.casefold() in model.name.casefold()
    ]


def approvals_by_pair(manifests: Sequence[Mapping[str, Any]]) -> dict[naming.Pair, Mapping[str, Any]]:
    """Return the newest approval of each pair of checkpoints."""
    pairs = {str(one["comparison_id"]): naming.pair_of(one) for one in manifests}
    known = [one for one in data.approvals().manifests if str(one.get("comparison_id")) in pairs]
    ordered = sorted(known, key=lambda one: str(one["provenance"]["time"]))
    return {pairs[str(one["comparison_id"])]: one for one in ordered}


def approval_remark(model: Model, approval: Mapping[str, Any] | None) -> str:
    """Return whether the newest verdict is new since the last approval of this pair."""
    if accepted := model.latest.get("accepted"):
        return "; ".join(
            f"{', '.join(blocks.clip(one, 80) for one in what)} accepted by {blocks.clip(who, 120)}"
            for who, what in accepted.items()
        )
    if approval is None:
        return ""
    time = str(approval["provenance"]["time"])
    if str(approval["comparison_id"]) == str(model.latest["comparison_id"]):
        return f"accepted by {blocks.clip(str(approval.get('by', 'unknown')), 60)}"
    return f"new since the approval of {blocks.when(time)}" if model.time > time else ""


def _card(model: Model, approval: Mapping[str, Any] | None) -> None:
    latest = model.latest
    name = str(latest["comparison_id"])
    with blocks.section(), st.container(border=True):
        left, right = st.columns([5, 2], vertical_alignment="center")
        with left:
            head, _ = rows.split_headline(_sentence(latest))
            blocks.html(
                f"{blocks.badge(model.outcome)}{_standing(latest)} "
                f'<span class="pair">&nbsp;{blocks.text(model.name)}</span>'
                f'<p style="margin:.55rem 0 .3rem">{blocks.text(rows.full_sentence(head))}</p>'
                f'<p class="note">{_remark(model, approval)}</p>{_settle(name, model.outcome)}'
            )
        with right:
            if not latest.get("changed"):
                _figure(name, model)
            blocks.link("compare", "Open", ":material/arrow_forward:", comparison=name)


def _standing(manifest: Mapping[str, Any]) -> str:
    """Return what stands beside the badge: approved, or changed since it was logged."""
    _, bracket, words = naming.outcome_of(manifest).partition(" (")
    return f' <span class="soft">({blocks.text(words)}</span>' if bracket else ""


def _sentence(manifest: Mapping[str, Any]) -> str:
    sentence = str(manifest["sentence"] or "No policy was judged; the comparison shows what moved")
    return sentence[:1].upper() + sentence[1:]


def _remark(model: Model, approval: Mapping[str, Any] | None) -> str:
    latest = model.latest
    parts = [
        blocks.text(blocks.when(latest["provenance"]["time"])),
        blocks.term("probe", count(int(latest["n_probes"]), "probe")),
        f"{blocks.term('method')} {blocks.text(latest['method'], 60)}",
        blocks.term("replicate", count(len(latest["replicates"]), "replicate")),
    ]
    if model.kind != "paired":
        parts.append(blocks.term("2×2", KINDS[CROSSED]) if model.kind == CROSSED else KINDS[model.kind])
    if len(model.history) > 1:
        parts.append(f"{len(model.history)} audits so far")
    if approved := approval_remark(model, approval):
        parts.append(blocks.text(approved, 4000))
    return " · ".join(parts)


def _settle(name: str, outcome: str) -> str:
    if outcome != "INCONCLUSIVE":
        return ""
    needs = rows.to_settle(data.verdict(name))
    lines = "".join(f"<div>{blocks.text(where)}: {blocks.text(need)}</div>" for where, need in needs[:3])
    return f'<div class="settle INCONCLUSIVE"><b>What would settle it</b>{lines}</div>' if lines else ""


def _figure(name: str, model: Model) -> None:
    found = largest(data.verdict(name))
    if found is not None:
        blocks.html(
            f"<small>largest judged {blocks.term('shift')}</small>"
            f'<div class="pair">{blocks.text(found[0])} {blocks.text(found[1])}</div>'
            f"<small>{blocks.term('interval')} {blocks.text(found[2] or '–')}</small>"
        )
    if len(model.history) > 1:
        values = [_size(_stored(one)) for one in model.history[-12:]]
        blocks.html(sparkline(values))


def largest(found: Verdict | None) -> tuple[str, str, str] | None:
    """Return region, value and interval of the rule whose shift is largest, None without any."""
    judged = [
        rule for rule in rows.rules_of(found) if rule.value is not None and rule.rule.measure == "shift"
    ]
    if not judged:
        return None
    rule = max(judged, key=lambda one: abs(one.value or 0.0))
    return (
        rows.where_rule(rule),
        quantity("shift", rule.value, like=rule.interval),
        span("shift", rule.interval) if rule.interval else "",
    )


def _stored(manifest: Mapping[str, Any]) -> Verdict | None:
    """Return a verdict of the history, None where it is not the one that was logged."""
    return None if manifest.get("changed") else data.stored_verdict(str(manifest["comparison_id"]))


def _size(found: Verdict | None) -> float | None:
    values = [abs(r.value) for r in rows.rules_of(found) if r.value is not None and r.rule.measure == "shift"]
    return max(values, default=None)


def sparkline(values: Sequence[float | None]) -> str:
    """Return the largest shift of each of the last audits as small bars, oldest on the left."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    top = max(known) or 1.0
    last, highest = (quantity("shift", value, signed=False) for value in (known[-1], top))
    title = f"Largest shift in the last {len(known)} audits; now {last}, highest {highest}"
    bars = "".join(f'<i style="height:{max(4, round(100 * value / top))}%"></i>' for value in known)
    return f'<div class="spark" role="img" aria-label="{escape(title)}" title="{escape(title)}">{bars}</div>'


def _table(found: Sequence[Model]) -> None:
    with blocks.folded("All audits as a table", "audits") as opened:
        if opened:
            frame = audits_frame(found)
            st.dataframe(
                frame,
                hide_index=True,
                height=min(420, 38 + 35 * len(frame)),
                column_config={"time": blocks.TIME},
            )
            downloads.table("audits", frame)


def audits_frame(found: Sequence[Model]) -> pl.DataFrame:
    """Return every audit of these models as a table, the newest of each first."""
    import polars as pl

    return pl.DataFrame(
        [
            {
                "time": blocks.moment(one["provenance"]["time"]),
                "model": model.name,
                "outcome": naming.outcome_of(one),
                "accepted by": "; ".join(one.get("accepted") or ()) or None,
                "method": model.method,
                "probes": one["n_probes"],
                "replicates": len(one["replicates"]),
                "comparison": one["comparison_id"],
                "sentence": one["sentence"],
            }
            for model in found
            for one in reversed(model.history)
        ],
        infer_schema_length=None,
    )
