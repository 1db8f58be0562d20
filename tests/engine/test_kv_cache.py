"""Blocks and slots: handed out once, given back whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebudget.engine import BlockManager, Request, Sequence


def manager(num_blocks: int = 8, max_num_seqs: int = 4, max_blocks_per_seq: int = 6) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks, block_size=16, max_num_seqs=max_num_seqs, max_blocks_per_seq=max_blocks_per_seq
    )


def sequence(index: int = 0) -> Sequence:
    return Sequence(index, Request(arrival_s=0.0, prompt_tokens=40, output_tokens=9))


def blocks_of(kv: BlockManager, holder: Sequence) -> list[int]:
    return [int(block) for block in kv.block_table[holder.slot, : holder.kv_capacity // 16]]


def test_a_sequence_holds_whole_blocks_for_its_tokens() -> None:
    kv, holder = manager(num_blocks=4), sequence()
    assert kv.hold(holder, 17)
    assert (holder.slot, holder.kv_capacity, kv.num_used, kv.num_free_slots) == (0, 32, 2, 3)
    assert kv.hold(holder, 32), "held already"
    assert kv.num_used == 2
    assert kv.hold(holder, 33)
    assert len(set(blocks_of(kv, holder))) == 3
    kv.release(holder)
    assert (holder.slot, holder.kv_capacity, kv.num_used, kv.num_free_slots) == (-1, 0, 0, 4)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert manager().blocks_for(tokens) == blocks


def test_the_block_freed_last_is_used_first() -> None:
    kv, first, second = manager(), sequence(0), sequence(1)
    kv.hold(first, 16)
    kv.hold(second, 16)
    (block,) = blocks_of(kv, first)
    kv.release(first)
    kv.hold(second, 32)
    assert blocks_of(kv, second)[1] == block


def test_used_blocks_stay_at_the_low_end() -> None:
    kv, holder = manager(), sequence()
    for _ in range(3):
        kv.hold(holder, 48)
        assert blocks_of(kv, holder) == [0, 1, 2]
        kv.release(holder)


def test_refusals_leave_nothing_taken() -> None:
    kv, holder = manager(num_blocks=2, max_num_seqs=1), sequence()
    assert not kv.hold(holder, 48)
    assert (holder.slot, kv.num_used, kv.num_free_slots) == (-1, 0, 1)
    assert kv.hold(holder, 16)
    assert not kv.hold(holder, 48)
    assert (holder.kv_capacity, kv.num_used) == (16, 1)
    with pytest.raises(ValueError, match="no free slot"):
        kv.hold(sequence(1), 16)
    assert kv.num_used == 1


def test_a_row_cannot_outgrow_the_table() -> None:
    kv, holder = manager(max_blocks_per_seq=2), sequence(3)
    with pytest.raises(ValueError, match="request 3 would hold 3 blocks, the table has 2"):
        kv.hold(holder, 48)
    assert (holder.slot, kv.num_used) == (-1, 0)
    kv.hold(holder, 32)
    with pytest.raises(ValueError, match="request 3 would hold 3 blocks, the table has 2"):
        kv.hold(holder, 33)
    assert kv.num_used == 2


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "max_num_seqs", "max_blocks_per_seq"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"num_blocks": 1, "block_size": 1, "max_num_seqs": 1, "max_blocks_per_seq": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        BlockManager(
            num_blocks=sizes["num_blocks"],
            block_size=sizes["block_size"],
            max_num_seqs=sizes["max_num_seqs"],
            max_blocks_per_seq=sizes["max_blocks_per_seq"],
        )


@given(st.lists(st.tuples(st.sampled_from(["start", "grow", "release"]), st.integers(1, 60)), max_size=60))
def test_no_block_is_ever_shared_or_lost(operations: list[tuple[str, int]]) -> None:
    kv = manager(num_blocks=10, max_num_seqs=3, max_blocks_per_seq=6)
    held: list[Sequence] = []
    for operation, number in operations:
        if operation == "start" and kv.num_free_slots:
            starting = sequence()
            if kv.hold(starting, number):
                held.append(starting)
        elif held:
            holder = held[number % len(held)]
            if operation == "release":
                kv.release(holder)
                held.remove(holder)
            elif holder.kv_capacity < 6 * 16:
                kv.hold(holder, holder.kv_capacity + 1)
        owned = [block for holder in held for block in blocks_of(kv, holder)]
        assert len(set(owned)) == len(owned) == kv.num_used
        assert set(owned) <= set(range(10))
        assert kv.num_free_slots == 3 - len(held)
