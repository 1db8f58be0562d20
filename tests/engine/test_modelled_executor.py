"""The modelled executor: durations are the table's, runs equal single iterations, and memory bounds the KV cache."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from fake_executor import TOKEN_COSTS
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_table import MODEL, make_table
from tilebudget.engine import (
    POLICY_NAMES,
    Batch,
    Engine,
    EngineConfig,
    OutOfMemoryError,
    Request,
    StepResult,
    Workload,
)
from tilebudget.engine.executor import ExecutorWrapper
from tilebudget.engine.model.config import ModelConfig
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.kernels.latency.table import IterationShape


class OneByOne(ExecutorWrapper):
    """The same executor with its ``decode_run_s`` hidden, so that the engine iterates one by one."""

    def __init__(self, inner: ModelledExecutor) -> None:
        super().__init__(inner)
        self.num_calls = 0

    def execute(self, batch: Batch) -> StepResult:
        self.num_calls += 1
        return super().execute(batch)


def make_workload(rows: list[tuple[float, int, int]]) -> Workload:
    return Workload(
        name="test",
        requests=tuple(
            Request(arrival_s=at, prompt_tokens=prompt, output_tokens=output) for at, prompt, output in sorted(rows)
        ),
    )


@settings(max_examples=60)
@given(
    load=st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=12).map(
        make_workload
    ),
    policy=st.sampled_from(POLICY_NAMES),
    num_kv_blocks=st.integers(12, 60),
)
def test_runs_of_decodes_equal_single_iterations(load: Workload, policy: str, num_kv_blocks: int) -> None:
    config = EngineConfig(
        policy=policy,
        token_budget=48,
        max_num_seqs=5,
        max_model_len=256,
        num_kv_blocks=num_kv_blocks,
        token_costs=TOKEN_COSTS,
    )
    executor = ModelledExecutor(make_table(), MODEL)
    one, other = (Engine(each).run(load, config) for each in (OneByOne(executor), executor))
    for column in fields(one.iterations):
        np.testing.assert_array_equal(getattr(one.iterations, column.name), getattr(other.iterations, column.name))
    np.testing.assert_array_equal(one.token_s, other.token_s)
    np.testing.assert_array_equal(one.token_request, other.token_request)


def test_an_iteration_takes_what_the_table_says() -> None:
    """One request of 100 tokens in chunks of 60 and 40, then two decodes at 101 and 102 tokens of KV."""
    table = make_table()
    record = Engine(ModelledExecutor(table, MODEL)).run(
        make_workload([(0.0, 100, 3)]), EngineConfig(token_budget=60, max_num_seqs=4)
    )
    shapes = [
        IterationShape(chunks=((60, 0),)),
        IterationShape(chunks=((40, 60),), num_logits=1),
        IterationShape(num_decodes=1, decode_kv_tokens=101, num_logits=1),
        IterationShape(num_decodes=1, decode_kv_tokens=102, num_logits=1),
    ]
    expected_s = [table.iteration(shape).latency_ms * 1e-3 for shape in shapes]
    assert record.iterations.duration_s.tolist() == pytest.approx(expected_s, rel=1e-12)
    assert record.outputs == ()


def test_whole_prompts_beyond_the_unrolled_table_are_looked_up_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(policy="orca", token_budget=None, max_num_seqs=4)
    load = make_workload([(0.0, 300, 2), (0.0, 200, 2)])
    whole = Engine(ModelledExecutor(make_table(), MODEL)).run(load, config)
    monkeypatch.setattr("tilebudget.engine.modelled.executor.LARGEST_UNROLLED_TOKENS", 64)
    small = Engine(ModelledExecutor(make_table(), MODEL)).run(load, config)
    assert small.iterations.duration_s.tolist() == pytest.approx(whole.iterations.duration_s.tolist(), rel=1e-12)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_kv_blocks_are_what_memory_leaves_after_the_weights(tensor_parallel: int) -> None:
    config = EngineConfig(max_num_seqs=512, token_budget=512, max_model_len=1024, block_size=16)
    executor = ModelledExecutor(make_table(tensor_parallel), MODEL, memory_bytes=100_000_000)
    weights = MODEL.num_parameters * 2 // tensor_parallel
    block = 2 * 3 * (2 // tensor_parallel) * 16 * 2 * 16  # keys and values, layers, KV heads, head_dim, bytes, tokens
    assert executor.weight_bytes == weights
    assert executor.default_num_kv_blocks(config) == (90_000_000 - weights) // block


def test_kv_blocks_are_no_more_than_can_be_used_and_no_less_than_a_request() -> None:
    config = EngineConfig(max_num_seqs=2, max_model_len=1024, block_size=16)
    assert ModelledExecutor(make_table(), MODEL).default_num_kv_blocks(config) == 2 * 64
    assert ModelledExecutor(make_table(), MODEL, memory_bytes=10**9).default_num_kv_blocks(config) == 2 * 64
    with pytest.raises(OutOfMemoryError, match="one request of 1024 tokens needs 64"):
        ModelledExecutor(make_table(), MODEL, memory_bytes=400_000).default_num_kv_blocks(config)


def test_a_table_of_another_model_is_refused() -> None:
    other = ModelConfig.preset("llama-2-7b")
    with pytest.raises(ValueError, match="table is for a model with num_layers=3: llama-2-7b has 32"):
        ModelledExecutor(make_table(), other)


def test_describe_names_device_model_degree_and_table() -> None:
    described = ModelledExecutor(make_table(2), MODEL).describe()
    wanted = {"device": "made_up", "model": "small", "dtype": "bf16", "tensor_parallel": 2, "framework": "none"}
    assert {name: described[name] for name in wanted} == wanted


def test_a_gpu_of_the_silicon_tables() -> None:
    """The sizes of vLLM on an 80 GB A100 with Llama-2-7B: some 7,600 blocks, decode iterations of 10 to 20 ms."""
    pytest.importorskip("aiconfigurator_core")
    executor = ModelledExecutor.from_silicon("llama-2-7b", system="a100_sxm", framework="vllm")
    assert executor.weight_bytes == pytest.approx(13.5e9, rel=0.01)
    assert 7000 < executor.default_num_kv_blocks(EngineConfig(max_num_seqs=256, token_budget=512)) < 8000
    record = Engine(executor).run(make_workload([(0.0, 500, 50)] * 8), EngineConfig(max_num_seqs=8))
    assert 0.008 < np.median(record.iterations.duration_s) < 0.02
