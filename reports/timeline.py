"""The iteration timeline of the policies on the same requests: who computes what when, and who waits meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from .budgets import highest, lowest
from .run_folder import RunFolder, TokenTimes
from .stalls import Waits, find_waits
from .style import GREEN, INK, ORANGE, PAPER, SKY, VERMILLION, Drawing, finish
from .text import POLICY_NAMES, count, listing, milliseconds, percent, significant

#: Iterations drawn in one lane; a window holds no more.
MAX_ITERATIONS_PER_LANE = 300
#: Up to so many a lane (mean), hairlines keep neighbouring iterations apart; beyond, they would hide them.
SEPARATED_PER_LANE = 200
#: A policy within this share of the fastest one counts as equally fast.
RIVAL_THROUGHPUT = 0.9
#: Without an SLO a stall is a wait this many times the policy's median one.
STALL_RATIO = 5.0
POLICY_ORDER = ("faster_transformer", "orca", "vllm_v0", "sarathi", "tile_aligned")
COMPOSITIONS = {
    "decode only": (SKY, ""),
    "hybrid": (GREEN, ""),
    "prefill only": (ORANGE, "/"),
}


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One policy's run: its iterations in order of time, token times, and the waits that are stalls."""

    policy: str
    iterations: pd.DataFrame
    tokens: TokenTimes | None
    stalls: Waits

    @property
    def name(self) -> str:
        return POLICY_NAMES.get(self.policy, self.policy)

    @property
    def span_s(self) -> float:
        return float((self.iterations["start_s"] + self.iterations["duration_s"]).max())


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """A row of the table beside the timeline, as printed; ``stalls`` and ``stalled`` are dashes without token times."""

    name: str
    p50: str
    p99: str
    largest: str
    throughput: str
    bubble: str
    stalls: str
    stalled: str


def build_lanes(folder: RunFolder) -> list[Lane]:
    """A lane for every complete policy run with iterations, in the order of the papers."""
    lanes = []
    rows = folder.policies
    ranks = {name: rank for rank, name in enumerate(POLICY_ORDER)}
    for _, row in sorted(rows.iterrows(), key=lambda item: ranks.get(str(item[1]["policy"]), 99)):
        iterations = folder.iterations.get(str(row["run"]))
        if iterations is None or iterations.empty:
            continue
        iterations = iterations.sort_values("start_s").reset_index(drop=True)
        tokens = folder.tokens.get(str(row["run"]))
        waits = find_waits(iterations, tokens) if tokens is not None else Waits(start_s=np.empty(0), end_s=np.empty(0))
        limit_ms = folder.answer.slo.tbt_p99_ms
        median_s = float(np.median(waits.durations_s)) if len(waits) else 0.0
        limit_s = limit_ms / 1e3 if limit_ms else STALL_RATIO * median_s
        lanes.append(
            Lane(policy=str(row["policy"]), iterations=iterations, tokens=tokens, stalls=waits.longer_than(limit_s))
        )
    return lanes


def draw_timeline(folder: RunFolder, lanes: list[Lane]) -> Drawing:
    """One lane a policy: iterations coloured by composition, stalls and one request's tokens beneath."""
    name, title = "timeline", "The same requests under each policy"
    if not lanes:
        return Drawing(name=name, title=title, finding="This study ran no policy comparison, so there is no timeline.")
    begin_s, end_s = choose_window(lanes)
    figure = go.Figure()
    centers = {lane.policy: float(len(lanes) - 1 - place) for place, lane in enumerate(lanes)}
    num_drawn = _add_iterations(figure, lanes, centers, begin_s, end_s)
    _add_stalls(figure, lanes, centers, begin_s, end_s)
    _add_example(figure, lanes, centers, begin_s, end_s)
    finish(figure, 130 + 105 * len(lanes))
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_xaxes(title_text="time since the first arrival, s", range=[begin_s, end_s])
    figure.update_yaxes(
        tickmode="array",
        tickvals=[centers[lane.policy] for lane in lanes],
        ticktext=[lane.name.replace("FasterTransformer", "Faster<br>Transformer") for lane in lanes],
        range=[-0.62, len(lanes) - 0.5],
        showgrid=False,
        fixedrange=True,
        tickfont={"color": INK, "size": 12.5},
    )
    return Drawing(
        name=name,
        title=title,
        finding=timeline_finding(folder),
        note=_note(folder, lanes, begin_s, end_s, num_drawn),
        figure=figure,
    )


