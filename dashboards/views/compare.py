"""Comparison: the verdict in one sentence, then where, in which layer, and on which probes it moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from audit.records import Cell, Comparison, Verdict
from audit.report import facts, rows
from audit.report.wording import count
from dashboards import acceptance, blocks, charts, data, forest, selection, state, theme
from dashboards.selection import Selected
from dashboards.views import effects, probes_table
from dashboards.views import verdict as verdict_view

KEYS = ("comparison", "effect", *selection.KEYS, "region")


def page() -> None:
    """Draw the comparison that the selection names, or the newest one."""
    st.title("Comparison", anchor=False)
    manifests = list(reversed(data.comparisons().manifests))
    if not manifests:
        st.info(
            "There is no comparison in this store yet; `audit run audit.toml` makes one.",
            icon=":material/inbox:",
        )
        return
    name = choose_comparison(manifests)
    comparison, verdict = data.comparison(name), data.verdict(name)
    verdict_view.hero(comparison, verdict)
    answers = None
    with blocks.section():
        answers = selection.answers_of(comparison)
    chosen = _filters(comparison, answers)
    cells = _cells(name, comparison, chosen)
    judged = None if chosen is not None and chosen.filtered else verdict
    _forest(comparison, cells, judged)
    effects.crossing(comparison)
    _layers(comparison, cells)
    _distribution(name, comparison, cells, chosen)
    _segments(comparison)
    verdict_view.rules(verdict)
    acceptance.draw(comparison, verdict)
    if chosen is not None:
        probes_table.draw(name, chosen)
    effects.methods(comparison, manifests, state.get("region"))
    _cell_table(comparison, cells)
    state.publish(*KEYS)
    blocks.share_link()


def choose_comparison(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Draw the list of comparisons, newest first, and return the chosen one."""
    names = [str(one["comparison_id"]) for one in manifests]
    titles = {str(one["comparison_id"]): _title(one) for one in manifests}
    asked = state.get("comparison")
    if asked is not None and asked not in names:
        st.warning(
            f"The link asks for {blocks.plain(asked, 40)}, which is not in this store (it may have been "
            "removed, "
            "or belong to another store). The newest comparison is shown instead.",
            icon=":material/link_off:",
        )
        state.put(comparison=None)
    chosen = state.pick(
        st.selectbox,
        "Comparison",
        "comparison",
        names,
        default=names[0],
        format_func=lambda name: titles[name],
    )
    state.put(comparison=chosen)
    return str(chosen)


def _title(one: Mapping[str, Any]) -> str:
    before, after = ((one[side] or {}).get("checkpoint") for side in ("before", "after"))
    return (
        f"{one['outcome'] or rows.COMPARED} · {blocks.pair_name(before, after)} · {one['method']} · "
        f"{'2×2 with new data · ' if crossed(one) else ''}"
        f"{blocks.when(one['provenance']['time'])} · {one['comparison_id']}"
    )


def crossed(manifest: Mapping[str, Any]) -> bool:
    """Return whether a comparison crosses two checkpoints with two probe sets (2×2)."""
    return manifest["kind"] == "paired" and bool(manifest.get("settings", {}).get("domain"))


def _filters(comparison: Comparison, answers: Any) -> Selected | None:
    if answers is None:
        if comparison.kind == "paired":
            blocks.note("The runs of this comparison are no longer in the store: probes cannot be filtered.")
        return None
    st.header("Which probes", anchor=False, help="Every plot and table below follows these filters.")
    chosen = selection.choose(answers)
    if chosen.filtered and len(chosen.rows):
        blocks.note(
            f"<b>{len(chosen.rows):,} of {chosen.total:,} probes.</b> The plots show this selection; "
            "the verdict "
            "above is about all probes, and a selection made after looking proves nothing by itself."
        )
    return chosen


def _cells(name: str, comparison: Comparison, chosen: Selected | None) -> tuple[Cell, ...]:
    """Return all cells, or those of the selected probes."""
    if chosen is None or not chosen.filtered:
        return comparison.cells
    if not len(chosen.rows):
        st.info("No probe fits these filters; widen them to see plots.", icon=":material/filter_alt_off:")
        return ()
    with blocks.section():
        return data.subset(name, chosen.rows["probe_id"].to_list())
    return ()


