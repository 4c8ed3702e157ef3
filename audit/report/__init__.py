"""A verdict as terminal text, Markdown, JSON, JUnit XML and self-contained HTML.

Everything here is pure: records in, a string out. Shares are printed as per cent, shifts and excess
shifts as percentage points (pp), ratios as multiples (×), distances as plain numbers; JSON keeps the
unrounded fractions.
"""

from __future__ import annotations

from audit.report.context import ReportContext
from audit.report.examples import Example
from audit.report.html import SIZE_LIMIT, to_html
from audit.report.machine import JSON_SCHEMA_VERSION, to_json
from audit.report.junit import to_junit
from audit.report.markdown import to_markdown
from audit.report.text import VerdictRow, compare_table, list_table, to_text, verdict_row

__all__ = [
    "JSON_SCHEMA_VERSION",
    "SIZE_LIMIT",
    "Example",
    "ReportContext",
    "VerdictRow",
    "compare_table",
    "list_table",
    "to_html",
    "to_json",
    "to_junit",
    "to_markdown",
    "to_text",
    "verdict_row",
]
