"""The figures about budgets: what each one costs and gains, its TBT distribution, its pipeline variance."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..data.run_folder import RunFolder
from ..findings import budget_finding, pipeline_finding, tail_finding
from ..style import GREEN, INK, KIND_STYLES, MUTED, PAPER, SKY, VERMILLION, Drawing, finish, log_ticks
from ..text import KIND_NAMES, budget_label, count, listing
from .axes import add_slo_line, finish_budget_axis, latency_axis, mark_recommended, value_axis
from .trials import KIND_ORDER, at_recommended

NOTHING_COMPLETE = "No trial ran to its end, so there is nothing to draw here; the trials and their reasons are below."
NOTHING_MEASURED = "No complete trial carries a TBT, a throughput or a bubble fraction, so nothing is drawn here."
NO_GAPS = (
    "No trial has a time between tokens: every request generated at most one token, so P99 TBT has no data "
    "and the SLO is neither met nor missed."
)
X_TITLE = "token budget (in order, not to scale)"


def draw_budgets(folder: RunFolder, budgets: pd.DataFrame) -> Drawing:
    """Budget against P99 TBT, throughput and bubble fraction; one marker a kind, error bars over repeats."""
    title = "Budget against latency, throughput and pipeline bubbles"
    name = "budgets"
    if budgets.empty:
        return Drawing(name=name, title=title, finding=NOTHING_COMPLETE)
    bubble = folder.answer.bubble_metric
    search = at_recommended(folder.search, folder.answer)
    pruned = _pruned_only(search, budgets)
    panels = [
        ("tbt_p99_ms", "P99 TBT, ms", 1.0, ".4~g"),
        ("total_tokens_per_s", "total tokens/s", 1.0, ",.0f"),
        (bubble, f"bubbles, {folder.answer.bubble_stages} stages, %", 100.0, ".1f"),
    ]
    panels = [panel for panel in panels if budgets[panel[0]].notna().any()]
    if not panels:
        return Drawing(name=name, title=title, finding=NOTHING_MEASURED)
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.055)
    for kind in KIND_ORDER:
        rows = budgets[budgets["kind"] == kind]
        if rows.empty:
            continue
        for row, (metric, label, scale, form) in enumerate(panels, start=1):
            figure.add_trace(_kind_markers(rows, kind, metric, label, scale, form, legend=row == 1), row=row, col=1)
    timed = panels[0][0] == "tbt_p99_ms"
    if len(pruned) and timed:
        figure.add_trace(_pruned_markers(pruned), row=1, col=1)
    order = pd.concat([budgets["token_budget"], pruned["token_budget"]]).drop_duplicates()
    labels = [budget_label(budget) for budget in order.sort_values(na_position="last")]
    mark_recommended(figure, labels, folder.answer, rows=len(panels))
    finish_budget_axis(figure, labels)
    finish(figure, 100 + 180 * len(panels))
    for row, (metric, label, scale, _) in enumerate(panels, start=1):
        figure.update_yaxes(title_text=label, row=row, col=1, **value_axis(budgets, metric, scale))
    if timed:
        latencies = pd.concat([budgets["tbt_p99_ms_low"], budgets["tbt_p99_ms_high"], pruned["tbt_p99_ms"]]).dropna()
        axis = latency_axis(latencies, folder.answer.slo.tbt_p99_ms)
        figure.update_yaxes(row=1, col=1, **axis)
        add_slo_line(figure, folder.answer.slo.tbt_p99_ms, log="type" in axis)
    figure.update_xaxes(title_text=X_TITLE, row=len(panels), col=1)
    repeated = budgets[budgets["num_runs"] > 1]
    stopped = search[search["state"] == "pruned"]
    unseen = stopped[~stopped["token_budget"].isin(order)]["token_budget"].drop_duplicates().sort_values()
    note = (
        f"Points are medians; bars run from the lowest to the highest run of the {count(len(repeated), 'budget')} that "
        "ran more than once."
        if len(repeated)
        else "Every budget ran once, so no spread is drawn."
    )
    if len(unseen):
        note += f" Not drawn, because stopped early: {listing([budget_label(budget) for budget in unseen])}."
    return Drawing(name=name, title=title, finding=budget_finding(folder, budgets), note=note, figure=figure)


def draw_tails(folder: RunFolder, budgets: pd.DataFrame) -> Drawing:
    """TBT distribution by budget: quartiles, P1–P99, P99.9 and the single worst gap."""
    name, title = "tails", "Distribution of time between tokens by budget"
    if budgets.empty:
        return Drawing(name=name, title=title, finding=NOTHING_COMPLETE)
    rows = budgets[budgets["tbt_max_ms"] > 0]
    if rows.empty:
        return Drawing(name=name, title=title, finding=NO_GAPS)
    figure = go.Figure()
    with_quantiles = rows[rows["quantiles"].notna()]
    if len(with_quantiles):
        levels = np.maximum(np.stack(list(with_quantiles["quantiles"])), 1e-6)
        figure.add_trace(_span(with_quantiles["label"], levels[:, 1], levels[:, 99], "P1–P99", SKY, 2.5))
        figure.add_trace(_span(with_quantiles["label"], levels[:, 25], levels[:, 75], "P25–P75", SKY, 10))
    marks = [
        ("tbt_p50_ms", "P50", "line-ew-open", INK, 13),
        ("tbt_p99_ms", "P99", "circle", SKY, 7),
        ("tbt_p999_ms", "P99.9", "diamond-open", GREEN, 11),
        ("tbt_max_ms", "largest gap", "x-thin-open", VERMILLION, 8),
    ]
    for metric, label, symbol, color, size in marks:
        figure.add_trace(
            go.Scatter(
                x=rows["label"],
                y=rows[metric],
                name=label,
                mode="markers",
                marker={"symbol": symbol, "size": size, "color": color, "line": {"color": color, "width": 2}},
                hovertemplate=f"budget %{{x}}<br>{label} %{{y:.4~g}} ms<extra></extra>",
            )
        )
    mark_recommended(figure, list(rows["label"]), folder.answer, rows=1)
    finish_budget_axis(figure, list(rows["label"]))
    finish(figure, 420)
    low = float(levels[:, 1].min()) if len(with_quantiles) else float(rows["tbt_p50_ms"].min())
    slo_ms = folder.answer.slo.tbt_p99_ms
    spread = [low, float(rows["tbt_max_ms"].max())] + ([slo_ms] if slo_ms else [])
    figure.update_yaxes(title_text="time between tokens, ms (log)", **log_ticks(min(spread), max(spread)))
    figure.update_xaxes(title_text=X_TITLE)
    add_slo_line(figure, slo_ms, log=True)
    note = (
        "Gaps between consecutive tokens of one request, pooled over all requests. "
        "P99.9 and the largest gap show a stall that the P99 can hide."
    )
    return Drawing(name=name, title=title, finding=tail_finding(folder, rows), note=note, figure=figure)


def draw_pipeline(folder: RunFolder, budgets: pd.DataFrame) -> Drawing:
    """Bubble fraction at 2, 4 and 8 pipeline stages and the variation of iteration time, by budget."""
    name, title = "pipeline", "Pipeline variance"
    metrics = [f"bubble_fraction_{stages}" for stages in (2, 4, 8)]
    if budgets.empty:
        return Drawing(name=name, title=title, finding=NOTHING_COMPLETE)
    if budgets[metrics].isna().all(axis=None):
        return Drawing(name=name, title=title, finding="No trial carries a bubble fraction, so nothing is drawn here.")
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.6, 0.4])
    styles = [(SKY, "circle", "dot"), (GREEN, "square", "dash"), (VERMILLION, "diamond", "solid")]
    for metric, (color, symbol, dash) in zip(metrics, styles, strict=True):
        stages = metric.rsplit("_", 1)[1]
        figure.add_trace(
            _line(budgets, metric, 100.0, f"{stages} stages", color, symbol, dash, ".1f", "%"), row=1, col=1
        )
    figure.add_trace(
        _line(budgets, "iteration_cv", 1.0, "CV of iteration time", MUTED, "triangle-down", "solid", ".2f", ""),
        row=2,
        col=1,
    )
    mark_recommended(figure, list(budgets["label"]), folder.answer, rows=2)
    finish_budget_axis(figure, list(budgets["label"]))
    finish(figure, 440)
    figure.update_yaxes(title_text="bubbles, %", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="CV", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text=X_TITLE, row=2, col=1)
    note = (
        "Bubbles: idle share of stages × span when each iteration is a micro-batch that takes its share of the layers "
        "on every stage and as many are in flight as there are stages. CV: standard deviation ÷ mean of iteration time."
    )
    return Drawing(name=name, title=title, finding=pipeline_finding(folder, budgets), note=note, figure=figure)


def _kind_markers(
    rows: pd.DataFrame, kind: str, metric: str, label: str, scale: float, form: str, *, legend: bool
) -> go.Scatter:
    color, symbol = KIND_STYLES[kind]
    value = rows[metric] * scale
    return go.Scatter(
        x=rows["label"],
        y=value,
        name=KIND_NAMES[kind],
        legendgroup=kind,
        showlegend=legend,
        mode="markers",
        marker={
            "symbol": symbol,
            "size": 12 if symbol == "triangle-up" else 10,
            "color": color,
            "line": {"color": PAPER, "width": 1},
        },
        error_y={
            "type": "data",
            "symmetric": False,
            "array": rows[f"{metric}_high"] * scale - value,
            "arrayminus": value - rows[f"{metric}_low"] * scale,
            "color": color,
            "thickness": 1.5,
            "width": 4,
        },
        customdata=np.stack(
            [rows[f"{metric}_low"] * scale, rows[f"{metric}_high"] * scale, rows["num_runs"], rows["ttft_p99_ms"]],
            axis=1,
        ),
        hovertemplate=(
            f"budget %{{x}} ({KIND_NAMES[kind]})<br>{label}: %{{y:{form}}}"
            f"<br>%{{customdata[0]:{form}}} to %{{customdata[1]:{form}}} over %{{customdata[2]}} run(s)"
            + ("<br>P99 TTFT %{customdata[3]:.4~g} ms" if rows["ttft_p99_ms"].notna().all() else "")
            + "<extra></extra>"
        ),
    )


def _pruned_only(search: pd.DataFrame, budgets: pd.DataFrame) -> pd.DataFrame:
    """The longest of the stopped trials of each budget that has no complete run, where it has a P99 so far."""
    pruned = search[(search["state"] == "pruned") & search["tbt_p99_ms"].notna()]
    pruned = pruned[~pruned["token_budget"].isin(budgets["token_budget"])]
    return pruned.sort_values("tbt_count").drop_duplicates("token_budget", keep="last")


def _pruned_markers(pruned: pd.DataFrame) -> go.Scatter:
    return go.Scatter(
        x=[budget_label(budget) for budget in pruned["token_budget"]],
        y=pruned["tbt_p99_ms"],
        name="stopped early (so far)",
        mode="markers",
        marker={"symbol": "x-thin-open", "size": 8, "color": MUTED, "line": {"color": MUTED, "width": 1.5}},
        hovertemplate="budget %{x}: stopped early<br>P99 TBT so far %{y:.4~g} ms<extra></extra>",
    )


def _line(
    rows: pd.DataFrame,
    metric: str,
    scale: float,
    label: str,
    color: str,
    symbol: str,
    dash: str,
    form: str,
    unit: str,
) -> go.Scatter:
    return go.Scatter(
        x=rows["label"],
        y=rows[metric] * scale,
        name=label,
        mode="lines+markers",
        line={"color": color, "dash": dash, "width": 1.75},
        marker={"symbol": symbol, "size": 7, "color": color},
        hovertemplate=f"budget %{{x}}<br>{label}: %{{y:{form}}}{unit}<extra></extra>",
    )


def _span(x: pd.Series, low: np.ndarray, high: np.ndarray, label: str, color: str, width: float) -> go.Scatter:
    """One vertical segment a budget, drawn as a single trace."""
    gap = np.full(len(low), np.nan)
    return go.Scatter(
        x=np.repeat(x.to_numpy(dtype=object), 3),
        y=np.stack([low, high, gap], axis=1).ravel(),
        name=label,
        mode="lines",
        line={"color": color, "width": width},
        hovertemplate=f"budget %{{x}}<br>{label}: %{{y:.4~g}} ms<extra></extra>",
    )
