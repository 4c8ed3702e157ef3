"""What every chart shares: sizes, letters, tick labels, and the diverging colour scale."""

from __future__ import annotations

from typing import Any

import altair as alt

from dashboards.theme import OUTCOMES, SANS, SHAPES, Palette

AXIS = 52
"""Pixels that the axis and its title take below a plot."""
SIGNED = "datum.value == 0 ? '0' : replace(format(datum.value, '+.2~r'), '0.', '.')"
"""Tick labels as the sentences print numbers: +.05."""
PLAIN = "datum.value == 0 ? '0' : replace(format(datum.value, '.3~r'), '0.', '.')"
"""The same for numbers without a sign: .05."""


def finish(chart: alt.LayerChart, height: int, colours: Palette) -> alt.LayerChart:
    """Set size and letters."""
    return (
        chart.properties(width="container", height=height + AXIS)
        .configure(background="transparent", aria=False, font=SANS)  # first: it replaces what is configured
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=colours.ink,
            titleColor=colours.soft,
            titleFontWeight="normal",
            labelFontSize=12,
            titleFontSize=13,
            titlePadding=10,
            domainColor=colours.line,
            tickColor=colours.line,
            gridColor=colours.line,
        )
        .configure_legend(
            labelColor=colours.soft,
            titleColor=colours.soft,
            titleFontWeight="normal",
            labelFontSize=12,
            titleFontSize=13,
        )
        .configure_mark(aria=False)
    )


def names(order: list[str] | tuple[str, ...]) -> alt.Y:
    """Return an axis of region names from top to bottom."""
    return alt.Y(
        "name:N",
        sort=list(order),
        title=None,
        axis=alt.Axis(labelLimit=190, ticks=False, domain=False, labelPadding=10),
    )


def diverging(largest: float, colours: Palette, *, title: str, **legend: Any) -> alt.Color:
    """Return the colours of a signed value on one symmetric scale around zero."""
    return alt.Color(
        "value:Q",
        scale=alt.Scale(
            domain=[-largest, 0, largest],
            range=[colours.down, colours.middle, colours.up],
            interpolate="lab",
        ),
        legend=alt.Legend(title=title, gradientLength=110, labelExpr=SIGNED, **legend),
    )


def outcome_colour(colours: Palette) -> alt.Color:
    """Return the colours of the outcomes."""
    return alt.Color(
        "outcome:N", scale=alt.Scale(domain=list(OUTCOMES), range=list(colours.outcomes)), legend=None
    )


def outcome_shape() -> alt.Shape:
    """Return the shapes of the outcomes, so that none is told by its colour alone."""
    return alt.Shape("outcome:N", scale=alt.Scale(domain=list(OUTCOMES), range=list(SHAPES)), legend=None)
