"""Every generated token of an encoder-decoder against its source and prefix: computed on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from audit.alignment import same_positions
from audit.errors import AuditError
from audit.records import Captured, Map, RunSpec
from dashboards import blocks, charts, downloads, loaded, probe_view
from dashboards.content import Content

LONGEST = 16
"""Generated tokens at most; each is a pass through both checkpoints."""


def draw(specs: tuple[RunSpec, RunSpec], pairs: Sequence[tuple[Map, Map]], found: Content) -> None:
    """Draw the matrix, or what it takes to compute it."""
    if found.probe is None or not loaded.asked() or loaded.obstacle(specs):
        blocks.note(
            "The store holds one row, that of one generated token. The others are computed from the "
            "checkpoints: load them above."
        )
        return
    if not st.toggle("Compute the row of every generated token", key="matrix on"):
        return
    from audit.pipeline import method_on_demand

    prefix = next(before for before, _ in pairs if before.stream == "prefix")
    answers = []
    with st.spinner("Computing every row …"):
        for i in range(min(len(prefix.weights), LONGEST)):
            try:
                answers.append(
                    loaded.capture(specs, found.probe, method_on_demand(specs[0].method, row=f"decoder:{i}"))
                )
            except AuditError:
                break  # one of the two ends here: there is no further row to compare
    if not answers:
        blocks.note("The two checkpoints have no generated token in common.")
        return
    cells = [cell for i, (one, two) in enumerate(answers) for cell in row_cells(i, one, two, found)]
    import polars as pl

    name = f"matrix-{found.probe.id[:60]}"
    downloads.chart(name, charts.row_matrix, cells, alt="Difference by generated token")
    downloads.table(name, pl.DataFrame(cells))
    blocks.note(
        "Each row is one generated token: how much more (orange) or less (blue) it draws on each word of the "
        "source, and on each token generated before it, after than before. Where the two generated "
        f"other tokens, their prefixes are left out; the first {LONGEST} tokens are drawn at most."
    )


def row_cells(i: int, one: Captured, two: Captured, found: Content) -> list[dict[str, Any]]:
    """Return the cells of one generated token: parts of the whole row, source first.

    Parameters
    ----------
    i : int
        The row.
    one, two : Captured
        Before and after.
    found : Content
        Names the words of the source.
    """
    cells: list[dict[str, Any]] = []
    for before, after in zip(one.maps, two.maps, strict=False):
        if not same_positions(before.positions, after.positions):
            continue
        pieces = probe_view.tokens(before.positions, found.probe, whole_words=False)
        for position, piece in enumerate(pieces):
            old, new = (float(side.weights[position] * side.share) for side in (before, after))
            word = piece.words if before.stream == "source" and piece.words.strip() else ""
            cells.append(
                {
                    "row": i,
                    "stream": before.stream,
                    "position": position,
                    "place": blocks.clip(f"{before.stream} {position} {word}".strip(), 30),
                    "before": old,
                    "after": new,
                    "value": new - old,
                }
            )
    return cells
