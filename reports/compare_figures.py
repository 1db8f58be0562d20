"""The figures that hold several studies: their answers, what each budget gives, and the tails at the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from .budgets.axes import latency_axis
from .budgets.trials import at_recommended, lowest
from .data.run_folder import RunFolder
from .policies.tails import exceedance
from .style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, Drawing, finish, log_ticks
from .text import budget_label, change, listing, milliseconds, percent, rate, significant

_COLORS = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study under its label, with its budgets as ``summarise_budgets`` gives them."""

    label: str
    folder: RunFolder
    budgets: pd.DataFrame

    @property
    def chosen(self) -> pd.Series | None:
        """The row of the recommended budget; None where it has none."""
        rows = self.budgets[self.budgets["recommended"]]
        return rows.iloc[0] if len(rows) else None

    @property
    def over_slo(self) -> pd.Series:
        """P99 TBT of each budget as a multiple of the SLO, NaN without one."""
        limit_ms = self.folder.answer.slo.tbt_p99_ms or float("nan")
        return self.budgets["tbt_p99_ms"] / limit_ms

    def value(self, metric: str) -> float:
        """An expected figure of the recommendation, NaN where there is none."""
        value = self.folder.answer.value(metric)
        return float("nan") if value is None else value


def _style(place: int) -> tuple[str, str, str]:
    return _COLORS[place % len(_COLORS)], _SYMBOLS[place % len(_SYMBOLS)], _DASHES[place % len(_DASHES)]


def draw_answers(studies: Sequence[Study]) -> Drawing:
    """A row a study: its budget, its throughput and its P99 TBT over its SLO."""
    name, title = "answers", "The recommended budgets"
    known = [study for study in studies if study.folder.answer.token_budget]
    if not known:
        return Drawing(name=name, title=title, finding="No study has a budget to recommend.")
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.04)
    labels = [_wrapped(study.label) for study in known]
    budgets = [float(study.folder.answer.token_budget or 0) for study in known]
    columns = (
        (budgets, "budget, tokens (log)", BLUE, "circle", ",.0f"),
        ([study.value("total_tokens_per_s") for study in known], "total tokens/s", GREEN, "square", ",.0f"),
        ([100 * _share_of_slo(study) for study in known], "P99 TBT, % of the SLO", ORANGE, "diamond", ".0f"),
    )
    for place, (values, label, color, symbol, form) in enumerate(columns, start=1):
        figure.add_trace(
            go.Scatter(
                x=values,
                y=labels,
                mode="markers",
                name=label,
                showlegend=False,
                marker={"symbol": symbol, "size": 11, "color": color},
                hovertemplate=f"%{{y}}<br>{label}: %{{x:{form}}}<extra></extra>",
            ),
            row=1,
            col=place,
        )
        figure.update_xaxes(title_text=label, row=1, col=place, rangemode="tozero", nticks=4)
    finish(figure, 110 + 48 * len(known))
    figure.update_xaxes(**log_ticks(min(budgets), max(budgets)), row=1, col=1)
    figure.update_xaxes(nticks=4, row=1, col=1)
    figure.add_vline(x=100, line={"color": INK, "dash": "dash", "width": 1.25}, row=1, col=3, name="slo")
    figure.update_yaxes(autorange="reversed")
    return Drawing(name=name, title=title, finding=_answer_finding(known), figure=figure)


def _share_of_slo(study: Study) -> float:
    limit_ms = study.folder.answer.slo.tbt_p99_ms
    return study.value("tbt_p99_ms") / limit_ms if limit_ms else float("nan")


