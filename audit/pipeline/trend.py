"""The trend over the history of a model: slow drift that no single verdict shows.

Every scheduled audit is a look. The reliance of each region is followed from look to look, and the
evidence that its changes go one way is an e-process: valid however often one looks. A single large step
is a matter for the gate; it gives no evidence of a trend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from audit.calibrate import e_process
from audit.records import Comparison, Policy
from audit.statistics.changes import FEWEST, change_points, noise_scale
from audit.store import Store

ALARM = 20.0
"""Evidence from which on a trend is told: under no trend it is ever reached with a chance of 1 in 20."""

FEWEST_LOOKS = 3

__all__ = ["ALARM", "FEWEST", "FEWEST_LOOKS", "Trend", "trend_notes", "trends"]


@dataclass(frozen=True)
class Trend:
    """How the reliance of one region went over the looks at a model.

    Attributes
    ----------
    levels : tuple of float
        Mean share: of the first look's baseline, then after each look.
    evidence : float
        Value of the e-process at the newest look; `highest` is its maximum over all looks.
    scale : float
        Size of a change that would matter, fixed at the first look: the replicates' SD there, or the
        effect floor where there were none.
    alarm : str or None
        Comparison at which the evidence first reached :data:`ALARM`.
    sentence : str
    course : tuple of float
        Value of the e-process after each look.
    changes : tuple of int
        Indices into `looks` from which on the mean share is another, see
        :func:`audit.statistics.changes.change_points`: for reading the history, not for judging it.
    """

    region: str
    stream: str
    effect: str
    looks: tuple[str, ...]
    levels: tuple[float, ...]
    evidence: float
    highest: float
    scale: float
    alarm: str | None
    sentence: str
    course: tuple[float, ...] = ()
    changes: tuple[int, ...] = ()


def trends(store: Store, comparison_id: str | None = None) -> list[Trend]:
    """Return the trend of each region over the history of each model, alarms first.

    A history holds the judged comparisons with one kind, method and capture settings on one probe set (for
    a domain audit: with one baseline run), whose baseline was a baseline or a candidate in it before; each
    newly captured run is a look.

    Parameters
    ----------
    store : Store
    comparison_id : str, optional
        Only the history of this comparison, up to it.

    Returns
    -------
    list of Trend
        Regions with fewer than three looks have none.
    """
    found = [
        trend
        for history in _histories(store, comparison_id)
        if len(history) >= FEWEST_LOOKS
        for trend in _trends_of([store.comparison(name) for name in history])
    ]
    return sorted(found, key=lambda one: (one.alarm is None, -one.evidence))


def trend_notes(store: Store, comparison: Comparison) -> tuple[str, ...]:
    """Return one sentence for each region of a comparison's history that drifts, or one that none does."""
    if comparison.id is None:
        return ()
    found = trends(store, comparison.id)
    alarms = tuple(one.sentence for one in found if one.alarm is not None)
    if alarms or not found:
        return alarms
    strongest = found[0]
    return (
        f"Trend over {len(strongest.looks)} audits: no region drifts (strongest evidence "
        f"{strongest.evidence:.1f} of the {ALARM:g} that tell one, '{strongest.region}').",
    )


# --- histories --------------------------------------------------------------------------------


@dataclass
class _History:
    """Comparisons of one line of checkpoints, and every digest that was seen in it."""

    members: list[dict[str, Any]] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)

    def add(self, manifest: dict[str, Any]) -> None:
        self.members.append(manifest)
        self.digests |= {manifest["before"]["digest"], manifest["after"]["digest"]}


