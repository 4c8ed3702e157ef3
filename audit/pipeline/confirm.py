"""Confirm a shifted region by occluding it on both checkpoints: the causal check beside the map."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from audit.compare import compare_tables
from audit.config import AuditConfig
from audit.errors import ProbeError
from audit.pipeline.loader import LOADER
from audit.pipeline.plan import Progress, RunPlan, plan_run
from audit.pipeline.runs import read_run
from audit.pipeline.sources import frozen_elsewhere, load_probes
from audit.pipeline.specs import target_of
from audit.pipeline.targets import PREDICTION, kept_answers
from audit.probes import load_annotations
from audit.records import (
    Column,
    Confirmation,
    Outcome,
    Positions,
    Probe,
    Region,
    RuleVerdict,
    ShareTable,
    Verdict,
)
from audit.regions import region_weights
from audit.store import Store

Fill = Literal["mean", "blur"]
NOT_OCCLUDED = frozenset({"*", "special", "first", "rest"})
"""Regions that hold no content of their own to remove."""


@dataclass(frozen=True)
class _Effect:
    """By how much the target logit changes for each probe when a region is occluded; NaN = undefined.

    Its size counts, not its sign: a shortcut that contradicts the label on half of the probes speaks for
    the target there and against it elsewhere, and is relied on all the same.
    """

    values: np.ndarray
    occlusion: str


def confirm_regions(
    config: AuditConfig, verdict: Verdict, *, progress: Progress | None = None
) -> tuple[tuple[Confirmation, ...], tuple[str, ...]]:
    """Occlude each failing region on both checkpoints and compare how far the target logit moves.

    Parameters
    ----------
    config : AuditConfig
        Both checkpoints must be given by path.
    verdict : Verdict
        Its failing rules name the regions.
    progress : callable, optional

    Returns
    -------
    confirmations : tuple of Confirmation
    notes : tuple of str
        Which failing regions could not be occluded, and why: no checkpoint at hand, no task head, no
        target, or windows of long texts.

    Raises
    ------
    CheckpointError, CaptureError
    """
    failing: dict[str, RuleVerdict] = {}
    for rule in verdict.rules:
        if rule.outcome is Outcome.FAIL and rule.region not in NOT_OCCLUDED:
            failing.setdefault(rule.region, rule)
    if not failing:
        return (), ()
    reason = obstacle(config)
    if reason is not None:
        return (), _notes(dict.fromkeys(failing, reason))
    before, after = plan_run(config, "before"), plan_run(config, "after")
    effects = _all_effects((before, after), failing, config.report.occlusion, progress)
    found: list[Confirmation] = []
    missing: dict[str, str] = {}
    for name, rule in failing.items():
        pair = [effects["before", name], effects["after", name]]
        known = [effect for effect in pair if isinstance(effect, _Effect)]
        one = _confirmation(rule, before, known, config) if len(known) == 2 else None
        if one is not None:
            found.append(one)
        else:
            reasons = [effect for effect in pair if isinstance(effect, str)]
            missing[name] = reasons[0] if reasons else "too few probes have both the region and a target"
    return tuple(found), _notes(missing)


def obstacle(config: AuditConfig) -> str | None:
    """Return why nothing can be occluded, None where both checkpoints are at hand."""
    known = [config.checkpoints[role].path for role in ("before", "after") if role in config.checkpoints]
    if len(known) < 2 or None in known or frozen_elsewhere(config):
        return "a checkpoint is not at hand; give both by path"
    if config.probes.stride is not None:
        return "occlusion is not defined for windows of one probe; remove [probes] stride"
    return None


def _notes(missing: Mapping[str, str]) -> tuple[str, ...]:
    """Return one line for each reason, naming its regions.

    >>> _notes({"corner": "there is no target", "logo": "there is no target"})
    ('Not confirmed by occlusion (corner, logo): there is no target.',)
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        by_reason.setdefault(reason, []).append(name)
    return tuple(f"Not confirmed by occlusion ({', '.join(by_reason[one])}): {one}." for one in by_reason)


