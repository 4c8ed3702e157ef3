"""Trends: the audits of one model over time, with limits, intervals and approvals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from audit.records import RuleVerdict
from audit.report import rows
from audit.report.wording import count
from dashboards import blocks, charts, data, forest, state, theme
from dashboards.views.overview import models

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
    names = [f"{model.name} · {model.method}" for model in longest]
    chosen = state.pick(st.selectbox, "Model", "model", names, default=names[0])
    model = longest[names.index(str(chosen))]
    history = model.history[-LONGEST:]
    if len(history) < 2:
        st.info(
            f"{blocks.plain(model.name, 80)} has been audited once. A trend begins with the second "
            "audit; `audit serve` runs "
            "audits on a schedule.",
            icon=":material/timeline:",
        )
    with blocks.section():
        _draw(history)
    state.publish(*KEYS)
    blocks.share_link()


def points(history: Sequence[Mapping[str, Any]], region: str) -> list[dict[str, Any]]:
    """Return one row for each audit that judged the shift of a region, oldest first."""
    found = []
    for one in history:
        judged = _judged(str(one["comparison_id"]), region)
        if judged is None or judged.value is None:
            continue
        found.append(
            {
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
    rules = [r for r in rows.rules_of(data.verdict(name)) if r.rule.measure == "shift" and r.region == region]
    return rows.worst_first(rules)[0] if rules else None


def _draw(history: Sequence[Mapping[str, Any]]) -> None:
    newest = data.verdict(str(history[-1]["comparison_id"]))
    regions = list(dict.fromkeys(r.region for r in rows.rules_of(newest) if r.rule.measure == "shift"))
    if not regions:
        blocks.note("The newest audit judged no shift; give its policy a rule to see a trend.")
        return
    region = str(state.pick(st.selectbox, "Region", "region", regions, default=regions[0], width=260))
    found = points(history, region)
    limits = sorted(
        {
            end
            for r in rows.rules_of(newest)
            if r.region == region and r.rule.kind == "limit" and r.rule.measure == "shift"
            for end in forest.zone(r, 0.0) or ()
            if abs(end) != float("inf")
        }
    )
    given = [str(one["provenance"]["time"]) for one in data.approvals().manifests]
    st.altair_chart(charts.trend(found, limits, given, theme.palette()), alt=f"Shift of {region} over time")
    blocks.note(
        f"{count(len(found), 'audit')} of <b>{blocks.text(region)}</b>: mean shift with its interval. "
        "Dashed: the limit "
        "of today's policy. Vertical: approvals. Many looks find a false alarm sooner or later: judge a "
        "trend, not "
        "one point."
    )
    import polars as pl

    frame = pl.DataFrame(found, infer_schema_length=None)
    with st.expander("As a table"):
        st.dataframe(frame, hide_index=True)
        blocks.downloads("trend", frame)
