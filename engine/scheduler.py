"""What every policy shares: the queues, admission, preemption by recomputation, and the step after an iteration.

A policy (``policies.py``) only decides what the next iteration runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from .config import EngineConfig
from .kv_cache import BlockManager
from .request import Batch, Sequence

UNLIMITED = 1 << 62


class Scheduler(ABC):
    """Queues of one engine run. First come, first served; a preempted sequence returns to the front.

    waiting: arrived, not running. prefilling: admitted, some known tokens not computed yet.
    decoding: one token per iteration. All in order of admission.
    """

    #: Whether admission reserves blocks for the whole output too (then nothing is ever preempted).
    reserves_output = False

    def __init__(self, config: EngineConfig, kv: BlockManager) -> None:
        self.config = config
        self.kv = kv
        self.budget = UNLIMITED if config.token_budget is None else config.token_budget
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self._num_preempted = 0

    @abstractmethod
    def schedule(self) -> Batch:
        """The next iteration; never empty while ``has_work``."""

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting or self.prefilling or self.decoding)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        self.waiting.append(sequence)

    def admit_next(self) -> Sequence | None:
        """Move the head of the queue to ``prefilling``; None when it must wait.

        It is admitted when a slot is free and the cache holds its whole prefill, as Sarathi-Serve and vLLM v0
        do: a prompt that has begun can always be finished, so two long prompts never preempt each other in turn.
        """
        if not self.waiting or not self.kv.num_free_slots:
            return None
        sequence = self.waiting[0]
        tokens = sequence.request.total_tokens if self.reserves_output else sequence.num_tokens
        if self.kv.blocks_for(tokens) > self.kv.num_free:
            return None
        self.waiting.popleft()
        sequence.slot = self.kv.allocate(tokens)
        sequence.kv_capacity = self.kv.blocks_for(tokens) * self.kv.block_size
        self.prefilling.append(sequence)
        return sequence

    def grow_decodes(self) -> list[Sequence]:
        """The decodes of the next iteration, each with room for one more token.

        When no block is free the running sequence that arrived last gives up all of its own and will be
        recomputed (vLLM's recompute preemption).
        """
        for sequence in list(self.decoding):
            while sequence.slot >= 0 and sequence.num_computed >= sequence.kv_capacity:
                if self.kv.append_block(sequence.slot):
                    sequence.kv_capacity += self.kv.block_size
                else:
                    self._preempt(max(self.decoding + self.prefilling, key=lambda running: running.index))
        return list(self.decoding)

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
        any_finished = False
        for sequence in batch.decodes:
            sequence.num_computed += 1
            sequence.num_tokens += 1
            sequence.num_generated += 1
            if sequence.num_generated >= sequence.output_tokens:
                any_finished = True
                self._release(sequence)
        if any_finished:
            self.decoding = [sequence for sequence in self.decoding if sequence.slot >= 0]
        for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True):
            sequence.num_computed += tokens
            if sequence.num_computed < sequence.num_tokens:
                continue
            emitted.append(sequence)
            sequence.num_tokens += 1
            sequence.num_generated += 1
            self.prefilling.remove(sequence)
            if sequence.finished:
                self._release(sequence)
            else:
                self.decoding.append(sequence)
        return emitted

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