def choose_window(lanes: list[Lane]) -> tuple[float, float]:
    """The stretch of time to draw: all of it, or where the longest stall is, short enough that no lane holds more
    than MAX_ITERATIONS_PER_LANE iterations."""
    end_s = max(lane.span_s for lane in lanes)
    if all(len(lane.iterations) <= MAX_ITERATIONS_PER_LANE for lane in lanes):
        return 0.0, end_s
    longest = max((lane.stalls for lane in lanes), key=lambda stalls: max(stalls.durations_s, default=0.0))
    focus_s = float(longest.start_s[np.argmax(longest.durations_s)]) if len(longest) else 0.0
    width_s = end_s
    for _ in range(40):
        begin_s = float(np.clip(focus_s - 0.25 * width_s, 0.0, end_s - width_s))
        drawn = (
            int(((lane.iterations["start_s"] < begin_s + width_s) & (_ends(lane.iterations) > begin_s)).sum())
            for lane in lanes
        )
        if max(drawn) <= MAX_ITERATIONS_PER_LANE:
            break
        width_s *= 0.8
    return begin_s, begin_s + width_s


def policy_rows(folder: RunFolder, lanes: list[Lane]) -> list[PolicyRow]:
    """The table of the policies: TBT, throughput, bubbles and stalls of the whole runs."""
    by_policy = {lane.policy: lane for lane in lanes}
    ranks = {name: rank for rank, name in enumerate(POLICY_ORDER)}
    rows = []
    for _, run in sorted(folder.policies.iterrows(), key=lambda item: ranks.get(str(item[1]["policy"]), 99)):
        lane = by_policy.get(str(run["policy"]))
        seen = lane is not None and lane.tokens is not None
        rows.append(
            PolicyRow(
                name=POLICY_NAMES.get(str(run["policy"]), str(run["policy"])),
                p50=milliseconds(run["tbt_p50_ms"]),
                p99=milliseconds(run["tbt_p99_ms"]),
                largest=milliseconds(run["tbt_max_ms"]),
                throughput=f"{run['total_tokens_per_s']:,.0f}" if run["total_tokens_per_s"] > 0 else "–",
                bubble=percent(run[folder.answer.bubble_metric], 1),
                stalls=f"{len(lane.stalls):,}" if lane is not None and seen else "–",
                stalled=(
                    percent(float(lane.stalls.durations_s.sum()) / lane.span_s, 1) if lane is not None and seen else "–"
                ),
            )
        )
    return rows


def timeline_finding(folder: RunFolder) -> str:
    """Which policy has the worst tail, which the best, and what the difference costs in throughput."""
    runs = folder.policies
    known = runs[runs["tbt_p99_ms"].notna()]
    if known.empty:
        return "No policy run has a time between tokens, so the policies differ in throughput alone."
    worst, best = highest(known, "tbt_p99_ms"), lowest(known, "tbt_p99_ms")
    name = {index: POLICY_NAMES.get(str(row["policy"]), str(row["policy"])) for index, row in runs.iterrows()}
    if len(known) == 1:
        return f"{name[best.name]} alone was run: P99 TBT {milliseconds(best['tbt_p99_ms'])}."
    slowest = lowest(runs, "total_tokens_per_s")
    fastest = highest(runs, "total_tokens_per_s")
    # A policy that buys its tail with throughput is no measure for the others.
    rivals = known[known["total_tokens_per_s"] >= RIVAL_THROUGHPUT * fastest["total_tokens_per_s"]]
    rivals = rivals.drop(index=worst.name, errors="ignore")
    if len(rivals):
        best = lowest(rivals, "tbt_p99_ms")
    return (
        f"{name[worst.name]} has the worst P99 TBT, {milliseconds(worst['tbt_p99_ms'])}, "
        f"{significant(worst['tbt_p99_ms'] / best['tbt_p99_ms'], 2)} times that of {name[best.name]} "
        f"({milliseconds(best['tbt_p99_ms'])}); {name[slowest.name]} has the lowest throughput, "
        f"{percent(1 - slowest['total_tokens_per_s'] / fastest['total_tokens_per_s'])} below {name[fastest.name]}."
    )


def _note(folder: RunFolder, lanes: list[Lane], begin_s: float, end_s: float, num_drawn: int) -> str:
    limit_ms = folder.answer.slo.tbt_p99_ms
    limit = f"the SLO of {milliseconds(limit_ms)}" if limit_ms else f"{STALL_RATIO:g} times the policy's median wait"
    total = sum(len(lane.iterations) for lane in lanes)
    part = (
        f"Drawn: {begin_s:.2f} s to {end_s:.2f} s, around the longest stall; {num_drawn:,} of "
        f"{count(total, 'iteration')}. The table covers the whole runs."
        if num_drawn < total
        else f"All {count(total, 'iteration')} are drawn."
    )
    silent = [lane.name for lane in lanes if lane.tokens is None]
    unknown = f" No token times were saved for {listing(silent)}, so stalls cannot be shown there." if silent else ""
    return (
        "A bar is one iteration, its width the duration. Stall: the requests that are decoding wait longer than "
        f"{limit} for their next token. Ticks: when one and the same request got its tokens. {part}{unknown}"
    )


