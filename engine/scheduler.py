"""What the engine asks of a batching policy, and what every policy keeps: its queues, and the step after an iteration.

A policy decides what the next iteration runs. Each has a file of its own in ``policies/``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import ClassVar, Protocol

from .kv_cache import BlockManager
from .request import Batch, Sequence
from .token_costs import TokenCosts

UNLIMITED = 1 << 62


class SchedulerSettings(Protocol):
    """What schedulers read of the ``EngineConfig``."""

    @property
    def policy(self) -> str: ...
    @property
    def token_budget(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def token_costs(self) -> TokenCosts | None: ...


class Scheduler(ABC):
    """A policy, and its state in one run: who waits and who runs.

    waiting: arrived, not running; a preempted sequence returns to the front. running: admitted and not finished, in
    order of admission, whether its prefill has ended (``Sequence.is_decode``) or not. A pipeline has several schedulers
    over one ``waiting`` queue and one ``kv``.
    """

    #: The name in settings, and the one that a report prints.
    name: ClassVar[str]
    label: ClassVar[str]
    #: The year of the policy; lists of policies are in this order.
    since: ClassVar[int]
    #: Whether the Sarathi-Serve paper compares it.
    in_paper: ClassVar[bool]
    #: Whether the token budget bounds its iterations.
    heeds_budget: ClassVar[bool]
    #: Whether decodes and prompts share an iteration.
    mixes: ClassVar[bool]
    #: Whether a prompt may take several iterations.
    chunks: ClassVar[bool]
    #: Who gives up all KV blocks when none is free; None where that cannot happen.
    victim: ClassVar[str | None]
    #: Whether a request that comes with the KV cache of its prompt decodes at once.
    takes_cached: ClassVar[bool] = False
    #: Whether it needs ``token_costs``.
    needs_token_costs: ClassVar[bool] = False

    def __init__(self, config: SchedulerSettings, kv: BlockManager, waiting: deque[Sequence] | None = None) -> None:
        self.config = config
        self.kv = kv
        self.budget = UNLIMITED if config.token_budget is None else config.token_budget
        self.waiting: deque[Sequence] = deque() if waiting is None else waiting
        self.running: list[Sequence] = []
        self.num_finished = 0
        self.num_preempted = 0  # since the last batch

    @abstractmethod
    def schedule(self) -> Batch:
        """The next iteration; never empty while ``has_work``."""

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and are not finished."""
        return len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        self.waiting.append(sequence)

    def make_batch(
        self,
        decodes: list[Sequence],
        chunks: list[Sequence] | None = None,
        chunk_tokens: list[int] | None = None,
    ) -> Batch:
        """A batch that carries the preemptions since the last one."""
        preempted, self.num_preempted = self.num_preempted, 0
        return Batch(decodes, chunks or [], chunk_tokens or [], preempted)

    def commit(self, batch: Batch) -> list[Sequence]:
        """Advance every sequence of ``batch``; returns those that got a token, decodes first, then chunks."""
        emitted = list(batch.decodes)
        finished = self._advance(batch.decodes, 1)
        for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True):
            sequence.num_computed += tokens
            if sequence.num_computed < sequence.num_tokens:
                continue
            emitted.append(sequence)
            sequence.num_tokens += 1
            sequence.is_decode = True
            if sequence.finished:
                finished.append(sequence)
        if finished:
            self.finish(finished)
        return emitted

    def finish(self, finished: list[Sequence]) -> None:
        """Let running sequences go that have all their tokens."""
        self.num_finished += len(finished)
        for sequence in finished:
            self.kv.release(sequence)
        self.running = [sequence for sequence in self.running if sequence.slot >= 0]

    def decode_run_length(self, batch: Batch) -> int:
        """Iterations, this one included, that surely run the same ``batch`` again if nobody arrives: 1, unless a policy
        knows more. More than 1 only for decodes alone, and at most ``longest_decode_run``."""
        return 1

    def commit_run(self, batch: Batch, num_iterations: int) -> list[int]:
        """Advance the decodes of ``batch`` by a whole run of iterations; for each block that one of them took on the
        way, the iteration of the run (1 or later) from which on it is in use."""
        taken_at: list[int] = []
        for sequence in batch.decodes:
            first = sequence.kv_capacity - sequence.num_computed
            if first < num_iterations:
                taken_at += range(first, num_iterations, self.kv.block_size)
                self.kv.hold(sequence, sequence.num_computed + num_iterations)
        if finished := self._advance(batch.decodes, num_iterations):
            self.finish(finished)
        return taken_at

    def longest_decode_run(self, batch: Batch) -> int:
        """Iterations until one of the decodes of ``batch`` has finished, or until the free KV blocks do not last."""
        length = min([sequence.total_tokens - sequence.num_tokens for sequence in batch.decodes])
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

    def preempt(self, victim: Sequence) -> None:
        """Take all blocks from a running sequence; it waits at the front and will be recomputed."""
        self.running.remove(victim)
        self.kv.release(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.is_decode = False
        self.num_preempted += 1
        self.waiting.appendleft(victim)

    def _blocks_to_grow(self, batch: Batch, num_iterations: int) -> int:
        """Blocks that a run of decode iterations takes beyond those held."""
        size = self.kv.block_size
        return sum(
            [
                max(0, -(-(sequence.num_computed + num_iterations - sequence.kv_capacity) // size))
                for sequence in batch.decodes
            ]
        )

    @staticmethod
    def _advance(decodes: Iterable[Sequence], num_tokens: int) -> list[Sequence]:
        """Give every decode its next tokens; returns those that have them all."""
        finished = []
        for sequence in decodes:
            sequence.num_computed += num_tokens
            sequence.num_tokens = known = sequence.num_tokens + num_tokens
            if known >= sequence.total_tokens:
                finished.append(sequence)
        return finished
