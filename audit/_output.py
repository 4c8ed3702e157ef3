"""Print a comparison and its verdict, and write the files that were asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from audit._terminal import note, say

if TYPE_CHECKING:
    from audit.config import AuditConfig
    from audit.records import Verdict
    from audit.store import Store


@dataclass(frozen=True)
class Outputs:
    """Where results go beside standard output, and in which form they are printed there."""

    html: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    as_json: bool = False


def emit(
    store: Store,
    comparison_id: str,
    verdict: Verdict | None,
    config: AuditConfig | None,
    outputs: Outputs,
) -> None:
    """Print a stored comparison with its verdict and write the wanted files.

    Parameters
    ----------
    store : Store
    comparison_id : str
    verdict : Verdict or None
    config : AuditConfig or None
        Names the probe file whose content a report may show.
    outputs : Outputs
        `markdown` is appended to, as CI summaries want it; the others are written anew.
    """
    from audit import report
    from audit.pipeline import report_context, write_html
    from audit.pipeline.files import writing

    comparison = store.comparison(comparison_id)
    context = report_context(store, comparison, verdict, config)
    render = report.to_json if outputs.as_json else report.to_text
    say(render(comparison, verdict, context=context))
    if outputs.html is not None:
        note(f"HTML report: {write_html(store, comparison, verdict, outputs.html, config=config)}")
    if outputs.markdown is not None:
        with writing(outputs.markdown), outputs.markdown.open("a", encoding="utf-8") as file:
            file.write(report.to_markdown(comparison, verdict, context=context) + "\n")
    if outputs.junit is not None:
        text = report.to_junit(comparison, verdict, context=context)
        with writing(outputs.junit):
            outputs.junit.write_text(text, encoding="utf-8")
