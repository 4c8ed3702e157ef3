"""Long texts in overlapping windows, as a production pipeline with `stride` cuts them.

Each window goes through the model by itself. The probe's map is the mean of its windows' maps, laid on the
positions of the whole text: a token that several windows hold adds up what it has in each, so that the map
sums to 1 again; [CLS], [SEP] and their kin are the same position in every window. The logits are the mean of
the windows' logits, and the prediction is read from that mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from audit.errors import ConfigError
from audit.records import Captured, Map, Positions, Prediction

Key = tuple[int, int, int, int]
"""Part, first and last character, and which of the tokens with this span."""

ROWS = frozenset({"auto", "cls", "mean", "last"})
"""Output rows that every window has."""


def check_stride(stride: int, limit: int | None, row: str = "auto") -> None:
    """Refuse a stride that cannot move forward, and rows that lie in one window alone.

    Raises
    ------
    ConfigError
    """
    if limit is None:
        raise ConfigError("[probes] stride needs a limit: set max_length, or remove stride")
    if stride >= limit:
        raise ConfigError(
            f"[probes] stride = {stride} must be below max_length = {limit}: windows would not move on"
        )
    if row not in ROWS:
        raise ConfigError(
            f"[probes] stride works with the rows {', '.join(sorted(ROWS))}, not with {row!r}, which one "
            "window alone would hold; remove stride or change [method] row"
        )


def merge_windows(captured: Iterable[Captured], class_names: Sequence[str] | None) -> Iterator[Captured]:
    """Yield one Captured for each probe from those of its windows, which follow one another.

    Parameters
    ----------
    captured : iterable of Captured
    class_names : sequence of str or None
        Classes of the logits; None where a prediction is no class of a list.
    """
    for _, group in groupby(captured, key=lambda one: one.prediction.probe_id):
        windows = list(group)
        yield windows[0] if len(windows) == 1 else _merged(windows, class_names)


def _merged(windows: Sequence[Captured], class_names: Sequence[str] | None) -> Captured:
    streams = zip(*(window.maps for window in windows), strict=True)
    return Captured(
        tuple(merge_maps(maps) for maps in streams),
        _prediction([window.prediction for window in windows], class_names),
    )


def merge_maps(maps: Sequence[Map]) -> Map:
    """Return the mean of the windows' maps on the positions of the whole text.

    Examples
    --------
    >>> def window(weights, starts):
    ...     n = len(weights)
    ...     special = np.array([True] + [False] * (n - 1))
    ...     spans = np.array([-1, *starts], np.int32)
    ...     ends = np.array([-1, *(s + 1 for s in starts)], np.int32)
    ...     parts = np.array([-1] + [0] * (n - 1), np.int8)
    ...     return Map("p", np.array(weights), Positions("token", special, spans, ends, parts))
    >>> merge_maps([window([0.2, 0.5, 0.3], [0, 2]), window([0.2, 0.4, 0.4], [2, 4])]).weights.tolist()
    [0.2, 0.25, 0.35, 0.2]
    """
    keys = [_keys(one.positions) for one in maps]
    order = _order(keys)
    place = {key: i for i, key in enumerate(order)}
    rows = [np.array([place[key] for key in window], np.intp) for window in keys]

    def mean(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        total = np.zeros((*values[0].shape[:-1], len(order)))
        for row, value in zip(rows, values, strict=True):
            total[..., row] += value / len(values)  # no position comes twice within a window
        return total

    layers = [one.layers for one in maps if one.layers is not None]
    diagnostics = {
        name: float(np.mean([one.diagnostics[name] for one in maps if name in one.diagnostics]))
        for name in maps[0].diagnostics
    }
    return replace(
        maps[0],
        weights=mean([one.weights for one in maps]),
        layers=mean(layers) if len(layers) == len(maps) else None,
        positions=_positions(maps, keys, order),
        share=float(np.mean([one.share for one in maps])),
        diagnostics=diagnostics,
    )


def _keys(positions: Positions) -> list[Key]:
    if positions.starts is None or positions.ends is None or positions.parts is None:
        raise ConfigError(
            "[probes] stride needs a fast tokenizer, which knows where its tokens lie; remove it"
        )
    seen: Counter[tuple[int, int, int]] = Counter()
    found = []
    for special, part, start, end in zip(
        positions.special, positions.parts, positions.starts, positions.ends, strict=True
    ):
        span = (-1, -1, -1) if special else (int(part), int(start), int(end))
        found.append((*span, seen[span]))
        seen[span] += 1
    return found


def _order(windows: Sequence[Sequence[Key]]) -> list[Key]:
    """Return all positions as one sequence: the first special one, the text, the other special ones."""
    every = dict.fromkeys(key for window in windows for key in window)
    specials = [key for key in every if key[0] < 0]
    leading = [key for key in specials if windows[0][0] == key]
    content = sorted(key for key in every if key[0] >= 0)
    return [*leading, *content, *(key for key in specials if key not in leading)]


def _positions(maps: Sequence[Map], keys: Sequence[Sequence[Key]], order: Sequence[Key]) -> Positions:
    places = {key: (w, i) for w, window in reversed(list(enumerate(keys))) for i, key in enumerate(window)}
    chosen = [places[key] for key in order]

    def pick(name: str) -> Any:
        columns = [getattr(one.positions, name) for one in maps]
        return None if columns[0] is None else np.stack([columns[w][i] for w, i in chosen])

    return replace(
        maps[0].positions,
        special=pick("special"),
        starts=pick("starts"),
        ends=pick("ends"),
        parts=pick("parts"),
    )


def _prediction(windows: Sequence[Prediction], class_names: Sequence[str] | None) -> Prediction:
    first = windows[0]
    tokens = sum(one.tokens or 0 for one in windows)
    logits = [one.logits for one in windows if one.logits is not None]
    if len(logits) < len(windows) or len({len(one) for one in logits}) > 1:
        return replace(first, logits=None, predicted=None, target_logit=None, tokens=tokens)
    mean = np.mean(np.array(logits, float), axis=0)
    known = class_names is not None and len(class_names) == len(mean) > 1
    targets = [one.target_logit for one in windows if one.target_logit is not None]
    return replace(
        first,
        logits=tuple(float(value) for value in mean),
        predicted=class_names[int(mean.argmax())] if known and class_names is not None else first.predicted,
        target_logit=float(np.mean(targets)) if len(targets) == len(windows) else None,
        tokens=tokens,
    )
