"""The policy ``vllm_v0``: prompts first, whole, up to the budget."""

from __future__ import annotations

from serve import serve


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
