"""Decide what has to be captured: one immutable plan for each checkpoint and probe set.

Planning hashes files and reads probes; it loads no model, so that it also runs where torch is absent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from audit.config import AuditConfig
from audit.errors import ConfigError
from audit.models import compatible_targets
from audit.pipeline.checks import check_replicates, check_rules, label_note
from audit.pipeline.sources import (
    CheckpointSource,
    ProbeSource,
    checkpoint_source,
    frozen_elsewhere,
    load_probes,
    probe_source,
    sources,
)
from audit.pipeline.specs import device_type, plan_spec
from audit.pipeline.targets import PREDICTION
from audit.records import CheckpointInfo, RunSpec
from audit.statistics.measures import MAP_MEASURES

LOG = logging.getLogger("audit")

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many probes are done and how many there are."""


@dataclass(frozen=True)
class RunPlan:
    """One run before it exists: what to load, what to feed, where to write.

    Attributes
    ----------
    role : str
        ``before``, ``after``, ``replicate-0``, ...; with ``@domain`` appended on the second probe set.
    shards : tuple of (start, stop)
        Half-open ranges of probes; batches never cross a shard.
    device : str
        As asked for; the run's id holds the device type.
    answers_run : str or None
        With ``target = "prediction"`` the run of the checkpoint before, whose answers are explained; None
        for that run itself.
    shares_ruled : bool
        Whether a rule of the policy judges shares of regions, so that a run without any is of no use to it.
    """

    role: str
    store: str
    source: CheckpointSource
    probes: ProbeSource
    spec: RunSpec
    shards: tuple[tuple[int, int], ...]
    device: str = "auto"
    answers_run: str | None = None
    shares_ruled: bool = False

    @property
    def run_id(self) -> str:
        """Return the id that the published run will have."""
        return self.spec.id

    @property
    def n_probes(self) -> int:
        """Return how many probes the run covers."""
        return self.shards[-1][1]


def plan_audit(config: AuditConfig) -> tuple[RunPlan, ...]:
    """Return the plans of every run that an audit needs, adapters before their base.

    The order lets one loaded base + adapter serve both runs. Checkpoints given as ``run = "run-…"``
    or as a floor need no capture and have no plan.

    Parameters
    ----------
    config : AuditConfig

    Returns
    -------
    tuple of RunPlan

    Raises
    ------
    ConfigError, ProbeError, CheckpointError
    """
    plans = [
        plan_run(config, role, domain=domain)
        for role, source in sources(config)
        if source.path is not None and not (role == "before" and frozen_elsewhere(config))
        for domain in ([False, True] if config.domain is not None else [False])
    ]
    if config.probes.target is not None:
        check_label_sets([plan.spec.checkpoint for plan in plans])
    for plan in plans:
        check_rules(config.policy().rules, plan.spec.regions)
    check_replicates(
        [
            (plan.role.partition("@")[0], plan.source.ref, plan.spec.checkpoint.weights_digest)
            for plan in plans
        ]
    )
    _tell_unknown_labels(plans)
    order = {plan.source.ref: i for i, plan in reversed(list(enumerate(plans)))}
    plans.sort(key=lambda p: (order[p.source.ref], p.source.adapter is None))
    return tuple(sorted(plans, key=lambda p: p.answers_run is not None))


def _tell_unknown_labels(plans: Sequence[RunPlan]) -> None:
    """Say once for each probe set which labels are no class of the checkpoint."""
    told: set[ProbeSource] = set()
    for plan in plans:
        text = None
        if plan.probes not in told:
            text = label_note(load_probes(plan.probes), plan.spec.checkpoint, plan.probes.path)
        if text is not None:
            told.add(plan.probes)
            LOG.warning(text)


def check_label_sets(checkpoints: Sequence[CheckpointInfo]) -> None:
    """Refuse checkpoints that do not know the same classes, where a target class is needed.

    Raises
    ------
    CheckpointError
    """
    for other in checkpoints[1:]:
        compatible_targets(checkpoints[0], other)


def plan_run(config: AuditConfig, role: str, *, domain: bool = False) -> RunPlan:
    """Return the plan of one run of an audit.

    Parameters
    ----------
    config : AuditConfig
    role : str
        ``before``, ``after`` or ``replicate-<i>``.
    domain : bool
        Plan the run on the second probe set.

    Returns
    -------
    RunPlan

    Raises
    ------
    ConfigError
        When the audit has no such role.
    ProbeError, CheckpointError
        When the probe set or the checkpoint cannot be read.
    """
    source = checkpoint_source(config, role)
    probes = probe_source(config, domain=domain)
    device = device_type(config.capture.device)
    return RunPlan(
        role=f"{role}@domain" if domain else role,
        store=config.store.url,
        source=source,
        probes=probes,
        spec=plan_spec(config, role, domain=domain, device=device),
        shards=cut_shards(len(load_probes(probes)), config.capture.shard_probes),
        device=config.capture.device,
        answers_run=None if role == "before" else _answers_run(config, domain=domain, device=device),
        shares_ruled=any(rule.measure not in MAP_MEASURES for rule in config.policy().rules),
    )


def _answers_run(config: AuditConfig, *, domain: bool, device: str) -> str | None:
    """Return the run whose answers the others explain, None where another target is set."""
    if config.probes.target != PREDICTION:
        return None
    stored = config.checkpoints["before"].run
    if stored is None:
        return plan_spec(config, "before", domain=domain, device=device).id
    if domain:
        raise ConfigError(
            'target = "prediction" with [domain] needs the baseline on both probe sets; name '
            "[checkpoints.before] by path"
        )
    return stored


def cut_shards(n_probes: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of at most `size` probes.

    >>> cut_shards(1200, 500)
    ((0, 500), (500, 1000), (1000, 1200))
    """
    return tuple((start, min(start + size, n_probes)) for start in range(0, n_probes, size))
