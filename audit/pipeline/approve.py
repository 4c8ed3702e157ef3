"""Accept a shift, or a release; what an approval is stands in :mod:`audit.pipeline.approvals`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path

from audit.errors import ConfigError, NothingEvaluatedError
from audit.pipeline.accepted import read_verdict
from audit.pipeline.approvals import Approval, binding, distrust, from_record, rule_digest, scope_of
from audit.pipeline.signatures import Signers, sign
from audit.records import Outcome, Verdict, canonical_json
from audit.store import Store


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
    draft = from_record({**stated, "approval_id": "", "signature": signature})
    obstacle = distrust(store, draft, comparison=comparison, signers=signers)
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
    if len({rule_digest(one.rule) for one in named}) > 1:
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
    return [scope_of(one) for one in failing]


def _require_pass(comparison_id: str, verdict: Verdict) -> None:
    if verdict.outcome is not Outcome.PASS:
        raise NothingEvaluatedError(
            f"{comparison_id} is {verdict.status}; a release is approved once it passes: approve its failing "
            "rules with --rule first"
        )
