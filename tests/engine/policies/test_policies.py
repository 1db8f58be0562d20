"""What holds for every policy: its place in the list, its traits on any workload, and how they compare."""

from __future__ import annotations

from typing import get_type_hints

import numpy as np
import pytest
from fake_executor import FakeExecutor, expected_output
from hypothesis import given, settings
from serve import Batches, runs, workload
from tilebudget.engine import PAPER_POLICIES, POLICIES, POLICY_NAMES, Engine, EngineConfig, RunRecord, Workload
from tilebudget.engine.scheduler import Scheduler


def test_policies_are_listed_in_the_order_in_which_they_came() -> None:
    assert POLICY_NAMES == ("faster_transformer", "orca", "vllm_v0", "sarathi", "tile_aligned")
    assert POLICY_NAMES[:4] == PAPER_POLICIES


@pytest.mark.parametrize("policy", POLICIES.values())
def test_every_policy_states_its_traits(policy: type[Scheduler]) -> None:
    assert [trait for trait in get_type_hints(Scheduler) if not hasattr(policy, trait)] == []
    assert policy.victim is None or policy.victim.startswith("the ")


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
    """What the traits of the policy promise."""
    policy = POLICIES[config.policy]
    budget = config.token_budget if policy.heeds_budget else None
    if policy.victim is None:
        assert record.iterations.num_preemptions.sum() == 0
    if not policy.mixes:
        assert not any(decodes and chunks for decodes, chunks, _ in batches)
    if budget is not None and policy.chunks:
        assert record.iterations.num_tokens.max() <= budget
    if budget is not None and not policy.chunks:
        assert all(sum(chunks.values()) <= budget or len(chunks) == 1 for _, chunks, _ in batches)
    for iterations, preemptions in zip(token_iterations(record), record.requests.num_preemptions, strict=True):
        if policy.mixes and not preemptions:
            assert iterations == list(range(iterations[0], iterations[-1] + 1)), "a decode missed an iteration"
