"""Every policy's rule, the paper's worked example, and what must hold on any workload."""

from __future__ import annotations

import numpy as np
from fake_executor import TOKEN_COSTS, FakeExecutor, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import PAPER_POLICIES, POLICY_NAMES, Engine, EngineConfig, Request, RunRecord, Workload

Batches = list[tuple[list[int], dict[int, int], int]]


def serve(lengths: list[tuple[int, int]], arrivals_s: list[float] | None = None, **settings_: object) -> Batches:
    """The batches of a run over (prompt, output) requests: (decodes, {chunk: tokens}, preempted)."""
    executor = FakeExecutor()
    config = EngineConfig(**({"max_num_seqs": 8, "max_model_len": 1024} | settings_))  # type: ignore[arg-type]
    Engine(executor).run(workload(lengths, arrivals_s), config)
    return executor.batches


def workload(lengths: list[tuple[int, int]], arrivals_s: list[float] | None = None) -> Workload:
    arrivals_s = arrivals_s or [0.0] * len(lengths)
    requests = tuple(
        Request(arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)
        for (prompt, output), arrival in zip(lengths, arrivals_s, strict=True)
    )
    return Workload(name="test", requests=requests)


def test_sarathi_worked_example() -> None:
    """Budget 100: R1-R4 decode, R5 has 30 prompt tokens left, R6 80, R7 150: 4 + 30 + 66."""
    lengths = [(10, 50)] * 4 + [(126, 50), (80, 50), (150, 50)]
    # An iteration takes over 1 ms, so R5 comes in the second and R6 and R7 in the third.
    batches = serve(lengths, [0.0] * 4 + [0.0001, 0.0015, 0.0015], token_budget=100)
    assert batches[0] == ([], {0: 10, 1: 10, 2: 10, 3: 10}, 0)
    assert batches[1] == ([0, 1, 2, 3], {4: 96}, 0)
    assert batches[2] == ([0, 1, 2, 3], {4: 30, 5: 66}, 0)
    assert batches[3] == ([0, 1, 2, 3, 4], {5: 14, 6: 81}, 0)
    assert batches[4] == ([0, 1, 2, 3, 4, 5], {6: 69}, 0)


def test_sarathi_chunks_what_is_left_of_the_budget() -> None:
    assert serve([(25, 2)], token_budget=10)[:3] == [([], {0: 10}, 0), ([], {0: 10}, 0), ([], {0: 5}, 0)]


def test_sarathi_full_of_decodes_starts_no_prefill() -> None:
    """Budget and decodes are equal: an iteration holds the decodes and no empty chunk."""
    batches = serve([(2, 4), (2, 4), (9, 1)], max_num_seqs=2, token_budget=2)
    assert ([0, 1], {}, 0) in batches
    assert all(tokens > 0 for _, chunks, _ in batches for tokens in chunks.values())


def test_sarathi_without_a_budget_takes_whole_prompts() -> None:
    batches = serve([(700, 2), (900, 1)], token_budget=None)
    assert batches[0] == ([], {0: 700, 1: 900}, 0)


def test_vllm_v0_prefills_first_and_decodes_wait() -> None:
    batches = serve([(10, 4), (20, 2)], [0.0, 0.001], policy="vllm_v0", token_budget=64)
    assert batches[:3] == [([], {0: 10}, 0), ([], {1: 20}, 0), ([0, 1], {}, 0)]


def test_vllm_v0_packs_whole_prompts_up_to_the_budget() -> None:
    batches = serve([(30, 1), (30, 1), (10, 1)], policy="vllm_v0", token_budget=64)
    assert batches == [([], {0: 30, 1: 30}, 0), ([], {2: 10}, 0)]


def test_vllm_v0_fills_the_budget_exactly_and_not_beyond() -> None:
    assert serve([(32, 1), (32, 1)], policy="vllm_v0", token_budget=64) == [([], {0: 32, 1: 32}, 0)]
    batches = serve([(32, 1), (33, 1)], policy="vllm_v0", token_budget=64)
    assert batches == [([], {0: 32}, 0), ([], {1: 33}, 0)]


def test_vllm_v0_lets_a_prompt_over_the_budget_go_alone() -> None:
    batches = serve([(10, 1), (100, 1), (10, 1)], policy="vllm_v0", token_budget=64)
    assert [chunks for _, chunks, _ in batches] == [{0: 10}, {1: 100}, {2: 10}]


def test_orca_adds_whole_prompts_to_the_decodes() -> None:
    batches = serve([(10, 4), (300, 2)], [0.0, 0.0005], policy="orca", token_budget=64)
    assert batches[:2] == [([], {0: 10}, 0), ([0], {1: 300}, 0)]


def test_orca_is_bounded_by_the_number_of_requests() -> None:
    batches = serve([(10, 3)] * 3, policy="orca", max_num_seqs=2)
    assert batches[0] == ([], {0: 10, 1: 10}, 0)
    assert batches[3] == ([], {2: 10}, 0)


def test_faster_transformer_serves_one_batch_to_its_end() -> None:
    batches = serve([(10, 2), (20, 4), (5, 1)], policy="faster_transformer", max_num_seqs=2)
    assert batches == [
        ([], {0: 10, 1: 20}, 0),
        ([0, 1], {}, 0),
        ([1], {}, 0),
        ([1], {}, 0),
        ([], {2: 5}, 0),
    ]


