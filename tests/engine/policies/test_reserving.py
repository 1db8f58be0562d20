"""What policies share that reserve the blocks of a prompt: admission, preemption, and the step after an iteration."""

from __future__ import annotations

import pytest
from fake_executor import TOKEN_COSTS
from tilebudget.engine import Batch, BlockManager, EngineConfig, Request, Sequence
from tilebudget.engine.policies import POLICIES, make_scheduler
from tilebudget.engine.policies.reserving import Reserving


def scheduler(
    policy: str = "sarathi", *, num_blocks: int = 100, max_num_seqs: int = 8, token_budget: int | None = 100
) -> Reserving:
    config = EngineConfig(
        policy=policy, max_num_seqs=max_num_seqs, token_budget=token_budget, block_size=4, token_costs=TOKEN_COSTS
    )
    kv = BlockManager(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, max_blocks_per_seq=64)
    made = make_scheduler(config, kv)
    assert isinstance(made, Reserving)
    return made


def add(target: Reserving, index: int, prompt: int, output: int) -> Sequence:
    sequence = Sequence(index, Request(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output))
    target.add(sequence)
    return sequence


def step(target: Reserving) -> Batch:
    batch = target.schedule()
    target.commit(batch)
    return batch


def test_admission_needs_a_slot() -> None:
    target = scheduler(max_num_seqs=2)
    for index in range(3):
        add(target, index, 4, 2)
    assert target.admit_next() is not None
    assert target.admit_next() is not None
    assert target.admit_next() is None
    assert [sequence.index for sequence in target.waiting] == [2]


def test_admission_is_first_come_first_served() -> None:
    """A small prompt does not overtake a large one that has to wait for blocks."""
    target = scheduler(num_blocks=5)
    add(target, 0, 12, 4)
    add(target, 1, 12, 4)
    add(target, 2, 4, 4)
    assert target.admit_next() is not None
    assert target.admit_next() is None
    assert [sequence.index for sequence in target.waiting] == [1, 2]


def test_admission_takes_the_blocks_of_the_whole_prompt() -> None:
    target = scheduler()
    add(target, 0, 13, 40)
    sequence = target.admit_next()
    assert sequence is not None
    assert (target.kv.num_used, sequence.kv_capacity) == (4, 16)


@pytest.mark.parametrize("policy", ["faster_transformer", "orca"])
def test_policies_of_request_level_memory_reserve_the_output_too(policy: str) -> None:
    target = scheduler(policy)
    add(target, 0, 13, 40)
    assert target.admit_next() is not None
    assert target.kv.num_used == 14


def test_nothing_waits_nothing_is_admitted() -> None:
    assert scheduler().admit_next() is None
    assert not scheduler().has_work


def test_the_last_arrived_is_preempted_and_comes_back_first() -> None:
    """Two requests fill four blocks exactly; the first to need a fifth takes it from the one that came last."""
    target = scheduler(num_blocks=4)
    first, second = add(target, 0, 8, 8), add(target, 1, 8, 8)
    add(target, 2, 4, 2)
    step(target)
    batch = step(target)
    assert batch.decodes == [first]
    assert batch.num_preempted == 1
    assert (second.slot, second.num_computed, second.num_preemptions) == (-1, 0, 1)
    assert [sequence.index for sequence in target.waiting] == [1, 2]
    assert second.num_tokens == 9, "the token that it has generated stays known"
    assert target.kv.num_used == 3


def test_a_preempted_sequence_recomputes_all_known_tokens() -> None:
    target = scheduler(num_blocks=4)
    first, second = add(target, 0, 8, 3), add(target, 1, 8, 8)
    step(target)
    step(target)
    step(target)
    assert first.finished
    batch = step(target)
    assert batch.chunks == [second]
    assert batch.chunk_tokens == [9]
    assert second.num_generated == 2


def test_the_needy_one_preempts_itself_when_it_came_last() -> None:
    target = scheduler(num_blocks=4)
    first, second = add(target, 0, 7, 6), add(target, 1, 8, 6)
    step(target)
    batch = step(target)
    assert batch.decodes == [first]
    assert second.num_preemptions == 1


def test_commit_returns_decodes_then_ended_chunks() -> None:
    target = scheduler(token_budget=10)
    first = add(target, 0, 4, 3)
    step(target)
    second, third = add(target, 1, 5, 1), add(target, 2, 9, 2)
    batch = target.schedule()
    assert (batch.decodes, batch.chunks, batch.chunk_tokens) == ([first], [second, third], [5, 4])
    assert target.commit(batch) == [first, second]
    assert second.finished
    assert second.slot == -1
    assert target.running == [first, third]
    assert (first.is_decode, third.is_decode) == (True, False)
    assert (third.num_computed, third.num_uncomputed) == (4, 5)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_blocks_return_when_a_request_finishes(policy: str) -> None:
    target = scheduler(policy)
    sequences = [add(target, index, 5 + index, 1 + 3 * index) for index in range(3)]
    while target.has_work:
        step(target)
    assert target.kv.num_used == 0
    assert target.kv.num_free_slots == 8
    assert all(sequence.finished and sequence.slot == -1 for sequence in sequences)
