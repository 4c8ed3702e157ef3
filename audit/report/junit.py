"""A verdict as JUnit XML for CI systems."""

from __future__ import annotations

from xml.etree import ElementTree

from audit.records import Comparison, Outcome, RuleVerdict, Verdict, worst
from audit.report import facts, rows
from audit.report.context import ReportContext
from audit.report.wording import clean, clip

_ELEMENTS = {Outcome.FAIL: "failure", Outcome.ERROR: "error", Outcome.INCONCLUSIVE: "skipped"}


def _case(suite: ElementTree.Element, name: str, outcome: Outcome, message: str, details: str) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="audit.gate", name=clip(name, 200), time="0")
    if outcome in _ELEMENTS:
        found = ElementTree.SubElement(case, _ELEMENTS[outcome], message=clip(message, rows.SENTENCE_WIDTH))
        if outcome is not Outcome.INCONCLUSIVE:
            found.set("type", outcome.value)
            found.text = details
    ElementTree.SubElement(case, "system-out").text = details


def _details(found: RuleVerdict) -> str:
    row = rows.rule_row(found)
    numbers = (
        f"{row.levels}; {row.value} {row.excess} {row.interval}; limit {row.limits}; "
        f"noise floor {row.noise}; detectable {row.detectable}; probes {row.probes}"
    )
    return "\n".join([f"{row.outcome}: {row.sentence}", numbers, *row.notes])


def _names(verdict: Verdict | None) -> list[str]:
    names = [f"{found.rule.label} [{rows.where_rule(found)}]" for found in rows.rules_of(verdict)]
    return [
        f"{name} #{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)
    ]


def to_junit(
    comparison: Comparison | None, verdict: Verdict | None, *, context: ReportContext | None = None
) -> str:
    """Return the verdict as JUnit XML: one suite for the policy, one case for each rule.

    FAIL is a ``failure``, ERROR an ``error``, INCONCLUSIVE ``skipped``; each case carries its sentence
    and its numbers in ``system-out``. When the verdict is not the worst of its rules (nothing was
    evaluated, identical maps, an allowed mismatch), a case named ``verdict`` says so.

    Parameters
    ----------
    comparison : Comparison or None
    verdict : Verdict or None
        None for a comparison that no policy judged: one skipped case.
    context : ReportContext or None

    Returns
    -------
    str
        Well-formed XML 1.0; control characters are replaced by visible marks.
    """
    title = (context.title if context is not None else None) or _suite_name(verdict)
    root = ElementTree.Element("testsuites", name="rollout-audit")
    suite = ElementTree.SubElement(root, "testsuite", name=clip(title, 200), time="0")
    _properties(suite, comparison, verdict, context)
    for found, name in zip(rows.rules_of(verdict), _names(verdict), strict=True):
        _case(suite, name, found.outcome, rows.sentence_of(found), _details(found))
    outcome = verdict.outcome if verdict is not None else Outcome.INCONCLUSIVE
    if not rows.rules_of(verdict) or worst(f.outcome for f in rows.rules_of(verdict)) is not outcome:
        sentence = clip(rows.headline(comparison, verdict), rows.SENTENCE_WIDTH)
        _case(suite, "verdict", outcome, sentence, sentence)
    for element in (root, suite):
        _count(element, suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _suite_name(verdict: Verdict | None) -> str:
    return f"policy {verdict.policy.digest[:12]}" if verdict is not None else "no policy"


def _count(element: ElementTree.Element, suite: ElementTree.Element) -> None:
    for attribute, path in (
        ("tests", "testcase"),
        ("failures", "testcase/failure"),
        ("errors", "testcase/error"),
        ("skipped", "testcase/skipped"),
    ):
        element.set(attribute, str(len(suite.findall(path))))


def _properties(
    suite: ElementTree.Element,
    comparison: Comparison | None,
    verdict: Verdict | None,
    context: ReportContext | None,
) -> None:
    values = {"verdict": rows.status(verdict), "compared": facts.compared(comparison)}
    if verdict is not None:
        values["exit_code"] = str(int(verdict.exit_code))
        values["policy_digest"] = verdict.policy.digest
        values["comparison"] = verdict.comparison_id or ""
    if context is not None and context.log_head:
        values["log_head"] = context.log_head
    holder = ElementTree.SubElement(suite, "properties")
    for name, value in values.items():
        ElementTree.SubElement(holder, "property", name=name, value=clean(value))
