"""Decide what has to be captured: one immutable plan for each checkpoint and probe set.

Planning hashes files and reads probes; it loads no model, so that it also runs where torch is absent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from audit._method_parameters import TARGETED
from audit.config import AuditConfig, CheckpointSection, ReplicateSection
from audit.errors import CheckpointError, ConfigError, ProbeError
from audit.models import checkpoint_info, compatible_targets
from audit.models.tasks import COMPARES, task_of
from audit.pipeline.checks import check_replicates, check_rules, label_note
from audit.pipeline.targets import PREDICTION, answers_digest
from audit.probes import read_probes
from audit.records import (
    CaptureSettings,
    CheckpointInfo,
    ProbeSet,
    Region,
    RunSpec,
    canonical_json,
    digest,
)
from audit.regions import expand_regions

LOG = logging.getLogger("audit")

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many probes are done and how many there are."""

VERSIONED = ("torch", "transformers")
"""Packages whose version is part of a run's id, because it changes numbers."""

CAPTURE_VERSION = "2"
"""Raised whenever the capture code changes a number."""


@dataclass(frozen=True)
class CheckpointSource:
    """Where a checkpoint is loaded from."""

    ref: str
    revision: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ProbeSource:
    """Where a probe set is read from; `stamp` tells an edited file from the one that was read before."""

    path: str
    columns: tuple[tuple[str, str], ...] = ()
    stamp: tuple[int, ...] = ()


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
    """

    role: str
    store: str
    source: CheckpointSource
    probes: ProbeSource
    spec: RunSpec
    shards: tuple[tuple[int, int], ...]
    device: str = "auto"
    answers_run: str | None = None

    @property
    def run_id(self) -> str:
        """Return the id that the published run will have."""
        return self.spec.id

    @property
    def n_probes(self) -> int:
        """Return how many probes the run covers."""
        return self.shards[-1][1]


@lru_cache(maxsize=4)
def load_probes(source: ProbeSource) -> ProbeSet:
    """Read a probe set once per process; see :func:`audit.probes.read_probes`."""
    return read_probes(source.path, columns=dict(source.columns) or None)


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
    check_replicates([(plan.role, plan.source.ref, plan.spec.checkpoint.weights_digest) for plan in plans])
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


def frozen_elsewhere(config: AuditConfig) -> bool:
    """Return whether the baseline is not on this machine, and a floor stands in for it."""
    section = config.checkpoints["before"]
    if section.path is None or all(one.floor is None for one in config.replicates):
        return False
    try:
        checkpoint_info(section.path, revision=section.revision, adapter=section.adapter)
    except CheckpointError:
        return True
    return False


def check_label_sets(checkpoints: Sequence[CheckpointInfo]) -> None:
    """Refuse checkpoints that do not know the same classes, where a target class is needed.

    Raises
    ------
    CheckpointError
    """
    for other in checkpoints[1:]:
        compatible_targets(checkpoints[0], other)


def sources(config: AuditConfig) -> Iterator[tuple[str, CheckpointSection | ReplicateSection]]:
    """Yield (role, section) for before, after and every replicate that is a checkpoint or a run."""
    for role in ("before", "after"):
        if role in config.checkpoints:
            yield role, config.checkpoints[role]
    for i, section in enumerate(config.replicates):
        if section.floor is None:
            yield f"replicate-{i}", section


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


def plan_spec(config: AuditConfig, role: str, *, domain: bool = False, device: str = "cpu") -> RunSpec:
    """Return what a run would be made of on a machine with `device`; imports no torch."""
    source = checkpoint_source(config, role)
    info = checkpoint_info(source.ref, revision=source.revision, adapter=source.adapter)
    probes = load_probes(probe_source(config, domain=domain))
    check_fixed_target(config, probes, info)
    return RunSpec(
        checkpoint=info,
        inputs_digest=probes.inputs_digest,
        annotations_digest=probes.annotations_digest,
        regions=audit_regions(config, probes),
        target=target_name(config),
        targets_digest=targets_digest(config, probes),
        method=config.method.record(),
        settings=capture_settings(config, device),
        versions=numeric_versions(),
    )


def check_fixed_target(config: AuditConfig, probes: ProbeSet, info: CheckpointInfo) -> None:
    """Refuse a method that explains one class where the class could differ between checkpoints.

    Raises
    ------
    ConfigError
        When neither a target nor labels nor labelled spans say which class it is.
    """
    if len(info.labels) == 1 or config.method.row == "labelled":
        return  # a regression has one output, and each labelled span its own class
    if task_of(info.architecture, info.model_type) == COMPARES:
        return  # how alike image and text are is one number, too
    unlabelled = sum(probe.label is None for probe in probes)
    if config.method.record().name in TARGETED and config.probes.target is None and unlabelled:
        raise ConfigError(
            f"method {config.method.name!r} explains one class, the same for every checkpoint, but "
            f"{unlabelled} of {len(probes)} probes have no label; label them or set [probes] target"
        )


def checkpoint_source(config: AuditConfig, role: str) -> CheckpointSource:
    """Return where the checkpoint of a role is loaded from.

    Raises
    ------
    ConfigError
        When the audit has no such role, or names a stored run for it.
    """
    section = dict(sources(config)).get(role)
    if section is None or section.path is None:
        raise ConfigError(
            f"this audit captures no checkpoint as {role!r}; give it a path in the configuration"
        )
    if isinstance(section, ReplicateSection) and section.command and not Path(section.path).exists():
        raise CheckpointError(f"{section.path} is not trained yet; `audit replicate` trains it")
    return CheckpointSource(section.path, section.revision, section.adapter, section.trust_remote_code)


def probe_source(config: AuditConfig, *, domain: bool = False) -> ProbeSource:
    """Return where the audit's probes (or its second probe set) are read from."""
    section = config.probes if not domain else config.domain
    if section is None:
        raise ConfigError("this audit has no [domain]; add [domain] path = … for a second probe set")
    return ProbeSource(section.path, tuple(sorted(section.columns.items())), _stamp(Path(section.path)))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return times and sizes that change whenever a file, or a file of a folder, does."""
    try:
        states = [entry.stat() for entry in [path, *(path.rglob("*") if path.is_dir() else ())]]
    except OSError:
        return ()  # reading it will say what is wrong
    return (len(states), max(one.st_mtime_ns for one in states), sum(one.st_size for one in states))


def audit_regions(config: AuditConfig, probes: ProbeSet) -> tuple[Region, ...]:
    """Return the regions of the configuration together with annotated and automatic ones."""
    try:
        return expand_regions(config.region_records(), probes.probes)
    except ValueError as error:
        raise ProbeError(str(error)) from None


def target_name(config: AuditConfig) -> str:
    """Return how target classes are chosen, as text."""
    target = config.probes.target
    if target is None and config.method.record().name in TARGETED:
        return "label"  # a checkpoint's own prediction would explain another class on each
    if target is None:
        return "auto"
    return canonical_json(target) if isinstance(target, list) else str(target)


def target_of(name: str) -> str | list[str] | None:
    """Return what :func:`target_name` put into a run's record, as a capture takes it.

    None for ``prediction``, whose classes stand in the run: see :mod:`audit.pipeline.targets`.

    >>> target_of('["Yes","No"]'), target_of("auto"), target_of("positive")
    (['Yes', 'No'], None, 'positive')
    """
    if name.startswith('["'):
        try:
            return [str(one) for one in json.loads(name)]
        except json.JSONDecodeError:
            return name
    return None if name in ("auto", PREDICTION) else name


def targets_digest(config: AuditConfig, probes: ProbeSet) -> str:
    """Return the digest of the target classes of the probes, where each has its own; else nothing."""
    if config.probes.target == PREDICTION:
        return answers_digest(config)
    if config.probes.target != "label":
        return ""
    return digest([[probe.id, probe.label] for probe in probes])


def capture_settings(config: AuditConfig, device: str) -> CaptureSettings:
    """Return everything else of a capture that changes its numbers."""
    return CaptureSettings(
        dtype=config.capture.dtype or "float32",
        attention_implementation=config.capture.attention_implementation or "auto",
        device_type=device,
        batch_tokens=config.capture.batch_tokens,
        max_length=config.probes.max_length,
        truncate=config.probes.truncate,
        truncation_side=config.probes.truncation_side,
        stride=config.probes.stride,
        shard_probes=config.capture.shard_probes,
        layer_maps=config.capture.layer_maps,
    )


def device_type(device: str) -> str:
    """Return ``cuda`` or ``cpu``; ``auto`` takes a GPU where torch is installed and sees one."""
    if device != "auto":
        return device
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def numeric_versions() -> dict[str, str]:
    """Return the versions that change numbers; packages that are absent here are left out."""
    found = {"capture": CAPTURE_VERSION}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cut_shards(n_probes: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return half-open ranges of at most `size` probes.

    >>> cut_shards(1200, 500)
    ((0, 500), (500, 1000), (1000, 1200))
    """
    return tuple((start, min(start + size, n_probes)) for start in range(0, n_probes, size))
