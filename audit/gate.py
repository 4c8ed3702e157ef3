"""Policy × comparison → verdict.

A failed gate is a value, not an exception. Only ``scipy.special`` is loaded, so that ``audit gate``
starts fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from audit.calibrate import holm
from audit.errors import ConfigError, ExitCode, NothingEvaluatedError
from audit.faithfulness import unproven
from audit.records import Cell, Comparison, Outcome, Policy, Rule, RuleVerdict, Verdict, worst
from audit.verdicts.floor import floor_of, plural
from audit.verdicts.rules import find_cells, judge_excess, judge_limit, precheck

_EXIT = {
    Outcome.PASS: ExitCode.PASS,
    Outcome.FAIL: ExitCode.FAIL,
    Outcome.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
}


def evaluate_gate(comparison: Comparison, policy: Policy) -> Verdict:
    """Judge a comparison by every rule of a policy.

    Parameters
    ----------
    comparison : Comparison
        Cells of two runs and their replicates.
    policy : Policy
        Rules and thresholds. `allow` may hold ``inconclusive`` (exit 0 instead of 4) and ``mismatch``
        (runs with different settings are judged, and every rule ends INCONCLUSIVE); both are recorded.

    Returns
    -------
    Verdict
        The worst outcome of all rules (ERROR > FAIL > INCONCLUSIVE > PASS), each rule with its numbers
        and one sentence, and the exit code: 0 PASS, 3 FAIL, 4 INCONCLUSIVE, 10 a rule or runs that
        cannot be judged, 13 a checkpoint that does not repeat itself.

    Raises
    ------
    NothingEvaluatedError
        When there are no rules, no probes or no cells.

    Examples
    --------
    >>> cell = Cell("shift", "corner", value=0.052, interval=(0.049, 0.055), n_probes=400)
    >>> comparison = Comparison("paired", (cell,), alpha=0.05, n_probes=400, same_weights=False)
    >>> verdict = evaluate_gate(comparison, Policy((Rule("corner", "limit", fail=0.02),)))
    >>> verdict.status, verdict.exit_code
    ('FAIL', 3)
    """
    if not policy.rules:
        raise NothingEvaluatedError("the policy has no rules; add at least one [[gate.rules]]")
    if not comparison.cells or comparison.n_probes < 1:
        raise NothingEvaluatedError("the comparison holds no pair of probes; capture before and after first")
    if comparison.nondeterministic is not None:
        return _refused(
            comparison,
            policy,
            ExitCode.CAPTURE,
            f"the same probe twice through the same checkpoint disagrees ({comparison.nondeterministic}); "
            "switch off dropout and other randomness, or audit on the CPU",
        )
    if not math.isclose(comparison.alpha, policy.alpha):
        return _refused(
            comparison,
            policy,
            ExitCode.CONFIG,
            f"the comparison's intervals were made with alpha {comparison.alpha:g}, the policy has "
            f"{policy.alpha:g}; compare again with the policy's alpha",
        )
    if comparison.mismatches and "mismatch" not in policy.allow:
        return _refused(
            comparison,
            policy,
            ExitCode.CONFIG,
            f"the runs differ in {', '.join(comparison.mismatches)}; capture them alike, or pass "
            "--allow-mismatch, with which the verdict is INCONCLUSIVE",
        )
    reason = unproven(comparison.faithfulness)
    judged = [_labelled(_cap(one, comparison), reason) for one in _judge(comparison, policy)]
    return conclude(comparison, policy, judged)


def _judge(comparison: Comparison, policy: Policy) -> list[RuleVerdict]:
    """Return the verdict of every rule on each of its cells."""
    targets: list[tuple[Rule, Cell | ConfigError]] = []
    for rule in policy.rules:
        try:
            targets += [(rule, cell) for cell in find_cells(comparison, rule)]
        except ConfigError as error:
            targets.append((rule, error))
    adjusted = _adjusted_pvalues(targets, comparison, policy)
    explained = _explained(targets, adjusted, comparison, policy)
    found = []
    for i, (rule, cell) in enumerate(targets):
        try:
            if isinstance(cell, ConfigError):
                raise cell
            told = explained[cell]
            if rule.kind == "limit":
                found.append(judge_limit(cell, rule, comparison, policy, explained=told))
            else:
                pvalue, tests = adjusted.get(i), len(adjusted)
                found.append(
                    judge_excess(cell, rule, comparison, policy, adjusted=pvalue, tests=tests, explained=told)
                )
        except ConfigError as error:
            region = rule.region if isinstance(cell, ConfigError) else cell.region
            found.append(
                RuleVerdict(rule, region, Outcome.ERROR, str(error), reason=str(error), limit=rule.fail)
            )
    return found


def _adjusted_pvalues(
    targets: list[tuple[Rule, Cell | ConfigError]], comparison: Comparison, policy: Policy
) -> dict[int, float]:
    """Return Holm-adjusted p-values of the excess tests that can be made, by place in `targets`."""
    raw: dict[int, float] = {}
    for i, (rule, cell) in enumerate(targets):
        if rule.kind != "excess" or isinstance(cell, ConfigError):
            continue
        if precheck(cell, rule, comparison, policy) is not None:
            continue
        test = floor_of(cell, rule, comparison, policy).test
        if test is not None and test.pvalue is not None:
            raw[i] = test.pvalue
    return dict(zip(raw, holm(list(raw.values())).tolist(), strict=True))


def _explained(
    targets: list[tuple[Rule, Cell | ConfigError]],
    adjusted: dict[int, float],
    comparison: Comparison,
    policy: Policy,
) -> dict[Cell, bool | None]:
    """Return, for each cell, whether re-training alone could explain it: one answer for all its rules.

    False when an excess rule's test rejects, or the two-sided test does after Bonferroni's correction
    for the policy's excess tests; None where there is no test.
    """
    found: dict[Cell, bool | None] = {}
    for rule, cell in targets:
        if isinstance(cell, ConfigError) or cell in found:
            continue
        test = floor_of(cell, replace(rule, direction="both"), comparison, policy).test
        own = [p for i, p in adjusted.items() if targets[i][1] is cell]
        if test is None or test.pvalue is None or precheck(cell, rule, comparison, policy) is not None:
            found[cell] = None
        else:
            correction = len(adjusted) if own else 1
            found[cell] = min([min(1.0, test.pvalue * correction), *own]) > policy.alpha
    return found


def _cap(found: RuleVerdict, comparison: Comparison) -> RuleVerdict:
    """Return INCONCLUSIVE for what was judged on runs with different settings."""
    if not comparison.mismatches or found.outcome in (Outcome.ERROR, Outcome.INCONCLUSIVE):
        return found
    reason = f"the runs differ in {', '.join(comparison.mismatches)}"
    return replace(
        found,
        outcome=Outcome.INCONCLUSIVE,
        sentence=f"{reason}, so that this {found.outcome.value} cannot be trusted: {found.sentence}",
        reason=reason,
        needed="runs captured with the same settings",
        warned=False,
    )


def _labelled(found: RuleVerdict, reason: str | None) -> RuleVerdict:
    """Return a verdict that tells of a shift with what its method's faithfulness makes of it.

    Occlusion of the region itself is the stronger evidence: what it confirmed needs no label.
    """
    low, high = found.interval or (0.0, 0.0)
    moved = found.outcome is Outcome.FAIL or (found.rule.measure == "shift" and (low > 0 or high < 0))
    confirmed = found.confirmation is not None and found.confirmation.confirmed
    if reason is None or confirmed or not moved or found.outcome is Outcome.ERROR:
        return found
    return replace(
        found, sentence=f"{found.sentence}; map changed, reliance unproven: {reason}", unproven=reason
    )


def _refused(comparison: Comparison, policy: Policy, code: ExitCode, reason: str) -> Verdict:
    return Verdict(
        outcome=Outcome.ERROR,
        rules=(),
        sentence=reason,
        exit_code=int(code),
        policy=policy,
        comparison_id=comparison.id,
        reason=reason,
    )


def conclude(comparison: Comparison, policy: Policy, judged: Sequence[RuleVerdict]) -> Verdict:
    """Return the verdict of rules that were judged: the worst outcome, its sentence and exit code.

    An approved rule has passed; the sentence says how many did so by approval.
    """
    outcome = worst(one.outcome for one in judged)
    code = ExitCode.CONFIG if outcome is Outcome.ERROR else _EXIT[outcome]
    allowed = ("mismatch",) if comparison.mismatches else ()
    if outcome is Outcome.INCONCLUSIVE and "inconclusive" in policy.allow:
        code, allowed = ExitCode.PASS, (*allowed, "inconclusive")
    deciding = [one for one in judged if one.outcome is outcome]
    return Verdict(
        outcome=outcome,
        rules=tuple(judged),
        sentence=_summary(outcome, judged, deciding),
        exit_code=int(code),
        policy=policy,
        comparison_id=comparison.id,
        reason=None if outcome is Outcome.PASS else deciding[0].reason,
        allowed=allowed,
    )


def _summary(outcome: Outcome, judged: Sequence[RuleVerdict], deciding: list[RuleVerdict]) -> str:
    approved = [one for one in judged if one.approved_by]
    if len(judged) == 1:
        return (
            f"{judged[0].sentence}; approved by {approved[0].approved_by}" if approved else judged[0].sentence
        )
    if outcome is Outcome.PASS and approved:
        held = len(judged) - len(approved)
        who = "; ".join(dict.fromkeys(str(one.approved_by) for one in approved))
        return f"{held} of {len(judged)} conditions hold, {len(approved)} accepted by approval: {who}"
    if outcome is Outcome.PASS:
        warned = sum(one.warned for one in judged)
        extra = f", {warned} with a warning" if warned else ""
        return f"all {len(judged)} conditions hold{extra}"
    verb = {Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "undecided", Outcome.ERROR: "in error"}[outcome]
    return f"{len(deciding)} of {plural(len(judged), 'condition')} {verb}; {deciding[0].sentence}"
