"""The loop with several micro-batches in flight: against the serial loop, an event simulation, and by hand."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
from fake_executor import TOKEN_COSTS, FakeExecutor, expected_output
from fake_pipeline import FakePipeline
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import (
    POLICY_NAMES,
    Batch,
    Engine,
    EngineConfig,
    PipelinedStepResult,
    Progress,
    Request,
    RunRecord,
    Workload,
    compute_metrics,
)
from tilebudget.engine.executor import NonFiniteTimeError


def workload(*rows: tuple[float, int, int]) -> Workload:
    """Requests of (arrival, prompt, output)."""
    return Workload(
        name="test",
        requests=tuple(Request(arrival_s=at, prompt_tokens=prompt, output_tokens=out) for at, prompt, out in rows),
    )


def seconds(batch: Batch) -> float:
    return 1e-3 + 1e-5 * batch.num_tokens + 1e-7 * sum(sequence.num_computed for sequence in batch.decodes)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, EngineConfig]:
    """Short requests, several arriving together, and a KV cache that barely holds them."""
    lengths = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=10))
    arrivals_s = sorted(draw(st.sampled_from([0.0, 0.001, 0.004, 0.1])) for _ in lengths)
    load = workload(*((at, *pair) for at, pair in zip(arrivals_s, lengths, strict=True)))
    max_num_seqs = draw(st.integers(1, 5))
    block_size = draw(st.integers(1, 16))
    longest = max(sum(pair) for pair in lengths)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICY_NAMES)),
        token_budget=draw(st.none() | st.integers(max_num_seqs, 40)),
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=-(-longest // block_size) + draw(st.integers(0, 12)),
        token_costs=TOKEN_COSTS,
    )
    return load, config


@given(runs())
@settings(max_examples=80, deadline=None)
def test_one_stage_is_the_serial_loop(run: tuple[Workload, EngineConfig]) -> None:
    load, config = run
    serial, pipeline = FakeExecutor(lambda _, batch: seconds(batch)), FakePipeline(1, lambda _, batch: [seconds(batch)])
    one, other = Engine(serial).run(load, config), Engine(pipeline).run(load, config)
    assert pipeline.inner.batches == serial.batches
    np.testing.assert_array_equal(other.token_request, one.token_request)
    np.testing.assert_array_equal(other.token_s, one.token_s)
    for column in fields(one.requests):
        np.testing.assert_array_equal(getattr(other.requests, column.name), getattr(one.requests, column.name))
    for column in fields(one.iterations):
        expected = getattr(one.iterations, column.name)
        if expected is not None:  # a duration is a difference of two times there: equal but for rounding
            np.testing.assert_allclose(getattr(other.iterations, column.name), expected, rtol=1e-9)
    assert other.outputs == one.outputs
    assert other.busy_s == pytest.approx(one.busy_s)


@given(runs(), st.integers(2, 4), st.sampled_from([0.0, 2e-4]), st.booleans(), st.integers(0, 1 << 16))
@settings(max_examples=80, deadline=None)
def test_whatever_the_workload(
    run: tuple[Workload, EngineConfig], num_stages: int, transfer_s: float, late: bool, seed: int
) -> None:
    """All finish with the right tokens, no block leaks, and the stages work when an event simulation says."""
    load, config = run
    shares = np.random.default_rng(seed).uniform(0.5, 2.0, num_stages)
    executor = FakePipeline(
        num_stages, lambda _, batch: list(seconds(batch) * shares), transfer_s=transfer_s, late=late
    )
    record = Engine(executor).run(load, config)
    assert set(record.requests.status) == {"finished"}
    for index, request in enumerate(load.requests):
        rng = np.random.default_rng([config.seed, index])
        prompt = tuple(rng.integers(0, 1000, request.prompt_tokens).tolist())
        assert record.outputs[index] == expected_output(prompt, request.output_tokens)
    assert executor.inner.kv.num_used == 0
    assert executor.inner.kv.num_free_slots == num_stages * config.max_num_seqs
    iterations = record.iterations
    assert iterations.num_requests.max() <= config.max_num_seqs
    assert iterations.num_preemptions.sum() == record.requests.num_preemptions.sum()
    assert (record.requests.first_scheduled_s >= record.requests.arrival_s).all()
    assert len(record.token_s) == sum(request.output_tokens for request in load.requests)
    if not record.requests.num_preemptions.any():
        assert iterations.num_prefill_tokens.sum() == load.num_prompt_tokens
        assert iterations.num_decodes.sum() == load.num_output_tokens - len(load.requests)
    assert iterations.stage_start_s is not None
    assert iterations.stage_end_s is not None
    start_s, end_s = simulate(
        [ready for ready, *_ in executor.submitted], [times for *_, times in executor.submitted], transfer_s
    )
    np.testing.assert_allclose(iterations.stage_start_s, start_s, rtol=0, atol=1e-12)
    np.testing.assert_allclose(iterations.stage_end_s, end_s, rtol=0, atol=1e-12)
    check_no_request_is_ahead_of_itself(record, executor)


def check_no_request_is_ahead_of_itself(record: RunRecord, executor: FakePipeline) -> None:
    """A request enters the first stage only after its last micro-batch has left the last one."""
    left_s: dict[int, float] = {}
    assert record.iterations.stage_end_s is not None
    for number, (ready_s, indices, _) in enumerate(executor.submitted):
        for index in indices:
            assert ready_s >= left_s.get(index, 0.0)
            left_s[index] = float(record.iterations.stage_end_s[number, -1])


def simulate(
    ready_s: Sequence[float], stage_s: Sequence[Sequence[float]], transfer_s: float
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    """Start and end by micro-batch and stage: events, a first-in first-out queue before each stage."""
    num_stages = len(stage_s[0])
    starts, ends = np.full((2, len(ready_s), num_stages), np.nan)
    queues: list[list[int]] = [[] for _ in range(num_stages)]
    working: list[int | None] = [None] * num_stages
    events: list[tuple[float, int, str, int]] = [(at, number, "arrives", 0) for number, at in enumerate(ready_s)]
    heapq.heapify(events)
    while events:
        now, number, kind, stage = heapq.heappop(events)
        if kind == "arrives":
            queues[stage].append(number)
        else:
            ends[number, stage] = now
            working[stage] = None
            if stage + 1 < num_stages:
                heapq.heappush(events, (now + transfer_s, number, "arrives", stage + 1))
        for place in range(num_stages):
            if working[place] is None and queues[place]:
                batch = queues[place].pop(0)
                working[place] = batch
                starts[batch, place] = now
                heapq.heappush(events, (now + stage_s[batch][place], batch, "leaves", place))
    return starts, ends


def serve(load: Workload, executor: FakePipeline, **settings: object) -> RunRecord:
    config = EngineConfig(**({"max_num_seqs": 2, "token_budget": 64} | settings))  # type: ignore[arg-type]
    return Engine(executor).run(load, config)


def test_two_stages_by_hand() -> None:
    """Two requests, one in each lane; a prefill takes 2 s in a stage and a decode 1 s.

    Lane A: 0-2, 2-4; then its decode. Lane B: 2-4, 4-6; its decode follows A's.
    A's decode enters at 4 (result back at 4, first stage free at 4): 4-5, and 6-7 in the second stage, which B's
    prefill has until 6. B's decode enters at 6: 6-7, 7-8.
    """
    executor = FakePipeline(2, lambda _, batch: [2.0, 2.0] if batch.chunks else [1.0, 1.0])
    record = serve(workload((0.0, 64, 2), (0.0, 64, 2)), executor)
    iterations = record.iterations
    assert iterations.stage_start_s is not None
    assert iterations.stage_end_s is not None
    assert iterations.stage_start_s.tolist() == [[0, 2], [2, 4], [4, 6], [6, 7]]
    assert iterations.stage_end_s.tolist() == [[2, 4], [4, 6], [5, 7], [7, 8]]
    assert record.token_request.tolist() == [0, 1, 0, 1]
    assert record.token_s.tolist() == [4.0, 6.0, 7.0, 8.0]
    assert record.requests.first_scheduled_s.tolist() == [0.0, 2.0]
    assert record.busy_s == 8.0


def test_an_arrival_takes_a_free_lane_while_another_is_in_flight() -> None:
    executor = FakePipeline(2, lambda _, batch: [1.0, 1.0])
    record = serve(workload((0.0, 10, 1), (0.5, 10, 1)), executor)
    assert [at for at, *_ in executor.submitted] == [0.0, 0.5]
    assert record.requests.first_scheduled_s.tolist() == [0.0, 1.0]
    assert record.token_s.tolist() == [2.0, 3.0]


def test_idle_gaps_are_skipped_and_not_busy() -> None:
    executor = FakePipeline(2, lambda _, batch: [1.0, 1.0])
    record = serve(workload((0.5, 10, 2), (10.0, 10, 1)), executor)
    assert record.token_s.tolist() == [2.5, 4.5, 12.0]
    assert record.busy_s == pytest.approx(6.0)
    assert compute_metrics(record).output_tokens_per_s == pytest.approx(0.5)


def test_a_request_joins_the_free_lane_with_the_fewest() -> None:
    """At 2.0 the first lane is back, and the other is empty: the request that arrives then goes there."""
    executor = FakePipeline(2, lambda _, batch: [1.0, 1.0])
    serve(workload((0.0, 10, 3), (2.0, 10, 2)), executor)
    assert [indices for _, indices, _ in executor.submitted] == [(0,), (1,), (0,), (1,), (0,)]


def test_each_micro_batch_takes_max_num_seqs() -> None:
    executor = FakePipeline(3, lambda _, batch: [1.0] * 3)
    record = serve(workload(*[(0.0, 4, 3)] * 7), executor, max_num_seqs=2)
    assert record.iterations.num_requests[:4].tolist() == [2, 2, 2, 2]
    assert [indices for _, indices, _ in executor.submitted[:3]] == [(0, 1), (2, 3), (4, 5)]


def test_a_monitor_stops_the_run_and_what_is_in_flight_is_dropped() -> None:
    executor = FakePipeline(2, lambda _, batch: [1.0, 1.0])
    seen: list[Progress] = []

    def stop(progress: Progress) -> str | None:
        seen.append(progress)
        return "enough" if len(seen) == 3 else None

    config = EngineConfig(max_num_seqs=2, token_budget=64)
    record = Engine(executor).run(workload((0.0, 64, 9), (0.0, 64, 9)), config, monitor=stop)
    assert record.stopped == "enough"
    assert not executor.in_flight
    assert [progress.now_s for progress in seen] == [2.0, 3.0, 4.0]
    assert [list(progress.gaps_s) for progress in seen] == [[], [], [2.0]]
    assert record.requests.num_generated.tolist() == [2, 1]


def test_a_time_that_is_not_finite_is_refused() -> None:
    class Broken(FakePipeline):
        def collect(self) -> PipelinedStepResult:
            return PipelinedStepResult(np.array([0.0, np.nan]), np.array([1.0, np.nan]))

    with pytest.raises(NonFiniteTimeError, match="by stage"):
        serve(workload((0.0, 4, 1)), Broken(2, lambda _, batch: [1.0, 1.0]))