def _histories(store: Store, comparison_id: str | None) -> Iterator[list[str]]:
    """Yield the comparisons of each history, oldest first, one for each run that was looked at."""
    specs = {manifest["run_id"]: manifest["spec"] for manifest in store.runs()}
    grouped: dict[str, list[_History]] = {}
    for manifest in _as_logged(store):
        if manifest["before"] is None or manifest["after"] is None or manifest["outcome"] is None:
            continue
        lines = grouped.setdefault(_setting_of(manifest, specs), [])
        line = next((one for one in lines if manifest["before"]["digest"] in one.digests), None)
        if line is None:
            lines.append(line := _History())
        line.add(manifest)
    for line in (one for lines in grouped.values() for one in lines):
        names = [str(one["comparison_id"]) for one in line.members]
        if comparison_id is not None and comparison_id not in names:
            continue
        last = len(names) if comparison_id is None else names.index(comparison_id) + 1
        looks: dict[str, str] = {}
        for one in line.members[:last]:
            looks.setdefault(one["after"]["run_id"], str(one["comparison_id"]))
        yield list(looks.values())


def _as_logged(store: Store) -> list[dict[str, Any]]:
    """Return the manifests of comparisons in the order of their verdicts; their times tell only seconds."""
    logged = [str(entry["payload"]["comparison_id"]) for entry in store.log() if entry["kind"] == "verdict"]
    order = {name: i for i, name in enumerate(logged)}
    return sorted(store.comparisons(), key=lambda one: order.get(str(one["comparison_id"]), -1))


def _setting_of(manifest: dict[str, Any], specs: dict[str, dict[str, Any]]) -> str:
    """Return the probes, method and settings that all looks of one history share."""
    spec = specs.get(manifest["before"]["run_id"])
    subject = manifest["before"]["run_id"]
    if spec is not None and manifest["kind"] == "paired":
        subject = repr([spec[key] for key in ("inputs_digest", "method", "settings")])
    return repr([manifest["kind"], manifest["method"], subject])


def _trends_of(history: Sequence[Comparison]) -> Iterator[Trend]:
    first = history[0]
    effect = "model" if first.kind == "paired" else "data"
    for cell in first.find("*", "shift", effect=effect):
        key = (cell.region, cell.stream)
        levels, looks = [cell.before], []
        for comparison in history:
            found = next(comparison.find(key[0], "shift", stream=key[1], effect=effect), None)
            if found is not None and found.after is not None:
                levels.append(found.after)
                looks.append(str(comparison.id))
        known = [level for level in levels if level is not None]
        if len(known) == len(levels) and len(looks) >= FEWEST_LOOKS:
            yield _trend(key, effect, looks, known, _scale(cell.replicates))


def _scale(replicates: Sequence[float]) -> float:
    spread = float(np.std(replicates, ddof=1)) if len(replicates) > 1 else 0.0
    return spread if spread > 0 else Policy.effect_floor


def _trend(
    key: tuple[str, str], effect: str, looks: Sequence[str], levels: Sequence[float], scale: float
) -> Trend:
    """Return the trend of one region; the differences are those between neighbouring looks."""
    evidence = e_process(np.diff(levels), scale=scale)
    reached = np.flatnonzero(evidence >= ALARM)
    alarm = looks[int(reached[0])] if len(reached) else None
    return Trend(
        region=key[0],
        stream=key[1],
        effect=effect,
        looks=tuple(looks),
        levels=tuple(float(level) for level in levels),
        evidence=float(evidence[-1]),
        highest=float(evidence.max()),
        scale=scale,
        alarm=alarm,
        sentence=_sentence(key[0], looks, levels, float(evidence.max()), alarm),
        course=tuple(float(value) for value in evidence),
        changes=change_points(levels[1:], scale=noise_scale(levels[1:], known=scale)),
    )


def _sentence(
    region: str, looks: Sequence[str], levels: Sequence[float], highest: float, alarm: str | None
) -> str:
    span = f"share {levels[0]:.3f} → {levels[-1]:.3f} over {len(looks)} audits".replace(" 0.", " .")
    if alarm is None:
        return f"No trend on '{region}': {span}, evidence {highest:.1f} of {ALARM:g}."
    way = "towards" if levels[-1] > levels[0] else "away from"
    return (
        f"Trend: audit by audit the attention map moves {way} '{region}': {span}, evidence {highest:.3g} "
        f"(told from {ALARM:g} on, first at {alarm})."
    )
