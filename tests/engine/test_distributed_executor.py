"""Stage processes give what one process gives; a dead one is named, cleared away and replaced."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from tilebudget.autotune.study.space import Candidate
from tilebudget.autotune.study.trial import TrialRunner
from tilebudget.engine import (
    SLO,
    Engine,
    EngineConfig,
    OutOfMemoryError,
    PipelinedExecutor,
    Request,
    Workload,
    num_stages,
)
from tilebudget.engine.distributed.executor import (
    PipelineExecutor,
    TensorParallelExecutor,
    distributed_executor,
)
from tilebudget.engine.distributed.launch import Torchrun
from tilebudget.engine.distributed.messages import Begin, Begun

ROOMY, TIGHT = None, 18  # KV blocks of 4 tokens: 18 hold any one request but not all six


@pytest.fixture(scope="module")
def pipeline(reference: Callable[[str], SimpleNamespace]) -> Iterator[PipelineExecutor]:
    executor = distributed_executor(reference("llama").folder, pipeline_parallel=2, num_threads=1)
    assert isinstance(executor, PipelineExecutor)
    yield executor
    executor.close()


def workload_of(expected: SimpleNamespace) -> Workload:
    requests = [
        Request(arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=count, prompt_token_ids=prompt)
        for prompt, count in zip(expected.prompts, expected.num_outputs, strict=True)
    ]
    return Workload(name="parity", requests=tuple(requests))


def config_with(token_budget: int | None, policy: str, num_kv_blocks: int | None) -> EngineConfig:
    return EngineConfig(
        token_budget=token_budget,
        policy=policy,
        max_num_seqs=3,
        max_model_len=64,
        block_size=4,
        num_kv_blocks=num_kv_blocks,
    )


@pytest.mark.parametrize(
    ("token_budget", "policy", "num_kv_blocks"),
    [(8, "sarathi", ROOMY), (17, "sarathi", TIGHT), (None, "orca", ROOMY), (16, "vllm_v0", TIGHT), (64, "orca", ROOMY)],
)
def test_a_pipeline_generates_what_transformers_does(
    token_budget: int | None,
    policy: str,
    num_kv_blocks: int | None,
    pipeline: PipelineExecutor,
    reference: Callable[[str], SimpleNamespace],
) -> None:
    expected = reference("llama")
    record = Engine(pipeline).run(workload_of(expected), config_with(token_budget, policy, num_kv_blocks))
    assert record.outputs == expected.outputs
    assert (record.iterations.num_preemptions.sum() > 0) == (num_kv_blocks == TIGHT)


def test_stage_times_are_on_one_clock(pipeline: PipelineExecutor, reference: Callable[[str], SimpleNamespace]) -> None:
    began_s = perf_counter()
    iterations = Engine(pipeline).run(workload_of(reference("llama")), config_with(8, "sarathi", ROOMY)).iterations
    starts, ends = iterations.stage_start_s, iterations.stage_end_s
    assert starts is not None
    assert ends is not None
    assert starts.shape == (len(iterations), 2)
    assert (starts[:, 0] >= 0).all()
    assert (ends[:, 1] <= perf_counter() - began_s).all()
    assert (starts < ends).all()
    assert (starts[:, 1] >= ends[:, 0]).all(), "a stage began before the one before had ended"
    assert (starts[1:] >= ends[:-1]).all(), "a stage worked on two micro-batches at once"
    assert (starts[1:, 0] < ends[:-1, 1]).any(), "no two micro-batches were in flight together"


def test_a_pipeline_says_what_it_is(pipeline: PipelineExecutor) -> None:
    described = pipeline.describe()
    assert described["pipeline_parallel"] == num_stages(pipeline) == 2
    assert (described["stage_layers"], described["backend"], described["num_threads"]) == ("1,1", "gloo", 1)
    assert pipeline.default_num_kv_blocks(config_with(8, "sarathi", ROOMY)) == 2 * 3 * 16


def test_a_killed_stage_fails_the_trial_and_not_the_study(
    pipeline: PipelineExecutor, reference: Callable[[str], SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with micro-batches in flight: named, at once, no process and no port left; the next trial has new ones."""
    expected, pids = reference("llama"), pipeline.stage_pids
    launch = pipeline._group._launch
    ports = (launch.meeting.driver_port, launch.meeting.store_port)
    runner = TrialRunner(
        Engine(pipeline),
        workload_of(expected),
        config_with(8, "sarathi", 64),
        SLO(name="loose", tbt_s=60.0, max_scheduling_delay_s=None),
    )
    collect, num_collected, killed_s = pipeline.collect, 0, 0.0

    def collect_and_kill() -> Any:
        nonlocal num_collected, killed_s
        num_collected += 1
        if num_collected == 5:
            os.kill(pids[1], signal.SIGKILL)
            killed_s = perf_counter()
        return collect()

    monkeypatch.setattr(pipeline, "collect", collect_and_kill)
    candidate = Candidate(token_budget=8, kind="aligned", edge_tokens=8)
    row, record = runner.run(candidate, run="trial-0", role="search")
    assert perf_counter() - killed_s < 10.0
    assert (row.state, record) == ("failed", None)
    assert f"StageFailedError: stage 1 of 2 (rank 1 of 2, process {pids[1]} on " in str(row.reason)
    assert "was killed by SIGKILL" in str(row.reason)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for port in ports:
        with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", port))

    row, record = runner.run(candidate, run="trial-1", role="search")
    assert (row.state, row.reason) == ("complete", None)
    assert record is not None
    assert record.outputs == expected.outputs
    assert not set(pids) & set(pipeline.stage_pids)


