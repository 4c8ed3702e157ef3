"""Several checkpoints in one pass over the probes: each probe is read and encoded once.

All of them are in memory at once, which is why nobody gets this unasked (`[capture] together = true`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, tee
from typing import TYPE_CHECKING, Any

from audit.pipeline.capture import (
    capture_run,
    check_loaded,
    is_stored,
    missing_shards,
    planned_probes,
    publish_run,
    relink_run,
    write_captured,
)
from audit.pipeline.loader import load_planned
from audit.pipeline.plan import Progress, RunPlan
from audit.pipeline.specs import target_of
from audit.pipeline.targets import PREDICTION
from audit.records import Captured, Checkpoint, Probe

if TYPE_CHECKING:
    from audit.capture import Opened


def capture_together(plans: Sequence[RunPlan], *, progress: Progress | None = None) -> dict[str, str]:
    """Capture plans in as few passes over the probes as their tokenizers and settings allow.

    Parameters
    ----------
    plans : sequence of RunPlan
    progress : callable, optional

    Returns
    -------
    dict
        Role → run id; the runs are those of :func:`audit.pipeline.capture_all`, to the last bit.

    Raises
    ------
    CheckpointError, ProbeError, CaptureError, StoreError
    """
    if any(plan.spec.target == PREDICTION for plan in plans):  # one run asks, the others read its answers
        return {plan.role: capture_run(plan, progress=progress) for plan in plans}
    missing = [plan for plan in plans if not (is_stored(plan) or relink_run(plan))]
    missing = list({plan.run_id: plan for plan in missing}.values())
    for _, group in groupby(sorted(missing, key=_encoding), key=_encoding):
        alike = list(group)
        if len(alike) == 1 or not _capture_group(alike, progress):
            for plan in alike:
                capture_run(plan, progress=progress)
    return {plan.role: plan.run_id for plan in plans}


def _encoding(plan: RunPlan) -> str:
    """Return what must be equal for two checkpoints to take the same tensors in the same order."""
    spec = plan.spec
    return repr(
        (
            spec.inputs_digest,
            spec.annotations_digest,
            spec.checkpoint.tokenizer_digest,
            spec.checkpoint.architecture,
            spec.settings,
            spec.method.row,
            plan.shards,
            plan.device,
        )
    )


def _capture_group(plans: Sequence[RunPlan], progress: Progress | None) -> bool:
    """Capture plans side by side; return False where each checkpoint makes inputs of its own."""
    from audit.capture import Opened

    probes = planned_probes(plans[0]).probes
    checkpoints = [load_planned(plan) for plan in plans]
    if not all(_takes_what_others_take(one, probes) for one in checkpoints):
        return False
    for plan, checkpoint in zip(plans, checkpoints, strict=True):
        check_loaded(plan, checkpoint)
    missing = sorted({index for plan in plans for index in missing_shards(plan)})
    opened = [Opened() for _ in plans]
    for index in missing:
        start, stop = plans[0].shards[index]
        columns = _lockstep(plans, checkpoints, probes[start:stop], opened)
        for plan, column in zip(plans, columns, strict=True):
            write_captured(plan, index, probes[start:stop], column)
            if progress is not None:
                progress(f"capture {plan.role}", stop, plan.n_probes)
    for plan in plans:
        publish_run(plan)
    return True


def _takes_what_others_take(checkpoint: Checkpoint, probes: Sequence[Probe]) -> bool:
    """Return whether a checkpoint's tensors come from its tokenizer or processor alone.

    Encoder-decoders generate their prefix, and of an image among text each checkpoint's own gradients tell
    what its positions stand for.
    """
    generates = getattr(checkpoint.model.config, "is_encoder_decoder", False)
    pictured = any(probe.image is not None and probe.modality != "image" for probe in probes)
    return not (generates or pictured)


def _lockstep(
    plans: Sequence[RunPlan],
    checkpoints: Sequence[Checkpoint],
    probes: Sequence[Probe],
    opened: Sequence[Opened],
) -> list[list[Captured]]:
    """Return what each plan gives for the probes of a shard, encoding each window of them once."""
    from audit.capture import capture, probe_windows

    spec = plans[0].spec
    windows: Sequence[Iterator[Any]] = tee(
        probe_windows(checkpoints[0], probes, spec.settings, spec.method.row), len(plans)
    )
    captures = [
        capture(
            checkpoint,
            probes,
            method=plan.spec.method,
            settings=plan.spec.settings,
            target=target_of(plan.spec.target),
            windows=own,
            opened=shared,
        )
        for plan, checkpoint, own, shared in zip(plans, checkpoints, windows, opened, strict=True)
    ]
    rows = list(zip(*captures, strict=True))
    return [list(column) for column in zip(*rows, strict=True)]