def _all_effects(
    plans: Sequence[RunPlan], names: Collection[str], fill: Fill, progress: Progress | None
) -> dict[tuple[str, str], _Effect | str]:
    """Occlude every region on one checkpoint after the other, so that each is loaded once."""
    effects: dict[tuple[str, str], _Effect | str] = {}
    total = len(plans) * len(names)
    for plan in plans:
        regions = {region.name: region for region in plan.spec.regions}
        for name in names:
            if progress is not None:
                progress("confirm by occlusion", len(effects), total)
            effects[plan.role, name] = _effects(plan, regions[name], fill)
    if progress is not None:
        progress("confirm by occlusion", total, total)
    return effects


def _effects(plan: RunPlan, region: Region, fill: Fill) -> _Effect | str:
    """Return the effect of a region on each probe, or why there is none."""
    probes = load_probes(plan.probes).probes
    with LOADER.use(plan) as checkpoint:
        from audit.capture import occlude

        if not checkpoint.has_head:
            return "the checkpoint has no task head, so there is no logit to watch"
        placed = _positions(plan, probes)
        if placed is None:
            return "the maps have several streams, and occlusion is defined for one"
        weights = [_weights(region, one, probe) for one, probe in placed]
        try:
            occlusions = occlude(checkpoint, probes, weights, fill=fill, **question_of(plan))
        except ProbeError as error:  # the labels are no classes of this checkpoint
            return f"there is no target logit to watch: {error}"
    changes = [occlusion.change for occlusion in occlusions]
    values = np.array([np.nan if change is None else abs(change) for change in changes])
    if np.isnan(values).all():
        return "no probe has both the region and a target class; label the probes or set [probes] target"
    return _Effect(values, occlusions[0].occlusion)


def question_of(plan: RunPlan) -> dict[str, Any]:
    """Return which logit is watched: the audit's target, else each probe's label."""
    return {
        "targets": _watched(plan),
        "row": plan.spec.method.row,
        "settings": plan.spec.settings,
    }


def _watched(plan: RunPlan) -> Any:
    if plan.spec.target != PREDICTION:
        return target_of(plan.spec.target) or "label"
    ids = [probe.id for probe in load_probes(plan.probes)]
    return kept_answers(Store(plan.store), plan.answers_run or plan.run_id, ids)


def _positions(plan: RunPlan, probes: Sequence[Probe]) -> list[tuple[Positions, Probe]] | None:
    """Return where the positions of each probe lie, None for maps of several streams."""
    placed = [(one.stream, one.positions) for one in Store(plan.store).iter_maps(plan.run_id)]
    if any(stream != "input" for stream, _ in placed):
        return None
    return [(positions, probe) for (_, positions), probe in zip(placed, probes, strict=True)]


def _weights(region: Region, positions: Positions, probe: Probe) -> np.ndarray:
    return region_weights(region, positions, load_annotations(probe))


def _confirmation(
    rule: RuleVerdict, before: RunPlan, effects: Sequence[_Effect], config: AuditConfig
) -> Confirmation | None:
    """Compare the effects on both checkpoints as one paired column."""
    one, two = effects
    run = read_run(Store(before.store), before.run_id, layers=False)
    ids, column = run.shares.probe_ids, Column(rule.region)
    cells = compare_tables(
        ShareTable(ids, (column,), one.values[:, None]),
        ShareTable(ids, (column,), two.values[:, None]),
        groups=list(run.groups) or None,
        alpha=config.statistics.alpha,
        resamples=config.statistics.resamples,
        seed=config.statistics.seed,
    )
    cell = next(cell for cell in cells if cell.measure == "shift")
    if cell.value is None or cell.interval is None or cell.before is None or cell.after is None:
        return None
    low, high = cell.interval
    same_way = rule.value is not None and (rule.value > 0) == (cell.value > 0)
    return Confirmation(
        region=rule.region,
        occlusion=two.occlusion,
        before=cell.before,
        after=cell.after,
        difference=cell.value,
        interval=cell.interval,
        confirmed=same_way and (low > 0 or high < 0),
        n_probes=cell.n_probes,
    )
