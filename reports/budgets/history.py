"""The study in the order it ran: every trial with its outcome, and the best feasible objective so far."""

from __future__ import annotations

from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..data.run_folder import RunFolder
from ..style import BLUE, GREEN, MUTED, ORANGE, VERMILLION, Drawing, finish
from ..text import budget_label, count, listing, rate
from .trials import highest, only_bounded

BOUNDED = "capacity bounded"

#: Objective → its column, unit and noun.
THROUGHPUT = ("total_tokens_per_s", "total tokens/s", "throughput")
OBJECTIVES = {"capacity": ("capacity_qps", "requests/s", "capacity"), "throughput": THROUGHPUT}

#: Outcome → (colour, marker). Shapes differ so that none rests on colour alone.
OUTCOMES = {
    "meets the SLO": (BLUE, "circle"),
    "misses the SLO": (ORANGE, "circle-open"),
    "no data": (MUTED, "square-open"),
    "stopped early": (MUTED, "x-thin-open"),
    BOUNDED: (MUTED, "triangle-down-open"),
    "failed": (VERMILLION, "x"),
}


def outcome(state: str, feasible: bool | None) -> str:
    """The outcome of a trial in words."""
    if state == "failed":
        return "failed"
    if state == "pruned":
        return "stopped early"
    if feasible is None:
        return "no data"
    return "meets the SLO" if feasible else "misses the SLO"


def draw_history(folder: RunFolder) -> Drawing:
    """Trials in order of their start: the budget each tried and how it ended, with the best objective so far."""
    name, title = "history", "Study history"
    rows = folder.search.sort_values("started_at", kind="stable").reset_index(drop=True)
    if rows.empty:
        return Drawing(name=name, title=title, finding="The study holds no trial.")
    rows["order"] = np.arange(1, len(rows) + 1)
    rows["label"] = [budget_label(budget) for budget in rows["token_budget"]]
    rows["outcome"] = [outcome(row["state"], row["feasible"]) for _, row in rows.iterrows()]
    rows.loc[only_bounded(rows), "outcome"] = BOUNDED
    metric, unit, _ = _objective(folder)
    measured = bool(rows[metric].notna().any())
    figure = make_subplots(rows=1 + measured, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    for label, (color, symbol) in OUTCOMES.items():
        part = rows[rows["outcome"] == label]
        if part.empty:
            continue
        line = {"color": color, "width": 0 if symbol == "x" else 2}
        marker = {"symbol": symbol, "size": 9, "color": color, "line": line}
        text = [escape(f"{row['run']} ({row['role']})") + _reason(row) for _, row in part.iterrows()]
        figure.add_trace(
            go.Scatter(
                x=part["order"],
                y=part["label"],
                name=label,
                legendgroup=label,
                showlegend=True,
                mode="markers",
                marker=marker,
                text=text,
                hovertemplate=f"%{{text}}<br>budget %{{y}}: {label}<extra></extra>",
            ),
            row=1,
            col=1,
        )
        if part[metric].notna().any() and label != "failed":
            figure.add_trace(
                go.Scatter(
                    x=part["order"],
                    y=part[metric],
                    name=label,
                    legendgroup=label,
                    showlegend=False,
                    mode="markers",
                    marker=marker,
                    text=text,
                    hovertemplate=f"%{{text}}<br>%{{y:,.4~g}} {unit}<extra></extra>",
                ),
                row=2,
                col=1,
            )
    best = _best_so_far(rows, metric)
    if best.notna().any():
        figure.add_trace(
            go.Scatter(
                x=rows["order"],
                y=best,
                name="best so far",
                mode="lines",
                line={"color": GREEN, "width": 1.75, "shape": "hv"},
                hovertemplate=f"best after run %{{x}}: %{{y:,.4~g}} {unit}<extra></extra>",
            ),
            row=2,
            col=1,
        )
    order = rows.drop_duplicates("label").sort_values("token_budget", na_position="last")
    finish(figure, 280 + 200 * measured)
    figure.update_yaxes(
        title_text="token budget",
        type="category",
        categoryorder="array",
        categoryarray=list(order["label"]),
        row=1,
        col=1,
    )
    if measured:
        figure.update_yaxes(title_text=unit, row=2, col=1)
    figure.update_xaxes(range=[0.4, len(rows) + 0.6])
    figure.update_xaxes(title_text="run, in the order they started", tickformat="d", row=1 + measured, col=1)
    return Drawing(
        name=name,
        title=title,
        finding=history_finding(folder, rows),
        note="Each run counts, the interleaved repeats of the contenders included." if measured else "",
        figure=figure,
    )


def history_finding(folder: RunFolder, rows: pd.DataFrame) -> str:
    """How many trials ended how, and when the best one was found."""
    trials = rows[rows["role"] == "search"]
    numbers = trials["state"].where(~only_bounded(trials), "bounded").value_counts()
    endings = (
        ("complete", "ran to the end"),
        ("bounded", "ended with a bound on their capacity"),
        ("pruned", "stopped early"),
        ("failed", "failed"),
    )
    states = [f"{numbers[state]:,} {words}" for state, words in endings if numbers.get(state, 0)]
    repeats = int((rows["role"] == "repeat").sum())
    tail = f", then {count(repeats, 'repeat')} of the contenders" if repeats else ""
    sentence = f"{count(len(trials), 'trial')}: {listing(states)}{tail}."
    feasible = trials[(trials["state"] == "complete") & trials["feasible"].isin([True])]
    metric, unit, noun = _objective(folder)
    feasible = feasible[feasible[metric].notna()]
    if feasible.empty:
        return sentence
    best = highest(feasible, metric)
    place = trials.index.get_loc(best.name)
    within = feasible[feasible[metric] >= 0.99 * best[metric]].iloc[0]
    early = trials.index.get_loc(within.name)
    return (
        f"{sentence} Trial {int(str(place)) + 1} found the highest feasible {noun}, "
        f"{rate(best[metric])} {unit} (budget {best['label']})"
        + (f"; trial {int(str(early)) + 1} was already within 1% of it." if early != place else ".")
    )


def _objective(folder: RunFolder) -> tuple[str, str, str]:
    """The column that the study maximised, where its trials have it, with its unit and what it is called."""
    metric, unit, noun = OBJECTIVES.get(folder.answer.objective, THROUGHPUT)
    return (metric, unit, noun) if metric in folder.search and folder.search[metric].notna().any() else THROUGHPUT


def _best_so_far(rows: pd.DataFrame, metric: str) -> pd.Series:
    feasible = (rows["state"] == "complete") & rows["feasible"].isin([True]) & (rows["role"] == "search")
    return rows[metric].where(feasible).cummax().ffill()


def _reason(row: pd.Series) -> str:
    reason = str(row["reason"])
    return "<br>" + escape(reason if len(reason) <= 160 else f"{reason[:157]}…") if reason else ""
