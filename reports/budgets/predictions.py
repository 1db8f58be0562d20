"""What the latency model expected of each budget beside what its runs measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..data.answer import Answer
from ..data.run_folder import RunFolder
from ..style import BLUE, INK, ORANGE, PAPER, Drawing, finish
from ..text import budget_label, change, count, percent
from .axes import add_slo_line, finish_budget_axis, latency_axis, mark_recommended
from .figures import X_TITLE

ABSENT = "No run carries a prediction, so there is nothing to compare the measured figures with."


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A measured column of trials.parquet and the one that predicts it."""

    measured: str
    predicted: str
    words: str
    axis: str
    form: str


METRICS = (
    Metric(measured="tbt_p99_ms", predicted="predicted_tbt_p99_ms", words="P99 TBT", axis="P99 TBT, ms", form=".4~g"),
    Metric(
        measured="total_tokens_per_s",
        predicted="predicted_total_tokens_per_s",
        words="throughput",
        axis="total tokens/s",
        form=",.0f",
    ),
)
#: Below this relative difference everywhere, prediction and run come from one and the same model.
SAME = 1e-6


def prediction_errors(folder: RunFolder, metric: Metric) -> pd.DataFrame:
    """Complete runs with both figures: ``run``, ``token_budget``, ``label``, ``measured``, ``predicted``, ``error``
    (predicted ÷ measured − 1), in order of budget, unlimited last."""
    runs = folder.search[folder.search["state"] == "complete"]
    runs = runs[(runs[metric.measured] > 0) & (runs[metric.predicted] > 0)]
    return pd.DataFrame(
        {
            "run": runs["run"],
            "token_budget": runs["token_budget"],
            "label": [budget_label(budget) for budget in runs["token_budget"]],
            "measured": runs[metric.measured],
            "predicted": runs[metric.predicted],
            "error": runs[metric.predicted] / runs[metric.measured] - 1,
        }
    ).sort_values("token_budget", na_position="last", kind="stable")


def draw_predictions(folder: RunFolder) -> Drawing:
    """Measured and predicted P99 TBT and throughput by budget, and the relative error of each prediction."""
    name, title = "predictions", "Predicted against measured"
    found = [(metric, prediction_errors(folder, metric)) for metric in METRICS]
    found = [(metric, errors) for metric, errors in found if len(errors)]
    if not found:
        return Drawing(name=name, title=title, finding=ABSENT)
    rows = 2 * len(found)
    figure = make_subplots(
        rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.6, 0.4] * len(found)
    )
    for place, (metric, errors) in enumerate(found):
        _add_pairs(figure, metric, errors, row=2 * place + 1, legend=place == 0)
    order = pd.concat([errors for _, errors in found])[["token_budget", "label"]].drop_duplicates("label")
    labels = list(order.sort_values("token_budget", na_position="last")["label"])
    mark_recommended(figure, labels, folder.answer, rows=rows)
    finish_budget_axis(figure, labels)
    finish(figure, 110 + 260 * len(found))
    for place, (metric, errors) in enumerate(found):
        values = pd.concat([errors["measured"], errors["predicted"]])
        slo_ms = folder.answer.slo.tbt_p99_ms if metric.measured == "tbt_p99_ms" else None
        axis = latency_axis(values, slo_ms)
        figure.update_yaxes(title_text=metric.axis, row=2 * place + 1, col=1, **axis)
        if slo_ms and place == 0:
            add_slo_line(figure, slo_ms, log="type" in axis)
        widest = max(100 * float(errors["error"].abs().max()), 1.0) * 1.25
        figure.update_yaxes(
            title_text="error, %", range=[-widest, widest], nticks=5, tickformat="~g", row=2 * place + 2, col=1
        )
        figure.add_hline(
            y=0, row=2 * place + 2, col=1, line={"color": INK, "width": 1.25}, layer="below", name="identity"
        )
    figure.update_xaxes(title_text=X_TITLE, row=rows, col=1)
    note = (
        "Error: predicted ÷ measured − 1 of each run, the line at 0 is a prediction come true. Points are medians of "
        "the runs of a budget; bars run from the lowest to the highest."
    )
    return Drawing(name=name, title=title, finding=prediction_finding(folder), note=note, figure=figure)


def prediction_finding(folder: RunFolder) -> str:
    """Median and worst relative error of both predictions, and whether they get the SLO right."""
    found = [(metric, prediction_errors(folder, metric)) for metric in METRICS]
    found = [(metric, errors) for metric, errors in found if len(errors)]
    if not found:
        return ABSENT
    first = found[0][1]
    over = f"{count(len(first), 'run')} of {count(first['label'].nunique(), 'budget')}"
    if all(float(errors["error"].abs().max()) < SAME for _, errors in found):
        return f"Predicted and measured are equal in all {over}, as on a modelled clock: this says nothing on accuracy."
    parts = "; the prediction of ".join(_error_words(metric, errors) for metric, errors in found)
    return f"Over {over} the prediction of {parts}.{_slo_sentence(folder.answer, found)}"


def _error_words(metric: Metric, errors: pd.DataFrame) -> str:
    size = errors["error"].abs()
    worst = errors.iloc[int(size.argmax())]
    if not change(worst["error"]):
        return f"{metric.words} is exact"
    most = f"{change(worst['error'])} (budget {worst['label']})"
    return f"{metric.words} is {percent(float(size.median()))} off (median), at worst {most}"


def _slo_sentence(answer: Answer, found: list[tuple[Metric, pd.DataFrame]]) -> str:
    limit_ms = answer.slo.tbt_p99_ms
    errors = next((errors for metric, errors in found if metric.measured == "tbt_p99_ms"), None)
    if not limit_ms or errors is None:
        return ""
    budgets = errors.groupby("label", sort=False)[["measured", "predicted"]].median()
    wrong = budgets[(budgets["measured"] <= limit_ms) != (budgets["predicted"] <= limit_ms)]
    if wrong.empty:
        return f" It puts all {count(len(budgets), 'budget')} on the right side of the SLO."
    return f" It puts {len(wrong)} of {count(len(budgets), 'budget')} on the wrong side of the SLO."


def _add_pairs(figure: go.Figure, metric: Metric, errors: pd.DataFrame, *, row: int, legend: bool) -> None:
    groups = errors.groupby("label", sort=False)[["measured", "predicted", "error"]]
    middle, low, high = groups.median(), groups.min(), groups.max()
    series = (
        (row, "measured", "measured", BLUE, "circle", 1.0),
        (row, "predicted", "predicted", ORANGE, "diamond-open", 1.0),
        (row + 1, "error", "error of the prediction", INK, "square", 100.0),
    )
    for at, column, name, color, symbol, scale in series:
        unit = "%{y:+.2~f}%" if column == "error" else f"%{{y:{metric.form}}}"
        figure.add_trace(
            go.Scatter(
                x=list(middle.index),
                y=scale * middle[column],
                name=name,
                legendgroup=column,
                showlegend=legend,
                mode="markers",
                marker={
                    "symbol": symbol,
                    "size": 10 if "open" in symbol else 7,
                    "color": color,
                    "line": {"color": color if "open" in symbol else PAPER, "width": 2 if "open" in symbol else 1},
                },
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": scale * (high[column] - middle[column]),
                    "arrayminus": scale * (middle[column] - low[column]),
                    "color": color,
                    "thickness": 1.25,
                    "width": 3,
                    "visible": bool(np.any(high[column] > low[column])),
                },
                hovertemplate=f"budget %{{x}}, {metric.words}<br>{name}: {unit}<extra></extra>",
            ),
            row=at,
            col=1,
        )
