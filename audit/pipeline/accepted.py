"""A verdict as it is read: with every approval that counts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime

from audit.errors import StoreError
from audit.gate import conclude
from audit.pipeline.approvals import Approval, binding, objection, read_approvals, scope_of
from audit.pipeline.signatures import Signers
from audit.records import Comparison, Outcome, RuleVerdict, Verdict
from audit.store import Store


def apply_approvals(
    store: Store,
    comparison: Comparison,
    verdict: Verdict,
    *,
    signers: Signers | None = None,
    today: date | None = None,
) -> Verdict:
    """Return `verdict` with every approval that counts applied, and a note for each that does not.

    Parameters
    ----------
    store : Store
    comparison : Comparison
    verdict : Verdict
        As stored or just judged, without approvals.
    signers : Signers, optional
        Whose signatures count. A comparison that was made under ``[approvals] allowed_signers`` accepts
        none without it.
    today : date, optional
        In UTC.

    Returns
    -------
    Verdict
        Failing rules in the scope of an approval have passed with `approved_by`; `notes` says which
        approvals of this pair do not count, and why.

    Raises
    ------
    StoreError
        When an approval or the log was changed.
    """
    failing = [rule for rule in verdict.rules if rule.outcome is Outcome.FAIL]
    known = list(read_approvals(store)) if failing else []
    if not known:
        return verdict
    today = today or datetime.now(UTC).date()
    bound = binding(store, comparison, verdict.policy)
    accepted: dict[int, Approval] = {}
    notes: dict[str, None] = {}
    for approval in reversed(known):
        covered = [i for i, rule in enumerate(verdict.rules) if rule in failing and _covers(approval, rule)]
        if not covered or approval.bound.get("after") != bound.get("after"):
            continue
        obstacle = objection(store, approval, bound, comparison=comparison, signers=signers, today=today)
        if obstacle is None:
            accepted.update(dict.fromkeys(set(covered) - set(accepted), approval))
        elif set(covered) - set(accepted):
            notes[f"The approval by {approval.by} ({approval.id}) does not count: {obstacle}."] = None
    rules = [
        replace(rule, outcome=Outcome.PASS, warned=True, approved_by=accepted[i].attribution)
        if i in accepted
        else rule
        for i, rule in enumerate(verdict.rules)
    ]
    judged = conclude(comparison, verdict.policy, rules) if accepted else verdict
    return replace(judged, comparison_id=verdict.comparison_id, notes=(*verdict.notes, *notes))


def read_verdict(
    store: Store, comparison_id: str, *, signers: Signers | None = None, today: date | None = None
) -> Verdict | None:
    """Return the stored verdict of a comparison with its approvals, None where it was not judged."""
    verdict = store.verdict(comparison_id)
    if verdict is None:
        return None
    return apply_approvals(store, store.comparison(comparison_id), verdict, signers=signers, today=today)


def accepted_outcomes(
    store: Store, *, signers: Signers | None = None, today: date | None = None
) -> dict[str, str]:
    """Return the outcome, as it is read, of each comparison that failed until an approval accepted it.

    Approvals that must be signed count for nothing without `signers`; nor does any for a comparison with a
    damaged file.
    """
    approved = {one.bound.get("after") for one in read_approvals(store) if one.kind == "rule"}
    failed = [
        str(one["comparison_id"])
        for one in store.comparisons()
        if one["outcome"] == Outcome.FAIL.value and one["after"] and one["after"]["digest"] in approved
    ]
    read = {name: _intact_verdict(store, name, signers, today) for name in failed}
    return {name: found.status for name, found in read.items() if found and found.outcome is not Outcome.FAIL}


def _intact_verdict(store: Store, name: str, signers: Signers | None, today: date | None) -> Verdict | None:
    try:
        return read_verdict(store, name, signers=signers, today=today)
    except StoreError:
        return None


def _covers(approval: Approval, found: RuleVerdict) -> bool:
    return approval.kind == "rule" and any(one == scope_of(found) for one in approval.scope)