def test_stalls_are_ordered_as_in_the_paper() -> None:
    """Saturated: a decode waits longest under vLLM v0 and Orca; Sarathi is bounded by its budget."""
    lengths = [(50, 40)] * 4 + [(1000, 40)] * 4
    arrivals_s = [0.0] * 4 + [0.005, 0.02, 0.03, 0.04]
    worst_gap_s = {}
    for policy in PAPER_POLICIES:
        config = EngineConfig(policy=policy, max_num_seqs=8, token_budget=128, max_model_len=2048)
        record = Engine(FakeExecutor()).run(workload(lengths, arrivals_s), config)
        worst_gap_s[policy] = max(np.diff(times).max() for times in record.request_frame()["token_s"])
    assert worst_gap_s["sarathi"] <= 1e-3 + 1e-5 * 128 + 1e-9
    assert min(worst_gap_s["vllm_v0"], worst_gap_s["orca"]) > 4 * worst_gap_s["sarathi"]


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, EngineConfig]:
    """A workload and settings that fit it, often with too little cache."""
    count = draw(st.integers(1, 10))
    lengths = [(draw(st.integers(1, 50)), draw(st.integers(1, 12))) for _ in range(count)]
    arrivals_s = sorted(draw(st.sampled_from([0.0, 0.001, 0.004, 0.1])) for _ in range(count))
    max_num_seqs = draw(st.integers(1, 6))
    budget = draw(st.none() | st.integers(max_num_seqs, 40))
    block_size = draw(st.integers(1, 16))
    longest = max(prompt + output for prompt, output in lengths)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICY_NAMES)),
        token_budget=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=-(-longest // block_size) + draw(st.integers(0, 8)),
        token_costs=TOKEN_COSTS,
    )
    return workload(lengths, arrivals_s), config


def token_iterations(record: RunRecord) -> list[list[int]]:
    """For each request, the iteration of each of its tokens."""
    ends_s = record.iterations.start_s + record.iterations.duration_s
    return [np.searchsorted(ends_s, times).tolist() for times in record.request_frame()["token_s"]]


@given(runs())
@settings(max_examples=200, deadline=None)
def test_whatever_the_workload(run: tuple[Workload, EngineConfig]) -> None:
    """Everything finishes with the right tokens, no block leaks, no iteration is empty, first come first served."""
    load, config = run
    executor = FakeExecutor()
    record = Engine(executor).run(load, config)
    assert set(record.requests.status) == {"finished"}
    for index, request in enumerate(load.requests):
        rng = np.random.default_rng([config.seed, index])
        prompt = tuple(rng.integers(0, 1000, request.prompt_tokens).tolist())
        assert record.outputs[index] == expected_output(prompt, request.output_tokens)
    assert executor.kv.num_used == 0
    assert executor.kv.num_free_slots == config.max_num_seqs
    assert record.iterations.num_tokens.min() >= 1
    assert record.iterations.num_requests.max() <= config.max_num_seqs
    assert record.iterations.kv_blocks_used.max() <= record.num_kv_blocks
    ends_s = record.iterations.start_s + record.iterations.duration_s
    assert (record.iterations.start_s[1:] >= ends_s[:-1]).all(), "the clock went back"
    assert (np.diff(record.requests.first_scheduled_s) >= 0.0).all()
    assert (record.requests.first_scheduled_s >= record.requests.arrival_s).all()
    assert record.iterations.num_preemptions.sum() == record.requests.num_preemptions.sum()
    check_policy(record, config, executor.batches)


def check_policy(record: RunRecord, config: EngineConfig, batches: Batches) -> None:
    if config.policy in ("faster_transformer", "orca"):
        assert record.iterations.num_preemptions.sum() == 0, "the output is reserved"
    if config.policy in ("faster_transformer", "vllm_v0"):
        assert not any(decodes and chunks for decodes, chunks, _ in batches), "never mixed"
    if config.policy == "vllm_v0" and config.token_budget is not None:
        assert all(sum(chunks.values()) <= config.token_budget or len(chunks) == 1 for _, chunks, _ in batches)
    if config.policy not in ("sarathi", "tile_aligned"):
        return
    if config.token_budget is not None:
        assert record.iterations.num_tokens.max() <= config.token_budget
    for iterations, preemptions in zip(token_iterations(record), record.requests.num_preemptions, strict=True):
        if not preemptions:
            assert iterations == list(range(iterations[0], iterations[-1] + 1)), "a decode missed an iteration"


@given(runs())
@settings(max_examples=60, deadline=None)
def test_sarathi_never_wastes_budget_that_a_prompt_could_use(run: tuple[Workload, EngineConfig]) -> None:
    """With room for everyone, an iteration below the budget leaves nothing waiting that had arrived."""
    load, config = run
    lengths = [(request.prompt_tokens, request.output_tokens) for request in load.requests]
    budget = max(len(lengths), config.token_budget or 40)
    batches = serve(
        lengths, policy="sarathi", token_budget=budget, max_num_seqs=len(lengths), block_size=config.block_size
    )
    left = {index: prompt for index, (prompt, _) in enumerate(lengths)}
    for decodes, chunks, preempted in batches:
        assert preempted == 0
        for index, tokens in chunks.items():
            left[index] -= tokens
        if len(decodes) + sum(chunks.values()) < budget:
            assert not any(left.values())
