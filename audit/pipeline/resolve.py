"""Which stored runs and floors play the roles of an audit; loads no model and no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from audit.config import AuditConfig, CheckpointSection, ReplicateSection
from audit.errors import CheckpointError, NothingEvaluatedError
from audit.pipeline.floor import Floor, read_floor
from audit.pipeline.plan import plan_spec, probe_source, sources
from audit.pipeline.runs import RunData, read_run
from audit.records import RunSpec
from audit.store import Store


@dataclass(frozen=True)
class AuditRuns:
    """The runs of one audit, each in its role.

    `domain` holds the runs of before, after and the replicates on the second probe set; None without a
    2×2. `paired` is False where one checkpoint is compared on two probe sets.
    """

    before: RunData
    after: RunData
    replicates: tuple[RunData, ...] = ()
    domain: tuple[RunData, RunData, tuple[RunData, ...]] | None = None
    paired: bool = True


def audit_runs(config: AuditConfig, store: Store) -> AuditRuns:
    """Return the runs that a configuration compares.

    Raises
    ------
    NothingEvaluatedError
        When one has not been captured, naming the command that does.
    ConfigError, ProbeError, CheckpointError, StoreError
    """
    floors = [read_floor(one.floor) for one in config.replicates if one.floor is not None]
    before = _baseline(config, store, floors)
    if "after" not in config.checkpoints:
        return AuditRuns(before, resolve(config, store, "before", domain=True), paired=False)
    frozen = tuple(one for floor in floors for one in floor.replicates)
    return AuditRuns(
        before,
        resolve(config, store, "after"),
        frozen + replicate_runs(config, store),
        _domain(config, store) if config.domain is not None else None,
    )


def resolve(config: AuditConfig, store: Store, role: str, *, domain: bool = False) -> RunData:
    """Return the stored run that plays `role`.

    Raises
    ------
    NothingEvaluatedError
        When it has not been captured.
    """
    section = dict(sources(config))[role]
    if section.run is not None:
        return read_run(store, section.run, kind=_kind(section))
    if section.path is None:
        raise NothingEvaluatedError(
            "no baseline is approved in this store yet; approve a release first, or give "
            '[checkpoints.before] path = "…"'
        )
    wanted = plan_spec(config, role, domain=domain)
    found = [run_id for run_id in _candidates(store, wanted) if _fits(store.spec(run_id), wanted, config)]
    if not found:
        probes = probe_source(config, domain=domain).path
        raise NothingEvaluatedError(
            f"{section.path} has not been captured on {probes}; run `audit capture` first"
        )
    return read_run(store, found[-1], kind=_kind(section))


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
    return (spec.method, spec.target, spec.settings) == (wanted.method, wanted.target, settings)


def _kind(section: CheckpointSection | ReplicateSection) -> str | None:
    return section.kind if isinstance(section, ReplicateSection) else None


def _baseline(config: AuditConfig, store: Store, floors: list[Floor]) -> RunData:
    """Return the baseline run; the frozen one where the run itself is not at hand."""
    try:
        return resolve(config, store, "before")
    except (CheckpointError, NothingEvaluatedError):
        section = config.checkpoints["before"]
        for floor in floors:
            known = (floor.baseline.ref.checkpoint, floor.baseline.ref.run_id)
            if section.run in known or section.path in known or not section.approved:
                return floor.baseline
        raise


def replicate_runs(config: AuditConfig, store: Store, *, domain: bool = False) -> tuple[RunData, ...]:
    """Return the stored runs of every replicate that is not frozen in a floor."""
    roles = [role for role, _ in sources(config) if role.startswith("replicate-")]
    return tuple(resolve(config, store, role, domain=domain) for role in roles)


def _domain(config: AuditConfig, store: Store) -> tuple[RunData, RunData, tuple[RunData, ...]]:
    return (
        resolve(config, store, "before", domain=True),
        resolve(config, store, "after", domain=True),
        replicate_runs(config, store, domain=True),
    )
