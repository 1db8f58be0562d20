"""What the policies share that reserve KV blocks for the whole prompt at admission, first come, first served."""

from __future__ import annotations

from typing import ClassVar

from ..request import Batch, Sequence
from ..scheduler import Scheduler


class Reserving(Scheduler):
    """Admission by room for the whole prompt, and preemption by recomputation.

    A sequence is admitted when fewer than ``max_num_seqs`` run and the cache holds its whole prefill, as Sarathi-Serve
    and vLLM v0 do: a prompt that has begun can always be finished, so two long ones never preempt each other in turn.
    Where ``victim`` is None the output is reserved too, so a decode always finds its next block. Otherwise it takes
    one block at a time, and when none is free the running sequence that arrived last is preempted (vLLM's recompute
    preemption).
    """

    victim: ClassVar[str | None] = "the running request that arrived last"

    def admit_next(self) -> Sequence | None:
        """Let the head of the queue run; None when it must wait."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return None
        sequence = self.waiting[0]
        if not self.kv.hold(sequence, sequence.num_tokens if self.victim else sequence.request.total_tokens):
            return None
        self.running.append(self.waiting.popleft())
        return sequence

    def admit_whole_prompts(self, budget: int | None = None) -> tuple[list[Sequence], list[int]]:
        """Admit waiting sequences and schedule all their tokens; with a budget, stop before it would be exceeded."""
        chunks: list[Sequence] = []
        chunk_tokens: list[int] = []
        used = 0
        while self.waiting:
            tokens = self.waiting[0].num_uncomputed
            if budget is not None and chunks and used + tokens > budget:
                break
            admitted = self.admit_next()
            if admitted is None:
                break
            chunks.append(admitted)
            chunk_tokens.append(tokens)
            used += tokens
        return chunks, chunk_tokens

    def grow_decodes(self) -> list[Sequence]:
        """The decodes of the next iteration, each with room for one more token."""
        full = [sequence for sequence in self.running if sequence.num_computed >= sequence.kv_capacity]
        for sequence in full:  # a prompt is not among them: it has all its blocks
            while sequence.slot >= 0 and not self.kv.hold(sequence, sequence.num_computed + 1):
                self.preempt(max(self.running, key=lambda running: running.index))
        return [sequence for sequence in self.running if sequence.is_decode]

    def decode_run_length(self, batch: Batch) -> int:
        """As long as none of the decodes finishes and the free blocks last, the next batch is the same.

        For nothing is prefilling, or the iteration would have a chunk of it; and the head of the queue, which found no
        slot, no blocks or no budget this time, finds less next time: slots and budget stay as they are, and free
        blocks only become fewer. A preemption is the exception: Sarathi does not even ask the head then, and vLLM v0
        asked it before the victim's blocks were given up.
        """
        return 1 if batch.chunks or batch.num_preempted else self.longest_decode_run(batch)
