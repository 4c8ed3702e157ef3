"""``target = "prediction"``: every run explains what the checkpoint before answered.

A checkpoint's own prediction would be another class on each, so that maps of gradient methods would differ
because of the question. The classes are those of the checkpoint before, on each probe set; they stand in
the column ``target`` of every run's predictions, and the digest of where they come from in its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from audit.config import AuditConfig
from audit.errors import ConfigError, NothingEvaluatedError, ProbeError
from audit.models import checkpoint_info
from audit.records import Checkpoint, Method, Probe, digest
from audit.store import Store

if TYPE_CHECKING:
    from audit.pipeline.plan import RunPlan

PREDICTION = "prediction"
"""What ``[probes] target`` says for the answers of the checkpoint before."""


def answers_digest(config: AuditConfig) -> str:
    """Return the digest of what decides, beside probes and settings, what the checkpoint before answers.

    Raises
    ------
    ConfigError
        When the baseline is given by approval, so that it may be another one next time.
    CheckpointError, StoreError
        When the baseline is not at hand.
    """
    section = config.checkpoints["before"]
    if section.run is not None:
        checkpoint = Store(config.store.url).spec(section.run).checkpoint.digest
    elif section.path is not None:
        info = checkpoint_info(section.path, revision=section.revision, adapter=section.adapter)
        checkpoint = info.digest
    else:
        raise ConfigError(
            'target = "prediction" binds every run to one baseline; name [checkpoints.before] by path or run'
        )
    return digest([PREDICTION, checkpoint])


def shard_answers(plan: RunPlan, probes: Sequence[Probe], checkpoint: Checkpoint) -> dict[str, str]:
    """Return the class that is explained for each probe of a shard.

    For the checkpoint before, one more forward pass asks it; for the others its stored run is read.

    Raises
    ------
    NothingEvaluatedError
        When the run before is not stored yet.
    ProbeError
        When there is no single class for a probe.
    """
    if plan.answers_run is not None:
        return kept_answers(Store(plan.store), plan.answers_run, [probe.id for probe in probes])
    from audit.capture import capture

    settings = replace(plan.spec.settings, layer_maps=False)
    captured = capture(checkpoint, probes, method=Method(row=plan.spec.method.row), settings=settings)
    return _named((item.prediction.probe_id, item.prediction.predicted) for item in captured)


def kept_answers(store: Store, run_id: str, probe_ids: Sequence[str]) -> dict[str, str]:
    """Return what the stored run of the checkpoint before answered, by probe id.

    Raises
    ------
    NothingEvaluatedError, ProbeError
        As for :func:`shard_answers`.
    """
    if not store.has_run(run_id):
        raise NothingEvaluatedError(
            f'target = "prediction" needs the run before ({run_id}), which is not stored; capture it first: '
            "`audit capture --role before`"
        )
    wanted = set(probe_ids)
    rows = store.predictions(run_id).select("probe_id", "predicted").iter_rows()
    return _named((probe_id, predicted) for probe_id, predicted in rows if probe_id in wanted)


def _named(answers: Iterable[tuple[str, str | None]]) -> dict[str, str]:
    found = dict(answers)
    lacking = [probe_id for probe_id, answer in found.items() if answer is None]
    if lacking:
        raise ProbeError(
            f'probe {lacking[0]}: the checkpoint before answers no class, as target = "prediction" needs; '
            "use a checkpoint with a classification head, or name what is explained as [probes] target: one "
            "token, where the checkpoint generates text"
        )
    return {probe_id: answer for probe_id, answer in found.items() if answer is not None}
