"""What every policy shares: the queues, admission, preemption by recomputation, and the step after an iteration.

A policy (``policies.py``) only decides what the next iteration runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable

from .config import EngineConfig
from .kv_cache import BlockManager
from .request import Batch, Sequence

UNLIMITED = 1 << 62


class Scheduler(ABC):
    """Queues of one engine run. First come, first served; a preempted sequence returns to the front.

    waiting: arrived, not running. prefilling: admitted, some known tokens not computed yet.
    decoding: one token per iteration. All in order of admission. A pipeline has several schedulers over one ``waiting``
    queue and one ``kv``.
    """

    #: Whether admission reserves blocks for the whole output too (then nothing is ever preempted).
    reserves_output = False

    def __init__(self, config: EngineConfig, kv: BlockManager, waiting: deque[Sequence] | None = None) -> None:
        self.config = config
        self.kv = kv
        self.budget = UNLIMITED if config.token_budget is None else config.token_budget
        self.waiting: deque[Sequence] = deque() if waiting is None else waiting
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.num_finished = 0
        self._num_preempted = 0

    @abstractmethod
    def schedule(self) -> Batch:
        """The next iteration; never empty while ``has_work``."""

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting or self.prefilling or self.decoding)

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and are not finished."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        self.waiting.append(sequence)

    def admit_next(self) -> Sequence | None:
        """Move the head of the queue to ``prefilling``; None when it must wait.

        It is admitted when fewer than ``max_num_seqs`` run and the cache holds its whole prefill, as Sarathi-Serve and
        vLLM v0 do: a prompt that has begun can always be finished, so two long ones never preempt each other in turn.
        """
        if not self.waiting or self.num_running >= self.config.max_num_seqs:
            return None
        sequence = self.waiting[0]
        tokens = sequence.request.total_tokens if self.reserves_output else sequence.num_tokens
        num_blocks = self.kv.blocks_for(tokens)
        if num_blocks > self.kv.num_free:
            return None
        self.waiting.popleft()
        sequence.slot = self.kv.allocate(tokens)
        sequence.kv_capacity = num_blocks * self.kv.block_size
        self.prefilling.append(sequence)
        return sequence

    def grow_decodes(self) -> list[Sequence]:
        """The decodes of the next iteration, each with room for one more token.

        When no block is free the running sequence that arrived last gives up all of its own and will be
        recomputed (vLLM's recompute preemption).
        """
        decodes = list(self.decoding)
        for sequence in decodes:
            while sequence.num_computed >= sequence.kv_capacity and sequence.slot >= 0:
                if self.kv.append_block(sequence.slot):
                    sequence.kv_capacity += self.kv.block_size
                else:
                    self._preempt(max(self.decoding + self.prefilling, key=lambda running: running.index))
        return list(self.decoding) if self._num_preempted else decodes

    def make_batch(
        self,
        decodes: list[Sequence],
        chunks: list[Sequence] | None = None,
        chunk_tokens: list[int] | None = None,
    ) -> Batch:
        """A batch that carries the preemptions since the last one."""
        preempted, self._num_preempted = self._num_preempted, 0
        return Batch(decodes, chunks or [], chunk_tokens or [], preempted)

    def commit(self, batch: Batch) -> list[Sequence]:
        """Advance every sequence of ``batch``; returns those that got a token, decodes first, then chunks."""
        emitted = list(batch.decodes)
        self._advance(batch.decodes, 1)
        for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True):
            sequence.num_computed += tokens
            if sequence.num_computed < sequence.num_tokens:
                continue
            emitted.append(sequence)
            sequence.num_tokens += 1
            sequence.num_generated += 1
            self.prefilling.remove(sequence)
            if sequence.finished:
                self.num_finished += 1
                self._release(sequence)
            else:
                self.decoding.append(sequence)
        return emitted

    def decode_run_length(self, batch: Batch) -> int:
        """Iterations, this one included, that run the same ``batch`` again if nobody arrives; at least 1.

        More than 1 only for decodes that preempted nobody. Then the next batch is the same as long as none of them
        finishes and the free blocks last, under every policy: nothing is prefilling, or the iteration would have a
        chunk of it; and the head of the queue, which found no slot, no blocks or no budget this time, finds less next
        time, for slots and budget stay as they are and free blocks only become fewer. (A preemption is the exception:
        Sarathi does not even ask the head then, and vLLM v0 asked it before its blocks were given up.)
        """
        if batch.chunks or batch.num_preempted:
            return 1
        length = min([sequence.output_tokens - sequence.num_generated for sequence in batch.decodes])
        if len(batch.decodes) * (length // self.kv.block_size + 1) <= self.kv.num_free:
            return length
        # Few free blocks: the longest run whose last iteration still has them. This iteration's are taken already.
        shortest, longest = 1, length
        while shortest < longest:
            middle = (shortest + longest + 1) // 2
            if self._blocks_to_grow(batch, middle) <= self.kv.num_free:
                shortest = middle
            else:
                longest = middle - 1
        return shortest

    def commit_run(self, batch: Batch, num_iterations: int) -> list[int]:
        """Advance the decodes of ``batch`` by a whole run of iterations; for each block that one of them took on the
        way, the iteration of the run (1 or later) from which on it is in use."""
        size = self.kv.block_size
        taken_at: list[int] = []
        for sequence in batch.decodes:
            first = sequence.kv_capacity - sequence.num_computed
            if first < num_iterations:
                grows_at = range(first, num_iterations, size)
                taken_at += grows_at
                self.kv.append_blocks(sequence.slot, len(grows_at))
                sequence.kv_capacity += len(grows_at) * size
        self._advance(batch.decodes, num_iterations)
        return taken_at

    def _blocks_to_grow(self, batch: Batch, num_iterations: int) -> int:
        """Blocks that a run of decode iterations takes beyond those held."""
        size = self.kv.block_size
        return sum(
            [
                max(0, -(-(sequence.num_computed + num_iterations - sequence.kv_capacity) // size))
                for sequence in batch.decodes
            ]
        )

    def _advance(self, decodes: Iterable[Sequence], num_tokens: int) -> None:
        """Give every decode its next tokens; those that have them all finish."""
        num_finished = 0
        for sequence in decodes:
            sequence.num_computed += num_tokens
            sequence.num_tokens += num_tokens
            sequence.num_generated = generated = sequence.num_generated + num_tokens
            if generated >= sequence.output_tokens:
                num_finished += 1
                self._release(sequence)
        if num_finished:
            self.num_finished += num_finished
            self.decoding = [sequence for sequence in self.decoding if sequence.slot >= 0]

    def _preempt(self, victim: Sequence) -> None:
        (self.decoding if victim in self.decoding else self.prefilling).remove(victim)
        self._release(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._num_preempted += 1
        self.waiting.appendleft(victim)

    def _release(self, sequence: Sequence) -> None:
        self.kv.free(sequence.slot)
        sequence.slot = -1
        sequence.kv_capacity = 0
