"""The approved baseline: which run ``approved = true`` stands for."""

from __future__ import annotations

from datetime import UTC, date, datetime

from audit.errors import NothingEvaluatedError
from audit.pipeline.accepted import apply_approvals
from audit.pipeline.approvals import Approval, binding, objection, read_approvals
from audit.pipeline.signatures import Signers
from audit.records import Comparison, Outcome
from audit.store import Store


def approved_baseline(store: Store, *, inputs: str, signers: Signers | None = None) -> str:
    """Return the run of the checkpoint after that was approved last on these probes.

    A release that was approved as such counts while its approval does; a checkpoint whose failing rules
    were all approved counts while its verdict passes.

    Parameters
    ----------
    store : Store
    inputs : str
        Digest of the probe set's inputs.
    signers : Signers, optional

    Raises
    ------
    NothingEvaluatedError
        When there is none.
    """
    today = datetime.now(UTC).date()
    refused = ""
    for approval in reversed(list(read_approvals(store))):
        if approval.bound.get("inputs") != inputs or not store.has_comparison(approval.comparison_id):
            continue
        comparison = store.comparison(approval.comparison_id)
        obstacle = _no_baseline(store, approval, comparison, signers=signers, today=today)
        if obstacle is None and comparison.after is not None:
            return comparison.after.run_id
        refused = refused or f" (the approval by {approval.by} does not count: {obstacle})"
    raise NothingEvaluatedError(
        f"no baseline is approved for these probes{refused}; approve a passing comparison with `audit "
        'approve CMP --reason … --by …`, or give [checkpoints.before] path = "…"'
    )


def _no_baseline(
    store: Store, approval: Approval, comparison: Comparison, *, signers: Signers | None, today: date
) -> str | None:
    """Return why an approval pins no baseline, None when it does."""
    stored = store.verdict(approval.comparison_id)
    if stored is None:
        return "its comparison has no verdict"
    bound = binding(store, comparison, stored.policy)
    obstacle = objection(store, approval, bound, comparison=comparison, signers=signers, today=today)
    if obstacle is not None or approval.kind == "release":
        return obstacle
    verdict = apply_approvals(store, comparison, stored, signers=signers, today=today)
    return None if verdict.outcome is Outcome.PASS else f"its verdict is {verdict.status}"
