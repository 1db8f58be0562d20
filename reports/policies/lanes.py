"""The policy runs side by side: iterations, stalls, what stretch of time to draw, and the table of their figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..data.run_folder import RunFolder, TokenTimes
from ..text import POLICY_NAMES, milliseconds, percent
from .stalls import Waits, find_waits

#: Iterations drawn in one lane; a window holds no more.
MAX_ITERATIONS_PER_LANE = 300
#: Without an SLO a stall is a wait this many times the policy's median one.
STALL_RATIO = 5.0
POLICY_ORDER = ("faster_transformer", "orca", "vllm_v0", "sarathi", "tile_aligned")


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
    first: str
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


def choose_window(lanes: list[Lane]) -> tuple[float, float]:
    """The stretch of time to draw: all of it, or where the longest stall is, short enough that no lane holds more
    than MAX_ITERATIONS_PER_LANE iterations."""
    end_s = max(lane.span_s for lane in lanes)
    if all(len(lane.iterations) <= MAX_ITERATIONS_PER_LANE for lane in lanes):
        return 0.0, end_s
    longest = max((lane.stalls for lane in lanes), key=lambda stalls: max(stalls.durations_s, default=0.0))
    focus_s = float(longest.start_s[np.argmax(longest.durations_s)]) if len(longest) else 0.0
    width_s = end_s
    starts_and_ends = [
        (np.sort(lane.iterations["start_s"].to_numpy()), np.sort(ends_s(lane.iterations).to_numpy())) for lane in lanes
    ]
    for _ in range(40):
        begin_s = float(np.clip(focus_s - 0.25 * width_s, 0.0, end_s - width_s))
        # Those that start before the window's end, less those that end before its begin.
        drawn = (
            int(np.searchsorted(starts, begin_s + width_s) - np.searchsorted(ends, begin_s, side="right"))
            for starts, ends in starts_and_ends
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
                first=milliseconds(run["ttft_p99_ms"]),
                throughput=f"{run['total_tokens_per_s']:,.0f}" if run["total_tokens_per_s"] > 0 else "–",
                bubble=percent(run[folder.answer.bubble_metric], 1),
                stalls=f"{len(lane.stalls):,}" if lane is not None and seen else "–",
                stalled=(
                    percent(float(lane.stalls.durations_s.sum()) / lane.span_s, 1) if lane is not None and seen else "–"
                ),
            )
        )
    return rows


def ends_s(iterations: pd.DataFrame) -> pd.Series:
    """When each iteration ended, seconds."""
    return iterations["start_s"] + iterations["duration_s"]
