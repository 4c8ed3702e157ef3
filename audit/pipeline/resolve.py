"""Which stored runs and floors play the roles of an audit; loads no model and no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from audit.config import AuditConfig, CheckpointSection, ReplicateSection
from audit.errors import CheckpointError, ConfigError, NothingEvaluatedError, ProbeError, StoreError
from audit.models import checkpoint_info
from audit.pipeline.baseline import approved_baseline
from audit.pipeline.checks import check_replicate_runs
from audit.pipeline.floor import Floor, read_floor
from audit.pipeline.plan import LOG, check_label_sets
from audit.pipeline.runs import RunData, StoredRun, find_run
from audit.pipeline.signatures import signers_of
from audit.pipeline.sources import load_probes, probe_source, sources
from audit.pipeline.specs import audit_regions, plan_spec, targets_digest
from audit.records import CheckpointInfo, RunSpec
from audit.store import Store

Run = StoredRun | RunData
"""A run of the store, or one that a floor holds."""


@dataclass(frozen=True)
class AuditRuns:
    """The runs of one audit, each in its role.

    `domain` holds the runs of before, after and the replicates on the second probe set; None without a
    2×2. `paired` is False where one checkpoint is compared on two probe sets.
    """

    before: Run
    after: Run
    replicates: tuple[Run, ...] = ()
    domain: tuple[Run, Run, tuple[Run, ...]] | None = None
    paired: bool = True


def audit_runs(config: AuditConfig, store: Store) -> AuditRuns:
    """Return the runs that a configuration compares; shares are not read yet.

    Raises
    ------
    NothingEvaluatedError
        When one has not been captured, naming the command that does.
    ConfigError, ProbeError, CheckpointError, StoreError
    """
    floors = _floors(config)
    before = _baseline(config, store, floors)
    if "after" not in config.checkpoints:
        return AuditRuns(before, resolve(config, store, "before", domain=True), paired=False)
    runs = AuditRuns(
        before,
        resolve(config, store, "after"),
        tuple(one for floor in floors for one in floor.replicates) + replicate_runs(config, store),
        _domain(config, store) if config.domain is not None else None,
    )
    if config.probes.target is not None:
        check_label_sets([*_infos(runs.before), *_infos(runs.after)])
    check_replicate_runs(
        [one.ref for one in runs.replicates], {"before": runs.before.ref, "after": runs.after.ref}
    )
    return runs


def check_sources(config: AuditConfig, store: Store) -> None:
    """Refuse, before anything is captured, a missing approval, stored run or floor.

    Raises
    ------
    NothingEvaluatedError, StoreError, ConfigError
    """
    _floors(config)
    for _, section in sources(config):
        if section.run is not None:
            store.manifest(section.run)
        elif section.path is None:
            _approved(config, store)


def _approved(config: AuditConfig, store: Store) -> str:
    """Return the run that ``approved = true`` stands for."""
    inputs = load_probes(probe_source(config)).inputs_digest
    return approved_baseline(store, inputs=inputs, signers=signers_of(config))


def _floors(config: AuditConfig) -> list[Floor]:
    floors = [read_floor(one.floor) for one in config.replicates if one.floor is not None]
    if floors and config.domain is not None:
        raise ConfigError(
            "a floor holds no second probe set, which [domain] needs; give the replicates by path or run"
        )
    return floors


def _infos(run: Run) -> list[CheckpointInfo]:
    return [run.spec.checkpoint] if isinstance(run, StoredRun) else []


def resolve(config: AuditConfig, store: Store, role: str, *, domain: bool = False) -> StoredRun:
    """Return the stored run that plays `role`.

    Raises
    ------
    NothingEvaluatedError
        When it has not been captured.
    """
    section = dict(sources(config))[role]
    run = _approved(config, store) if section.run is None and section.path is None else section.run
    if run is not None and not domain:
        return find_run(store, run, kind=_kind(section))
    wanted = _wanted(config, store, role, run, domain=domain)
    found = [run_id for run_id in _candidates(store, wanted) if _fits(store.spec(run_id), wanted, config)]
    if not found:
        raise NothingEvaluatedError(
            f"{wanted.checkpoint.ref} has not been captured on {probe_source(config, domain=domain).path}; "
            "run `audit capture` first"
        )
    return find_run(store, found[-1], kind=_kind(section))


def _wanted(config: AuditConfig, store: Store, role: str, run: str | None, *, domain: bool) -> RunSpec:
    """Return the spec of a role; for a given run, that of its checkpoint on the second probe set."""
    if run is None:
        return plan_spec(config, role, domain=domain)
    probes = load_probes(probe_source(config, domain=domain))
    return replace(
        store.spec(run),
        inputs_digest=probes.inputs_digest,
        annotations_digest=probes.annotations_digest,
        regions=audit_regions(config, probes),
        targets_digest=targets_digest(config, probes),
    )


def _candidates(store: Store, wanted: RunSpec) -> list[str]:
    return store.find_runs(
        checkpoint=wanted.checkpoint.digest,
        inputs=wanted.inputs_digest,
        annotations=wanted.annotations_digest,
        regions=wanted.regions_digest,
        method=wanted.method.name,
    )


def _fits(spec: RunSpec, wanted: RunSpec, config: AuditConfig) -> bool:
    """Return whether a stored run is the wanted one, whatever the machine and the versions."""
    device = spec.settings.device_type if config.capture.device == "auto" else config.capture.device
    settings = replace(wanted.settings, device_type=device)
    found = (spec.method, spec.target, spec.targets_digest, spec.settings)
    return found == (wanted.method, wanted.target, wanted.targets_digest, settings)


def _kind(section: CheckpointSection | ReplicateSection) -> str | None:
    return section.kind if isinstance(section, ReplicateSection) else None


def _baseline(config: AuditConfig, store: Store, floors: list[Floor]) -> Run:
    """Return the baseline run; the frozen one where a floor holds it and the run is not at hand."""
    section = config.checkpoints["before"]
    if not floors or section.approved:
        return resolve(config, store, "before")
    frozen = floors[0].baseline
    _check_frozen(floors, _known_digest(section, store))
    try:
        return resolve(config, store, "before")
    except (CheckpointError, ProbeError, NothingEvaluatedError):
        LOG.info(
            "the baseline frozen in the floor is used: %s, run %s", frozen.ref.checkpoint, frozen.ref.run_id
        )
        return frozen
    except StoreError:
        if section.run != frozen.ref.run_id:
            raise
        return frozen


def _known_digest(section: CheckpointSection, store: Store) -> str | None:
    """Return the digest of the configured baseline, None where it is not on this machine."""
    if section.run is not None:
        return store.spec(section.run).checkpoint.digest if store.has_run(section.run) else None
    try:
        info = checkpoint_info(str(section.path), revision=section.revision, adapter=section.adapter)
    except CheckpointError:
        return None
    return info.digest


def _check_frozen(floors: list[Floor], digest: str | None) -> None:
    """Refuse floors whose replicates belong to another baseline than the configuration's."""
    for ref in [floor.baseline.ref for floor in floors]:
        if ref.digest != (digest or floors[0].baseline.ref.digest):
            raise ConfigError(
                f"the floor was frozen for the baseline {ref.checkpoint} (digest {ref.digest[:12]}), which "
                "is not [checkpoints.before]; freeze it again with `audit floor`"
            )


def replicate_runs(config: AuditConfig, store: Store, *, domain: bool = False) -> tuple[StoredRun, ...]:
    """Return the stored runs of every replicate that is not frozen in a floor."""
    roles = [role for role, _ in sources(config) if role.startswith("replicate-")]
    return tuple(resolve(config, store, role, domain=domain) for role in roles)


def _domain(config: AuditConfig, store: Store) -> tuple[StoredRun, StoredRun, tuple[StoredRun, ...]]:
    return (
        resolve(config, store, "before", domain=True),
        resolve(config, store, "after", domain=True),
        replicate_runs(config, store, domain=True),
    )
