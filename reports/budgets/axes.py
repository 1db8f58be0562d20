"""What the figures over budgets share: the axis of budgets, the recommended band, the SLO line, value ranges."""

from __future__ import annotations

from math import log10

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ..data.answer import Answer
from ..style import INK, TINT, log_ticks
from ..text import milliseconds

#: A latency axis turns logarithmic where its values span more than this factor.
LOG_SPAN = 4.0


def mark_recommended(figure: go.Figure, labels: list[str], answer: Answer, *, rows: int) -> None:
    """A tinted band over the recommended budget in every panel, named once."""
    chosen = answer.marked_label
    if chosen not in labels:
        return
    place = labels.index(chosen)
    for row in range(1, rows + 1):
        axis = "" if row == 1 else str(row)
        figure.add_shape(
            type="rect",
            xref=f"x{axis}",
            yref=f"y{axis} domain",
            x0=place - 0.45,
            x1=place + 0.45,
            y0=0,
            y1=1,
            fillcolor=TINT,
            line_width=0,
            layer="below",
            name="recommended",
        )
    name_recommended(figure, place, "closest" if answer.status == "infeasible" else "recommended")


def name_recommended(figure: go.Figure, x: float, words: str) -> None:
    """``words`` above the first panel at ``x``, in the units of its axis (the logarithm on a logarithmic one)."""
    figure.add_annotation(
        text=f"<b>{words}</b>",
        x=x,
        xref="x",
        y=1,
        yref="y domain",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11.5, "color": INK},
        name="recommended",
    )


def add_slo_line(figure: go.Figure, slo_ms: float | None, *, log: bool) -> None:
    """The SLO across the first panel, with its value at the left."""
    if not slo_ms:
        return
    figure.add_shape(
        type="line",
        xref="x domain",
        yref="y",
        x0=0,
        x1=1,
        y0=slo_ms,
        y1=slo_ms,
        line={"color": INK, "dash": "dash", "width": 1.5},
        name="slo",
    )
    figure.add_annotation(
        text=f"P99 SLO {milliseconds(slo_ms)}",
        xref="x domain",
        yref="y",
        x=0,
        # An annotation on a logarithmic axis stands at an exponent, a shape at a value.
        y=log10(slo_ms) if log else slo_ms,
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11.5, "color": INK},
        name="slo",
    )


def finish_budget_axis(figure: go.Figure, labels: list[str]) -> None:
    """One evenly spaced place a budget: edge and edge + 1 stay apart, unlimited has a place."""
    figure.update_xaxes(
        type="category",
        categoryorder="array",
        categoryarray=labels,
        range=[-0.6, len(labels) - 0.4],
        showgrid=False,
    )


def latency_axis(values: pd.Series, slo_ms: float | None) -> dict[str, object]:
    """An axis for latencies in ms that holds the SLO too: logarithmic where they span a wide range."""
    low, high = float(values.min()), float(values.max())
    if slo_ms:
        low, high = min(low, slo_ms), max(high, slo_ms)
    if low > 0 and high > LOG_SPAN * low:
        return log_ticks(low, high)
    margin = 0.12 * (high - low) or 0.05 * high
    return {"range": [max(low - margin, 0.0), high + 1.5 * margin]}


def value_axis(budgets: pd.DataFrame, metric: str, scale: float) -> dict[str, object]:
    """A range that does not blow differences below 10% up."""
    values = budgets[[f"{metric}_low", f"{metric}_high"]].to_numpy(dtype=float) * scale
    values = values[np.isfinite(values)]
    if not len(values):
        return {}
    low, high = float(values.min()), float(values.max())
    margin = max(0.12 * (high - low), 0.05 * high - 0.5 * (high - low), 1e-9)
    return {"range": [max(low - margin, 0.0), high + margin]}
