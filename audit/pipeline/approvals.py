"""Approvals: attributed, scoped, expiring, and bound to digests; which are known, and which count.

An approval changes no stored verdict. It is applied whenever a verdict is read, and only while the
checkpoints, the probe set, the method and the policy are those that were approved: anything that is
expired, stale, unsigned where signatures are demanded, or missing from the log counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from audit.config import AuditConfig
from audit.errors import StoreError
from audit.pipeline.signatures import Signers
from audit.records import Comparison, Policy, Rule, RuleVerdict, canonical_json, digest
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


def read_approvals(store: Store) -> Iterator[Approval]:
    """Yield the approvals that the log knows, oldest first; one that was slipped in is no approval."""
    stored = {record["approval_id"]: record for record in store.approvals()}
    if not stored:
        return
    for entry in store.log():
        record = stored.get(entry["payload"].get("approval_id")) if entry["kind"] == "approval" else None
        if record is not None and all(record.get(key) == entry["payload"].get(key) for key in _STATED):
            yield from_record(record)


def from_record(record: Mapping[str, Any]) -> Approval:
    """Return an approval from its stored values."""
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
    return distrust(store, approval, comparison=comparison, signers=signers)


def distrust(
    store: Store, approval: Approval, *, comparison: Comparison, signers: Signers | None
) -> str | None:
    """Return why the author or the signature of an approval does not let it count, None when both do."""
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


def scope_of(found: RuleVerdict) -> dict[str, str]:
    """Return what an approval names of a shift that it accepts."""
    return {
        "rule": found.rule.label,
        "rule_digest": rule_digest(found.rule),
        "region": found.region,
        "stream": found.stream,
        "effect": found.effect,
    }


def rule_digest(rule: Rule) -> str:
    """Return the digest by which an approval knows its rule again."""
    return digest(to_json(rule))


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
