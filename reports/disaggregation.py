"""Where chunked prefill on replicas serves more than prefill and decode on GPUs apart, and where it does not."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from .costs.tables import Table
from .data.json_object import JsonObject
from .data.run_folder import RunFolder
from .style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION, Drawing, finish
from .tables import Column
from .text import change, count, milliseconds, percent, rate

NAME = "disaggregation"
TITLE = "Chunked prefill against prefill and decode apart"
SPLIT_COLORS = (ORANGE, GREEN, VERMILLION, PURPLE, SKY)
PATTERNS = ("/", "x", "-", "+", ".", "|", "\\")


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """One way to use the GPUs under one limit: its capacity in requests/s, and what it did at that rate (ms)."""

    name: str
    is_split: bool
    capacity_qps: float
    tbt_p99_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    busy: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One limit on P99 TBT, and what every arrangement serves under it."""

    name: str
    tbt_p99_ms: float
    arrangements: tuple[Arrangement, ...]

    def best(self, *, is_split: bool) -> Arrangement | None:
        """The arrangement of one side that serves most; None where the side keeps the limit at no rate."""
        side = [one for one in self.arrangements if one.is_split is is_split and one.capacity_qps > 0.0]
        return max(side, key=lambda one: one.capacity_qps, default=None)


def read_limits(document: JsonObject) -> tuple[Limit, ...]:
    """The limits of ``disaggregation.json``, in the file's order. Raises ValueError naming what is wrong in it."""
    return tuple(
        Limit(
            name=limit.text("name"),
            tbt_p99_ms=limit.number("tbt_p99_ms") or 0.0,
            arrangements=tuple(_arrangement(row) for row in limit.children("arrangements")),
        )
        for limit in document.children("limits")
    )


def _arrangement(row: JsonObject) -> Arrangement:
    busy = row.child("busy_fractions")
    shares = [(side, busy.number(side)) for side in busy.values]
    return Arrangement(
        name=row.text("name"),
        is_split=row.number("num_prefill") is not None,
        capacity_qps=row.number("capacity_qps") or 0.0,
        tbt_p99_ms=row.number("tbt_p99_ms"),
        ttft_p50_ms=row.number("ttft_p50_ms"),
        ttft_p99_ms=row.number("ttft_p99_ms"),
        busy=", ".join(f"{'' if side == 'both' else side} {percent(share, 0)}".strip() for side, share in shares),
    )


def draw_disaggregation(folder: RunFolder) -> Drawing | None:
    """Capacity of the best replicas and of every split under each limit on TBT; None where it was not measured."""
    if folder.disaggregation is None:
        return None
    limits = read_limits(folder.disaggregation)
    if not limits:
        return Drawing(name=NAME, title=TITLE, finding="The comparison holds no limit.")
    labels = [f"{limit.name}<br>{milliseconds(limit.tbt_p99_ms)}" for limit in limits]
    replicas = [limit.best(is_split=False) for limit in limits]
    figure = go.Figure()
    figure.add_trace(_bars("chunked prefill, best budget", labels, replicas, BLUE, ""))
    splits = [one.name for one in limits[0].arrangements if one.is_split]
    for place, name in enumerate(splits):
        found = [next((one for one in limit.arrangements if one.name == name), None) for limit in limits]
        color = SPLIT_COLORS[place % len(SPLIT_COLORS)]
        figure.add_trace(_bars(name, labels, found, color, PATTERNS[place % len(PATTERNS)]))
    finish(figure, 380)
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_xaxes(title_text="limit on P99 TBT")
    figure.update_yaxes(title_text="capacity, requests/s", rangemode="tozero")
    document = folder.disaggregation
    note = (
        f"Capacity: the highest rate of {count(int(document.number('num_requests') or 0), 'request')} that keeps the "
        f"limit and the study's other limits, to within {percent(document.number('resolution'))}. Both sides are "
        "modelled on the same table with the same requests, which for short runs flatters both, for a queue that grows "
        "takes time to show in the median delay; a prompt's cache is sent when its prefill has ended, over "
        f"{rate((_link_bytes_per_s(document)) / 1e9)} GB/s a GPU."
    )
    return Drawing(name=NAME, title=TITLE, finding=disaggregation_finding(folder), note=note, figure=figure)


def disaggregation_finding(folder: RunFolder) -> str:
    """Which side serves more under each limit, by how much, and with what."""
    document = folder.disaggregation
    if document is None:
        return ""
    tie = document.number("resolution") or 0.0
    parts = [_sentence(limit, tie) for limit in read_limits(document)]
    return f"On {count(int(document.number('num_gpus') or 0), 'GPU')}: {'; '.join(parts)}."


def _sentence(limit: Limit, tie: float) -> str:
    ours, theirs = limit.best(is_split=False), limit.best(is_split=True)
    under = f"under {milliseconds(limit.tbt_p99_ms)}"
    if ours is None and theirs is None:
        return f"{under} neither keeps the limit at any rate"
    if ours is None or theirs is None:
        only = ours or theirs
        assert only is not None
        return f"{under} only {only.name} keeps the limit ({rate(only.capacity_qps)} requests/s)"
    more, less = (ours, theirs) if ours.capacity_qps >= theirs.capacity_qps else (theirs, ours)
    gain = more.capacity_qps / less.capacity_qps - 1
    figures = f"({rate(more.capacity_qps)} against {rate(less.capacity_qps)} requests/s)"
    if gain <= tie or not change(gain):
        return f"{under} {ours.name} and {theirs.name} tie {figures}"
    return f"{under} {more.name} serves {percent(gain)} more than {less.name} {figures}"


def disaggregation_tables(folder: RunFolder) -> list[Table]:
    """Every arrangement under each limit."""
    if folder.disaggregation is None:
        return []
    return [_table(limit) for limit in read_limits(folder.disaggregation)]


def _table(limit: Limit) -> Table:
    most = max((one.capacity_qps for one in limit.arrangements), default=0.0)
    places = [place for place, one in enumerate(limit.arrangements) if one.capacity_qps == most > 0.0]
    return Table(
        title=f"P99 TBT ≤ {milliseconds(limit.tbt_p99_ms)} ({limit.name})",
        columns=(
            Column(title="Arrangement", numeric=False),
            Column(title="Capacity", unit="requests/s"),
            Column(title="P99 TBT"),
            Column(title="P50 TTFT"),
            Column(title="P99 TTFT"),
            Column(title="Busy"),
        ),
        rows=tuple(
            (
                one.name,
                rate(one.capacity_qps) if one.capacity_qps else "none",
                milliseconds(one.tbt_p99_ms),
                milliseconds(one.ttft_p50_ms),
                milliseconds(one.ttft_p99_ms),
                one.busy or "–",
            )
            for one in limit.arrangements
        ),
        marked=places[0] if places else None,
    )


def _bars(name: str, labels: list[str], found: list[Arrangement | None], color: str, pattern: str) -> go.Bar:
    return go.Bar(
        name=name,
        x=labels,
        y=[0.0 if one is None else one.capacity_qps for one in found],
        marker={"color": color, "pattern": {"shape": pattern}},
        hovertext=["" if one is None else one.name for one in found],
        hovertemplate="%{hovertext}<br>%{y:.3~g} requests/s<extra></extra>",
    )


def _link_bytes_per_s(document: JsonObject) -> float:
    return document.child("link").number("bytes_per_s") or 0.0
