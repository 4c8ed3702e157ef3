"""A verdict as terminal text, Markdown, JSON, JUnit XML and self-contained HTML.

Everything here is pure: records in, a string out. Shares and shifts are printed as fractions of the
content mass without a leading zero (.05 is 5%), as in a policy and in the gate's sentences; ratios as
multiples (×). JSON keeps the unrounded numbers.
"""

from __future__ import annotations

from audit.report.context import ReportContext
from audit.report.examples import Example
from audit.report.html import SIZE_LIMIT, to_html
from audit.report.junit import to_junit
from audit.report.machine import JSON_SCHEMA_VERSION, to_json
from audit.report.markdown import to_markdown
from audit.report.tables import VerdictRow, compare_table, list_table, verdict_row
from audit.report.text import to_text

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
