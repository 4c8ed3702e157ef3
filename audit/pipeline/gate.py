"""Configuration or comparison → verdict, stored and logged; captures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from audit.config import AuditConfig
from audit.errors import NothingEvaluatedError
from audit.faithfulness import Score
from audit.gate import evaluate_gate
from audit.pipeline.accepted import apply_approvals
from audit.pipeline.approvals import demand_signatures
from audit.pipeline.capture import capture_all
from audit.pipeline.checks import check_replicate_runs
from audit.pipeline.compare import Statistics, compare_runs, outline
from audit.pipeline.confirm import Fill, confirm_regions
from audit.pipeline.faithfulness import Measured, measure_faithfulness, with_faithfulness
from audit.pipeline.floor import freeze_floor
from audit.pipeline.map_measures import MEASURES
from audit.pipeline.plan import Progress, plan_audit
from audit.pipeline.publish import publish
from audit.pipeline.resolve import audit_runs, check_sources, replicate_runs, resolve
from audit.pipeline.runs import find_run
from audit.pipeline.signatures import Signers, signers_of
from audit.records import Comparison, Confirmation, Outcome, Policy, Verdict
from audit.store import Store, comparison_id


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
        Overrides ``report.confirm``. Faithfulness is measured where ``[faithfulness]`` asks for it.

    Returns
    -------
    Verdict
        Its `comparison_id` names the stored comparison.

    Raises
    ------
    AuditError
    """
    require_rules(config)
    check_sources(config, Store(config.store.url))
    capture_all(plan_audit(config), together=config.capture.together, progress=progress)
    return gate_runs(
        config,
        progress=progress,
        allow=allow,
        confirm=config.report.confirm if confirm is None else confirm,
        measure=bool(config.faithfulness.probes),
    )


def require_rules(config: AuditConfig) -> None:
    """Refuse before any capture what could end in no verdict.

    Raises
    ------
    NothingEvaluatedError
        When the policy has no rules.
    """
    if not config.gate.rules:
        raise NothingEvaluatedError("the policy has no rules; add at least one [[gate.rules]]")


def gate_runs(
    config: AuditConfig,
    *,
    progress: Progress | None = None,
    allow: tuple[str, ...] = (),
    confirm: bool = False,
    measure: bool = False,
) -> Verdict:
    """Compare the stored runs of a configuration and judge them.

    Parameters
    ----------
    config : AuditConfig
    progress : callable, optional
    allow : tuple of str
    confirm : bool
        Occlude failing regions on both checkpoints, which needs torch and the checkpoints.
    measure : bool
        Measure the faithfulness that ``[faithfulness]`` asks for, which needs them too.

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
    signers = signers_of(config)
    runs, statistics = audit_runs(config, store), _statistics(config)
    planned = demand_signatures(config, outline(**vars(runs), statistics=statistics))
    stored = _stored(
        store,
        planned,
        with_faithfulness(config, planned),
        policy,
        confirm=config.report.occlusion if confirm else None,
        measure=measure,
    )
    if stored is not None:
        return apply_approvals(store, planned, stored, signers=signers)
    if progress is not None:
        progress("compare", 0, 1)
    comparison = demand_signatures(config, compare_runs(**vars(runs), statistics=statistics))
    measured = Measured()
    if measure:
        measured = measure_faithfulness(config, comparison, progress=progress)
        comparison = replace(with_faithfulness(config, comparison), faithfulness=measured.summary)
    verdict = replace(evaluate_gate(comparison, policy), notes=measured.notes)
    if confirm and verdict.outcome is Outcome.FAIL:
        found, notes = confirm_regions(config, verdict, progress=progress)
        comparison = with_confirmations(comparison, found, config.report.occlusion)
        verdict = replace(evaluate_gate(comparison, policy), notes=(*measured.notes, *notes))
    if progress is not None:
        progress("compare", 1, 1)
    verdict = replace(verdict, comparison_id=publish(store, comparison, verdict, measured.scores))
    return apply_approvals(store, comparison, verdict, signers=signers)


def _stored(
    store: Store,
    comparison: Comparison,
    measured: Comparison,
    policy: Policy,
    *,
    confirm: Fill | None,
    measure: bool,
) -> Verdict | None:
    """Return the verdict of the same audit where it is stored already: an audit done twice does nothing.

    One that was confirmed and `measured` for faithfulness comes before one that was not.
    """
    for one in (measured,) if measure else (measured, comparison):
        confirmed = comparison_id(with_confirmations(one, (), confirm or "mean"), policy)
        for identifier in (confirmed, comparison_id(one, policy)):
            verdict = store.verdict(identifier) if store.has_comparison(identifier) else None
            if verdict is not None and (
                identifier == confirmed or confirm is None or verdict.outcome is not Outcome.FAIL
            ):
                return verdict
    return None


def with_confirmations(comparison: Comparison, found: tuple[Confirmation, ...], fill: Fill) -> Comparison:
    """Return `comparison` with what occlusion found, under an id of its own."""
    settings = {**comparison.settings, "occlusion": True if fill == "mean" else fill}
    return replace(comparison, confirmations=found, settings=settings)


def gate_comparison(
    store: Store, comparison_id: str, *, allow: tuple[str, ...] = (), signers: Signers | None = None
) -> Verdict:
    """Return the verdict of a stored comparison under the policy it was stored with, approvals applied.

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
    policy = with_allowed(verdict.policy, allow)
    judged = replace(evaluate_gate(comparison, policy), notes=verdict.notes)
    if policy != verdict.policy:  # what was allowed is recorded, under an id of its own
        scores = [Score(**row) for row in store.comparison_faithfulness(comparison_id)]
        judged = replace(judged, comparison_id=publish(store, comparison, judged, scores))
    else:
        judged = replace(judged, comparison_id=comparison_id)
    return apply_approvals(store, comparison, judged, signers=signers)


def compare_stored(store: Store, before: str, after: str, replicates: Sequence[str] = ()) -> Comparison:
    """Return the comparison of runs that are named by id, each replicate as kind ``seed``.

    Raises
    ------
    ConfigError
        When a replicate is before, after or another replicate.
    StoreError, ProbeError
    """
    repeats = [find_run(store, one, kind="seed") for one in replicates]
    audited = {"before": find_run(store, before).ref, "after": find_run(store, after).ref}
    check_replicate_runs([one.ref for one in repeats], audited)
    return compare_runs(before, after, replicates=repeats, store=store)


def _statistics(config: AuditConfig) -> Statistics:
    """Return the settings of the statistics, with the measures that rules ask for."""
    given = config.statistics
    ruled = [rule.measure for rule in config.gate.rules if rule.measure in MEASURES]
    measures = tuple(dict.fromkeys((*given.measures, *ruled)))
    return Statistics(given.alpha, given.resamples, given.seed, measures)


def with_allowed(policy: Policy, allow: tuple[str, ...]) -> Policy:
    """Return `policy` with what the command line allows added."""
    return replace(policy, allow=tuple(dict.fromkeys((*policy.allow, *allow))))


def freeze_config_floor(config: AuditConfig, path: str | Path) -> Path:
    """Freeze the stored baseline and replicates of a configuration; see :func:`freeze_floor`."""
    store = Store(config.store.url)
    baseline = resolve(config, store, "before").read()
    replicates = [one.read() for one in replicate_runs(config, store)]
    check_replicate_runs([one.ref for one in replicates], {"before": baseline.ref})
    return freeze_floor(baseline, replicates, path, created=datetime.now(UTC).date().isoformat())
