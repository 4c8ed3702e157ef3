"""What the predictions of two runs say beside their maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from audit.pipeline.checks import classes_of, is_class
from audit.pipeline.runs import RunData
from audit.records import Comparison

if TYPE_CHECKING:
    import polars as pl


def prediction_changes(before: RunData, after: RunData) -> Mapping[str, Any]:
    """Return how many predictions changed, became wrong and became right, and both accuracies.

    Returns
    -------
    mapping
        ``truncated`` counts the probes that were cut for either run, where any was; the others are left
        out where a run has no predictions or no labels, and everything where a run comes from a floor.
    """
    if before.store is None or after.store is None:
        return {}
    one = before.store.predictions(before.ref.run_id)
    two = after.store.predictions(after.ref.run_id)
    cut = _truncated(one, two)
    found: dict[str, Any] = {"truncated": cut} if cut else {}
    old, new = (np.array(frame["predicted"].to_list(), dtype=object) for frame in (one, two))
    if None in old or None in new:
        return found  # a backbone without a task head predicts nothing
    found |= {"n": len(old), "changed": int((old != new).sum())}
    labels = one["label"].to_list()
    if None not in labels:
        found |= _accuracy(old, new, labels, _counted(labels, before))
    return found


def _counted(labels: list[str], run: RunData) -> NDArray[np.bool_]:
    """Return which labels the checkpoint could have predicted at all."""
    classes = () if run.store is None else classes_of(run.store.spec(run.ref.run_id).checkpoint)
    return np.array([not classes or is_class(label, classes) for label in labels], dtype=bool)


def _accuracy(
    old: NDArray[Any], new: NDArray[Any], labels: list[str], counted: NDArray[np.bool_]
) -> dict[str, Any]:
    """Return what the labels tell, over the probes that count."""
    if not counted.any():
        return {}
    right_before, right_after = ((one == np.array(labels, dtype=object))[counted] for one in (old, new))
    found: dict[str, Any] = {
        "accuracy_before": float(right_before.mean()),
        "accuracy_after": float(right_after.mean()),
        "newly_wrong": int((right_before & ~right_after).sum()),
        "fixed": int((~right_before & right_after).sum()),
    }
    if not counted.all():
        found["probes_with_a_known_label"] = int(counted.sum())
    return found


def _truncated(one: pl.DataFrame, two: pl.DataFrame) -> int:
    cut = [set(frame.filter(frame["truncated"])["probe_id"]) for frame in (one, two)]
    return len(cut[0] | cut[1])


def truncation_note(comparison: Comparison) -> tuple[str, ...]:
    """Return the line that a report prints where probes were cut.

    >>> truncation_note(Comparison("paired", (), 0.05, 24, predictions={"truncated": 2}))
    ('2 of 24 probes were longer than the model allows and were cut.',)
    """
    count = comparison.predictions.get("truncated", 0)
    if not count:
        return ()
    return (f"{count} of {comparison.n_probes} probes were longer than the model allows and were cut.",)
