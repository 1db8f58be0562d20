"""Colours, markers and the shared layout of the figures.

Series colours are Okabe and Ito's colour-blind safe set; every series also has a marker, dash or pattern of its own.
The neutral colours are placeholders that report.js replaces by those of the light, dark or print theme.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10

import plotly.graph_objects as go

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
#: Placeholders: text, quiet text, grid lines, the page under the figure, a tint behind what is recommended.
INK, MUTED, GRID, PAPER, TINT = "#010203", "#010204", "#010205", "#010206", "#010207"

KIND_STYLES = {
    "aligned": (BLUE, "circle"),
    "plus_one": (VERMILLION, "triangle-up"),
    "mid_tile": (ORANGE, "square"),
    "whole_prompt": (PURPLE, "diamond"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure of the report; ``figure`` is None where the run folder holds nothing to draw, and ``finding``
    then says so."""

    name: str
    title: str
    finding: str
    note: str = ""
    figure: go.Figure | None = None


_AXIS = {
    "gridcolor": GRID,
    "linecolor": MUTED,
    "tickcolor": MUTED,
    "zeroline": False,
    "tickfont": {"color": MUTED, "size": 11.5},
    "title": {"font": {"size": 12, "color": MUTED}, "standoff": 10},
    "automargin": True,
}
#: Transparent, legend above the panels, units in the axis titles. A template, so that every panel takes it up.
_TEMPLATE = go.layout.Template(
    layout={
        "autosize": True,
        "showlegend": True,
        "margin": {"l": 64, "r": 16, "t": 44, "b": 52},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12.5, "color": INK},
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
            "font": {"size": 12, "color": INK},
        },
        "hoverlabel": {
            "align": "left",
            "bgcolor": PAPER,
            "bordercolor": MUTED,
            "font": {"family": FONT, "size": 12, "color": INK},
        },
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": MUTED, "activecolor": INK},
        "xaxis": {**_AXIS, "showline": True, "ticks": "outside", "ticklen": 4},
        "yaxis": _AXIS,
    }
)


def finish(figure: go.Figure, height: int) -> None:
    """Give ``figure`` the report's layout and its height in pixels."""
    figure.layout.template = _TEMPLATE
    figure.layout.height = height


def log_ticks(low: float, high: float) -> dict[str, object]:
    """A logarithmic axis over low…high with ticks at 1, 2 and 5, printed as plain numbers."""
    low, high = low / 1.25, high * 1.25
    ticks = [m * 10.0**e for e in range(floor(log10(low)) - 1, ceil(log10(high)) + 1) for m in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) > 9:
        inside = [tick for tick in inside if f"{tick:e}"[0] == "1"]
    return {
        "type": "log",
        "range": [log10(low), log10(high)],
        "tickmode": "array",
        "tickvals": inside,
        "ticktext": [f"{tick:,.10g}" for tick in inside],
    }
