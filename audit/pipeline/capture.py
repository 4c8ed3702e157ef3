"""Run the plans: capture shard by shard into the store, publish when all shards are there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from audit.errors import NothingEvaluatedError, ProbeError
from audit.pipeline.cost import cost_note
from audit.pipeline.loader import LOADER
from audit.pipeline.plan import Progress, RunPlan
from audit.pipeline.sources import load_probes
from audit.pipeline.specs import target_of
from audit.pipeline.targets import PREDICTION, shard_answers
from audit.probes import load_annotations
from audit.records import Captured, Checkpoint, Map, Prediction, Probe, ProbeSet, Region, Reliance
from audit.regions import check_regions_match, count_matches, reliance
from audit.store import RunWriter, Store

LOG = logging.getLogger("audit")


def capture_all(
    plans: Sequence[RunPlan], *, together: bool = False, progress: Progress | None = None
) -> dict[str, str]:
    """Capture every plan that the store does not hold yet; see :func:`capture_run`.

    Parameters
    ----------
    plans : sequence of RunPlan
    together : bool
        Hold all checkpoints in memory and read the probes once; see
        :func:`audit.pipeline.joint.capture_together`.
    progress : callable, optional

    Returns
    -------
    dict
        Role → run id.
    """
    note = cost_note([plan for plan in plans if not is_stored(plan)])
    if note is not None:
        LOG.info(note)
    if together:
        from audit.pipeline.joint import capture_together

        return capture_together(plans, progress=progress)
    return {plan.role: capture_run(plan, progress=progress) for plan in plans}


def capture_run(plan: RunPlan, *, progress: Progress | None = None) -> str:
    """Capture one run into its store, resuming where an earlier attempt stopped.

    A run that is already stored is left as it is; one that differs only in its regions is derived
    from the stored maps.

    Parameters
    ----------
    plan : RunPlan
    progress : callable, optional

    Returns
    -------
    str
        The run's id.

    Raises
    ------
    CheckpointError, ProbeError, CaptureError, StoreError
    """
    for index in prepare_run(plan):
        capture_shard(plan, index, progress=_offset(progress, plan, plan.shards[index][0]))
    return publish_run(plan)


def prepare_run(plan: RunPlan) -> tuple[int, ...]:
    """Return the shards that are still to be captured, after refusing what would fail in one of them.

    None are where the run is stored, or derived now from stored maps; see :func:`relink_run`. The errors
    are those of :func:`check_run`.
    """
    if is_stored(plan) or relink_run(plan):
        return ()
    missing = missing_shards(plan)
    if missing:
        check_run(plan)
    return missing


def is_stored(plan: RunPlan) -> bool:
    """Return whether the run of `plan` is published."""
    return Store(plan.store).has_run(plan.run_id)


def missing_shards(plan: RunPlan) -> tuple[int, ...]:
    """Return the shards that are still to be captured; writes nothing."""
    writer = RunWriter(Store(plan.store).root, plan.spec, len(plan.shards))
    return tuple(sorted(set(range(len(plan.shards))) - writer.finished_shards()))


def relink_run(plan: RunPlan) -> bool:
    """Make the run from the stored maps of one that differs only in its regions.

    Returns
    -------
    bool
        False where the store has no such run.

    Raises
    ------
    ProbeError
        Naming every region that no probe has.
    StoreError
        When the stored maps are damaged.
    """
    store = Store(plan.store)
    if store.relinkable(plan.spec) is None:
        return False
    probes = check_regions(plan)
    by_id = {probe.id: probe for probe in probes}
    labels = plan.spec.checkpoint.labels
    store.relink_run(
        plan.spec,
        lambda one: _reliance_of(one, by_id[one.probe_id], plan.spec.regions),
        annotate=lambda one: annotate(one, by_id[one.probe_id], labels),
        counts=_counts(plan),
    )
    return True


def check_regions(plan: RunPlan) -> ProbeSet:
    """Return the probes of a plan after checking that each region matches something in them.

    Raises
    ------
    ProbeError
        Naming every region that no probe has; or when the file has changed since it was planned.
    """
    probes = planned_probes(plan)
    try:
        check_regions_match(plan.spec.regions, probes.probes)
    except ValueError as error:
        raise ProbeError(f"{plan.probes.path}: {error}") from None
    return probes


def check_run(plan: RunPlan) -> None:
    """Refuse before the first shard what would fail later: empty regions, long probes, no determinism.

    Raises
    ------
    ProbeError
        Naming every region that no probe has, or every probe that is longer than the checkpoint allows.
    NothingEvaluatedError
        When rules judge regions and the probes have none.
    CaptureError
        When the same probe twice through the checkpoint gives two maps.
    """
    check_regions(plan)
    with LOADER.use(plan) as checkpoint:
        check_loaded(plan, checkpoint)


def check_loaded(plan: RunPlan, checkpoint: Checkpoint) -> None:
    """Check a plan's probes and determinism on its loaded checkpoint; see :func:`check_run`."""
    from audit.capture import check_determinism, check_probes, has_automatic_regions

    probes = check_regions(plan).probes
    check_probes(checkpoint, probes, plan.spec.settings)
    asked = any(not region.params.get("automatic") for region in plan.spec.regions)
    if plan.shares_ruled and not asked and not has_automatic_regions(checkpoint, probes, plan.spec.settings):
        raise NothingEvaluatedError(
            f"{plan.probes.path} has no region for the rules to judge, and {plan.spec.checkpoint.ref} has no "
            "special positions; add [regions], annotate the probes, or give every rule a measure of whole "
            'maps, such as measure = "js_distance"'
        )
    check_determinism(checkpoint, probes, method=plan.spec.method, settings=plan.spec.settings)


