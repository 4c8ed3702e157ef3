"""Trends: the audits of one model over time, with limits, intervals and approvals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from audit.pipeline.trend import ALARM
from audit.records import RuleVerdict
from audit.report import rows
from audit.report.wording import count
from dashboards import blocks, charts, data, forest, state, theme
from dashboards.views.overview import KINDS, Model, models

LONGEST = 200
KEYS = ("model", "region")


def page() -> None:
    """Draw the history of one model."""
    st.title("Trends", anchor=False)
    found = models(data.comparisons().manifests)
    if not found:
        st.info(
            "There is no comparison in this store yet; `audit run audit.toml` makes one.",
            icon=":material/inbox:",
        )
        return
    longest = sorted(found, key=lambda model: -len(model.history))
    names = [
        f"{model.name} · {model.method}{f' · {KINDS[model.kind]}' if model.kind in KINDS else ''}"
        for model in longest
    ]
    chosen = state.pick(st.selectbox, "Model", "model", names, default=names[0])
    model = longest[names.index(str(chosen))]
    with blocks.section():
        _page(model)
    state.publish(*KEYS)
    blocks.share_link()


def _page(model: Model) -> None:
    history = line(model, data.comparisons().manifests)[-LONGEST:]
    if len(history) < 2:
        st.info(
            f"{blocks.plain(model.name, 80)} has been audited once. A trend begins with the second "
            "audit; `audit serve` runs "
            "audits on a schedule.",
            icon=":material/timeline:",
        )
    _draw(history)


def line(model: Model, manifests: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the audits of a model and of the releases before it, oldest first; one for each checkpoint."""
    found = data.trends(str(model.latest["comparison_id"]))
    looks = max((one.looks for one in found), key=len, default=())
    if len(looks) < len(model.history):
        return list(model.history)
    by_name = {str(one["comparison_id"]): one for one in manifests}
    newest = str(model.latest["comparison_id"])
    again = [name for name in looks if _after(by_name[name]) == _after(model.latest)]
    return [by_name[newest if name in again else name] for name in looks]


def points(history: Sequence[Mapping[str, Any]], region: str) -> list[dict[str, Any]]:
    """Return one row for each audit that judged the shift of a region, oldest first."""
    found = []
    for look, one in enumerate(history, start=1):
        judged = _judged(str(one["comparison_id"]), region)
        if judged is None or judged.value is None:
            continue
        found.append(
            {
                "look": look,
                "time": str(one["provenance"]["time"]),
                "value": judged.value,
                "low": judged.interval[0] if judged.interval else None,
                "high": judged.interval[1] if judged.interval else None,
                "outcome": rows.shown_outcome(judged),
                "comparison": str(one["comparison_id"]),
                "after": blocks.short_name((one["after"] or {}).get("checkpoint")),
            }
        )
    return found


def _judged(name: str, region: str) -> RuleVerdict | None:
    rules = [
        r
        for r in rows.rules_of(data.stored_verdict(name))
        if r.rule.measure == "shift" and r.region == region and r.effect in ("model", "data")
    ]
    return rows.worst_first(rules)[0] if rules else None


def _draw(history: Sequence[Mapping[str, Any]]) -> None:
    newest = data.verdict(str(history[-1]["comparison_id"]))
    regions = list(dict.fromkeys(r.region for r in rows.rules_of(newest) if r.rule.measure == "shift"))
    if not regions:
        blocks.note("The newest audit judged no shift; give its policy a rule to see a trend.")
        return
    region = str(state.pick(st.selectbox, "Region", "region", regions, default=regions[0], width=260))
    found = points(history, region)
    rules = [r for r in rows.rules_of(newest) if r.region == region and r.rule.measure == "shift"]
    limits = sorted(
        {
            end
            for r in rules
            if r.rule.kind == "limit" and r.effect in ("model", "data")
            for end in forest.zone(r, 0.0) or ()
            if abs(end) != float("inf")
        }
    )
    marks = approved(data.approvals().manifests, history, data.comparisons().manifests)
    chart = charts.trend(found, limits, control(rules), marks, theme.palette())
    st.altair_chart(chart, alt=f"Shift of {region} over time")
    blocks.note(
        f"{count(len(found), 'audit')} of <b>{blocks.text(region)}</b>: mean shift with its interval. "
        "Dashed: the limit of today's policy. Band: where harmless re-trainings lie (mean ± 3 SD). "
        "Flag: an approval."
    )
    _drift(history, region)
    import polars as pl

    frame = pl.DataFrame(found, infer_schema_length=None)
    with st.expander("As a table"):
        st.dataframe(frame, hide_index=True)
        blocks.downloads("trend", frame)


def control(rules: Sequence[RuleVerdict]) -> tuple[float, float] | None:
    """Return mean ± 3 SD of the newest audit's harmless re-trainings, None without any."""
    floor = next((r.floor for r in rules if r.floor is not None and r.effect == "model"), None)
    return None if floor is None else (floor[0] - 3 * floor[1], floor[0] + 3 * floor[1])


def _after(manifest: Mapping[str, Any]) -> str | None:
    return (manifest["after"] or {}).get("run_id")


def approved(
    approvals: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    manifests: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the approvals of the candidates of this history: at which look, by whom, and of what."""
    looks = {_after(one): look for look, one in enumerate(history, start=1)}
    runs = {str(one["comparison_id"]): _after(one) for one in manifests}
    return [
        {
            "look": looks[runs[one["comparison_id"]]],
            "by": blocks.clip(str(one.get("by", "unknown")), 60),
            "what": blocks.clip(
                "; ".join(f"{s['rule']} on {s['region']}" for s in one.get("scope") or ()) or "the release",
                120,
            ),
        }
        for one in approvals
        if runs.get(str(one.get("comparison_id"))) in looks
    ]


def _drift(history: Sequence[Mapping[str, Any]], region: str) -> None:
    with blocks.section(
        "Does it drift",
        "Evidence that the share changes one way from audit to audit. Without a drift it reaches 20 in at "
        "most 1 of 20 histories, however often one looks.",
    ):
        regions = {one.region: one for one in data.trends(str(history[-1]["comparison_id"]))}
        trend = regions.get(region)
        if trend is None:
            blocks.note("A drift can be told from the third audit of a new checkpoint on.")
            return
        if trend.alarm is not None:
            blocks.warn(trend.sentence, icon="trending_up")
        else:
            blocks.html(f"<p>{blocks.text(trend.sentence)}</p>")
        others = [one for one in regions.values() if one.alarm is not None and one.region != region]
        if others:
            names = ", ".join(blocks.text(one.region, 60) for one in others[:8])
            blocks.note(f"A drift is also told on {names}.")
        looks = range(len(history) - len(trend.looks) + 1, len(history) + 1)
        found = [
            {
                "look": look,
                "time": str(history[look - 1]["provenance"]["time"]),
                "evidence": max(value, 1e-6),
                "share": share,
                "comparison": name,
            }
            for look, name, value, share in zip(
                looks, trend.looks, trend.course, trend.levels[1:], strict=True
            )
            if look > 0
        ]
        chart = charts.evidence(found, ALARM, theme.palette())
        st.altair_chart(chart, alt=f"Evidence of a drift of {region}")
        blocks.note(
            f"Dashed: {ALARM:g}, from which on a drift is told. A single large step is no drift; the verdict "
            "judges that."
        )
