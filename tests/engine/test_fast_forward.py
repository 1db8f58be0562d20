"""Runs of decodes advanced in one step leave the record that single iterations leave, to the last bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import pytest
from fake_executor import TOKEN_COSTS
from hypothesis import given
from hypothesis import strategies as st
from tilebudget.engine import (
    POLICIES,
    POLICY_NAMES,
    Engine,
    EngineConfig,
    Monitor,
    Progress,
    Request,
    RunRecord,
    StepResult,
    Workload,
)
from tilebudget.engine.executor import NonFiniteTimeError
from tilebudget.engine.kv_cache import BlockManager
from tilebudget.engine.request import Batch


class SingleSteps:
    """A modelled device without ``decode_run_s``: time depends on rows and on KV tokens, in awkward fractions."""

    virtual_time = True
    needs_token_ids = False
    max_position = 1 << 20
    vocab_size = 1000

    def __init__(self) -> None:
        self.num_calls = 0

    def describe(self) -> Mapping[str, str | int | float]:
        return {"device": "modelled"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return 4096

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        self.num_calls = 0
        self.kv = kv

    def execute(self, batch: Batch) -> StepResult:
        self.num_calls += 1
        kv_tokens = sum(sequence.num_tokens for sequence in batch.decodes)
        return StepResult(self._seconds(batch.num_tokens, kv_tokens))

    @staticmethod
    def _seconds(num_tokens: int, kv_tokens: int) -> float:
        return (0.1 + 0.007 * num_tokens) + kv_tokens / 7e4


class Runs(SingleSteps):
    """The same device with ``decode_run_s``."""

    def decode_run_s(self, batch: Batch, num_iterations: int) -> list[float]:
        self.num_calls += 1
        rows = len(batch.decodes)
        kv_tokens = sum(sequence.num_tokens for sequence in batch.decodes)
        return [self._seconds(rows, kv_tokens + rows * iteration) for iteration in range(num_iterations)]


def assert_same(one: RunRecord, other: RunRecord) -> None:
    for group in ("iterations", "requests"):
        for column in fields(getattr(one, group)):
            first, second = (getattr(getattr(record, group), column.name) for record in (one, other))
            np.testing.assert_array_equal(first, second, err_msg=column.name)
            if isinstance(first, np.ndarray):
                assert first.dtype == second.dtype
    np.testing.assert_array_equal(one.token_request, other.token_request)
    np.testing.assert_array_equal(one.token_s, other.token_s)
    assert [str(column.dtype) for column in (one.token_request, one.token_s)] == ["int64", "float64"]


REQUESTS = st.lists(
    st.tuples(st.floats(0.0, 20.0), st.integers(1, 60), st.integers(1, 60), st.booleans()), min_size=1, max_size=14
).map(
    lambda rows: Workload(
        name="random",
        requests=tuple(
            Request(
                arrival_s=arrival_s,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=prompt - 1 if cached else 0,
            )
            for arrival_s, prompt, output, cached in sorted(rows)
        ),
    )
)
CONFIGS = st.builds(
    EngineConfig,
    policy=st.sampled_from(POLICY_NAMES),
    token_budget=st.sampled_from((5, 16, 64, None)),
    max_num_seqs=st.integers(1, 5),
    max_model_len=st.just(120),
    block_size=st.sampled_from((1, 4, 16)),
    num_kv_blocks=st.integers(8, 130),
    token_costs=st.just(TOKEN_COSTS),
)


@given(load=REQUESTS, config=CONFIGS, watched=st.booleans())
def test_a_run_in_steps_equals_a_run_by_single_iterations(load: Workload, config: EngineConfig, watched: bool) -> None:
    gaps_s: list[list[float]] = [[], []]
    records = []
    for executor, seen in zip((SingleSteps(), Runs()), gaps_s, strict=True):
        records.append(Engine(executor).run(load, config, monitor=collector(seen) if watched else None))
        assert executor.kv.num_free == executor.kv.num_blocks
    assert_same(*records)
    assert sorted(gaps_s[0]) == sorted(gaps_s[1])


def collector(seen: list[float]) -> Monitor:
    def collect(progress: Progress) -> None:
        seen.extend(np.asarray(progress.gaps_s).tolist())

    return collect


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_tight_cache_and_arrivals_in_the_middle(policy: str) -> None:
    """The case that the random ones may miss: preemptions while requests wait, and arrivals during a run."""
    load = Workload(
        name="tight",
        requests=tuple(
            Request(arrival_s=0.9 * index, prompt_tokens=20 + 3 * index, output_tokens=80) for index in range(12)
        ),
    )
    config = EngineConfig(
        policy=policy,
        token_budget=24,
        max_num_seqs=6,
        max_model_len=160,
        block_size=4,
        num_kv_blocks=60,
        token_costs=TOKEN_COSTS,
    )
    single, runs = SingleSteps(), Runs()
    one, other = Engine(single).run(load, config), Engine(runs).run(load, config)
    assert_same(one, other)
    if POLICIES[policy].victim is not None:
        assert one.iterations.num_preemptions.sum() > 3
    assert runs.num_calls < 0.6 * single.num_calls


def test_long_decodes_take_a_call_for_each_change_of_the_batch() -> None:
    load = Workload(
        name="long",
        requests=tuple(Request(arrival_s=0.0, prompt_tokens=8, output_tokens=1000 * (1 + index)) for index in range(4)),
    )
    executor = Runs()
    record = Engine(executor).run(load, EngineConfig(max_num_seqs=4, token_budget=64, max_model_len=8192))
    assert len(record.iterations) == 4000
    assert executor.num_calls == 1 + 4


def test_an_arrival_exactly_at_the_start_of_an_iteration_joins_it() -> None:
    class Even(Runs):
        def execute(self, batch: Batch) -> StepResult:
            return StepResult(0.5)

        def decode_run_s(self, batch: Batch, num_iterations: int) -> list[float]:
            return [0.5] * num_iterations

    load = Workload(
        name="even",
        requests=tuple(Request(arrival_s=at, prompt_tokens=4, output_tokens=20) for at in (0.0, 2.0, 2.25)),
    )
    record = Engine(Even()).run(load, EngineConfig(max_num_seqs=4, token_budget=64))
    assert record.requests.first_scheduled_s.tolist() == [0.0, 2.0, 2.5]


def test_a_monitor_that_stops_keeps_the_run_that_it_stopped_in() -> None:
    load = Workload(name="one", requests=(Request(arrival_s=0.0, prompt_tokens=4, output_tokens=50),))
    record = Engine(Runs()).run(
        load,
        EngineConfig(max_num_seqs=4, token_budget=64),
        monitor=lambda progress: "enough" if len(progress.gaps_s) else None,
    )
    assert record.stopped == "enough"
    assert len(record.iterations) == 50
    assert record.requests.status == ("finished",)


@pytest.mark.parametrize("bad_s", [float("nan"), -1.0, float("inf")])
def test_a_bad_time_in_the_middle_of_a_run_ends_it(bad_s: float) -> None:
    class Bad(Runs):
        def decode_run_s(self, batch: Batch, num_iterations: int) -> list[float]:
            durations_s = [1.0] * num_iterations
            durations_s[num_iterations // 2] = bad_s
            return durations_s

    load = Workload(name="one", requests=(Request(arrival_s=0.0, prompt_tokens=4, output_tokens=50),))
    with pytest.raises(NonFiniteTimeError, match=json.dumps(bad_s).lower().replace("infinity", "inf")):
        Engine(Bad()).run(load, EngineConfig(max_num_seqs=4, token_budget=64))