def capture_shard(plan: RunPlan, index: int, *, progress: Progress | None = None) -> None:
    """Capture one shard of a run and write its parts atomically.

    Parameters
    ----------
    plan : RunPlan
    index : int
        Which of ``plan.shards``.
    progress : callable, optional
        Counts the probes of this shard.
    """
    start, stop = plan.shards[index]
    probes = planned_probes(plan).probes[start:stop]
    with LOADER.use(plan) as checkpoint:
        from audit.capture import capture

        predicted = plan.spec.target == PREDICTION
        target = shard_answers(plan, probes, checkpoint) if predicted else target_of(plan.spec.target)
        captured = list(
            capture(
                checkpoint,
                probes,
                method=plan.spec.method,
                settings=plan.spec.settings,
                target=target,
                progress=_shard_progress(progress, plan.role, len(probes)),
                opened=LOADER.opened(plan),
            )
        )
    write_captured(plan, index, probes, captured)


def write_captured(plan: RunPlan, index: int, probes: Sequence[Probe], captured: Sequence[Captured]) -> None:
    """Write what was captured of a shard's probes, with their shares of the plan's regions."""
    labels = plan.spec.checkpoint.labels
    annotated = [
        replace(item, prediction=annotate(item.prediction, probe, labels))
        for item, probe in zip(captured, probes, strict=True)
    ]
    shares = [
        one
        for item, probe in zip(captured, probes, strict=True)
        for one_map in item.maps
        for one in _reliance_of(one_map, probe, plan.spec.regions)
    ]
    writer = Store(plan.store).begin_run(plan.spec, len(plan.shards))
    writer.write_shard(index, annotated, shares)


def publish_run(plan: RunPlan) -> str:
    """Write the manifest of a run whose shards are all there.

    Returns
    -------
    str
        The run's id.
    """
    store = Store(plan.store)
    if not store.has_run(plan.run_id):
        writer = store.begin_run(plan.spec, len(plan.shards))
        writer.publish(counts=_counts(plan), diagnostics={})
    return plan.run_id


def annotate(prediction: Prediction, probe: Probe, labels: Sequence[str]) -> Prediction:
    """Return `prediction` with the probe's label, group and segments.

    Parameters
    ----------
    prediction : Prediction
    probe : Probe
    labels : sequence of str
        Class names of the checkpoint in the order of its logits; they name a label that is an index.
    """
    label = _label(probe.label, labels if len(labels) == len(prediction.logits or ()) > 1 else ())
    return replace(
        prediction,
        label=prediction.label if label is None else label,  # labelled spans are labels too
        group=probe.group,
        segments=dict(probe.segments),
    )


def _label(label: Any, names: Sequence[str]) -> str | None:
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return names[label]
    if isinstance(label, (list, tuple)):  # several labels, in the order of the classes
        order = {name: i for i, name in enumerate(names)}
        return ", ".join(sorted(map(str, label), key=lambda one: order.get(one, len(order))))
    return None if label is None else str(label)


def _reliance_of(one_map: Map, probe: Probe, regions: Sequence[Region]) -> tuple[Reliance, ...]:
    try:
        return reliance(one_map, load_annotations(probe), regions)
    except ValueError as error:
        raise ProbeError(f"probe {probe.id}: {error}") from None


def planned_probes(plan: RunPlan) -> ProbeSet:
    """Return a plan's probes, or raise ProbeError where their file has changed since it was planned."""
    probes = load_probes(plan.probes)
    planned = (plan.spec.inputs_digest, plan.spec.annotations_digest)
    if (probes.inputs_digest, probes.annotations_digest) != planned:
        raise ProbeError(f"{plan.probes.path} was changed while it was audited; run the audit again")
    return probes


def _counts(plan: RunPlan) -> Mapping[str, Any]:
    """Return the number of probes, and in how many of them each named region has something to lie on."""
    probes = load_probes(plan.probes).probes
    return {"probes": len(probes), "matches": count_matches(plan.spec.regions, probes)}


def _offset(progress: Progress | None, plan: RunPlan, start: int) -> Progress | None:
    if progress is None:
        return None
    return lambda stage, done, _: progress(stage, start + done, plan.n_probes)


def _shard_progress(progress: Progress | None, role: str, total: int) -> Any:
    if progress is None:
        return None
    return lambda done: progress(f"capture {role}", done, total)