def test_an_error_in_a_stage_is_raised_as_what_it_is(pipeline: PipelineExecutor) -> None:
    """Here a cache that no memory holds. It ends the stages, so this test is the last of the pipeline's."""
    begin = Begin(num_blocks=10**12, block_size=4, max_tokens=8, max_query_len=8, max_context_len=8)
    with pytest.raises(OutOfMemoryError, match=r"a KV cache of 1000000000000 blocks needs"):
        pipeline._group.ask(begin, Begun)
    assert not pipeline._group.alive


def test_tensor_parallel_ranks_generate_what_transformers_does(reference: Callable[[str], SimpleNamespace]) -> None:
    expected = reference("qwen2")
    executor = distributed_executor(expected.folder, tensor_parallel=2, num_threads=1)
    try:
        assert isinstance(executor, TensorParallelExecutor)
        assert not isinstance(executor, PipelinedExecutor)
        for token_budget, policy, num_kv_blocks in ((8, "sarathi", ROOMY), (17, "vllm_v0", TIGHT)):
            record = Engine(executor).run(workload_of(expected), config_with(token_budget, policy, num_kv_blocks))
            assert record.outputs == expected.outputs
            assert (record.iterations.model_s > 0).all()
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pipeline_parallel": 2, "device": "h200_sxm"}, r"device='h200_sxm': must be cpu or cuda"),
        ({"pipeline_parallel": 2, "dtype": "fp8"}, r"dtype='fp8': must be one of"),
        ({"pipeline_parallel": 2, "kernels": "vllm"}, r"kernels='vllm': must be one of"),
        ({"pipeline_parallel": 2, "num_threads": 0}, r"num_threads=0: must be at least 1"),
        ({"pipeline_parallel": 5}, r"pipeline_parallel=5: must be from 1 to the model's 4 layers"),
        ({"tensor_parallel": 3}, r"tensor_parallel=3: must divide the 8 heads"),
        ({}, r"must be at least 2 processes"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        distributed_executor("tiny-llama", **settings)


def test_as_many_processes_as_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"pipeline_parallel=2: times tensor_parallel=1 must be the 3 processes"):
        distributed_executor("tiny-llama", pipeline_parallel=2)


def test_torchrun_is_recognised_by_its_variables() -> None:
    env = {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    torchrun = Torchrun.from_env(env)
    assert torchrun is not None
    assert (torchrun.rank, torchrun.local_rank, torchrun.num_ranks, torchrun.num_local_ranks) == (5, 1, 8, 4)
    assert (torchrun.store_host, torchrun.store_port, torchrun.has_store) == ("node0", 29500, True)
    assert Torchrun.from_env({}) is None
    assert Torchrun.from_env({**env, "WORLD_SIZE": "1"}) is None
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        Torchrun.from_env({"RANK": "0", "WORLD_SIZE": "2"})
