"""The iteration timeline of the policies on the same requests: who computes what when, and who waits meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from ..budgets.trials import highest, lowest
from ..data.run_folder import RunFolder
from ..style import GREEN, INK, ORANGE, PAPER, SKY, VERMILLION, Drawing, finish
from ..text import POLICY_NAMES, change, count, listing, milliseconds, percent
from .lanes import STALL_RATIO, Lane, choose_window, ends_s

#: Up to so many a lane (mean), hairlines keep neighbouring iterations apart; beyond, they would hide them.
SEPARATED_PER_LANE = 200
COMPOSITIONS = {
    "decode only": (SKY, ""),
    "hybrid": (GREEN, ""),
    "prefill only": (ORANGE, "/"),
}


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


def timeline_finding(folder: RunFolder) -> str:
    """How the policies rank by their tail, who has the longest gap, and who the lowest throughput."""
    runs = folder.policies
    known = runs[runs["tbt_p99_ms"].notna()]
    if known.empty:
        return "No policy run has a time between tokens, so the policies differ in throughput alone."
    names = {index: POLICY_NAMES.get(str(row["policy"]), str(row["policy"])) for index, row in runs.iterrows()}
    order = known.sort_values("tbt_p99_ms", ascending=False, kind="stable")
    tails = ", ".join(f"{names[index]} {milliseconds(row['tbt_p99_ms'])}" for index, row in order.iterrows())
    if len(known) == 1:
        return f"One policy was run: P99 TBT {tails}."
    longest = highest(known, "tbt_max_ms")
    slowest, fastest = lowest(runs, "total_tokens_per_s"), highest(runs, "total_tokens_per_s")
    below = 1 - slowest["total_tokens_per_s"] / fastest["total_tokens_per_s"]
    speed = (
        f"{names[slowest.name]} has the lowest throughput, {percent(below)} below {names[fastest.name]}"
        if change(below)
        else "all have the same throughput"
    )
    return (
        f"P99 TBT from worst to best: {tails}. The longest gap, {milliseconds(longest['tbt_max_ms'])}, is under "
        f"{names[longest.name]}; {speed}."
    )


def composition(iterations: pd.DataFrame) -> npt.NDArray[np.str_]:
    """What each iteration holds, as a key of COMPOSITIONS."""
    has_decodes, has_prefill = iterations["num_decodes"] > 0, iterations["num_prefill_tokens"] > 0
    kinds = np.select([has_decodes & has_prefill, has_prefill], ["hybrid", "prefill only"], "decode only")
    return np.asarray(kinds, dtype=np.str_)


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


def _add_iterations(
    figure: go.Figure, lanes: list[Lane], centers: Mapping[str, float], begin_s: float, end_s: float
) -> int:
    parts = []
    for lane in lanes:
        shown = lane.iterations[(ends_s(lane.iterations) > begin_s) & (lane.iterations["start_s"] < end_s)]
        parts.append(shown.assign(center=centers[lane.policy], policy=lane.name))
    drawn = pd.concat(parts)
    kinds = composition(drawn)
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
