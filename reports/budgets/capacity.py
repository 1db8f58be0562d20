"""What each budget serves where the study maximised capacity, and its latencies at the user's own rate."""

from __future__ import annotations

from math import log10

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..data.answer import Answer
from ..data.run_folder import RunFolder
from ..style import GREEN, INK, KIND_STYLES, MUTED, PAPER, SKY, TINT, Drawing, finish, log_ticks
from ..text import KIND_NAMES, budget_label, change, count, listing, rate
from .axes import latency_axis, name_recommended
from .trials import KIND_ORDER, at_recommended, highest, only_bounded


def capacities(folder: RunFolder) -> pd.DataFrame:
    """One row a budget of which a run says what it serves, in order, unlimited last.

    Columns: ``token_budget`` (NaN is unlimited), ``label``, ``kind``, ``capacity`` (median of its runs, of its repeats
    where those have one), ``low``, ``high``, ``at_most`` (the lowest bound, NaN beside a capacity), ``recommended``,
    ``equal`` (it counted as equal until the last step of the rule) and ``x``, its place on a logarithmic axis.
    """
    runs = at_recommended(folder.search, folder.answer)
    runs = runs[runs["capacity_qps"].notna() | only_bounded(runs)]
    group = {budget_label(budget) for budget in (folder.answer.decision.group if folder.answer.decision else ())}
    rows = []
    for budget, own in runs.groupby("token_budget", dropna=False):
        measured = own[own["capacity_qps"].notna()]
        repeats = measured[measured["role"] == "repeat"]
        values = (repeats if len(repeats) else measured)["capacity_qps"]
        rows.append(
            {
                "token_budget": budget,
                "label": budget_label(float(str(budget))),
                "kind": own["kind"].iloc[0],
                "capacity": values.median(),
                "low": values.min(),
                "high": values.max(),
                "at_most": np.nan if len(values) else own["capacity_at_most_qps"].min(),
            }
        )
    frame = pd.DataFrame(rows).sort_values("token_budget", na_position="last").reset_index(drop=True)
    frame["recommended"] = frame["label"] == folder.answer.marked_label
    frame["equal"] = frame["label"].isin(group) & (len(group) > 1)
    # Unlimited stands one octave above the largest budget.
    frame["x"] = frame["token_budget"].fillna(2 * frame["token_budget"].max())
    return frame


def draw_capacities(folder: RunFolder, budgets: pd.DataFrame) -> Drawing:
    """Capacity by budget, bounds apart from measurements; below it P99 TTFT and TBT at the user's own rate."""
    served = capacities(folder)
    answer = folder.answer
    panels = [
        (metric, f"P99 {name}, ms", limit_ms)
        for metric, name, limit_ms in (
            ("ttft_p99_ms", "TTFT", answer.slo.ttft_ms if answer.slo.ttft_quantile == 0.99 else None),
            ("tbt_p99_ms", "TBT", answer.slo.tbt_p99_ms),
        )
        if answer.own_rate_rps and budgets[metric].notna().any()
    ]
    figure = make_subplots(
        rows=1 + len(panels),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.05,
        row_heights=[0.5, 0.25, 0.25][: 1 + len(panels)],
    )
    _add_capacities(figure, served)
    _add_own_rate(figure, answer)
    places = dict(zip(served["label"], served["x"], strict=True))
    for row, (metric, label, limit_ms) in enumerate(panels, start=2):
        known = budgets[budgets[metric].notna() & budgets["label"].isin(served["label"])]
        figure.add_trace(_latencies(known, [places[name] for name in known["label"]], metric, label), row=row, col=1)
        if len(known):
            figure.update_yaxes(title_text=label, row=row, col=1, **latency_axis(known[metric], limit_ms))
        if limit_ms:
            figure.add_hline(y=limit_ms, line={"color": INK, "dash": "dash", "width": 1.25}, row=row, col=1, name="slo")
    _mark(figure, served, answer, rows=1 + len(panels))
    finish(figure, 380 + 150 * len(panels))
    top = float(np.nanmax([served["high"].max(), served["at_most"].max(), answer.own_rate_rps or 0.0]))
    figure.update_yaxes(title_text="capacity, requests/s", range=[0, 1.12 * top], row=1, col=1)
    figure.update_xaxes(**_budget_axis(served))
    figure.update_xaxes(title_text="token budget (log)", row=1 + len(panels), col=1)
    return Drawing(
        name="budgets",
        title="What each budget serves",
        finding=capacity_finding(folder, served),
        note=_note(panels=bool(panels), bounds=bool(served["at_most"].notna().any())),
        figure=figure,
    )


def _note(*, panels: bool, bounds: bool) -> str:
    note = "Capacity: the highest rate at which every limit holds."
    if bounds:
        note += (
            " Hollow triangles: one question was asked and answered with no, so the budget serves at most this much."
        )
    return note + (" Lower panels: the same budgets at your own rate; dashed, the limits." if panels else "")


