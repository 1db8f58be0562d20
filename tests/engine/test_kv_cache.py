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


def test_allocate_takes_whole_blocks() -> None:
    kv = manager()
    slot = kv.allocate(33)
    assert (kv.num_used, kv.num_free, kv.num_free_slots) == (3, 5, 3)
    kv.append_blocks(slot, 1)
    assert len(set(kv.block_table[slot, :4].tolist())) == 4
    kv.free(slot)
    assert (kv.num_used, kv.num_free_slots) == (0, 4)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert manager().blocks_for(tokens) == blocks


def test_the_block_freed_last_is_used_first() -> None:
    kv = manager()
    first, second = kv.allocate(16), kv.allocate(16)
    block = kv.block_table[first, 0]
    kv.free(first)
    kv.append_blocks(second, 1)
    assert kv.block_table[second, 1] == block


def test_used_blocks_stay_at_the_low_end() -> None:
    kv = manager()
    for _ in range(3):
        slot = kv.allocate(48)
        assert kv.block_table[slot, :3].tolist() == [0, 1, 2]
        kv.free(slot)


def test_refusals_leave_nothing_taken() -> None:
    kv = manager(num_blocks=2, max_num_seqs=1)
    with pytest.raises(ValueError, match=r"3 KV blocks asked for, 2 are free"):
        kv.allocate(48)
    assert (kv.num_used, kv.num_free_slots) == (0, 1)
    slot = kv.allocate(32)
    with pytest.raises(ValueError, match="1 KV blocks asked for, 0 are free"):
        kv.append_blocks(slot, 1)
    with pytest.raises(ValueError, match="no free slot"):
        kv.allocate(16)


def test_a_row_cannot_outgrow_the_table() -> None:
    kv = manager(max_blocks_per_seq=2)
    with pytest.raises(ValueError, match="would hold 3 blocks, the table has 2"):
        kv.allocate(48)
    slot = kv.allocate(32)
    with pytest.raises(ValueError, match="would hold 3 blocks, the table has 2"):
        kv.append_blocks(slot, 1)
    assert kv.num_used == 2


def test_a_sequence_holds_what_its_tokens_need() -> None:
    kv = manager(num_blocks=4, max_num_seqs=1)
    sequence = Sequence(0, Request(arrival_s=0.0, prompt_tokens=40, output_tokens=9))
    assert kv.hold(sequence, 17)
    assert (sequence.slot, sequence.kv_capacity, kv.num_used) == (0, 32, 2)
    assert kv.hold(sequence, 32), "held already"
    assert kv.num_used == 2
    assert kv.hold(sequence, 33)
    assert not kv.hold(sequence, 65), "it would need a fifth block"
    assert (sequence.kv_capacity, kv.num_used) == (48, 3)
    kv.release(sequence)
    assert (sequence.slot, sequence.kv_capacity, kv.num_used, kv.num_free_slots) == (-1, 0, 0, 1)


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


@given(st.lists(st.tuples(st.sampled_from(["allocate", "append", "free"]), st.integers(1, 60)), max_size=60))
def test_no_block_is_ever_shared_or_lost(operations: list[tuple[str, int]]) -> None:
    kv = manager(num_blocks=10, max_num_seqs=3, max_blocks_per_seq=6)
    held: dict[int, int] = {}
    for operation, number in operations:
        if operation == "allocate" and kv.num_free_slots and kv.blocks_for(number) <= kv.num_free:
            held[kv.allocate(number)] = kv.blocks_for(number)
        elif held:
            slot = sorted(held)[number % len(held)]
            if operation == "free":
                kv.free(slot)
                del held[slot]
            elif held[slot] < 6 and kv.num_free:
                kv.append_blocks(slot, 1)
                held[slot] += 1
        owned = [block for slot, count in held.items() for block in kv.block_table[slot, :count].tolist()]
        assert len(set(owned)) == len(owned) == kv.num_used
        assert set(owned) <= set(range(10))
        assert kv.num_free_slots == 3 - len(held)
