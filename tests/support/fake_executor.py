"""A device without a model: virtual time, and a paged cache of token ids that shows every paging mistake.

Each iteration writes the ids it computes through the block table and reads the whole context back through it; the next
token is a hash of what was read. So outputs depend on the prompt alone, if and only if no block was lost, shared or
read stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from zlib import crc32

import numpy as np
from tilebudget.engine import Batch, BlockManager, EngineConfig, Sequence, StepResult, TokenCosts

Duration = Callable[[int, Batch], float]

#: What ``tile_aligned`` goes by in tests of small batches.
TOKEN_COSTS = TokenCosts.from_edges((4, 8, 16, 24, 48, 96))


def linear_duration(iteration: int, batch: Batch) -> float:
    """1 ms and 10 us a token."""
    return 1e-3 + 1e-5 * batch.num_tokens


class FakeExecutor:
    """An ``Executor``; ``duration(iteration, batch)`` is the clock, ``batches`` what ran:
    ``(decode indices, {chunk index: tokens}, preempted)``."""

    needs_token_ids = True

    def __init__(
        self,
        duration: Duration = linear_duration,
        *,
        max_position: int = 1 << 20,
        vocab_size: int = 1000,
        default_blocks: int = 4096,
        virtual_time: bool = True,
    ) -> None:
        self.duration = duration
        self.max_position = max_position
        self.vocab_size = vocab_size
        self.default_blocks = default_blocks
        self.virtual_time = virtual_time
        self.batches: list[tuple[list[int], dict[int, int], int]] = []

    def describe(self) -> Mapping[str, str | int | float]:
        return {"device": "fake"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return self.default_blocks

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        self.kv = kv
        self.config = config
        self.batches = []
        self.cache = np.full(kv.num_blocks * kv.block_size, -1, dtype=np.int64)

    def execute(self, batch: Batch) -> StepResult:
        for sequence in batch.decodes:
            assert sequence.num_uncomputed == 1, "a decode has exactly its newest token to compute"
        for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True):
            assert 1 <= tokens <= sequence.num_uncomputed, "a chunk is part of what is not computed, and not empty"
        rows = [(sequence, 1) for sequence in batch.decodes]
        rows += list(zip(batch.chunks, batch.chunk_tokens, strict=True))
        slots = [sequence.slot for sequence, _ in rows]
        assert len(set(slots)) == len(slots), "two rows of one sequence, or two sequences in one slot"
        token_ids = [token for sequence, tokens in rows for token in self._run(sequence, tokens)]
        model_s = self.duration(len(self.batches), batch)
        chunks = {sequence.index: tokens for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True)}
        self.batches.append(([sequence.index for sequence in batch.decodes], chunks, batch.num_preempted))
        return StepResult(model_s, np.array(token_ids, dtype=np.int64))

    def _run(self, sequence: Sequence, tokens: int) -> list[int]:
        """Write ``tokens`` ids to the cache; the next token, when that completes the known ones."""
        assert sequence.token_ids is not None
        end = sequence.num_computed + tokens
        assert end <= sequence.kv_capacity, "more tokens than the sequence's blocks hold"
        positions = np.arange(end)
        blocks = self.kv.block_table[sequence.slot, positions // self.kv.block_size].astype(np.int64)
        places = blocks * self.kv.block_size + positions % self.kv.block_size
        self.cache[places[-tokens:]] = sequence.token_ids[end - tokens : end]
        return [next_token(self.cache[places], self.vocab_size)] if end == sequence.num_tokens else []


def next_token(context: np.ndarray[tuple[int], np.dtype[np.int64]], vocab_size: int = 1000) -> int:
    """The token that follows ``context``."""
    return crc32(context.tobytes()) % vocab_size


def expected_output(prompt: tuple[int, ...], num_tokens: int, vocab_size: int = 1000) -> tuple[int, ...]:
    """What any engine must generate, without an engine."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(np.array(ids, dtype=np.int64), vocab_size))
    return tuple(ids[len(prompt) :])
