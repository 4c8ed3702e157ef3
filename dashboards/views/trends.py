"""Trends: the audits of one model over time, with limits, intervals and approvals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import streamlit as st

from audit.pipeline.trend import ALARM, FEWEST, Trend
from audit.records import RuleVerdict
from audit.report import rows
from audit.report.wording import change, count
from dashboards import blocks, data, downloads, forest, naming, state, trend_charts
from dashboards.views.overview import KINDS, Model, models

LONGEST = 200
KEYS = ("model", "region")


def page() -> None:
    """Draw the history of one model."""
    st.title("Trends", anchor=False)
    found = models(data.comparisons().manifests)
    if not found:
        blocks.no_comparison()
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


def _page(model: Model) -> None:
    history = line(model, data.comparisons().manifests)[-LONGEST:]
    if len(history) < 2:
        st.info(
            f"{blocks.plain(model.name, 80)} has been audited once. A trend begins with the second "
            "audit; `audit serve` runs audits on a schedule.",
            icon=":material/timeline:",
        )
        latest = str(model.latest["comparison_id"])
        blocks.link("compare", "Open this audit", ":material/compare_arrows:", comparison=latest)
        return
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
                "after": naming.short_name((one["after"] or {}).get("checkpoint")),
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
    judged = [rule for rule in rows.rules_of(newest) if rule.rule.measure == "shift"]
    regions = list(dict.fromkeys(rule.region for rule in judged))
    if not regions:
        blocks.note("The newest audit judged no shift; give its policy a rule to see a trend.")
        return
    region = str(state.pick(st.selectbox, "Region", "region", regions, default=regions[0], width=260))
    found = points(history, region)
    held = reference([rule for rule in judged if rule.region == region], history)
    name = f"trend-{history[-1]['comparison_id']}"
    band = (
        "Band: control limits, where harmless re-trainings lie (mean ± 3 SD)."
        if held.control
        else "No control limits: the newest audit has no re-trainings."
    )
    flag = "Flag: an approval." if held.approvals else "Nothing was approved in this history."
    legend = f"Mean shift with its interval; dashed: the limit of the newest policy. {band} {flag}"
    what = f"Shift of {region} over time"
    downloads.chart(f"{name}-shift", trend_charts.trend, found, held, alt=what, notes=(name, legend))
    blocks.note(
        f"{count(len(found), 'audit')} of <b>{blocks.text(region)}</b>: mean {blocks.term('shift')} with its "
        f"{blocks.term('interval')}. Dashed: the {blocks.term('limit')} of today's policy. {band} {flag}"
    )
    regions_drift = {one.region: one for one in data.trends(str(history[-1]["comparison_id"]))}
    _changes(name, history, regions_drift.get(region))
    _drift(name, history, region, regions_drift)
    _table(name, found)


def _table(name: str, found: Sequence[dict[str, Any]]) -> None:
    import polars as pl

    with blocks.folded("As a table", "trend") as opened:
        if opened:
            frame = pl.DataFrame(found, infer_schema_length=None)
            st.dataframe(frame, hide_index=True, column_config={"time": blocks.TIME})
            downloads.table(name, frame)


def reference(rules: Sequence[RuleVerdict], history: Sequence[Mapping[str, Any]]) -> trend_charts.Reference:
    """Return limits, control limits and approvals of one region's history."""
    limits = {
        end
        for rule in rules
        if rule.rule.kind == "limit" and rule.effect in ("model", "data")
        for end in forest.zone(rule, 0.0) or ()
        if abs(end) != float("inf")
    }
    marks = approved(data.approvals().manifests, history, data.comparisons().manifests)
    return trend_charts.Reference(tuple(sorted(limits)), control(rules), tuple(marks))


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


def looks_of(trend: Trend, history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each look of a trend that the history shows: its share, stretch and evidence.

    Parameters
    ----------
    trend : Trend
    history : sequence of mapping
        Manifests, oldest first; the newest is the trend's last look.
    """
    first = len(history) - len(trend.looks)
    edges = [0, *trend.changes, len(trend.looks)]
    means = {
        (start, end): float(np.mean(trend.levels[1 + start : 1 + end])) for start, end in pairwise(edges)
    }
    return [
        {
            "look": first + i + 1,
            "time": str(history[first + i]["provenance"]["time"]),
            "share": trend.levels[1 + i],
            "mean": mean,
            "stretch": str(start),
            "evidence": max(trend.course[i], 1e-6),
            "comparison": trend.looks[i],
        }
        for (start, end), mean in means.items()
        for i in range(start, end)
        if first + i >= 0
    ]


def _changes(name: str, history: Sequence[Mapping[str, Any]], trend: Trend | None) -> None:
    with blocks.section(
        "Did it change at once",
        "Where the share changes from one level to another: the history cut into stretches of one mean, each "
        "cut at the price of 4 log n. In noise alone at most 1 of 20 histories is cut.",
    ):
        if trend is None or len(trend.looks) < FEWEST:
            blocks.note(f"Change points can be told from the {FEWEST}th audit of a new checkpoint on.")
            return
        found = looks_of(trend, history)
        turns = [row for i, row in enumerate(found) if i and row["stretch"] != found[i - 1]["stretch"]]
        turned = [row["look"] for row in turns]
        what = f"Share of {trend.region} over time"
        legend = "Solid: the mean of each stretch; dashed: where it changes."
        notes = (name, legend) if turns else (name,)
        downloads.chart(f"{name}-share", trend_charts.share, found, turned, alt=what, notes=notes)
        for row in turns:
            earlier = next(one for one in reversed(found) if one["look"] < row["look"])
            levels = change(earlier["mean"], row["mean"])
            blocks.html(
                f"<p>From the audit of <b>{blocks.text(blocks.when(row['time']))}</b> on, the share of "
                f"<b>{blocks.text(trend.region)}</b> is another: {levels} on average "
                f'<span class="soft">({blocks.text(row["comparison"])})</span>.</p>'
            )
        blocks.note(
            f"{legend} For reading the history; it judges nothing."
            if turns
            else f"No change point in {len(found)} audits: one level, or a steady drift, explains them."
        )


def _drift(
    name: str, history: Sequence[Mapping[str, Any]], region: str, regions: Mapping[str, Trend]
) -> None:
    with blocks.section(
        "Does it drift",
        "Evidence that the share changes one way from audit to audit. Without a drift it reaches 20 in at "
        "most 1 of 20 histories, however often one looks.",
    ):
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
        what = f"Evidence of a drift of {region}"
        legend, looks = f"Dashed: {ALARM:g}, from which on a drift is told.", looks_of(trend, history)
        notes = (name, legend)
        downloads.chart(f"{name}-evidence", trend_charts.evidence, looks, ALARM, alt=what, notes=notes)
        blocks.note(f"{legend} A single large step is no drift; the verdict judges that.")
