"""How the times between tokens are distributed under each policy, on the same requests and budget."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ..budgets.trials import highest, lowest
from ..data.run_folder import NUM_QUANTILES, RunFolder
from ..style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, Drawing, finish, log_ticks
from ..text import POLICY_NAMES, milliseconds, significant
from .lanes import POLICY_ORDER

ABSENT = "No policy run has a distribution of the time between tokens, so none is drawn."
_STYLES = (
    (ORANGE, "solid", "square"),
    (PURPLE, "dash", "diamond"),
    (VERMILLION, "dot", "x"),
    (BLUE, "solid", "circle"),
    (GREEN, "dashdot", "triangle-up"),
    (SKY, "longdash", "cross"),
)


def draw_policy_tails(folder: RunFolder) -> Drawing:
    """The share of gaps longer than a time, by policy, both logarithmic; the SLO marked."""
    name, title = "policy_tails", "Times between tokens under each policy"
    runs = [row for _, row in folder.policies.iterrows() if len(_levels(row))]
    if not runs:
        return Drawing(name=name, title=title, finding=ABSENT)
    figure = go.Figure()
    for place, row in enumerate(runs):
        policy = str(row["policy"])
        rank = POLICY_ORDER.index(policy) if policy in POLICY_ORDER else place
        color, dash, symbol = _STYLES[rank % len(_STYLES)]
        gaps_ms, shares = exceedance(row)
        figure.add_trace(
            go.Scatter(
                x=gaps_ms,
                y=100 * shares,
                name=POLICY_NAMES.get(policy, policy),
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 2},
                marker={
                    "symbol": symbol,
                    "color": color,
                    "size": [8 if share <= 0.0101 else 0 for share in shares],
                },
                hovertemplate="%{y:.3~g}% of gaps are longer than %{x:.4~g} ms<extra></extra>",
            )
        )
    finish(figure, 400)
    drawn = [exceedance(row) for row in runs]
    lengths = np.concatenate([gaps_ms for gaps_ms, _ in drawn])
    slo_ms = folder.answer.slo.tbt_p99_ms
    ends = [float(lengths.min()), float(lengths.max()), *([slo_ms] if slo_ms else [])]
    figure.update_xaxes(title_text="time between two tokens of a request, ms (log)", **log_ticks(min(ends), max(ends)))
    least = 100 * min(float(shares.min()) for _, shares in drawn)
    figure.update_yaxes(title_text="gaps that are longer, % (log)", **log_ticks(least, 100.0))
    if slo_ms:
        figure.add_vline(x=slo_ms, line={"color": INK, "dash": "dash", "width": 1.5}, name="slo")
    note = (
        "Every gap of every request. Markers: 1% (the P99), 0.1% and the single longest gap. Dashed: the SLO; a policy "
        "meets it where its line is below 1% there."
    )
    return Drawing(name=name, title=title, finding=policy_tail_finding(folder), note=note, figure=figure)


def exceedance(row: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Gap lengths (ms, rising) and the share of gaps that are longer: from the quantiles, P99.9 and the longest."""
    levels = _levels(row)
    gaps_ms, shares = levels[:-1], 1 - np.linspace(0, 1, NUM_QUANTILES)[:-1]
    one = 1 / max(float(row["tbt_count"]), 1.0)
    # Of fewer than a thousand gaps the P99.9 lies between the two longest.
    extremes = [*([(row["tbt_p999_ms"], 0.001)] if one < 0.001 else []), (row["tbt_max_ms"], one)]
    for gap_ms, share in extremes:
        if np.isfinite(gap_ms) and 0 < share < shares[-1]:
            gaps_ms, shares = np.append(gaps_ms, gap_ms), np.append(shares, share)
    return np.maximum(gaps_ms, 1e-6), shares


def policy_tail_finding(folder: RunFolder) -> str:
    """The median and the 0.1% tail of the calmest and the roughest policy."""
    runs = folder.policies
    known = runs[(runs["tbt_p999_ms"] > 0) & (runs["tbt_p50_ms"] > 0)]
    if known.empty:
        return ABSENT
    calm, rough = lowest(known, "tbt_p999_ms"), highest(known, "tbt_p999_ms")
    names = [POLICY_NAMES.get(str(row["policy"]), str(row["policy"])) for row in (calm, rough)]
    first = (
        f"One gap in a thousand is longer than {milliseconds(calm['tbt_p999_ms'])} under {names[0]}, "
        f"{significant(calm['tbt_p999_ms'] / calm['tbt_p50_ms'], 2)} times its median"
    )
    if len(known) == 1:
        return f"{first}."
    return (
        f"{first}; under {names[1]} it is {milliseconds(rough['tbt_p999_ms'])}, "
        f"{significant(rough['tbt_p999_ms'] / rough['tbt_p50_ms'], 2)} times."
    )


def _levels(row: pd.Series) -> np.ndarray:
    values = row["tbt_quantiles_ms"]
    if not isinstance(values, list | np.ndarray) or len(values) != NUM_QUANTILES:
        return np.empty(0)
    levels = np.asarray(values, dtype=float)
    return levels if np.isfinite(levels).all() else np.empty(0)
