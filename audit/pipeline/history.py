"""What the append-only log knows about a verdict: repeated attempts, and policies that were loosened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from audit.errors import ConfigError
from audit.records import Comparison, Policy, Rule
from audit.store import Store
from audit.verdicts.rules import limit_bounds


def attempt_of(store: Store, comparison_id: str | None) -> int | None:
    """Return which judgement of its pair of checkpoints and probes a verdict was; 3 = two came before."""
    for entry in reversed(store.log()):
        if entry["kind"] == "verdict" and entry["payload"]["comparison_id"] == comparison_id:
            return int(entry["payload"]["attempt"])
    return None


def loosened_since(store: Store, comparison: Comparison, policy: Policy) -> str | None:
    """Return the newest earlier verdict on these probes whose policy was stricter, and what it held.

    Parameters
    ----------
    store : Store
    comparison : Comparison
        A stored one; only verdicts before its own count.
    policy : Policy
        The one that it was judged by.

    Returns
    -------
    str or None
        "2026-03-01 (cmp-…: 'limit shift corner' .02 → .05)"; None where no policy was stricter.
    """
    known: dict[str, list[str]] = {}
    for manifest in _earlier(store, comparison):
        name = str(manifest["policy_digest"])
        if name not in known:
            verdict = store.verdict(manifest["comparison_id"])
            known[name] = [] if verdict is None else loosened(verdict.policy, policy)
        if known[name]:
            day = str(manifest["provenance"]["time"])[:10]
            return f"{day} ({manifest['comparison_id']}: {'; '.join(known[name])})"
    return None


def _earlier(store: Store, comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Yield the manifests of earlier verdicts on the same probes, newest first."""
    judged = [str(entry["payload"]["comparison_id"]) for entry in store.log() if entry["kind"] == "verdict"]
    if comparison.id in judged:
        judged = judged[: judged.index(comparison.id)]
    manifests = {str(manifest["comparison_id"]): manifest for manifest in store.comparisons()}
    inputs = {m["run_id"]: m["spec"]["inputs_digest"] for m in store.runs()}
    own = _subject(None if comparison.before is None else vars(comparison.before), inputs)
    for name in reversed(judged):
        manifest = manifests.get(name)
        if manifest is not None and _subject(manifest["before"], inputs) == own:
            yield manifest


def _subject(run: dict[str, Any] | None, inputs: dict[str, str]) -> str | None:
    """Return the probe set of a run, or the run itself where it is not in the store."""
    return None if run is None else inputs.get(run["run_id"], run["run_id"])


# --- comparing policies -----------------------------------------------------------------------


def loosened(old: Policy, new: Policy) -> list[str]:
    """Return in what `new` is more permissive than `old`, one phrase each.

    Examples
    --------
    >>> strict, loose = (Policy((Rule("corner", "limit", fail=limit),)) for limit in (0.02, 0.05))
    >>> loosened(strict, loose), loosened(loose, strict)
    (["'limit shift corner' .02 → .05"], [])
    >>> loosened(strict, Policy(()))
    ["'limit shift corner' removed"]
    """
    found = [phrase for rule in old.rules if (phrase := _rule_loosened(rule, new)) is not None]
    kinds = {rule.kind for rule in new.rules}
    raised, lowered = new.alpha > old.alpha, new.alpha < old.alpha
    if (raised and "limit" in kinds) or (lowered and "excess" in kinds):
        found.append(f"alpha {_plain(old.alpha)} → {_plain(new.alpha)}")
    if new.effect_floor > old.effect_floor and "excess" in kinds:
        found.append(f"effect floor {_plain(old.effect_floor)} → {_plain(new.effect_floor)}")
    for name in ("min_probes", "min_clusters", "min_replicates"):
        one, two = getattr(old, name), getattr(new, name)
        if two < one:
            found.append(f"{name.replace('_', ' ').replace('min', 'minimum of')} {one} → {two}")
    return found + [f"{name} allowed" for name in new.allow if name not in old.allow]


def _rule_loosened(rule: Rule, policy: Policy) -> str | None:
    """Return how a policy judges less than `rule` did, None where one of its rules is as strict."""
    same = [one for one in policy.rules if _covers(one, rule)]
    if any(_as_strict(one, rule) for one in same):
        return None
    if not same:
        return f"'{rule.label}' removed"
    return f"'{rule.label}' {_bound(rule)} → {_bound(same[0])}"


def _covers(new: Rule, old: Rule) -> bool:
    """Return whether `new` looks wherever `old` did, and in its direction."""
    exact = ("kind", "measure", "effect", "segment", "layer")
    return (
        all(getattr(new, name) == getattr(old, name) for name in exact)
        and new.region in ("*", old.region)
        and new.stream in (None, old.stream)
        and new.direction in ("both", old.direction)
    )


def _as_strict(new: Rule, old: Rule) -> bool:
    if old.kind == "excess":
        if type(new.within) is not type(old.within):
            return False
        return _margin(new) <= _margin(old)
    if old.fail is None or new.fail is None:
        return old.fail is None
    try:
        allowed, before = limit_bounds(new, new.fail), limit_bounds(old, old.fail)
    except ConfigError:
        return new == old
    return allowed[0] >= before[0] and allowed[1] <= before[1]


def _margin(rule: Rule) -> float:
    text = str(rule.within).partition(" ")[0]
    try:
        return float(text)
    except ValueError:
        return float("inf")


def _bound(rule: Rule) -> str:
    value = rule.fail if rule.kind == "limit" else rule.within
    return _plain(value) if isinstance(value, float | int) else str(value)


def _plain(value: float) -> str:
    return f"{value:g}".replace("0.", ".", 1)
