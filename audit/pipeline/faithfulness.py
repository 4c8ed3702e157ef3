"""Measure on both checkpoints of an audit whether the method's maps are faithful.

See :mod:`audit.faithfulness` for what that means.

A sample of the probes, the same for both, goes through each checkpoint with positions occluded in the order
of its maps, of the maps of other methods, and in random orders. The scores of single probes are stored with
the comparison, from which everything that is told is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from audit.config import AuditConfig
from audit.errors import AuditError, CaptureError, CheckpointError, ProbeError
from audit.faithfulness import GRID, Score, agreement, curve_scores, masks, ranking, summarise
from audit.pipeline.confirm import obstacle, question_of
from audit.pipeline.loader import LOADER
from audit.pipeline.plan import Progress, RunPlan, plan_run
from audit.pipeline.runs import read_annotations
from audit.pipeline.sources import load_probes
from audit.records import Checkpoint, Comparison, Faithfulness, Map, Method, Probe
from audit.store import Store

ROLES = ("before", "after")
STAGES = 4
"""Stages of the cascade in which weights are shuffled from the top."""


@dataclass(frozen=True)
class Measured:
    """Scores of single probes, their summary, and what could not be measured."""

    scores: tuple[Score, ...] = ()
    summary: tuple[Faithfulness, ...] = ()
    notes: tuple[str, ...] = ()


def with_faithfulness(config: AuditConfig, comparison: Comparison) -> Comparison:
    """Return `comparison` marked, where the configuration asks for it, as measured for faithfulness."""
    section = config.faithfulness
    if not section.probes:
        return comparison
    asked = {"probes": section.probes, "orders": section.orders, "methods": list(section.methods)}
    return replace(comparison, settings={**comparison.settings, "faithfulness": asked})


def measure_faithfulness(
    config: AuditConfig, comparison: Comparison, *, progress: Progress | None = None
) -> Measured:
    """Measure on both checkpoints whether maps order positions by what the target logit depends on.

    Parameters
    ----------
    config : AuditConfig
        Both checkpoints must be given by path; ``[faithfulness]`` says on how many probes, with how many
        random orders, and beside which other methods.
    comparison : Comparison
        Paired; its level, resamples and seed are used.
    progress : callable, optional

    Returns
    -------
    Measured
        Without scores, but with a note, where nothing can be occluded.
    """
    reason = obstacle(config)
    if comparison.kind != "paired" or comparison.before is None or comparison.after is None:
        reason = "the comparison has no two checkpoints on the same probes"
    if reason is not None:
        return Measured(notes=(_note(reason),))
    scores: list[Score] = []
    notes: list[str] = []
    for done, role in enumerate(ROLES):
        if progress is not None:
            progress("faithfulness", done, len(ROLES))
        plan = plan_run(config, role)
        try:
            with LOADER.use(plan) as checkpoint:
                found, missing = _one_checkpoint(config, plan, checkpoint)
        except (CaptureError, CheckpointError, ProbeError) as error:
            return Measured(notes=(_note(f"on the checkpoint {role}, {error}"),))
        scores += found
        notes += missing
    if progress is not None:
        progress("faithfulness", len(ROLES), len(ROLES))
    summary = summary_of(scores, comparison, Store(config.store.url))
    return Measured(tuple(scores), summary, tuple(dict.fromkeys(notes)))


def _note(reason: str) -> str:
    return f"Faithfulness was not measured: {reason.rstrip('.')}."


def summary_of(scores: Sequence[Score], comparison: Comparison, store: Store) -> tuple[Faithfulness, ...]:
    """Return what the scores of single probes say, with the level, resamples and seed of the comparison."""
    if not scores or comparison.before is None:
        return ()
    run_id = comparison.before.run_id
    groups, _ = read_annotations(store, run_id)
    ids = store.predictions(run_id)["probe_id"].to_list()
    return summarise(
        scores,
        audited=store.spec(run_id).method.name,
        groups=dict(zip(ids, groups, strict=True)) if groups else None,
        alpha=comparison.alpha,
        resamples=int(comparison.settings["resamples"]),
        seed=int(comparison.settings["seed"]),
    )


@dataclass(frozen=True)
class _Subject:
    """One checkpoint with the probes of the sample; `maps` are judged: method to probe id to map."""

    plan: RunPlan
    checkpoint: Checkpoint
    probes: tuple[Probe, ...]
    maps: Mapping[str, Mapping[str, Map]]

    @property
    def audited(self) -> str:
        """Return the method of the runs."""
        return self.plan.spec.method.name

    def capture(self, method: Method) -> dict[str, Map]:
        """Return the maps of the sample by another method, or of the checkpoint as it is now."""
        from audit.capture import capture

        spec = self.plan.spec
        settings = replace(spec.settings, layer_maps=False)
        target = question_of(self.plan)["targets"]
        found = capture(self.checkpoint, self.probes, method=method, settings=settings, target=target)
        return {one.maps[0].probe_id: one.maps[0] for one in found}


def _one_checkpoint(
    config: AuditConfig, plan: RunPlan, checkpoint: Checkpoint
) -> tuple[list[Score], list[str]]:
    section, seed = config.faithfulness, config.statistics.seed
    probes = load_probes(plan.probes).probes
    chosen = np.random.default_rng(seed).permutation(len(probes))[: section.probes]
    sample = tuple(probes[i] for i in sorted(chosen))
    subject = _Subject(plan, checkpoint, sample, {plan.spec.method.name: _stored_maps(plan, sample)})
    others, notes = {}, []
    for name in dict.fromkeys(section.methods):
        if name == subject.audited:
            continue
        try:
            others[name] = subject.capture(Method(name, plan.spec.method.row))
        except (CaptureError, CheckpointError) as error:
            notes.append(f"Faithfulness was not compared with {name}: {str(error).rstrip('.')}.")
    subject = replace(subject, maps={**subject.maps, **others})
    shuffles = _shuffled_maps(subject, seed)
    return list(_scores(subject, shuffles, section.orders, seed)), notes


def _stored_maps(plan: RunPlan, probes: Sequence[Probe]) -> dict[str, Map]:
    wanted, found = {probe.id for probe in probes}, {}
    for one in Store(plan.store).iter_maps(plan.run_id):
        if one.stream != "input":
            raise CaptureError("maps of several inputs cannot be occluded one position after the other")
        if one.probe_id in wanted:
            found[one.probe_id] = one
    return found


def _shuffled_maps(subject: _Subject, seed: int) -> list[dict[str, Map]]:
    """Return the maps of the audited method at each stage of the cascade."""
    from audit.capture import cascade, shuffled

    found = []
    stages = cascade(subject.checkpoint, subject.probes[0], subject.plan.spec.settings, stages=STAGES)
    for weights in stages:
        with shuffled(subject.checkpoint.model, weights, seed):
            try:
                found.append(subject.capture(subject.plan.spec.method))
            except AuditError:
                found.append({})  # what shuffled weights give may have no map at all
    return found


def _scores(
    subject: _Subject, shuffles: Sequence[Mapping[str, Map]], orders: int, seed: int
) -> Iterator[Score]:
    """Yield every score of every probe and method on one checkpoint."""
    from audit.capture import occluded_scores

    drawn = [_orders(subject, probe, orders, [seed, i]) for i, probe in enumerate(subject.probes)]
    rows = [
        np.concatenate([np.zeros((0, n)), *(m for o in each.values() for m in masks(o, n))])
        for each, n in drawn
    ]
    values = occluded_scores(subject.checkpoint, subject.probes, rows, **question_of(subject.plan))
    for probe, (each, _), found in zip(subject.probes, drawn, values, strict=True):
        curves = {} if found is None else _curves(each, found)
        chance = [curve for name, curve in curves.items() if name.startswith("random ")]
        for method, maps in subject.maps.items():
            numbers = _numbers(method, probe.id, subject, shuffles)
            if method in curves and chance:
                numbers |= curves[method]
                numbers |= {f"random_{k}": float(np.mean([c[k] for c in chance])) for k in chance[0]}
            else:
                numbers |= {"deletion": None, "insertion": None}
            if probe.id in maps:
                for name, value in numbers.items():
                    yield Score(subject.plan.role, method, probe.id, name, value)


def _orders(
    subject: _Subject, probe: Probe, orders: int, seed: Sequence[int]
) -> tuple[dict[str, np.ndarray], int]:
    """Return the orders in which the probe's positions are occluded, and how many positions it has.

    Random orders and ties are drawn alike for both checkpoints.
    """
    own = subject.maps[subject.audited][probe.id]
    content, n = own.positions.content, len(own.positions)
    rng = np.random.default_rng(seed)
    drawn = {f"random {i}": rng.permutation(np.flatnonzero(content)) for i in range(orders)}
    if content.sum() < 2:
        return {}, n
    ties = np.random.default_rng([*seed, 1])
    for method, maps in subject.maps.items():
        weights = maps[probe.id].weights if probe.id in maps else np.zeros(0)
        if len(weights) >= len(content) and weights[: len(content)][content].sum() > 0:
            drawn[method] = ranking(weights[: len(content)], content, ties)
    return drawn, n


def _curves(orders: Mapping[str, np.ndarray], values: np.ndarray) -> dict[str, dict[str, float]]:
    size = len(GRID)
    return {
        name: curve_scores(
            values[2 * i * size : (2 * i + 1) * size],
            values[(2 * i + 1) * size : (2 * i + 2) * size],
            len(order),
        )
        for i, (name, order) in enumerate(orders.items())
    }


def _numbers(
    method: str, probe_id: str, subject: _Subject, shuffles: Sequence[Mapping[str, Map]]
) -> dict[str, float | None]:
    """Return rank correlations with other methods' maps and those of shuffled weights, and diagnostics."""
    own = subject.maps[method].get(probe_id)
    if own is None:
        return {}
    found = {
        f"spearman:{other}": _rank_correlation(own, maps.get(probe_id))
        for other, maps in subject.maps.items()
        if other != method
    }
    if method == subject.audited:
        for stage, maps in enumerate(shuffles):
            found[f"randomised:{stage}"] = _rank_correlation(own, maps.get(probe_id))
    for name in ("sink", "depth_collapse"):
        if name in own.diagnostics:
            found[name] = float(own.diagnostics[name])
    return found


def _rank_correlation(one: Map, two: Map | None) -> float | None:
    if two is None:
        return None
    n = min(len(one.weights), len(two.weights))
    content = one.positions.content[:n] & ~two.positions.special[:n]
    return agreement(one.weights[:n], two.weights[:n], content)
