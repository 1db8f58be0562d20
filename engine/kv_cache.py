"""Which blocks of the paged KV cache belong to whom. The tensors themselves are the executor's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .request import Sequence


class BlockManager:
    """Lets running sequences hold a slot and KV blocks, and takes them back.

    ``block_table`` is int32 ``[max_num_seqs, max_blocks_per_seq]``: row ``slot`` lists the blocks of the
    sequence that holds the slot, in token order; entries past its length are stale. Blocks are reused last
    freed first, so the used ones stay at the low end of the pool.

    ``with_table=False`` only counts blocks: ``block_table`` is empty. For executors that have no cache behind it.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        with_table: bool = True,
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("max_num_seqs", max_num_seqs),
            ("max_blocks_per_seq", max_blocks_per_seq),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.with_table = with_table
        rows = max_num_seqs if with_table else 0
        self.block_table: npt.NDArray[np.int32] = np.zeros((rows, max_blocks_per_seq), dtype=np.int32)
        self._max_blocks_per_seq = max_blocks_per_seq
        self._free_blocks = list(range(num_blocks - 1, -1, -1)) if with_table else []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_used(self) -> int:
        """Blocks held by running sequences; ``num_free`` are the others."""
        return self.num_blocks - self.num_free

    @property
    def num_free_slots(self) -> int:
        """Sequences that may still be admitted."""
        return len(self._free_slots)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let ``sequence`` hold a slot and the blocks of its first ``num_tokens`` tokens, some of which it may hold
        already. False, and nothing is taken, when the free blocks do not suffice.

        Raises ValueError when no slot is free, or a row of the table is too short.
        """
        count = -(-(num_tokens - sequence.kv_capacity) // self.block_size)
        if count <= 0:
            return True
        if count > self.num_free:
            return False
        slot, held = sequence.slot, sequence.kv_capacity // self.block_size
        if held + count > self._max_blocks_per_seq:
            raise ValueError(
                f"request {sequence.index} would hold {held + count} blocks, the table has {self._max_blocks_per_seq}"
            )
        if slot < 0:
            if not self._free_slots:
                raise ValueError("no free slot: max_num_seqs sequences run already")
            slot = sequence.slot = self._free_slots.pop()
        if self.with_table:
            self.block_table[slot, held : held + count] = self._free_blocks[: -count - 1 : -1]
            del self._free_blocks[self.num_free - count :]
        self.num_free -= count
        sequence.kv_capacity += count * self.block_size
        return True

    def release(self, sequence: Sequence) -> None:
        """Take back the slot of ``sequence`` and all its blocks."""
        held = sequence.kv_capacity // self.block_size
        if self.with_table:
            self._free_blocks.extend(self.block_table[sequence.slot, :held][::-1].tolist())
        self.num_free += held
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.kv_capacity = 0
