"""Configuration or comparison → verdict, stored and logged; captures nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from audit.config import AuditConfig, CheckpointSection, ReplicateSection
from audit.errors import CheckpointError, NothingEvaluatedError
from audit.gate import evaluate_gate
from audit.pipeline.capture import capture_all
from audit.pipeline.compare import Statistics, compare_runs
from audit.pipeline.confirm import confirm_regions
from audit.pipeline.floor import Floor, freeze_floor, read_floor
from audit.pipeline.plan import Progress, plan_audit, plan_run, sources
from audit.pipeline.publish import publish
from audit.pipeline.runs import RunData, read_run
from audit.records import Comparison, Outcome, Policy, Verdict
from audit.store import Store


def run_audit(
    config: AuditConfig,
    *,
    progress: Progress | None = None,
    allow: tuple[str, ...] = (),
    confirm: bool | None = None,
) -> Verdict:
    """Capture what is missing, compare, judge, and confirm failing regions by occlusion.

    Parameters
    ----------
    config : AuditConfig
    progress : callable, optional
    allow : tuple of str
        ``inconclusive`` and ``mismatch``; recorded in the verdict.
    confirm : bool, optional
        Overrides ``report.confirm``.

    Returns
    -------
    Verdict
        Its `comparison_id` names the stored comparison.

    Raises
    ------
    AuditError
    """
    if not config.gate.rules:
        raise NothingEvaluatedError("the policy has no rules; add at least one [[gate.rules]]")
    capture_all(plan_audit(config), progress=progress)
    return gate_runs(
        config,
        progress=progress,
        allow=allow,
        confirm=config.report.confirm if confirm is None else confirm,
    )


def gate_runs(
    config: AuditConfig,
    *,
    progress: Progress | None = None,
    allow: tuple[str, ...] = (),
    confirm: bool = False,
) -> Verdict:
    """Compare the stored runs of a configuration and judge them.

    Parameters
    ----------
    config : AuditConfig
    progress : callable, optional
    allow : tuple of str
    confirm : bool
        Occlude failing regions on both checkpoints, which needs torch and the checkpoints.

    Returns
    -------
    Verdict

    Raises
    ------
    NothingEvaluatedError
        When a run is not stored, or the policy has no rules.
    """
    store = Store(config.store.url)
    policy = with_allowed(config.policy(), allow)
    comparison = compare_config(config, store, progress=progress)
    verdict = evaluate_gate(comparison, policy)
    if confirm and verdict.outcome is Outcome.FAIL:
        found = confirm_regions(config, verdict, progress=progress)
        comparison = replace(comparison, confirmations=found)
        verdict = evaluate_gate(comparison, policy)
    return replace(verdict, comparison_id=publish(store, comparison, verdict))


def gate_comparison(store: Store, comparison_id: str, *, allow: tuple[str, ...] = ()) -> Verdict:
    """Return the verdict of a stored comparison under the policy it was stored with.

    Raises
    ------
    StoreError
        When the comparison is not stored.
    NothingEvaluatedError
        When it was stored without a policy.
    """
    comparison, verdict = store.comparison(comparison_id), store.verdict(comparison_id)
    if verdict is None:
        raise NothingEvaluatedError(
            f"{comparison_id} was stored without rules; judge it with `audit gate CONFIG` and [[gate.rules]]"
        )
    judged = evaluate_gate(comparison, with_allowed(verdict.policy, allow))
    return replace(judged, comparison_id=comparison_id)


def compare_config(config: AuditConfig, store: Store, *, progress: Progress | None = None) -> Comparison:
    """Return the comparison that a configuration asks for, from stored runs and floors."""
    if progress is not None:
        progress("compare", 0, 1)
    floors = [read_floor(one.floor) for one in config.replicates if one.floor is not None]
    statistics = Statistics(config.statistics.alpha, config.statistics.resamples, config.statistics.seed)
    before = _baseline(config, store, floors)
    repeats = [one for floor in floors for one in floor.replicates]
    repeats += _replicates(config, store)
    if "after" not in config.checkpoints:
        after = resolve(config, store, "before", domain=True)
        comparison = compare_runs(before, after, paired=False, statistics=statistics)
    else:
        after = resolve(config, store, "after")
        domain = _domain(config, store) if config.domain is not None else None
        comparison = compare_runs(before, after, replicates=repeats, domain=domain, statistics=statistics)
    if progress is not None:
        progress("compare", 1, 1)
    return comparison


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
    plan = plan_run(config, role, domain=domain)
    if store.has_run(plan.run_id):
        return read_run(store, plan.run_id, kind=plan.kind)
    found = store.find_runs(
        checkpoint=plan.spec.checkpoint.digest,
        inputs=plan.spec.inputs_digest,
        regions=plan.spec.regions_digest,
        method=plan.spec.method.name,
    )
    if not found:
        raise NothingEvaluatedError(
            f"{section.path} has not been captured on {plan.probes.path}; run `audit capture` first"
        )
    return read_run(store, found[-1], kind=plan.kind)


def with_allowed(policy: Policy, allow: tuple[str, ...]) -> Policy:
    """Return `policy` with what the command line allows added."""
    return replace(policy, allow=tuple(dict.fromkeys((*policy.allow, *allow))))


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


def _replicates(config: AuditConfig, store: Store, *, domain: bool = False) -> list[RunData]:
    roles = [role for role, _ in sources(config) if role.startswith("replicate-")]
    return [resolve(config, store, role, domain=domain) for role in roles]


def _domain(config: AuditConfig, store: Store) -> tuple[RunData, RunData, list[RunData]]:
    return (
        resolve(config, store, "before", domain=True),
        resolve(config, store, "after", domain=True),
        _replicates(config, store, domain=True),
    )


def freeze_config_floor(config: AuditConfig, path: str | Path) -> Path:
    """Freeze the stored baseline and replicates of a configuration; see :func:`freeze_floor`."""
    store = Store(config.store.url)
    baseline = resolve(config, store, "before")
    created = datetime.now(UTC).date().isoformat()
    return freeze_floor(baseline, _replicates(config, store), path, created=created)
