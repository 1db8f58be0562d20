"""The loop: clock, arrivals, rejection, monitors, and the cases that broke other engines."""

from __future__ import annotations

import numpy as np
import pytest
from fake_executor import TOKEN_COSTS, FakeExecutor, expected_output
from tilebudget.engine import (
    POLICIES,
    POLICY_NAMES,
    Engine,
    EngineConfig,
    OutOfMemoryError,
    Progress,
    Request,
    RunRecord,
    StepResult,
    Workload,
)
from tilebudget.engine.request import Batch


def workload(*rows: tuple[float, int, int]) -> Workload:
    """Requests of (arrival, prompt, output)."""
    return Workload(
        name="test",
        requests=tuple(Request(arrival_s=at, prompt_tokens=prompt, output_tokens=out) for at, prompt, out in rows),
    )


def run(load: Workload, executor: FakeExecutor | None = None, **settings: object) -> RunRecord:
    defaults = {"max_num_seqs": 4, "token_budget": 64, "token_costs": TOKEN_COSTS}
    config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
    return Engine(executor or FakeExecutor()).run(load, config)


def test_the_clock_adds_up_iterations_and_jumps_over_idle_gaps() -> None:
    executor = FakeExecutor(lambda iteration, batch: 0.25)
    record = run(workload((0.5, 10, 2), (10.0, 10, 3)), executor)
    assert record.iterations.start_s.tolist() == [0.5, 0.75, 10.0, 10.25, 10.5]
    assert record.busy_s == pytest.approx(1.25)
    assert record.token_s.tolist() == [0.75, 1.0, 10.25, 10.5, 10.75]
    assert record.token_request.tolist() == [0, 0, 1, 1, 1]
    assert record.requests.first_scheduled_s.tolist() == [0.5, 10.0]


def test_a_request_that_arrives_during_an_iteration_joins_the_next() -> None:
    executor = FakeExecutor(lambda iteration, batch: 1.0)
    record = run(workload((0.0, 10, 3), (0.5, 10, 1)), executor)
    assert executor.batches[1] == ([0], {1: 10}, 0)
    assert record.requests.first_scheduled_s.tolist() == [0.0, 1.0]


def test_the_clock_never_goes_back_to_an_arrival() -> None:
    """The second request comes during the last iteration of the first, which leaves the engine without work."""
    record = run(workload((0.0, 10, 1), (0.5, 10, 1)), FakeExecutor(lambda iteration, batch: 1.0))
    assert record.iterations.start_s.tolist() == [0.0, 1.0]


def test_the_record_describes_every_iteration() -> None:
    record = run(workload((0.0, 40, 2), (0.0, 40, 2)), block_size=16)
    assert record.iterations.num_tokens.tolist() == [64, 17, 1]
    assert record.iterations.num_decodes.tolist() == [0, 1, 1]
    assert record.iterations.num_prefill_tokens.tolist() == [64, 16, 0]
    assert record.iterations.num_requests.tolist() == [2, 2, 1]
    assert record.iterations.kv_blocks_used.tolist() == [6, 6, 3]
    frame = record.iterations.to_frame()
    assert len(frame) == 3
    assert frame["num_tokens"].sum() == 82
    assert record.request_frame()["token_s"].map(len).tolist() == [2, 2]


def test_prompts_are_the_same_in_every_run_of_a_seed() -> None:
    load = workload((0.0, 20, 6), (0.0, 30, 6))
    outputs = [run(load, seed=3, token_budget=budget).outputs for budget in (4, 8, None)]
    assert outputs[0] == outputs[1] == outputs[2]
    assert run(load, seed=4).outputs != outputs[0]


def test_given_token_ids_are_used() -> None:
    request = Request(arrival_s=0.0, prompt_tokens=3, output_tokens=4, prompt_token_ids=(5, 6, 7))
    record = run(Workload(name="ids", requests=(request,)))
    assert record.outputs == (expected_output((5, 6, 7), 4),)


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    request = Request(arrival_s=0.0, prompt_tokens=2, output_tokens=1, prompt_token_ids=(5, 1000))
    with pytest.raises(ValueError, match=r"request 0: every id must be in 0\.\.999, found 5\.\.1000"):
        run(Workload(name="ids", requests=(request,)))


def test_a_context_longer_than_the_model_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len=4096: the model takes at most 2048 tokens"):
        run(workload((0.0, 1, 1)), FakeExecutor(max_position=2048))


def test_a_monitor_stops_the_run_and_says_why() -> None:
    seen: list[Progress] = []

    def stop_at_two(progress: Progress) -> str | None:
        seen.append(progress)
        return "enough" if progress.num_finished == 2 else None

    executor = FakeExecutor(lambda iteration, batch: 0.5)
    load = workload((0.0, 10, 1), (0.0, 10, 2), (0.0, 10, 3), (9.0, 10, 3))
    record = Engine(executor).run(load, EngineConfig(max_num_seqs=4, token_budget=64), monitor=stop_at_two)
    assert record.stopped == "enough"
    assert record.requests.status == ("finished", "finished", "unfinished", "unfinished")
    assert record.requests.num_generated.tolist() == [1, 2, 2, 0]
    assert np.isnan(record.requests.first_scheduled_s[3])
    assert [progress.gaps_s for progress in seen] == [[], [0.5, 0.5]]
    assert (seen[-1].now_s, seen[-1].num_requests) == (1.0, 4)


