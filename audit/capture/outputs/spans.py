"""Rows of tasks that answer at positions: the ends of an answer, and the labelled spans of entities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.inputs.encoded import Encoded
from audit.capture.outputs.scores import Score
from audit.errors import ProbeError
from audit.records import Region
from audit.regions import region_weights

ANSWER = "answer"
"""Name of the annotated region that holds a probe's answer."""

Span = tuple[int, int]
"""First and last position, both included."""


def annotated_rows(name: str, item: Encoded, annotation: Any = None) -> NDArray[np.float64]:
    """Return the weights of an annotated region over the rows of a probe: (position,).

    Raises
    ------
    ProbeError
        When it cannot be placed.
    """
    probe = item.probe
    if annotation is not None:
        probe = replace(probe, regions={name: annotation})
    try:
        region = Region(name, "annotated", {"annotated": name})
        return np.asarray(region_weights(region, item.positions, probe), np.float64)
    except ValueError as error:
        raise ProbeError(f"probe {probe.id}: row {name!r} cannot be placed ({error})") from None


# --- question answering -----------------------------------------------------------------------


def answer_ends(item: Encoded, wanted: Any, outputs: Any, place: int) -> Span:
    """Return the start and the end of a probe's answer.

    The annotated region ``answer``, else the text that is wanted or the label (its first occurrence in the
    context; an empty one is row 0, as for questions without an answer), else the best span that this
    checkpoint predicts.

    Parameters
    ----------
    item : Encoded
    wanted : text of the answer, or None
    outputs : what the model returned
    place : int
        Row of the probe in the batch.

    Raises
    ------
    ProbeError
        When the answer is not in the text, or was truncated away.
    """
    if ANSWER in item.probe.regions:
        return _ends(annotated_rows(ANSWER, item), item, "its annotated answer")
    text = wanted if isinstance(wanted, str) else item.probe.label
    if isinstance(text, str):
        return (0, 0) if not text else _ends(_found(text, item), item, f"answer {text!r}")
    return best_answer(item, outputs.start_logits[place], outputs.end_logits[place])


def best_answer(item: Encoded, start: Tensor, end: Tensor) -> Span:
    """Return the span with the largest start + end logit, start ≤ end, within the context."""
    n, positions = len(item), item.positions
    inside = ~positions.special
    if positions.parts is not None and (positions.parts == 1).any():
        inside &= positions.parts == 1
    allowed = torch.from_numpy(np.triu(np.outer(inside, inside)))
    sums = start[:n, None].double().cpu() + end[None, :n].double().cpu()
    if not bool(allowed.any()):
        return (0, 0)
    best = int(sums.masked_fill(~allowed, float("-inf")).argmax())
    return best // n, best % n


def answer_text(item: Encoded, ends: Span) -> str:
    """Return the text between the ends of an answer; empty where it is no text."""
    positions, (first, last) = item.positions, ends
    if positions.starts is None or positions.ends is None or positions.starts[first] < 0:
        return ""
    part = 0 if positions.parts is None else int(positions.parts[first])
    text = item.probe.text_pair if part == 1 else item.probe.text
    return (text or "")[int(positions.starts[first]) : int(positions.ends[last])]


def answer_score(item: Encoded, ends: Span) -> Score:
    """Return the score of an answer: its start logit plus its end logit, as :func:`interleaved` has them."""
    first, last = ends
    return Score(answer_text(item, ends), ((2 * first, 1.0), (2 * last + 1, 1.0)))


def interleaved(outputs: Any) -> Tensor:
    """Return start logits at even and end logits at odd places: (batch, 2 position)."""
    return torch.stack([outputs.start_logits, outputs.end_logits], dim=2).flatten(1)


def _found(text: str, item: Encoded) -> NDArray[np.float64]:
    probe = item.probe
    part, whole = ("text", probe.text) if probe.text_pair is None else ("text_pair", probe.text_pair)
    start = (whole or "").find(text)
    if start < 0:
        raise ProbeError(
            f"probe {probe.id}: answer {text!r} is not in its {part}; mend its label, or annotate 'answer'"
        )
    return annotated_rows(ANSWER, item, {part: [[start, start + len(text)]]})


def _ends(weights: NDArray[np.float64], item: Encoded, what: str) -> Span:
    rows = np.flatnonzero(weights)
    if not len(rows):
        raise ProbeError(
            f"probe {item.probe.id}: {what} lies outside what the checkpoint reads; mend it or the text"
        )
    return int(rows[0]), int(rows[-1])


# --- token classification ---------------------------------------------------------------------


def labelled_spans(item: Encoded, names: Sequence[str]) -> list[tuple[str, NDArray[np.float64], list[int]]]:
    """Return the spans that are annotated under the name of a class: name, rows, class of each row.

    A region ``PER`` means the classes ``PER``, or ``B-PER`` at the first row of a span and ``I-PER`` at the
    others.

    Parameters
    ----------
    item : Encoded
    names : sequence of str
        Class names of the checkpoint.

    Returns
    -------
    list of (name, weights (position,), class of each row with weight)
    """
    found = []
    for region, annotation in item.probe.regions.items():
        classes = _classes(region, names)
        if classes is None:
            continue
        for one in _single(annotation):
            rows = annotated_rows(region, item, one)
            places = np.flatnonzero(rows)
            if len(places):
                found.append((region, rows, [classes[0], *[classes[1]] * (len(places) - 1)]))
    return found


def entity(name: str) -> str:
    """Return a class name without the mark of its place in a span.

    >>> entity("B-PER"), entity("O")
    ('PER', 'O')
    """
    return name[2:] if name[:2] in ("B-", "I-", "E-", "S-", "L-", "U-") else name


def _classes(region: str, names: Sequence[str]) -> tuple[int, int] | None:
    known = {name: i for i, name in enumerate(names)}
    inside = known.get(f"I-{region}", known.get(region))
    first = known.get(f"B-{region}", inside)
    return None if first is None else (first, first if inside is None else inside)


def _single(annotation: Any) -> list[Any]:
    """Return an annotation of several spans as one annotation for each."""
    if isinstance(annotation, Mapping):
        return [
            {part: [span]}
            for part, spans in annotation.items()
            if part in ("text", "text_pair")
            for span in spans
        ]
    return [[span] for span in annotation]


def span_classes(item: Encoded, logits: Tensor, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return what each labelled span is, and what the mean of its logits (position, class) says it is."""
    found = []
    for name, rows, _ in labelled_spans(item, names):
        weights = torch.from_numpy(rows / rows.sum()).to(logits.dtype)
        found.append((name, entity(names[int((weights @ logits[: len(rows)]).argmax())])))
    return found
