"""Tables as plain text; rich is imported only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STYLES = {
    "PASS": "green",
    "WARN": "yellow",
    "FAIL": "red",
    "INCONCLUSIVE": "yellow",
    "ERROR": "magenta",
    "COMPARED": "blue",
}


def console(width: int, color: bool) -> Console:
    """Return a console that writes into memory and interprets no markup."""
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        no_color=not color,
        force_jupyter=False,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def written(screen: Console) -> str:
    """Return what was printed, without blanks at the ends of lines."""
    buffer = screen.file
    content = buffer.getvalue() if isinstance(buffer, io.StringIO) else ""
    return "\n".join(line.rstrip() for line in content.split("\n"))


def bullets(lines: Sequence[str], mark: str = " ") -> Table:
    """Return lines with a hanging indent behind `mark`."""
    from rich.table import Table
    from rich.text import Text

    drawn = Table.grid(padding=(0, 1, 0, 0))
    for line in lines:
        drawn.add_row(Text(mark), Text(line, overflow="fold"))
    return drawn


def table(
    headers: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    outcome: int | None = None,
    firm: Container[int] = (),
) -> Table:
    """Return a table; the column `outcome` is coloured, it and `firm` columns are never wrapped."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for index, header in enumerate(headers):
        drawn.add_column(
            Text(header), overflow="fold", no_wrap=index == outcome or index in firm, vertical="top"
        )
    for line in body:
        styled = [
            Text(cell, style=STYLES.get(cell, "") if i == outcome else "") for i, cell in enumerate(line)
        ]
        drawn.add_row(*styled)
    return drawn
