"""Accept a shift, or a release: attributed, scoped, expiring, and bound to digests.

An approval changes no stored verdict. It is applied whenever a verdict is read, and only while the
checkpoints, the probe set, the method and the policy are those that were approved: anything that is
expired, stale, unsigned where signatures are demanded, or missing from the log counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from audit.config import AuditConfig
from audit.errors import ConfigError, NothingEvaluatedError, StoreError
from audit.gate import conclude
from audit.pipeline.signatures import Signers, sign
from audit.records import Comparison, Outcome, Policy, Rule, RuleVerdict, Verdict, canonical_json, digest
from audit.serialize import to_json
from audit.store import Store

SIGNED = "signed"
"""Value of ``settings["approvals"]`` of a comparison whose approvals must carry a signature."""

_STATED = ("kind", "comparison_id", "scope", "bound", "reason", "by", "expires", "created")
_CHANGED = {
    "before": "the checkpoint before",
    "after": "the checkpoint after",
    "inputs": "the probe set",
    "annotations": "the probes' annotations",
    "regions": "the regions",
    "domain": "the second probe set",
    "method": "the method",
    "capture": "the capture settings",
    "policy": "the policy",
}


@dataclass(frozen=True)
class Approval:
    """One approval as it is stored.

    Attributes
    ----------
    kind : "rule" or "release"
        A rule's approval accepts a shift; a release's pins the checkpoint after as baseline.
    scope : tuple of mappings
        ``rule`` (label), ``rule_digest``, ``region``, ``stream`` and ``effect`` of each accepted shift.
    bound : mapping of str to str
        Digests that must be the same when the verdict is read.
    expires : date or None
        Last day (UTC) on which it counts; a release's may have none.
    """

    id: str
    kind: str
    comparison_id: str
    scope: tuple[Mapping[str, str], ...]
    bound: Mapping[str, str]
    reason: str
    by: str
    expires: date | None
    created: str
    statement: bytes
    signature: str | None = None

    @property
    def attribution(self) -> str:
        """Return who accepted it, until when, and why."""
        until = "" if self.expires is None else f" until {self.expires.isoformat()}"
        return f"{self.by}{until} ({self.reason})"


# --- reading a verdict ------------------------------------------------------------------------


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


def objection(
    store: Store,
    approval: Approval,
    bound: Mapping[str, str],
    *,
    comparison: Comparison,
    signers: Signers | None,
    today: date,
) -> str | None:
    """Return why an approval does not count, None when it does."""
    if approval.expires is not None and approval.expires < today:
        return f"it expired on {approval.expires.isoformat()}"
    changed = [_CHANGED[key] for key in _CHANGED if approval.bound.get(key) != bound.get(key)]
    if changed:
        return f"{' and '.join(changed)} changed since"
    return _distrust(store, approval, comparison=comparison, signers=signers)


def _distrust(
    store: Store, approval: Approval, *, comparison: Comparison, signers: Signers | None
) -> str | None:
    author = run_author(store, comparison)
    if author is not None and approval.by.casefold() == author.casefold():
        return f"{author} made the run, and nobody approves a run of their own"
    if signers is None:
        if comparison.settings.get("approvals") == SIGNED:
            return "this audit wants signatures, and the configuration with [approvals] was not given"
        return None
    if approval.signature is None:
        return "it is not signed"
    if author is None:
        return "the run does not tell its author; capture with ROLLOUT_AUDIT_AUTHOR or git's user.email set"
    return signers.objection(approval.statement, approval.signature, by=approval.by, author=author)


def _covers(approval: Approval, found: RuleVerdict) -> bool:
    return approval.kind == "rule" and any(one == _scope_of(found) for one in approval.scope)


def _scope_of(found: RuleVerdict) -> dict[str, str]:
    return {
        "rule": found.rule.label,
        "rule_digest": _rule_digest(found.rule),
        "region": found.region,
        "stream": found.stream,
        "effect": found.effect,
    }


def _rule_digest(rule: Rule) -> str:
    return digest(to_json(rule))


def binding(store: Store, comparison: Comparison, policy: Policy) -> dict[str, str]:
    """Return the digests that an approval of this comparison is bound to.

    What the command line allows (`Policy.allow`) is no part of the policy that was approved.

    Raises
    ------
    StoreError
        When neither run is in the store.
    """
    refs = (comparison.after, comparison.before)
    ref = next((one for one in refs if one is not None and store.has_run(one.run_id)), None)
    if ref is None:
        raise StoreError(
            f"{comparison.id}: neither run is in this store, so that nothing ties an approval to its probes; "
            "use the store in which they were captured"
        )
    spec = store.spec(ref.run_id)
    before, after = (None if one is None else one.digest for one in (comparison.before, comparison.after))
    method = [spec.method.name, spec.method.row, dict(spec.method.params), spec.target, spec.targets_digest]
    return {
        "before": before or "",
        "after": after or "",
        "inputs": spec.inputs_digest,
        "annotations": spec.annotations_digest,
        "regions": spec.regions_digest,
        "domain": digest(list(comparison.settings.get("domain", ()))[:2]),
        "method": digest(to_json(method)),
        "capture": digest(to_json(spec.settings)),
        "policy": replace(policy, allow=()).digest,
    }


def run_author(store: Store, comparison: Comparison) -> str | None:
    """Return who captured the run after, None where it does not say."""
    ref = comparison.after
    if ref is None or not store.has_run(ref.run_id):
        return None
    author = store.manifest(ref.run_id)["provenance"].get("author")
    return None if author is None else str(author)


def read_approvals(store: Store) -> Iterator[Approval]:
    """Yield the approvals that the log knows, oldest first; one that was slipped in is no approval."""
    stored = {record["approval_id"]: record for record in store.approvals()}
    if not stored:
        return
    for entry in store.log():
        record = stored.get(entry["payload"].get("approval_id")) if entry["kind"] == "approval" else None
        if record is not None and all(record.get(key) == entry["payload"].get(key) for key in _STATED):
            yield _approval(record)


def _approval(record: Mapping[str, Any]) -> Approval:
    stated = {key: record.get(key) for key in _STATED}
    return Approval(
        id=record["approval_id"],
        kind=str(stated["kind"]),
        comparison_id=str(stated["comparison_id"]),
        scope=tuple(record.get("scope") or ()),
        bound=record.get("bound") or {},
        reason=str(stated["reason"]),
        by=str(stated["by"]),
        expires=None if stated["expires"] is None else date.fromisoformat(str(stated["expires"])),
        created=str(stated["created"]),
        statement=canonical_json(stated).encode(),
        signature=record.get("signature"),
    )


# --- giving one -------------------------------------------------------------------------------


def approve(
    store: Store,
    comparison_id: str,
    *,
    reason: str,
    by: str,
    rule: str | None = None,
    region: str | None = None,
    expires: str | date | None = None,
    key: str | Path | None = None,
    signers: Signers | None = None,
    today: date | None = None,
) -> Approval:
    """Accept what a rule found in a comparison, or (without `rule`) the whole release as baseline.

    Parameters
    ----------
    store : Store
    comparison_id : str
    reason, by : str
        Why, and who: a name or an address, the principal of the signature where one is demanded.
    rule : str, optional
        Label of a failing rule: its name, or "limit shift corner". Without it the verdict must have
        passed, and the checkpoint after becomes the baseline of ``approved = true``.
    region : str, optional
        Only this region of the rule; every failing one when omitted.
    expires : ISO date, optional
        Last day (UTC) on which the approval counts; required with `rule`.
    key : path, optional
        SSH key to sign with (``ssh-keygen -Y sign``).
    signers : Signers, optional
        Whose signatures count.
    today : date, optional

    Returns
    -------
    Approval

    Raises
    ------
    ConfigError
        When rule, region, date, reason or signature do not fit, or the approver made the run.
    NothingEvaluatedError
        When the comparison was stored without a verdict, or a release has not passed.
    StoreError
        When the comparison is not stored.
    """
    today = today or datetime.now(UTC).date()
    until = _expiry(expires, today, required=rule is not None)
    comparison = store.comparison(comparison_id)
    verdict = read_verdict(store, comparison_id, signers=signers, today=today)
    if verdict is None:
        raise NothingEvaluatedError(f"{comparison_id} was stored without rules; there is nothing to approve")
    stated = {
        "kind": "release" if rule is None else "rule",
        "comparison_id": comparison_id,
        "scope": [] if rule is None else _scope(verdict, rule, region),
        "bound": binding(store, comparison, verdict.policy),
        "reason": _text("reason", reason),
        "by": _text("by", by),
        "expires": until,
        "created": today.isoformat(),
    }
    if rule is None:
        _require_pass(comparison_id, verdict)
    signature = None if key is None else sign(canonical_json(stated).encode(), Path(key))
    draft = _approval({**stated, "approval_id": "", "signature": signature})
    obstacle = _distrust(store, draft, comparison=comparison, signers=signers)
    if obstacle is not None:
        raise ConfigError(f"this approval would not count: {obstacle}; {_remedy(key, signers)}")
    return replace(draft, id=store.write_approval({**stated, "signature": signature}))


def _remedy(key: str | Path | None, signers: Signers | None) -> str:
    if signers is None:
        return "pass --config with [approvals], or let someone else approve"
    return "pass --key with an SSH key" if key is None else "use the key and --by of an allowed signer"


def _text(name: str, value: str) -> str:
    text = " ".join(value.split())
    if not text:
        raise ConfigError(f"--{name} is empty; an approval says who accepts what, and why")
    return text


def _expiry(value: str | date | None, today: date, *, required: bool) -> str | None:
    if value is None:
        if required:
            raise ConfigError("an approved rule needs --expires YYYY-MM-DD: no shift is accepted for ever")
        return None
    try:
        day = value if isinstance(value, date) else date.fromisoformat(value)
    except ValueError:
        raise ConfigError(f"--expires {value} is no date; give YYYY-MM-DD") from None
    if day < today:
        raise ConfigError(f"--expires {day.isoformat()} has passed; give a day from {today.isoformat()} on")
    return day.isoformat()


def _scope(verdict: Verdict, label: str, region: str | None) -> list[dict[str, str]]:
    named = [one for one in verdict.rules if label in (one.rule.label, one.rule.name)]
    if not named:
        known = sorted({one.rule.label for one in verdict.rules})
        raise ConfigError(f"--rule '{label}' does not exist; the rules are {', '.join(map(repr, known))}")
    if len({_rule_digest(one.rule) for one in named}) > 1:
        raise ConfigError(f"several rules are called '{label}'; give them different names in the policy")
    inside = [one for one in named if region in (None, one.region)]
    if not inside:
        known = sorted({one.region for one in named})
        raise ConfigError(f"rule '{label}' judges no region '{region}'; it judges {', '.join(known)}")
    failing = [one for one in inside if one.outcome is Outcome.FAIL]
    if not failing:
        where = f" on {region}" if region else ""
        accepted = dict.fromkeys(one.approved_by for one in inside if one.approved_by)
        if accepted:
            who = "; ".join(map(str, accepted))
            raise ConfigError(
                f"rule '{label}'{where} is already approved by {who}; nothing is left to approve"
            )
        ended = "/".join(sorted({one.outcome.value for one in inside}))
        raise ConfigError(f"rule '{label}'{where} ended {ended}; only a FAIL can be approved")
    return [_scope_of(one) for one in failing]


def _require_pass(comparison_id: str, verdict: Verdict) -> None:
    if verdict.outcome is not Outcome.PASS:
        raise NothingEvaluatedError(
            f"{comparison_id} is {verdict.status}; a release is approved once it passes: approve its failing "
            "rules with --rule first"
        )


# --- configuration ----------------------------------------------------------------------------


def signers_of(config: AuditConfig | None) -> Signers | None:
    """Return whose signatures count, None where the configuration demands none.

    Raises
    ------
    ConfigError
        When the file of allowed signers is missing.
    """
    if config is None or config.approvals.allowed_signers is None:
        return None
    return Signers(Path(config.approvals.allowed_signers))


def demand_signatures(config: AuditConfig, comparison: Comparison) -> Comparison:
    """Return `comparison` marked, where the configuration demands signed approvals, as demanding them."""
    if config.approvals.allowed_signers is None:
        return comparison
    return replace(comparison, settings={**comparison.settings, "approvals": SIGNED})


def approvals_of(approvals: Iterable[Approval]) -> list[dict[str, Any]]:
    """Return approvals as plain values, for lists."""
    return [
        {
            "approval_id": one.id,
            "kind": one.kind,
            "comparison_id": one.comparison_id,
            "rules": sorted({f"{s['rule']} on {s['region']}" for s in one.scope}),
            "by": one.by,
            "expires": None if one.expires is None else one.expires.isoformat(),
            "signed": one.signature is not None,
            "reason": one.reason,
        }
        for one in approvals
    ]