def _answer_finding(studies: Sequence[Study]) -> str:
    order = sorted(studies, key=lambda study: study.folder.answer.token_budget or 0)
    parts = [f"{study.folder.answer.token_budget} for {study.label}" for study in order]
    rates = [study for study in studies if study.value("total_tokens_per_s") > 0]
    sentence = f"The budgets to set: {listing(parts)}."
    if len(rates) < 2:
        return sentence
    fast = max(rates, key=lambda study: study.value("total_tokens_per_s"))
    slow = min(rates, key=lambda study: study.value("total_tokens_per_s"))
    ratio = fast.value("total_tokens_per_s") / slow.value("total_tokens_per_s")
    if ratio < 1.01:
        return f"{sentence} Their throughputs are within 1% of each other."
    return (
        f"{sentence} {fast.label} has the highest throughput, {rate(fast.value('total_tokens_per_s'))} tokens/s, "
        f"{significant(ratio)} times that of {slow.label}."
    )


def draw_throughputs(studies: Sequence[Study]) -> Drawing:
    """Budget against throughput, a line a study, the recommended budget large."""
    figure, drawn = _lines(studies, lambda study: study.budgets["total_tokens_per_s"], "total tokens/s", ",.0f")
    name, title = "throughputs", "Throughput by budget"
    if not drawn:
        return Drawing(name=name, title=title, finding="No study has a complete trial, so nothing is drawn.")
    figure.update_yaxes(title_text="total tokens/s", rangemode="tozero")
    parts = []
    for study in drawn:
        values = study.budgets["total_tokens_per_s"]
        spread = float(values.max() / values.min()) - 1
        parts.append(f"{percent(spread) if change(spread) else 'nothing'} in {study.label}")
    finding = f"Over the budgets that ran to the end, throughput varies by {listing(parts)}."
    note = "Large markers: the recommended budgets. Whole prompts (no budget) are left out."
    return Drawing(name=name, title=title, finding=finding, note=note, figure=figure)


def draw_latencies(studies: Sequence[Study]) -> Drawing:
    """Budget against P99 TBT as a multiple of the study's own SLO, so that studies with other SLOs compare."""
    name, title = "latencies", "P99 TBT over the SLO by budget"
    with_slo = [study for study in studies if study.folder.answer.slo.tbt_p99_ms]
    figure, drawn = _lines(with_slo, lambda study: study.over_slo, "of the SLO", ".2f")
    if not drawn:
        return Drawing(name=name, title=title, finding="No study has both an SLO and a P99 TBT, so nothing is drawn.")
    ratios = pd.concat([study.over_slo for study in drawn]).dropna()
    axis = latency_axis(ratios, 1.0)
    figure.update_yaxes(title_text="P99 TBT ÷ SLO" + (" (log)" if "type" in axis else ""), **axis)
    figure.add_hline(y=1, line={"color": INK, "dash": "dash", "width": 1.5}, name="slo")
    parts = []
    for study in drawn:
        met = study.budgets[study.budgets["feasible"].isin([True])]["token_budget"].dropna()
        largest = f"{budget_label(met.max())}" if len(met) else "none"
        parts.append(f"{largest} for {study.label}")
    finding = f"The largest budgets that met the SLO in every run: {listing(parts)}."
    note = "Budgets that were stopped early, because their SLO was lost, are not drawn."
    return Drawing(name=name, title=title, finding=finding, note=note, figure=figure)


def draw_first_tokens(studies: Sequence[Study]) -> Drawing:
    """Budget against P99 TTFT, a line a study, the recommended budget large."""
    name, title = "first_tokens", "P99 TTFT by budget"
    figure, drawn = _lines(studies, lambda study: study.budgets["ttft_p99_ms"], "ms", ",.4~g")
    if not drawn:
        return Drawing(name=name, title=title, finding="No study has a P99 time to first token, so nothing is drawn.")
    values = pd.concat([study.budgets["ttft_p99_ms"] for study in drawn]).dropna()
    axis = latency_axis(values, None)
    figure.update_yaxes(title_text="P99 TTFT, ms" + (" (log)" if "type" in axis else ""), **axis)
    parts = []
    for study in drawn:
        best = lowest(study.budgets, "ttft_p99_ms")
        parts.append(f"{best['label']} for {study.label} ({milliseconds(best['ttft_p99_ms'])})")
    finding = f"The budgets with the lowest P99 time to first token: {listing(parts)}."
    return Drawing(
        name=name, title=title, finding=finding, note="Large markers: the recommended budgets.", figure=figure
    )