def _add_capacities(figure: go.Figure, served: pd.DataFrame) -> None:
    for kind in KIND_ORDER:
        rows = served[(served["kind"] == kind) & served["capacity"].notna()]
        if len(rows):
            figure.add_trace(_measured(rows, kind), row=1, col=1)
    bounds = served[served["at_most"].notna()]
    if len(bounds):
        figure.add_trace(
            go.Scatter(
                x=bounds["x"],
                y=bounds["at_most"],
                customdata=bounds["label"],
                name="at most",
                mode="markers",
                marker={"symbol": "triangle-down-open", "size": 9, "color": MUTED},
                hovertemplate="budget %{customdata}: at most %{y:.3~g} requests/s<extra></extra>",
            ),
            row=1,
            col=1,
        )
    equal = served[served["equal"] & served["capacity"].notna()]
    if len(equal):
        ring = {"symbol": "circle-open", "size": 19, "color": GREEN, "line": {"width": 2}}
        figure.add_trace(
            go.Scatter(x=equal["x"], y=equal["capacity"], name="count as equal", mode="markers", marker=ring,
                       hoverinfo="skip"),
            row=1,
            col=1,
        )  # fmt: skip


def _measured(rows: pd.DataFrame, kind: str) -> go.Scatter:
    color, symbol = KIND_STYLES[kind]
    return go.Scatter(
        x=rows["x"],
        y=rows["capacity"],
        customdata=rows["label"],
        name=KIND_NAMES[kind],
        mode="markers",
        marker={"symbol": symbol, "size": 10, "color": color, "line": {"color": PAPER, "width": 1}},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": rows["high"] - rows["capacity"],
            "arrayminus": rows["capacity"] - rows["low"],
            "color": color,
            "thickness": 1.5,
            "width": 4,
        },
        hovertemplate=f"budget %{{customdata}} ({KIND_NAMES[kind]}): %{{y:.3~g}} requests/s<extra></extra>",
    )


def _latencies(rows: pd.DataFrame, x: list[float], metric: str, label: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=rows[metric],
        customdata=rows["label"],
        name=f"{label} at your rate",
        showlegend=False,
        mode="lines+markers",
        line={"color": SKY, "width": 1.5},
        marker={"size": 7, "color": SKY},
        hovertemplate=f"budget %{{customdata}}: {label} %{{y:.4~g}}<extra></extra>",
    )


def _add_own_rate(figure: go.Figure, answer: Answer) -> None:
    if not answer.own_rate_rps:
        return
    figure.add_hline(
        y=answer.own_rate_rps,
        line={"color": INK, "dash": "dot", "width": 1.5},
        name="own_rate",
        annotation={
            "text": f"your rate, {rate(answer.own_rate_rps)} requests/s",
            "font": {"size": 11.5, "color": INK},
            "name": "own_rate",
        },
        annotation_position="bottom left",
        row=1,
        col=1,
    )


def _mark(figure: go.Figure, served: pd.DataFrame, answer: Answer, *, rows: int) -> None:
    """A tinted band over the recommended budget in every panel, named once."""
    chosen = served[served["recommended"]]
    if chosen.empty:
        return
    x = float(chosen.iloc[0]["x"])
    for row in range(1, rows + 1):
        figure.add_vrect(
            x0=x / 1.06, x1=x * 1.06, fillcolor=TINT, line_width=0, layer="below", row=row, col=1, name="recommended"
        )
    words = "closest" if answer.status == "infeasible" else f"recommended: {chosen.iloc[0]['label']}"
    name_recommended(figure, log10(x), words)


def _budget_axis(served: pd.DataFrame) -> dict[str, object]:
    low, high = float(served["x"].min()), float(served["x"].max())
    largest = float(served["token_budget"].max())
    ticks = [2.0**power for power in range(4, 21) if low / 1.1 <= 2**power <= largest * 1.1] or [low]
    names = [f"{tick:,.0f}" for tick in ticks]
    if high > largest:
        ticks, names = [*ticks, high], [*names, "unlimited"]
    axis = log_ticks(low, high)
    return {**axis, "tickvals": ticks, "ticktext": names, "showgrid": False}


def capacity_finding(folder: RunFolder, served: pd.DataFrame) -> str:
    """Which budget serves most, what the recommended one gives away, and how its neighbours do."""
    measured = served[served["capacity"].notna()]
    bounds = count(int(served["at_most"].notna().sum()), "budget")
    if measured.empty:
        return f"No budget's capacity was measured; of {bounds} an upper bound is known."
    best = highest(measured, "capacity")
    own = folder.answer.own_rate_rps
    times = f", {best['capacity'] / own:.1f} times your rate of {rate(own)}" if own else ""
    most = f"serves most: {rate(best['capacity'])} requests/s{times}."
    chosen = measured[measured["recommended"]]
    if chosen.empty:
        return f"Budget {best['label']} {most}"
    row = chosen.iloc[0]
    if row["label"] == best["label"]:
        sentence = f"The recommended {best['label']} {most}"
    else:
        lost = change(row["capacity"] / best["capacity"] - 1)
        against = f"{lost.removeprefix('−')} less" if lost else "as much"
        sentence = (
            f"Budget {best['label']} {most} The recommended {row['label']} serves {rate(row['capacity'])}, {against}."
        )
    return " ".join(part for part in (sentence, _neighbours(served, row)) if part)


def _neighbours(served: pd.DataFrame, chosen: pd.Series) -> str:
    """What the next smaller and the next larger budget serve beside the chosen one."""
    place = int(str(chosen.name))
    parts = []
    for side in (place - 1, place + 1):
        if not 0 <= side < len(served):
            continue
        row = served.iloc[side]
        if row["capacity"] > 0:
            beside = change(row["capacity"] / chosen["capacity"] - 1) or "no difference"
            parts.append(f"{row['label']} serves {rate(row['capacity'])} ({beside})")
        else:
            parts.append(f"{row['label']} at most {rate(row['at_most'])}")
    return f"Next to it, {listing(parts)}." if parts else ""