def test_a_monitor_sees_every_gap() -> None:
    gaps_s: list[float] = []
    load = workload(*[(0.001 * index, 30 + 7 * index, 20) for index in range(8)])

    def collect(progress: Progress) -> None:
        gaps_s.extend(progress.gaps_s)

    record = Engine(FakeExecutor()).run(
        load, EngineConfig(max_num_seqs=4, token_budget=16, block_size=4, num_kv_blocks=24), monitor=collect
    )
    frame = record.request_frame()
    expected = np.concatenate([np.diff(times) for times in frame["token_s"]])
    assert record.iterations.num_preemptions.sum() > 0
    assert sorted(gaps_s) == sorted(expected.tolist())


def test_a_failing_executor_ends_the_run_with_its_error() -> None:
    class Full(FakeExecutor):
        def execute(self, batch: Batch) -> StepResult:
            raise OutOfMemoryError("no memory for the batch")

    with pytest.raises(OutOfMemoryError, match="no memory for the batch"):
        run(workload((0.0, 5, 5)), Full())


def test_an_engine_is_reusable_after_a_failure() -> None:
    executor = FakeExecutor(lambda iteration, batch: 1.0)
    engine = Engine(executor)
    config = EngineConfig(max_num_seqs=4, token_budget=64)
    with pytest.raises(ValueError, match="every id"):
        engine.run(
            Workload(
                name="bad",
                requests=(Request(arrival_s=0.0, prompt_tokens=1, output_tokens=1, prompt_token_ids=(-1,)),),
            ),
            config,
        )
    record = engine.run(workload((0.0, 5, 2)), config)
    assert record.count_status("finished") == 1


def test_measured_time_comes_from_the_host_clock() -> None:
    record = run(workload((0.0, 30, 5)), FakeExecutor(lambda iteration, batch: 1e-9, virtual_time=False))
    assert (record.iterations.duration_s > record.iterations.model_s).all()
    assert record.overhead_s > 0.0


def test_case_4_a_budget_below_the_decodes_is_refused() -> None:
    with pytest.raises(ValueError, match="token_budget=64: must be at least max_num_seqs=128"):
        EngineConfig(token_budget=64, max_num_seqs=128)


def test_case_4_a_budget_equal_to_the_decodes_runs() -> None:
    record = run(workload(*[(0.0, 5, 10)] * 100), token_budget=100, max_num_seqs=100)
    assert record.count_status("finished") == 100
    assert record.iterations.num_tokens.max() == 100


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_case_5_a_chunk_may_be_smaller_than_a_block(policy: str) -> None:
    record = run(workload(*[(0.0, 50, 20)] * 6), policy=policy, token_budget=8, max_num_seqs=8, block_size=16)
    assert record.count_status("finished") == 6
    assert record.iterations.num_tokens.min() >= 1


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_case_6_too_long_requests_are_rejected_and_counted(policy: str) -> None:
    """One is longer than max_model_len, one than the whole cache of 20 blocks of 16; the others finish."""
    load = workload((0.0, 40, 5), (0.0, 600, 5), (0.0, 400, 5), (0.1, 60, 5), (0.1, 508, 5))
    record = run(load, policy=policy, max_model_len=512, block_size=16, num_kv_blocks=20)
    assert record.requests.status == (
        "finished",
        "rejected_model_len",
        "rejected_kv",
        "finished",
        "rejected_model_len",
    )
    assert record.requests.num_generated.tolist() == [5, 0, 0, 5, 0]
    assert np.isnan(record.requests.first_scheduled_s[1])
    assert record.count_status("rejected_model_len") == 2


def test_case_6_a_request_that_fills_the_cache_exactly_runs() -> None:
    record = run(workload((0.0, 300, 20), (0.0, 301, 20)), block_size=16, num_kv_blocks=20)
    assert record.requests.status == ("finished", "rejected_kv")


def test_a_run_that_rejects_everything_ends() -> None:
    record = run(workload((0.0, 600, 5)), max_model_len=512)
    assert len(record.iterations) == 0
    assert record.requests.status == ("rejected_model_len",)
    assert record.busy_s == 0.0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_case_7_a_cache_for_two_of_four_long_prompts(policy: str) -> None:
    load = workload(*[(0.0, 200, 60)] * 4)
    tight_executor = FakeExecutor()
    tight = run(load, tight_executor, policy=policy, block_size=16, num_kv_blocks=28)
    roomy = run(load, policy=policy, block_size=16, num_kv_blocks=200)
    assert tight.count_status("finished") == 4
    assert tight.outputs == roomy.outputs
    assert roomy.iterations.num_preemptions.sum() == 0
    if POLICIES[policy].victim is not None:
        assert 1 <= tight.iterations.num_preemptions.sum() <= 12, "preempted, and not in a loop"
        assert tight.requests.num_preemptions.sum() == tight.iterations.num_preemptions.sum()


def test_case_9_one_token_each() -> None:
    record = run(workload(*[(0.0, 30, 1)] * 5))
    assert record.count_status("finished") == 5
    assert record.iterations.num_decodes.sum() == 0