def draw_tails_at_answers(studies: Sequence[Study]) -> Drawing:
    """The share of gaps that are longer than a time, at each study's recommended budget."""
    name, title = "answer_tails", "Times between tokens at the recommended budgets"
    figure = go.Figure()
    lengths, least, parts = [], 1.0, []
    for place, study in enumerate(studies):
        row = study.chosen
        quantiles = None if row is None else row["quantiles"]
        if row is None or quantiles is None:
            continue
        runs = at_recommended(study.folder.search, study.folder.answer)
        counts = runs.loc[runs["token_budget"] == row["token_budget"], "tbt_count"]
        gaps_ms, shares = exceedance(
            pd.Series({**row.to_dict(), "tbt_quantiles_ms": quantiles, "tbt_count": counts.max()}, dtype=object)
        )
        color, symbol, dash = _style(place)
        lengths.append(gaps_ms)
        least = min(least, float(shares.min()))
        parts.append(f"{milliseconds(row['tbt_p999_ms'])} for {study.label}")
        figure.add_trace(
            go.Scatter(
                x=gaps_ms,
                y=100 * shares,
                name=f"{study.label}: {row['label']}",
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 2},
                marker={"symbol": symbol, "color": color, "size": [8 if share <= 0.0101 else 0 for share in shares]},
                hovertemplate="%{y:.3~g}% of gaps are longer than %{x:.4~g} ms<extra></extra>",
            )
        )
    if not lengths:
        return Drawing(name=name, title=title, finding="No study has a TBT distribution at its recommended budget.")
    finish(figure, 400)
    every = np.concatenate(lengths)
    figure.update_xaxes(
        title_text="time between two tokens of a request, ms (log)", **log_ticks(float(every.min()), float(every.max()))
    )
    figure.update_yaxes(title_text="gaps that are longer, % (log)", **log_ticks(100 * least, 100.0))
    finding = f"One gap in a thousand is longer than {listing(parts)}."
    note = "Markers: 1% (the P99), 0.1% and the single longest gap."
    return Drawing(name=name, title=title, finding=finding, note=note, figure=figure)


def _lines(
    studies: Sequence[Study], values_of: Callable[[Study], pd.Series], label: str, form: str
) -> tuple[go.Figure, list[Study]]:
    """A line a study over its budgets, and the studies that had one."""
    figure = go.Figure()
    drawn = []
    for place, study in enumerate(studies):
        values = values_of(study)
        keep = study.budgets["token_budget"].notna() & values.notna()
        if not keep.any():
            continue
        rows, values = study.budgets[keep], values[keep]
        color, symbol, dash = _style(place)
        drawn.append(Study(label=study.label, folder=study.folder, budgets=rows))
        figure.add_trace(
            go.Scatter(
                x=rows["token_budget"],
                y=values,
                name=study.label,
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 1.5},
                marker={
                    "symbol": symbol,
                    "color": color,
                    "size": [14 if chosen else 5 for chosen in rows["recommended"]],
                },
                hovertemplate=f"{study.label}<br>budget %{{x}}: %{{y:{form}}} {label}<extra></extra>",
            )
        )
    finish(figure, 400)
    if drawn:
        budgets = pd.concat([study.budgets["token_budget"] for study in drawn])
        low, high = float(budgets.min()), float(budgets.max())
        ticks = [2**power for power in range(4, 18) if low / 1.1 <= 2**power <= high * 1.1]
        figure.update_xaxes(
            title_text="token budget (log)",
            type="log",
            range=[log10(low / 1.15), log10(high * 1.15)],
            tickmode="array",
            tickvals=ticks,
            ticktext=[f"{tick:,}" for tick in ticks],
        )
    return figure, drawn


def _wrapped(label: str) -> str:
    """The label on two lines where it is long."""
    head, _, rest = label.partition(", ")
    return f"{head}<br>{rest}" if rest and len(label) > 18 else label
