"""Where each budget wins: the best budget at each load, beside the recommended one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..costs.tables import Table
from ..data.answer import Answer, LoadWin
from ..style import BLUE, MUTED, ORANGE, Drawing, finish
from ..tables import Column
from ..text import budget_label, count, listing, milliseconds, percent, rate, seconds

#: Values whose ratio is above this are drawn on a logarithmic axis.
WIDE = 10.0

#: Panel → the P99 of the best budget and that of the recommended one, ms.
_PANELS: tuple[tuple[str, Callable[[LoadWin], float | None], Callable[[LoadWin], float | None]], ...] = (
    (
        "P99 TTFT, ms",
        lambda win: None if win.ttft_p99_s is None else 1e3 * win.ttft_p99_s,
        lambda win: None if win.recommended_ttft_p99_s is None else 1e3 * win.recommended_ttft_p99_s,
    ),
    ("P99 TBT, ms", lambda win: win.tbt_p99_ms, lambda win: win.recommended_tbt_p99_ms),
)


def draw_by_load(answer: Answer) -> Drawing | None:
    """P99 TTFT and TBT over load, of the best budget at each and of the recommended one; None without the data."""
    wins = sorted(answer.best_by_load, key=lambda win: win.load)
    if not wins:
        return None
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.09)
    for col, (label, best, own) in enumerate(_PANELS, start=1):
        named = f"recommended ({budget_label(answer.token_budget)})"
        figure.add_trace(
            _line(wins, [own(win) for win in wins], named, ORANGE, "square-open", label, col), row=1, col=col
        )
        figure.add_trace(
            _line(wins, [best(win) for win in wins], "best at this load", BLUE, "circle", label, col), row=1, col=col
        )
        values = [value for win in wins for value in (best(win), own(win)) if value]
        if values and max(values) > WIDE * min(values):
            figure.update_yaxes(title_text=f"{label} (log)", type="log", row=1, col=col)
        else:
            figure.update_yaxes(title_text=label, rangemode="tozero", row=1, col=col)
    loads = [100 * win.load for win in wins]
    margin = 0.09 * (max(loads) - min(loads)) or 5.0
    figure.update_xaxes(
        title_text="load, % of the best capacity",
        tickmode="array",
        tickvals=loads,
        ticktext=[f"{load:.0f}%<br>{rate(win.rate_rps)}/s" for load, win in zip(loads, wins, strict=True)],
        range=[min(loads) - margin, max(loads) + margin],
    )
    finish(figure, 360)
    note = "Under each load its rate in requests/s; beside each circle the budget that is best there."
    missed = [win for win in wins if win.recommended_holds is False]
    if missed:
        note += f" Grey squares: the recommended budget misses a limit there ({count(len(missed), 'load')})."
    return Drawing(
        name="by_load", title="Where each budget wins", finding=load_finding(answer, wins), note=note, figure=figure
    )


def _line(
    wins: list[LoadWin], values: list[float | None], name: str, color: str, symbol: str, label: str, col: int
) -> go.Scatter:
    best = symbol == "circle"
    budgets = [budget_label(win.token_budget) for win in wins]
    missed = [not best and win.recommended_holds is False for win in wins]
    return go.Scatter(
        x=[100 * win.load for win in wins],
        y=np.array([np.nan if value is None else value for value in values]),
        name=name,
        legendgroup=name,
        showlegend=col == 1,
        mode="lines+markers+text" if best else "lines+markers",
        text=budgets if best else None,
        textposition="bottom center",
        cliponaxis=False,
        line={"color": color, "width": 1.75, "dash": "solid" if best else "dash"},
        marker={"symbol": symbol, "size": 8 if best else 13, "color": [MUTED if miss else color for miss in missed]},
        hovertemplate=f"{name}<br>{label}: %{{y:.4~g}} at %{{x:.0f}}%<extra></extra>",
    )


def load_finding(answer: Answer, wins: list[LoadWin]) -> str:
    """At which loads the recommended budget is the best, which is elsewhere, and up to which load it holds."""
    own = budget_label(answer.token_budget)
    others = [win for win in wins if budget_label(win.token_budget) != own]
    if not others:
        sentence = f"The recommended {own} is the best budget at all {count(len(wins), 'load')}."
    else:
        parts = [f"{budget_label(win.token_budget)} at {percent(win.load, 0)}" for win in others]
        where = (
            f"at {len(wins) - len(others)} of {count(len(wins), 'load')}" if len(others) < len(wins) else "at no load"
        )
        sentence = (
            f"The recommended {own} is the best budget {where}; elsewhere it is {listing(parts)} of the best capacity."
        )
    held = [win.recommended_holds for win in wins]
    if all(holds is True for holds in held):
        return f"{sentence} It holds every limit at each of them."
    missed = [f"{percent(win.load, 0)}" for win in wins if win.recommended_holds is False]
    return f"{sentence} It misses a limit at {listing(missed)}." if missed else sentence


def load_tables(answer: Answer) -> list[Table]:
    """The table under the figure, a row a load; none without the data."""
    if not answer.best_by_load:
        return []
    own = budget_label(answer.token_budget)
    words = {True: "held", False: "missed", None: "no data"}
    return [
        Table(
            title="Best budget by load",
            columns=(
                Column(title="Load", unit="of the best capacity"),
                Column(title="Rate", unit="requests/s"),
                Column(title="Best budget", unit="tokens"),
                Column(title="P99 TTFT"),
                Column(title="P99 TBT"),
                Column(title="P99 TTFT", unit=f"at {own}"),
                Column(title="P99 TBT", unit=f"at {own}"),
                Column(title="Limits", unit=f"at {own}", numeric=False),
            ),
            rows=tuple(
                (
                    percent(win.load, 0),
                    rate(win.rate_rps),
                    budget_label(win.token_budget),
                    seconds(win.ttft_p99_s),
                    milliseconds(win.tbt_p99_ms),
                    seconds(win.recommended_ttft_p99_s),
                    milliseconds(win.recommended_tbt_p99_ms),
                    words[win.recommended_holds],
                )
                for win in sorted(answer.best_by_load, key=lambda win: win.load)
            ),
        )
    ]
