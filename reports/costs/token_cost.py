"""What one more token costs: the layer's measured staircase with its edges and the study's budgets on it."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, floor, log, log2, log10

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..budgets.axes import latency_axis, name_recommended
from ..budgets.trials import KIND_ORDER
from ..data.answer import Answer
from ..data.run_folder import RunFolder
from ..data.staircase import Edge, TokenStaircase
from ..style import GREEN, INK, KIND_STYLES, MUTED, PAPER, PURPLE, Drawing, finish
from ..text import KIND_NAMES, listing
from .findings import ABSENT, edges_within, jump, studied_range, token_cost_finding

#: So many of the largest steps carry their jump in print.
NUM_NAMED_STEPS = 5
#: A printed jump takes this share of the width of the axis on a narrow screen.
LABEL_SHARE = 0.15
#: Between neighbouring points of a line no more than this factor in tokens.
FILL_RATIO = 1.06


def draw_token_cost(folder: RunFolder) -> Drawing:
    """Layer latency and tokens per ms against tokens; edges, candidate budgets and the recommended one marked."""
    name, title = "staircase", "What one more token costs"
    stairs = folder.staircase
    if stairs is None:
        return Drawing(name=name, title=title, finding=ABSENT)
    if not len(stairs.tokens):
        return Drawing(name=name, title=title, finding="The tile analysis holds no point of a layer: nothing to draw.")
    low, high = studied_range(folder, stairs)
    shown = (stairs.tokens >= low) & (stairs.tokens <= high)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.56, 0.44])
    _add_curves(figure, stairs.tokens[shown], stairs.layer_ms[shown])
    edges = edges_within(stairs.edges, low, high)
    _add_edges(figure, edges, folder.answer.token_budget, low, high)
    _add_candidates(figure, stairs, folder.candidates)
    _mark_budget(figure, folder.answer)
    finish(figure, 520)
    figure.update_xaxes(**_token_axis(low, high))
    figure.update_xaxes(title_text="tokens in one iteration (log)", row=2, col=1)
    log = latency_axis(pd.Series(stairs.layer_ms[shown]), None)
    title_text = "ms a layer (log)" if "type" in log else "ms a layer"
    figure.update_yaxes(title_text=title_text, row=1, col=1, **log)
    figure.update_yaxes(title_text="tokens/ms", rangemode="tozero", row=2, col=1)
    return Drawing(name=name, title=title, finding=token_cost_finding(folder), note=_note(stairs), figure=figure)


def _note(stairs: TokenStaircase) -> str:
    subject = ", ".join(f"{key} {value}" for key, value in stairs.subject.items())
    derived = [item.op for item in stairs.operations if item.in_layer and item.source == "transferred"]
    rest = f" Transferred from neighbouring shapes: {listing(derived)}." if derived else ""
    return (
        f"{subject[:1].upper()}{subject[1:]}, TP {stairs.tensor_parallel}. A layer is {listing(stairs.layer_ops)}: "
        f"attention is not in it. Dots are measured or tabulated counts; "
        f"the lines let latency run straight from one to the next.{rest}"
    )


def _add_curves(figure: go.Figure, tokens: npt.NDArray[np.int64], layer_ms: npt.NDArray[np.float64]) -> None:
    """The measured counts, and lines along which latency runs straight from one to the next in both panels."""
    dense = _fill(tokens)
    dense_ms = np.interp(dense, tokens, layer_ms)
    heights = ((1, dense_ms, layer_ms, "ms a layer"), (2, dense / dense_ms, tokens / layer_ms, "tokens/ms"))
    for row, line, marks, unit in heights:
        shared = {"legendgroup": "layer", "hoverinfo": "skip"}
        figure.add_trace(
            go.Scatter(x=dense, y=line, mode="lines", line={"color": MUTED, "width": 1.25}, showlegend=False, **shared),
            row=row,
            col=1,
        )
        figure.add_trace(
            go.Scatter(
                x=tokens,
                y=marks,
                name="layer",
                legendgroup="layer",
                showlegend=row == 1,
                mode="markers",
                marker={"size": 4, "color": MUTED},
                hovertemplate=f"%{{x}} tokens: %{{y:.4~g}} {unit}<extra></extra>",
            ),
            row=row,
            col=1,
        )


def _fill(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The counts with more between those that lie wide apart, so that a straight line bends as the axes do."""
    parts = [
        np.linspace(low, high, max(1, ceil(log(high / low) / log(FILL_RATIO))), endpoint=False)
        for low, high in pairwise(tokens.tolist())
    ]
    return np.concatenate([*parts, tokens[-1:]])


