"""The policy ``sarathi``: what it chunks, what it leaves, the paper's worked example."""

from __future__ import annotations

from hypothesis import given, settings
from serve import runs, serve
from tilebudget.engine import EngineConfig, Workload


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
