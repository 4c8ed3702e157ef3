"""Every generated token of an encoder-decoder against its source and prefix: computed on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st

from audit.alignment import same_positions
from audit.errors import ProbeError
from audit.records import Captured, Probe, RunSpec
from dashboards import blocks, charts, downloads, loaded, probe_view, state
from dashboards.content import Content

SHOWN = 16
"""Generated tokens of one part of the matrix; each is a pass through both checkpoints."""
KEY = "tokens"
"""Of the selection: the first generated token that is drawn."""
Pair = tuple[Captured, Captured]


def draw(specs: tuple[RunSpec, RunSpec], found: Content) -> None:
    """Draw the matrix part by part, or say what it takes to compute it."""
    if found.probe is None or not loaded.asked() or loaded.obstacle(specs):
        blocks.note(
            "The store holds one row, that of one generated token. The others are computed from the "
            "checkpoints: load them above."
        )
        return
    if not st.toggle("Compute the row of every generated token", key="matrix on"):
        return
    first = first_token(state.get(KEY))
    with st.spinner("Computing the rows …"):
        answers = rows_from(first, specs, found.probe)
    _turn(first, len(answers))
    if not answers:
        blocks.note(f"The two checkpoints have no generated token {first} in common.")
        return
    _draw(first, answers[:SHOWN], found)


def first_token(asked: str | None) -> int:
    """Return the first generated token of the part that an address asks for; 0 for nonsense."""
    return int(asked) // SHOWN * SHOWN if asked is not None and asked.isdecimal() and len(asked) < 6 else 0


def rows_from(first: int, specs: tuple[RunSpec, RunSpec], probe: Probe) -> list[Pair]:
    """Return what both checkpoints make of the generated tokens from `first` on.

    At most one more than are drawn, which tells whether there is a further part; fewer where one of the
    checkpoints ends.
    """
    from audit.pipeline import method_on_demand

    answers = []
    for i in range(first, first + SHOWN + 1):
        method = method_on_demand(specs[0].method, row=f"decoder:{i}")
        try:
            answers.append(loaded.capture(specs, probe, method))
        except ProbeError:
            break  # one of the two generates no further token
    return answers


def _turn(first: int, count: int) -> None:
    """Draw the way to the other parts, where there are any."""
    if not first and count <= SHOWN:
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        for label, icon, target, there in (
            ("Earlier tokens", "chevron_left", first - SHOWN, first > 0),
            ("Later tokens", "chevron_right", first + SHOWN, count > SHOWN),
        ):
            st.button(
                label,
                icon=f":material/{icon}:",
                disabled=not there,
                help=None if there else f"No {label.casefold()}: both checkpoints have no more in common.",
                on_click=state.put,
                kwargs={KEY: str(target) if target > 0 else None},
            )


def _draw(first: int, answers: Sequence[Pair], found: Content) -> None:
    import polars as pl

    assert found.probe is not None
    cells = [cell for i, pair in enumerate(answers, start=first) for cell in row_cells(i, *pair, found)]
    last = first + len(answers) - 1
    name = f"matrix-{found.probe.id[:60]}" + (f"-from-{first}" if first else "")
    what = f"Difference by generated token, {first} to {last}"
    legend = (
        f"Each row is one generated token ({first} to {last}): how much more (orange) or less (blue) it "
        "draws on each word of the source, and on each token generated before it, after than before."
    )
    downloads.chart(name, charts.row_matrix, cells, alt=what, notes=(name, legend))
    downloads.table(name, pl.DataFrame(cells))
    blocks.note(f"{legend} Where the two generated other tokens, their prefixes are left out.")


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