def _add_edges(figure: go.Figure, edges: list[Edge], budget: int | None, low: float, high: float) -> None:
    """Each edge as a thick stretch of the curve, from the last cheap count to the next; some steps named."""
    for is_step, name, color, dash in ((True, "step", PURPLE, "solid"), (False, "drop", GREEN, "dot")):
        part = [edge for edge in edges if edge.is_step == is_step]
        if not part:
            continue
        for row in (1, 2):
            figure.add_trace(
                go.Scatter(
                    x=[at for edge in part for at in (edge.tokens, edge.next_tokens, None)],
                    y=[at for edge in part for at in (*_heights(edge, row), None)],
                    name=name,
                    legendgroup=name,
                    showlegend=row == 1,
                    mode="lines",
                    line={"color": color, "width": 4, "dash": dash},
                    text=[text for edge in part for text in (_describe(edge), _describe(edge), "")],
                    hovertemplate="%{text}<extra></extra>",
                ),
                row=row,
                col=1,
            )
    for edge in _named(edges, budget, LABEL_SHARE * log10(high / low)):
        figure.add_annotation(
            x=log10(edge.next_tokens),
            y=1,
            xref="x2",
            yref="y2 domain",
            yanchor="bottom",
            text=jump(edge.jump_pct),
            showarrow=False,
            font={"size": 11, "color": INK},
            name="step",
        )


def _named(edges: list[Edge], budget: int | None, apart: float) -> list[Edge]:
    """The step after ``budget`` and the largest others whose labels do not meet: ``apart`` is in decades of tokens."""
    chosen: list[Edge] = []
    steps = (edge for edge in edges if edge.is_step)
    for edge in sorted(steps, key=lambda edge: (edge.tokens != budget, -edge.jump_pct)):
        if all(abs(log10(edge.tokens / other.tokens)) >= apart for other in chosen):
            chosen.append(edge)
    return chosen[:NUM_NAMED_STEPS]


def _heights(edge: Edge, row: int) -> tuple[float, float]:
    if row == 1:
        return edge.latency_ms, edge.next_latency_ms
    return edge.tokens / edge.latency_ms, edge.next_tokens / edge.next_latency_ms


def _describe(edge: Edge) -> str:
    return f"{edge.tokens} → {edge.next_tokens}: {jump(edge.jump_pct, edge.uncertainty_pct)}"


def _add_candidates(figure: go.Figure, stairs: TokenStaircase, candidates: dict[int, str]) -> None:
    """The study's candidate budgets on the curves, one marker a kind."""
    inside = {budget: kind for budget, kind in candidates.items() if stairs.tokens[0] <= budget <= stairs.tokens[-1]}
    for kind in KIND_ORDER:
        budgets = [budget for budget, own in inside.items() if own == kind]
        if not budgets:
            continue
        color, symbol = KIND_STYLES[kind]
        layer_ms = np.interp(budgets, stairs.tokens, stairs.layer_ms)
        places = [_place(stairs, budget) for budget in budgets]
        for row, values, unit in ((1, layer_ms, "ms a layer"), (2, np.array(budgets) / layer_ms, "tokens/ms")):
            figure.add_trace(
                go.Scatter(
                    x=budgets,
                    y=values,
                    name=f"budget tried: {KIND_NAMES[kind]}",
                    legendgroup=kind,
                    showlegend=row == 1,
                    mode="markers",
                    marker={
                        "symbol": symbol,
                        "size": 9 if symbol == "triangle-up" else 8,
                        "color": color,
                        "line": {"color": PAPER, "width": 1},
                    },
                    text=places,
                    hovertemplate=f"budget %{{x}}: %{{y:.4~g}} {unit}<br>%{{text}}<extra></extra>",
                ),
                row=row,
                col=1,
            )


def _place(stairs: TokenStaircase, budget: int) -> str:
    """How the budget's marker came to its height."""
    around = None if stairs.cost_at(budget) else stairs.neighbours(budget)
    return f"on the line from {around[0]} to {around[1]}" if around else "measured"


def _mark_budget(figure: go.Figure, answer: Answer) -> None:
    """A line through both panels at the recommended budget, named once."""
    if not answer.token_budget:
        return
    for row in ("", "2"):
        figure.add_shape(
            type="line",
            xref=f"x{row}",
            yref=f"y{row} domain",
            x0=answer.token_budget,
            x1=answer.token_budget,
            y0=0,
            y1=1,
            line={"color": INK, "width": 1.25, "dash": "dot"},
            layer="below",
            name="recommended",
        )
    word = "closest" if answer.status == "infeasible" else "recommended"
    name_recommended(figure, log10(answer.token_budget), f"{word} {answer.token_budget}")


def _token_axis(low: float, high: float) -> dict[str, object]:
    """A logarithmic axis of token counts with a tick at each power of two."""
    ticks = [2**power for power in range(floor(log2(low)), ceil(log2(high)) + 1) if low <= 2**power <= high]
    return {
        "type": "log",
        "range": [log10(low / 1.06), log10(high * 1.12)],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [str(tick) for tick in ticks],
        "showgrid": False,
    }
