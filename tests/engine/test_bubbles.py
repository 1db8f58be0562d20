"""Bubbles of runs whose schedule is known, and that they add up whatever the schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import BUBBLE_CAUSES, Bubbles, Iterations, find_bubbles, replay, replay_stages
from tilebudget.engine.pipeline_clock import PipelineClock
from tilebudget.engine.record import FloatArray


def schedule(
    stage_s: list[list[float]],
    *,
    transfer_s: float = 0.0,
    arrivals_s: list[float] | None = None,
    prefills: list[bool] | None = None,
    lanes: int | None = None,
) -> Iterations:
    """Micro-batches through a pipeline, at most ``lanes`` in flight (default: one for each stage)."""
    num_stages, count = len(stage_s[0]), len(stage_s)
    clock = PipelineClock(num_stages)
    starts: list[FloatArray] = []
    ends: list[FloatArray] = []
    for number, times in enumerate(stage_s):
        ready_s = 0.0 if arrivals_s is None else arrivals_s[number]
        if number >= (lanes or num_stages):
            ready_s = max(ready_s, float(ends[number - (lanes or num_stages)][-1]))
        start_s, end_s = clock.enter(ready_s, times, [transfer_s] * (num_stages - 1))
        starts.append(start_s)
        ends.append(end_s)
    start, end = np.array(starts), np.array(ends)
    prefill = np.array([1 if prefills is None else int(flag) for flag in prefills or [True] * count], dtype=np.int64)
    ones = np.ones(count, dtype=np.int64)
    return Iterations(
        start_s=start[:, 0],
        duration_s=end[:, -1] - start[:, 0],
        model_s=(end - start).sum(axis=1),
        num_tokens=ones,
        num_decodes=ones - prefill,
        num_prefill_tokens=prefill,
        num_requests=ones,
        kv_blocks_used=ones,
        num_preemptions=ones * 0,
        stage_start_s=start,
        stage_end_s=end,
    )


def causes(bubbles: Bubbles) -> dict[str, float]:
    """Seconds by cause, to nine places, those that are there."""
    totals = zip(BUBBLE_CAUSES, bubbles.idle_s.sum(axis=0).tolist(), strict=True)
    return {cause: round(idle_s, 9) for cause, idle_s in totals if idle_s > 1e-12}


def test_filling_and_draining_are_empty_slots() -> None:
    bubbles = find_bubbles(schedule([[1.0, 1.0]] * 5))
    assert bubbles.span_s == 6.0
    assert causes(bubbles) == {"empty_slot": 2.0}
    assert bubbles.idle_s[:, BUBBLE_CAUSES.index("empty_slot")].tolist() == [1.0, 0, 0, 0, 1.0]
    assert bubbles.bubble_fraction == pytest.approx(replay([2.0] * 5, 2).bubble_fraction)


def test_a_longer_micro_batch_makes_the_next_stage_wait_and_then_the_first() -> None:
    """Stage times 1, 2, 1, 1. First stage 0-1, 1-3, 3-4, then waits for the second to leave: 5-6.
    Second stage 1-2, waits to 3, 3-5, 5-6, 6-7."""
    iterations = schedule([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]])
    bubbles = find_bubbles(iterations)
    assert bubbles.span_s == 7.0
    assert causes(bubbles) == {"empty_slot": 2.0, "length_difference": 2.0}
    assert bubbles.idle_s[:, 0].tolist() == [0, 1, 0, 1]


def test_a_prefill_beside_a_decode_is_told_apart() -> None:
    prefills = [False, True, False, False]
    bubbles = find_bubbles(schedule([[1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]], prefills=prefills))
    assert causes(bubbles) == {"empty_slot": 2.0, "prefill_after_decode": 2.0}


def test_an_uneven_split_is_imbalance() -> None:
    """The second stage is the slower: the first waits 1 s before every micro-batch but the first two."""
    bubbles = find_bubbles(schedule([[1.0, 2.0]] * 6))
    assert bubbles.span_s == 13.0
    assert causes(bubbles) == {"stage_imbalance": 4.0, "empty_slot": 4.0}
    faster_last = find_bubbles(schedule([[2.0, 1.0]] * 6))
    assert causes(faster_last) == {"stage_imbalance": 5.0, "empty_slot": 3.0}


def test_equal_micro_batches_wait_for_transfers_alone() -> None:
    """A slot is taken for 1 + 0.5 + 1 s and there are two: each stage waits 0.5 s in 2.5."""
    bubbles = find_bubbles(schedule([[1.0, 1.0]] * 41, transfer_s=0.5))
    found = causes(bubbles)
    assert set(found) == {"transfer", "empty_slot"}
    assert found["transfer"] == 2 * 20 * 0.5
    assert bubbles.bubble_fraction == pytest.approx(0.2, abs=0.04)


def test_a_slot_with_nothing_to_run_is_empty() -> None:
    """One lane of two: each stage works half of the time."""
    bubbles = find_bubbles(schedule([[1.0, 1.0]] * 10, lanes=1))
    assert causes(bubbles) == {"empty_slot": 20.0}
    assert bubbles.bubble_fraction == pytest.approx(0.5)


def test_idle_gaps_are_not_bubbles() -> None:
    bubbles = find_bubbles(schedule([[1.0, 1.0], [1.0, 1.0]], arrivals_s=[0.0, 50.0]))
    assert bubbles.span_s == 4.0
    assert causes(bubbles) == {"empty_slot": 4.0}


def test_a_run_without_a_pipeline_has_none() -> None:
    iterations = schedule([[1.0]])
    object.__setattr__(iterations, "stage_end_s", None)
    with pytest.raises(ValueError, match="no stage times"):
        find_bubbles(iterations)


@given(
    st.integers(1, 5).flatmap(
        lambda stages: st.lists(
            st.lists(st.floats(0.01, 3.0), min_size=stages, max_size=stages), min_size=1, max_size=30
        )
    ),
    st.sampled_from([0.0, 0.3]),
    st.integers(1, 5),
    st.integers(0, 1 << 16),
)
@settings(max_examples=200, deadline=None)
def test_bubbles_add_up_to_the_idle_time(stage_s: list[list[float]], transfer_s: float, lanes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, num_stages = len(stage_s), len(stage_s[0])
    iterations = schedule(
        stage_s,
        transfer_s=transfer_s,
        arrivals_s=np.cumsum(rng.exponential(1.0, count) * rng.integers(0, 2, count)).tolist(),
        prefills=rng.integers(0, 2, count).astype(bool).tolist(),
        lanes=min(lanes, num_stages),
    )
    bubbles = find_bubbles(iterations)
    assert iterations.stage_start_s is not None
    assert iterations.stage_end_s is not None
    covered_s = 0.0  # by brute force: the time at which anything is in flight
    until_s = float("-inf")
    for start_s, end_s in zip(iterations.stage_start_s[:, 0], iterations.stage_end_s[:, -1], strict=True):
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    assert bubbles.span_s == pytest.approx(covered_s)
    assert (bubbles.idle_s >= -1e-9).all()
    idle_s = num_stages * covered_s - sum(map(sum, stage_s))
    assert bubbles.idle_s.sum() == pytest.approx(idle_s, abs=1e-6)
    assert bubbles.bubble_fraction == pytest.approx(idle_s / (num_stages * covered_s), abs=1e-6)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 4]))
def test_same_fraction_as_the_replay_of_whole_iterations(durations_s: list[float], num_stages: int) -> None:
    stage_s = [[duration_s / num_stages] * num_stages for duration_s in durations_s]
    bubbles = replay_stages(stage_s)
    assert bubbles.bubble_fraction == pytest.approx(replay(durations_s, num_stages).bubble_fraction, abs=1e-9)
    np.testing.assert_allclose(bubbles.idle_s, find_bubbles(schedule(stage_s, prefills=[False] * len(stage_s))).idle_s)


@pytest.mark.parametrize(
    ("stage_s", "message"),
    [([1.0, 2.0], "needs micro-batches and stages"), ([[1.0, 0.0]], "positive, finite"), ([[]], "at least one")],
)
def test_stage_times_that_are_none(stage_s: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay_stages(stage_s)  # type: ignore[arg-type]
