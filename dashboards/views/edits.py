"""What an edit of a text did to both maps, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
import streamlit as st

from audit.records import Captured, Map, Probe
from dashboards import blocks, downloads, map_svg, probe_view, theme
from dashboards.probe_view import Line, Token, Weights
from dashboards.views.maps import weights_at

SIDES = ("before", "after")
Moved = tuple[list[Token], Weights, tuple[Weights, Weights]]
"""The words of a text, what each gained, and its shares then and now."""


@dataclass(frozen=True)
class Seen:
    """One text as it was drawn: what it says and what both checkpoints made of it."""

    probe: Probe
    answers: tuple[Captured, Captured]


def since_last(answers: tuple[Captured, Captured], probe: Probe, layer: int | None) -> None:
    """Draw what the last edit moved in the map of each checkpoint, and what it did to their answers."""
    if probe.text is None:
        return
    last: Seen | None = st.session_state.get("live last")
    if last is not None and last.probe.text != probe.text:
        st.session_state["live edit"] = last
    st.session_state["live last"] = Seen(probe, answers)
    earlier: Seen | None = st.session_state.get("live edit")
    if earlier is None or earlier.probe.text == probe.text:
        return
    with blocks.section(
        "What your last edit moved", "Share of each word now, minus its share before the edit."
    ):
        _say(earlier, answers)
        found = [
            moved((then.maps[0], earlier.probe), (now.maps[0], probe), layer)
            for then, now in zip(earlier.answers, answers, strict=True)
        ]
        if None in found:
            blocks.note("The two texts have no map that could be subtracted.")
            return
        _draw([one for one in found if one is not None])
        blocks.note(
            "Each line is one checkpoint. Orange: the word has more of the map than before the edit (or is "
            "new); blue: it has less."
        )


def _draw(found: Sequence[Moved]) -> None:
    """Draw one line of words for each checkpoint."""
    peak = probe_view.peak(*(gained for _, gained, _ in found))
    rows = [
        (pieces, Line(side.capitalize(), gained, peak, signed=True))
        for side, (pieces, gained, _) in zip(SIDES, found, strict=True)
    ]
    drawn = [
        (line.title, probe_view.words_html(pieces, line, both))
        for (pieces, line), (_, _, both) in zip(rows, found, strict=True)
    ]
    blocks.html(probe_view.strips(drawn, blank=False))
    colours = theme.palette()
    downloads.figure("edit", lambda: map_svg.words_svg(rows, colours))


def _say(earlier: Seen, answers: Sequence[Captured]) -> None:
    turned = [
        f"{side}: {then.prediction.predicted} → {now.prediction.predicted}"
        for side, then, now in zip(SIDES, earlier.answers, answers, strict=True)
        if then.prediction.predicted != now.prediction.predicted
    ]
    what = "; ".join(turned) if turned else "neither checkpoint changed its answer"
    before = blocks.text(str(earlier.probe.text), 80)
    blocks.note(f"Since your last edit (“{before}”): {blocks.text(what)}.")


def moved(then: tuple[Map, Probe], now: tuple[Map, Probe], layer: int | None) -> Moved | None:
    """Return the words of a text, what each gained since another text, and its shares then and now.

    Words are matched in order; a new word had nothing. None where a map has no tokens.

    Parameters
    ----------
    then, now : (Map, Probe)
    layer : int or None
    """
    if then[0].positions.kind != "token" or now[0].positions.kind != "token":
        return None
    old_pieces, pieces = (
        probe_view.tokens(one.positions, probe, whole_words=True) for one, probe in (then, now)
    )
    old, new = (
        probe_view.summed(weights_at(one, layer), found)
        for one, found in ((then[0], old_pieces), (now[0], pieces))
    )
    matcher = SequenceMatcher(None, [p.words for p in old_pieces], [p.words for p in pieces], autojunk=False)
    earlier = np.zeros(len(pieces))
    for block in matcher.get_matching_blocks():
        earlier[block.b : block.b + block.size] = old[block.a : block.a + block.size]
    return pieces, new - earlier, (earlier, new)