def _ends(iterations: pd.DataFrame) -> pd.Series:
    return iterations["start_s"] + iterations["duration_s"]


def _add_iterations(
    figure: go.Figure, lanes: list[Lane], centers: Mapping[str, float], begin_s: float, end_s: float
) -> int:
    parts = []
    for lane in lanes:
        shown = lane.iterations[(_ends(lane.iterations) > begin_s) & (lane.iterations["start_s"] < end_s)]
        parts.append(shown.assign(center=centers[lane.policy], policy=lane.name))
    drawn = pd.concat(parts)
    has_decodes, has_prefill = drawn["num_decodes"] > 0, drawn["num_prefill_tokens"] > 0
    kinds = np.select([has_decodes & has_prefill, has_prefill], ["hybrid", "prefill only"], "decode only")
    line_width = 0.6 if len(drawn) <= SEPARATED_PER_LANE * len(lanes) else 0
    for kind, (color, pattern) in COMPOSITIONS.items():
        rows = drawn[kinds == kind]
        if rows.empty:
            continue
        figure.add_trace(
            go.Bar(
                orientation="h",
                base=rows["start_s"],
                x=rows["duration_s"],
                y=rows["center"] + 0.1,
                width=0.5,
                name=kind,
                marker={
                    "color": color,
                    "line": {"width": line_width, "color": PAPER},
                    "pattern": {
                        "shape": pattern,
                        "fillmode": "overlay",
                        "size": 5,
                        "solidity": 0.25,
                        "fgcolor": "#000000",
                        "fgopacity": 0.35,
                    },
                },
                customdata=np.stack(
                    [1e3 * rows["duration_s"], rows["num_decodes"], rows["num_prefill_tokens"]], axis=1
                ),
                hovertemplate=(
                    f"{kind}, %{{customdata[0]:.4~g}} ms<br>%{{customdata[1]}} decodes + %{{customdata[2]}} prefill "
                    "tokens<br>starts at %{base:.3f} s<extra></extra>"
                ),
            )
        )
    return len(drawn)


def _add_stalls(
    figure: go.Figure, lanes: list[Lane], centers: Mapping[str, float], begin_s: float, end_s: float
) -> None:
    starts, widths, places = [], [], []
    for lane in lanes:
        keep = (lane.stalls.end_s > begin_s) & (lane.stalls.start_s < end_s)
        starts += lane.stalls.start_s[keep].tolist()
        widths += lane.stalls.durations_s[keep].tolist()
        places += [centers[lane.policy] - 0.29] * int(keep.sum())
    if not starts:
        return
    figure.add_trace(
        go.Bar(
            orientation="h",
            base=starts,
            x=widths,
            y=places,
            width=0.2,
            name="stall",
            marker={"color": VERMILLION, "opacity": 0.85, "line": {"width": 0}},
            customdata=1e3 * np.array(widths),
            hovertemplate="running requests wait %{customdata:.4~g} ms for their next token<extra></extra>",
        )
    )


def _add_example(
    figure: go.Figure, lanes: list[Lane], centers: Mapping[str, float], begin_s: float, end_s: float
) -> None:
    """Ticks for the tokens of the request that waits longest for one inside the window, the same in every lane."""
    request = _example_request(lanes, begin_s, end_s)
    if request is None:
        return
    times: list[float] = []
    places: list[float] = []
    for lane in lanes:
        if lane.tokens is None or request >= len(lane.tokens.offsets) - 1:
            continue
        own = lane.tokens.of(request)
        own = own[(own >= begin_s) & (own <= end_s)]
        times += own.tolist()
        places += [centers[lane.policy] - 0.29] * len(own)
    figure.add_trace(
        go.Scatter(
            x=times,
            y=places,
            mode="markers",
            name=f"tokens of request {request}",
            marker={"symbol": "line-ns-open", "size": 11, "color": INK, "line": {"color": INK, "width": 1}},
            hovertemplate=f"request {request}: token at %{{x:.3f}} s<extra></extra>",
        )
    )


def _example_request(lanes: list[Lane], begin_s: float, end_s: float) -> int | None:
    longest: tuple[float, int] | None = None
    for lane in lanes:
        if lane.tokens is None:
            continue
        gaps_ms, owners = lane.tokens.gaps_ms(begin_s, end_s)
        if len(gaps_ms) and (longest is None or float(gaps_ms.max()) > longest[0]):
            longest = (float(gaps_ms.max()), int(owners[gaps_ms.argmax()]))
    return longest[1] if longest else None