def _effects(cells: Sequence[Cell]) -> list[str]:
    return [e for e in effects.EFFECTS if any(c.effect == e and c.measure == "shift" for c in cells)]


def _choose_effect(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """Draw what of a 2×2 is looked at; a filter leaves the effect of the checkpoint alone."""
    present = _effects(cells)
    if len(present) > 1:
        state.pick(
            st.segmented_control,
            "What moved it",
            "effect",
            present,
            default=present[0],
            format_func=effects.EFFECTS.__getitem__,
            required=True,
        )
        blocks.note(effects.MEANING[_effect(comparison)])
    elif len(_effects(comparison.cells)) > 1 and present:
        blocks.note("With a filter, only the effect of the checkpoint is shown.")
        return present[0]
    return _effect(comparison)


def _effect(comparison: Comparison) -> str:
    present = _effects(comparison.cells)
    chosen = state.get("effect")
    return chosen if chosen in present else (present[0] if present else "model")


def _forest(comparison: Comparison, cells: Sequence[Cell], verdict: Verdict | None) -> None:
    level = facts.level(comparison, verdict)
    with blocks.section(
        "Where the attention map moved", "Mean shift of each region, with everything it is judged by."
    ):
        effect = _choose_effect(comparison, cells)
        found = rows.by_size(effects.shifts(cells, effect))
        if not found:
            if cells:
                st.info("No shift was computed for this selection.")
            return
        judged = rows.judged_by(verdict)
        lines = [
            forest.Line(charts.name_of(c), c, tuple(judged.get(rows.cell_key(c), ()))) for c in found[:40]
        ]
        st.altair_chart(forest.forest(lines, theme.palette()), alt=f"Shift of {len(lines)} regions")
        _legend(level)
        far = forest.far_limits(lines)
        if far:
            blocks.note(f"Limits far outside the plot: {blocks.text('; '.join(far))}.")
        if len(found) > 40:
            blocks.note(f"The 40 largest of {len(found)} regions; all stand in the table below.")


def _legend(level: str) -> None:
    mark, band, dot, tick, excess = (
        f'<span class="key {kind}"></span>' for kind in ("mark", "band", "dot", "tick", "excess")
    )
    blocks.html(
        f'<ul class="legend"><li>{mark}<span>{blocks.term("shift", "mean shift")} with {level} '
        f"{blocks.term('interval')}</span></li>"
        f"<li>{tick}{blocks.term('limit', 'limit')}</li>"
        f"<li>{excess}<span>allowed beyond re-training ({blocks.term('excess')})</span></li>"
        f"<li>{dot}one harmless re-training</li>"
        f"<li>{band}<span>{blocks.term('noise floor')} (mean ± 2 SD)</span></li></ul>"
    )


def _layers(comparison: Comparison, cells: Sequence[Cell]) -> None:
    with blocks.section("In which layer", blocks.GLOSSARY["layer"]):
        effect = _effect(comparison)
        found = effects.shifts(cells, effect, layers=True)
        if not found:
            blocks.note(
                "This comparison holds no layers: the runs were made without them, or come from a floor."
            )
            return
        order = [charts.name_of(c) for c in rows.by_size(effects.shifts(cells, effect))][:30]
        found = [cell for cell in found if charts.name_of(cell) in order]
        st.altair_chart(charts.heat_map(found, order, theme.palette()), alt="Shift by region and layer")
        blocks.note(
            "Each column is the map as it stands after that layer. Orange: the region gained share; blue: it "
            "lost share."
        )


def choose_region(cells: Sequence[Cell]) -> str | None:
    """Draw the choice of one region; the one that moved most comes first."""
    names = list(dict.fromkeys(f"{c.region}" for c in rows.by_size(cells)))
    if not names:
        return None
    return state.pick(
        st.selectbox,
        "Region",
        "region",
        names,
        default=names[0],
        format_func=lambda n: blocks.clip(n, 60),
        width=260,
    )


def _distribution(name: str, comparison: Comparison, cells: Sequence[Cell], chosen: Selected | None) -> None:
    if comparison.kind != "paired" or chosen is None or not len(chosen.rows):
        return
    with blocks.section(
        "How it is spread over the probes", "One probe, one shift: does a mean hide two groups?"
    ):
        import polars as pl

        found = effects.shifts(cells, _effect(comparison))
        region = choose_region(found)
        table = data.probe_rows(name)
        if region is None or table.is_empty():
            blocks.note("This comparison holds no table of probes.")
            return
        wanted = table.filter(pl.col("region") == region)
        wanted = wanted.join(chosen.rows.select("probe_id"), on="probe_id", how="semi")
        values = wanted["shift"].drop_nulls().to_numpy()
        missing = wanted["shift"].null_count()
        if not len(values):
            st.info(f"{blocks.plain(region, 60)} has no position in any of these probes.")
            return
        cell = next((c for c in found if c.region == region), None)
        st.altair_chart(
            charts.histogram(
                values,
                cell.value if cell else None,
                theme.palette(),
                title=f"shift of {blocks.clip(region, 40)} in one probe",
            ),
            alt=f"Distribution of the shift of {blocks.clip(region, 40)} over probes",
        )
        rose, fell = int((values > 0).sum()), int((values < 0).sum())
        gone = f"; {count(missing, 'probe')} without this region" if missing else ""
        blocks.note(
            f"Rose in {rose:,} and fell in {fell:,} of {count(len(values), 'probe')}{gone}. "
            "Solid line: the mean; dashed: no change."
        )


def _segments(comparison: Comparison) -> None:
    found = [c for c in comparison.cells if c.measure == "shift" and c.segment and c.layer is None]
    if not found:
        return
    with blocks.section(
        "By segment", "The same shift, in each part of the probe set; over all probes, unfiltered."
    ):
        regions = list(dict.fromkeys(c.region for c in found))
        region = state.get("region")
        region = region if region in regions else _largest(comparison, regions)
        lines = [
            forest.Line(blocks.clip(str(c.segment), 40), c)
            for c in found
            if c.region == region and c.effect == _effect(comparison)
        ]
        blocks.note(f"Region: <b>{blocks.text(region)}</b>, as chosen above.")
        st.altair_chart(forest.forest(lines[:30], theme.palette()), alt=f"Shift of {region} by segment")


def _largest(comparison: Comparison, regions: Sequence[str]) -> str:
    ranked = rows.by_size(effects.shifts(comparison.cells, _effect(comparison)))
    return next((c.region for c in ranked if c.region in regions), regions[0])


def _cell_table(comparison: Comparison, cells: Sequence[Cell]) -> None:
    with st.expander(f"Every number of this comparison ({len(cells):,} rows)"), blocks.section():
        frame = cell_frame(cells)
        st.dataframe(frame, hide_index=True, height=360)
        blocks.downloads(f"{comparison.id}-cells", frame)


def cell_frame(cells: Sequence[Cell]) -> Any:
    """Return cells as a polars table, one row each."""
    import polars as pl

    return pl.DataFrame(
        [
            {
                "measure": c.measure,
                "region": c.region,
                "stream": c.stream,
                "layer": c.layer,
                "effect": c.effect,
                "segment": c.segment,
                "before": c.before,
                "after": c.after,
                "value": c.value,
                "low": c.interval[0] if c.interval else None,
                "high": c.interval[1] if c.interval else None,
                "sd": c.sd,
                "size": c.size,
                "pvalue": c.pvalue,
                "excess": c.excess.excess if c.excess else None,
                "minimum_detectable_shift": c.excess.minimum_detectable_shift if c.excess else None,
                "replicates": list(c.replicates),
                "n_probes": c.n_probes,
                "n_missing": c.n_missing,
                "reason": c.reason,
            }
            for c in cells
        ],
        infer_schema_length=None,
    )
