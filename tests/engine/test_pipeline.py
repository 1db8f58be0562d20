"""The pipeline replay against hand-computed schedules and an event simulation."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebudget.engine import replay


def simulate(durations_s: list[float], num_stages: int) -> float:
    """The span, by events: first-in first-out queues before the stages, at most num_stages inside."""
    queues: list[list[int]] = [[] for _ in range(num_stages)]
    busy = [False] * num_stages
    outside = list(range(len(durations_s)))
    inside = 0
    events: list[tuple[float, int, int]] = []
    now = 0.0
    while True:
        while outside and inside < num_stages:
            queues[0].append(outside.pop(0))
            inside += 1
        for stage in range(num_stages):
            if queues[stage] and not busy[stage]:
                busy[stage] = True
                batch = queues[stage].pop(0)
                heapq.heappush(events, (now + durations_s[batch] / num_stages, stage, batch))
        if not events:
            return now
        now, stage, batch = heapq.heappop(events)
        busy[stage] = False
        if stage + 1 < num_stages:
            queues[stage + 1].append(batch)
        else:
            inside -= 1


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_equal_iterations_leave_only_filling_and_draining(num_stages: int, count: int) -> None:
    result = replay([0.02] * count, num_stages)
    assert result.bubble_fraction == pytest.approx((num_stages - 1) / (count + num_stages - 1))
    assert result.span_s == pytest.approx((count + num_stages - 1) * 0.02 / num_stages)


def test_two_stages_by_hand() -> None:
    """Stage times 1, 2, 1. First stage: 0-1, 1-3, 3-4. Second: 1-2, 3-5, 5-6. Each works 4 of 6."""
    result = replay([2.0, 4.0, 2.0], 2)
    assert result.span_s == 6.0
    assert result.stage_idle_s == 2.0
    assert result.bubble_fraction == pytest.approx(1 / 3)


def test_no_more_than_num_stages_are_in_flight() -> None:
    """Stage times 1, 4, 1, 6. The fourth enters at 9, when the second has left, though the first stage is free at 6."""
    result = replay([2.0, 8.0, 2.0, 12.0], 2)
    assert result.span_s == 9.0 + 6.0 + 6.0


def test_one_stage_never_idles() -> None:
    assert replay(np.random.default_rng(0).random(1000) + 0.1, 1).bubble_fraction == pytest.approx(0.0, abs=1e-9)


def test_variance_makes_bubbles() -> None:
    even = replay([0.02] * 400, 4).bubble_fraction
    uneven = replay([0.01, 0.03] * 200, 4).bubble_fraction
    assert uneven > even + 0.1


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 4, 8]))
def test_same_as_an_event_simulation(durations_s: list[float], num_stages: int) -> None:
    result = replay(durations_s, num_stages)
    assert result.span_s == pytest.approx(simulate(durations_s, num_stages))
    work = sum(durations_s) / num_stages
    assert result.stage_idle_s == pytest.approx(result.span_s - work, abs=1e-9)
    assert 0.0 <= result.bubble_fraction < 1.0


@pytest.mark.parametrize(
    ("durations_s", "num_stages", "message"),
    [
        ([], 2, "at least one iteration"),
        ([[1.0]], 2, "needs one dimension"),
        ([1.0, float("nan")], 2, "positive, finite time"),
        ([1.0, 0.0], 2, "positive, finite time"),
        ([1.0], 0, "num_stages=0: must be at least 1"),
    ],
)
def test_bad_input(durations_s: list[float], num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(durations_s, num_stages)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["random", "sawtooth", "spikes", "equal"])
def test_a_long_run_replayed_in_lanes_has_the_same_span(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, kind: str
) -> None:
    rng = np.random.default_rng(1)
    durations_s = {
        "random": rng.exponential(1.0, 3001) + 1e-3,
        "sawtooth": np.tile(np.linspace(1.0, 1.3, 97), 31),
        "spikes": np.where(rng.random(3001) < 0.05, 50.0, 1.0),
        "equal": np.full(3001, 0.02),
    }[kind]
    single = replay(durations_s, num_stages)
    monkeypatch.setattr("tilebudget.engine.pipeline.LANES_FROM_ITERATIONS", 1000)
    monkeypatch.setattr("tilebudget.engine.pipeline.NUM_LANES", 16)
    lanes = replay(durations_s, num_stages)
    assert lanes.span_s == pytest.approx(single.span_s, rel=1e-12)
    assert lanes.bubble_fraction == pytest.approx(single.bubble_fraction, rel=1e-6, abs=1e-12)
