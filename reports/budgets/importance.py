"""Which of the study's parameters decides whether a trial is among the best."""

from __future__ import annotations

import plotly.graph_objects as go

from ..data.run_folder import RunFolder
from ..style import BLUE, GREEN, ORANGE, Drawing, finish
from ..text import listing, percent

ABSENT = "The study has too few complete trials to tell its parameters' importance (importance.json)."
PARAMETER_NAMES = {
    "edge_index": "edge (size of the budget)",
    "kind": "offset from the edge",
    "max_num_seqs": "most sequences",
    "policy": "policy",
}
METRIC_NAMES = {
    "total_tokens_per_s": "throughput",
    "tbt_p99_ms": "P99 TBT",
    "bubble_fraction_2": "bubble fraction",
    "bubble_fraction_4": "bubble fraction",
    "bubble_fraction_8": "bubble fraction",
}
_STYLES = ((BLUE, ""), (ORANGE, "/"), (GREEN, "x"))


def draw_importance(folder: RunFolder) -> Drawing:
    """A bar for every parameter and metric: its share of what sets the best quarter of the trials apart."""
    name, title = "importance", "Which parameter matters"
    found = {metric: shares for metric, shares in folder.importance.items() if shares}
    if not found:
        return Drawing(name=name, title=title, finding=ABSENT)
    parameters = list(dict.fromkeys(parameter for shares in found.values() for parameter in shares))
    figure = go.Figure()
    for (metric, shares), (color, pattern) in zip(found.items(), _STYLES, strict=False):
        figure.add_trace(
            go.Bar(
                orientation="h",
                x=[100 * shares.get(parameter, 0.0) for parameter in parameters],
                y=[PARAMETER_NAMES.get(parameter, parameter).replace(" (", "<br>(") for parameter in parameters],
                name=METRIC_NAMES.get(metric, metric),
                marker={
                    "color": color,
                    "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#000000", "fgopacity": 0.35},
                },
                hovertemplate="%{y}: %{x:.1f}%<extra></extra>",
            )
        )
    finish(figure, 150 + 34 * len(found) * len(parameters))
    figure.update_layout(barmode="group", bargap=0.3)
    figure.update_xaxes(title_text="importance, %", range=[0, 100])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    note = (
        "PED-ANOVA (Watanabe et al., IJCAI 2023) as in Optuna: how much each parameter alone sets the best quarter of "
        "the complete trials apart from all of them. The shares of a metric sum to 100%."
    )
    return Drawing(name=name, title=title, finding=importance_finding(folder), note=note, figure=figure)


def importance_finding(folder: RunFolder) -> str:
    """The parameter that counts most for each metric."""
    parts = []
    for metric, shares in folder.importance.items():
        if shares:
            parameter = max(shares, key=lambda key: shares[key])
            parts.append(
                f"{METRIC_NAMES.get(metric, metric)} the {PARAMETER_NAMES.get(parameter, parameter)} "
                f"({percent(shares[parameter])})"
            )
    return f"What sets the best trials apart is, for {listing(parts)}." if parts else ABSENT
