"""Why a larger budget loses in a pipeline: the idle time of its stages by cause, beside what came out of it."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..budgets.axes import finish_budget_axis, mark_recommended
from ..budgets.trials import highest
from ..data.run_folder import BUBBLE_COLUMNS, RunFolder
from ..style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, VERMILLION, Drawing, finish
from ..text import change, count, percent

#: Column, what it is called, colour and pattern, from the bottom of the pile up.
CAUSES = {
    "bubble_prefill_after_decode": ("a prefill beside a decode", VERMILLION, "/"),
    "bubble_length_difference": ("neighbours of different length", ORANGE, "\\"),
    "bubble_stage_imbalance": ("stages of different work", PURPLE, "x"),
    "bubble_transfer": ("activations on their way", GREEN, "."),
    "bubble_empty_slot": ("an empty slot: too few micro-batches", MUTED, ""),
}
assert set(CAUSES) == set(BUBBLE_COLUMNS)


def draw_bubble_causes(folder: RunFolder, budgets: pd.DataFrame) -> Drawing | None:
    """Idle share of the stages by cause, stacked, and the throughput that was left, by budget; None where no pipeline
    ran."""
    name, title = "bubble-causes", "What empties the pipeline"
    rows = budgets[budgets["bubble_fraction"].notna()]
    if rows.empty:
        return None
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07, row_heights=[0.6, 0.4])
    for column, (cause, color, pattern) in CAUSES.items():
        if not (rows[column] > 0.0).any():
            continue
        figure.add_trace(
            go.Bar(
                x=rows["label"],
                y=100.0 * rows[column],
                name=cause,
                marker={
                    "color": color,
                    "line": {"width": 0},
                    "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "solidity": 0.2, "fgcolor": INK},
                },
                hovertemplate=f"%{{x}}: {cause}, %{{y:.2f}} %<extra></extra>",
            ),
            row=1,
            col=1,
        )
    figure.add_trace(
        go.Scatter(
            x=rows["label"],
            y=rows["total_tokens_per_s"],
            name="total tokens/s",
            mode="lines+markers",
            line={"color": BLUE, "width": 1.5},
            marker={"symbol": "circle", "size": 7, "color": BLUE},
            hovertemplate="%{x}: %{y:,.0f} tokens/s<extra></extra>",
        ),
        row=2,
        col=1,
    )
    labels = list(rows["label"])
    mark_recommended(figure, labels, folder.answer, rows=2)
    finish_budget_axis(figure, labels)
    finish(figure, 460)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="idle share of the stages, %", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="total tokens/s", row=2, col=1)
    figure.update_xaxes(title_text="token budget (in order, not to scale)", row=2, col=1)
    note = (
        "Idle time of all stages ÷ (stages × span), gaps without any request left out. A stage waits because the "
        "micro-batch before it was shorter than the one it waits for, because one of the two holds a prefill and the "
        "other decodes alone, because a stage has more layers or the LM head, for a transfer, or because fewer "
        "micro-batches are in flight than there are stages."
    )
    return Drawing(name=name, title=title, finding=_finding(folder, rows), note=note, figure=figure)


def _finding(folder: RunFolder, rows: pd.DataFrame) -> str:
    stages = count(folder.answer.bubble_stages, "stage")
    worst = highest(rows, "bubble_fraction")
    main = max(CAUSES, key=lambda column: float(worst[column]))
    text = (
        f"The {stages} of the pipeline idle most at budget {worst['label']}: {percent(worst['bubble_fraction'])} of "
        f"the time, {percent(worst[main])} for {CAUSES[main][0]}."
    )
    chosen = rows[rows["recommended"]]
    larger = rows[rows["token_budget"] > chosen.iloc[0]["token_budget"]] if len(chosen) else chosen
    if larger.empty:
        return text
    own, other = chosen.iloc[0], highest(larger, "bubble_fraction")
    gained = {column: float(other[column] - own[column]) for column in CAUSES}
    if other["bubble_fraction"] <= own["bubble_fraction"]:
        return f"{text} No budget above the recommended {own['label']} idles more than it."
    cause = max(gained, key=lambda column: gained[column])
    gain = change(other["total_tokens_per_s"] / own["total_tokens_per_s"] - 1.0)
    return (
        f"{text} Budget {other['label']} idles {percent(other['bubble_fraction'])} where the recommended "
        f"{own['label']} idles {percent(own['bubble_fraction'])}, most of the difference for {CAUSES[cause][0]}; its "
        f"throughput {f'differs by {gain}' if gain else 'is the same'}."
    )
