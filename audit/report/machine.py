"""A verdict as JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from audit.records import Comparison, RuleVerdict, Verdict
from audit.report.context import ReportContext
from audit.report.measured import false_alarm_lines, false_alarms_of

JSON_SCHEMA_VERSION = 1
"""Raised when a key changes its meaning or goes away; new keys do not raise it."""


def plain(value: Any) -> Any:
    """Return `value` as JSON types; records become objects, numbers that are not finite null.

    Examples
    --------
    >>> plain({"x": np.float64("nan"), "y": (1, np.int64(2))})
    {'x': None, 'y': [1, 2]}
    """
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(entry) for entry in value)
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(entry) for entry in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def _rule(found: RuleVerdict) -> dict[str, Any]:
    return {"label": found.rule.label, **plain(found)}


def _false_alarms(comparison: Comparison | None, verdict: Verdict | None) -> dict[str, Any] | None:
    lines = false_alarm_lines(comparison, verdict)
    return {"sentences": lines, "measured": plain(false_alarms_of(comparison))} if lines else None


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.status,
        "exit_code": int(verdict.exit_code),
        "sentence": verdict.sentence,
        "reason": verdict.reason,
        "allowed": plain(verdict.allowed),
        "comparison_id": verdict.comparison_id,
        "policy_digest": verdict.policy.digest,
    }


def to_json(
    comparison: Comparison | None, verdict: Verdict | None, *, context: ReportContext | None = None
) -> str:
    """Return everything that is known about a verdict as JSON, with sorted keys.

    Top-level keys, which stay stable within one `schema_version`:

    ``schema_version``
        :data:`JSON_SCHEMA_VERSION`.
    ``verdict``
        ``outcome`` (PASS, FAIL, INCONCLUSIVE, ERROR), ``exit_code``, ``sentence``, ``reason``,
        ``allowed``, ``comparison_id``, ``policy_digest``; null for a comparison that no policy judged.
    ``policy``
        The fields of :class:`audit.records.Policy`.
    ``false_alarms``
        What is known about the false alarms of the excess rules: ``sentences``, and ``measured``, the
        fields of :class:`audit.report.measured.FalseAlarms`, null where none was measured; null without
        an excess rule that was tested.
    ``rules``
        In the policy's order: ``label`` and the fields of :class:`audit.records.RuleVerdict`.
    ``comparison``
        The fields of :class:`audit.records.Comparison`, every cell among them; null when none was made.
    ``context``
        The fields of :class:`ReportContext`; null when none was given.

    Shares, shifts, limits and intervals are fractions of content mass (0.02 is two percentage points).

    Parameters
    ----------
    comparison : Comparison or None
    verdict : Verdict or None
    context : ReportContext or None

    Returns
    -------
    str
        The same string for equal records; without NaN or Infinity; ASCII only.
    """
    document = {
        "schema_version": JSON_SCHEMA_VERSION,
        "verdict": _verdict(verdict) if verdict is not None else None,
        "policy": plain(verdict.policy) if verdict is not None else None,
        "false_alarms": _false_alarms(comparison, verdict),
        "rules": [_rule(found) for found in verdict.rules] if verdict is not None else [],
        "comparison": plain(comparison),
        "context": plain(context),
    }
    return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
