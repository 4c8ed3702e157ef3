"""Comparison: the verdict in one sentence, then where, in which layer, and on which probes it moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from audit.records import Cell, Comparison, Verdict
from audit.report import facts, rows
from dashboards import (
    acceptance,
    blocks,
    charts,
    data,
    downloads,
    forest,
    frames,
    naming,
    selection,
    state,
)
from dashboards.selection import Selected
from dashboards.views import effects, probes_table, spread
from dashboards.views import verdict as verdict_view

KEYS = ("comparison", "effect", *selection.KEYS, "region")


def page() -> None:
    """Draw the comparison that the selection names, or the newest one."""
    st.title("Comparison", anchor=False)
    manifests = list(reversed(data.comparisons().manifests))
    if not manifests:
        blocks.no_comparison()
        return
    name = choose_comparison(manifests)
    comparison, verdict = data.comparison(name), data.verdict(name)
    manifest = next(one for one in manifests if one["comparison_id"] == name)
    verdict_view.hero(comparison, verdict, naming.pair_names(manifests)[naming.pair_of(manifest)])
    answers = None
    with blocks.section():
        answers = selection.answers_of(comparison)
    chosen = _filters(comparison, answers)
    cells = _cells(name, comparison, chosen)
    judged = None if chosen is not None and chosen.filtered else verdict
    files = selection.source(comparison, chosen)
    if cells:
        _forest(comparison, files, cells, judged)
        effects.crossing(files.file, cells)
        _layers(comparison, files, cells)
        spread.distribution(comparison, _effect(comparison), cells, chosen)
        spread.segments(files, _effect(comparison), cells, facts.level(comparison, judged))
    verdict_view.rules(name, verdict)
    acceptance.draw(comparison, verdict)
    if chosen is not None:
        probes_table.draw(name, files.file, chosen)
    effects.methods(comparison, manifests, state.get("region"), chosen)
    if cells:
        _cell_table(files.file, cells)
    state.publish(*KEYS)


def choose_comparison(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Draw the list of comparisons, newest first, and return the chosen one."""
    names = [str(one["comparison_id"]) for one in manifests]
    by_name, pairs = dict(zip(names, manifests, strict=True)), naming.pair_names(manifests)
    asked = state.get("comparison")
    if asked is not None and asked not in names:
        unread = next((one for one in data.comparisons().problems if asked in one), None)
        why = "which is not in this store (it may have been removed, or belong to another store)."
        st.warning(
            f"The link asks for {blocks.plain(asked, 40)}, "
            f"{'which cannot be read: ' + blocks.plain(unread) + '.' if unread else why} "
            "The newest comparison is shown instead.",
            icon=":material/link_off:",
        )
        state.put(comparison=None)
    chosen = state.pick(
        st.selectbox,
        "Comparison",
        "comparison",
        names,
        default=names[0],
        format_func=lambda name: _title(by_name[name], pairs),
    )
    state.put(comparison=chosen)
    return str(chosen)


def _title(one: Mapping[str, Any], pairs: Mapping[naming.Pair, str]) -> str:
    return (
        f"{naming.outcome_of(one)} · {pairs[naming.pair_of(one)]} · {one['method']} · "
        f"{'2×2 with new data · ' if naming.crossed(one) else ''}"
        f"{blocks.when(one['provenance']['time'])} · {one['comparison_id']}"
    )


def _filters(comparison: Comparison, answers: Any) -> Selected | None:
    filters = selection.options(answers) if answers is not None else {}
    selection.drop_unknown({"effect": _effects(comparison.cells), **filters})
    if answers is None:
        if comparison.kind == "paired":
            blocks.note(
                "The runs of this comparison are no longer in the store, or have lost their manifest: probes "
                "cannot be filtered."
            )
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
        return _subset(name, comparison, chosen)
    return ()


def _subset(name: str, comparison: Comparison, chosen: Selected) -> tuple[Cell, ...]:
    """Return the cells of the selection; of a 2×2, with the same filters on its second probe set."""
    domain = selection.crossed(comparison, chosen)
    if domain is not None and len(domain.rows):
        blocks.note(
            f"The filters hold for both probe sets: {len(domain.rows):,} of {domain.total:,} probes of the "
            "second one are left."
        )
        return data.subset(name, chosen, domain)
    if comparison.settings.get("domain"):
        why = "its runs are no longer in the store" if domain is None else "no probe of it fits these filters"
        blocks.note(f"Only the effect of the checkpoint is shown: of the second probe set, {why}.")
    return data.subset(name, chosen)


def _effects(cells: Sequence[Cell]) -> list[str]:
    return [e for e in effects.EFFECTS if any(c.effect == e and c.measure == "shift" for c in cells)]


def _choose_effect(comparison: Comparison, cells: Sequence[Cell]) -> str:
    """Draw what of a 2×2 is looked at; where a filter leaves one effect, there is no choice."""
    present = _effects(cells)
    if len(present) < 2:
        return present[0] if present else _effect(comparison)
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
    return _effect(comparison)


def _effect(comparison: Comparison) -> str:
    present = _effects(comparison.cells)
    chosen = state.get("effect")
    return chosen if chosen in present else (present[0] if present else "model")


def _forest(
    comparison: Comparison, files: downloads.Source, cells: Sequence[Cell], verdict: Verdict | None
) -> None:
    level = facts.level(comparison, verdict)
    with blocks.section(
        "Where the attention map moved", "Mean shift of each region, with everything it is judged by."
    ):
        blocks.meaning()
        effect = _choose_effect(comparison, cells)
        found = rows.by_size(effects.shifts(cells, effect))
        if not found:
            st.info("No shift was computed for this selection.")
            return
        judged = rows.judged_by(verdict)
        lines = [
            forest.Line(charts.name_of(c), c, tuple(judged.get(rows.cell_key(c), ()))) for c in found[:40]
        ]
        what = f"Shift of {len(lines)} regions"
        notes = (files.about, *forest.legend(level))
        downloads.chart(f"{files.file}-regions", forest.forest, lines, alt=what, notes=notes)
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


def _layers(comparison: Comparison, files: downloads.Source, cells: Sequence[Cell]) -> None:
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
        what = "Shift by region and layer"
        legend = (
            "Each column is the map as it stands after that layer. Orange: the region gained share; blue: it "
            "lost share."
        )
        notes = (files.about, legend)
        downloads.chart(f"{files.file}-layers", charts.heat_map, found, order, alt=what, notes=notes)
        blocks.note(legend)


def _cell_table(file: str, cells: Sequence[Cell]) -> None:
    with blocks.folded(f"Every number of this comparison ({len(cells):,} rows)", "cells") as opened:
        if opened:
            frame = frames.cells(cells)
            st.dataframe(frame, hide_index=True, height=360)
            downloads.table(f"{file}-cells", frame)
