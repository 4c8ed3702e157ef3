"""What a run is made of, as the configuration, the probes and this machine decide it; no model is loaded."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

from audit._method_parameters import TARGETED
from audit.config import AuditConfig
from audit.errors import ConfigError, ProbeError
from audit.models import checkpoint_info
from audit.models.tasks import COMPARES, task_of
from audit.pipeline.sources import checkpoint_source, load_probes, probe_source
from audit.pipeline.targets import PREDICTION, answers_digest
from audit.records import CaptureSettings, CheckpointInfo, ProbeSet, Region, RunSpec, canonical_json, digest
from audit.regions import expand_regions

VERSIONED = ("torch", "transformers")
"""Packages whose version is part of a run's id, because it changes numbers."""

CAPTURE_VERSION = "2"
"""Raised whenever the capture code changes a number."""


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
