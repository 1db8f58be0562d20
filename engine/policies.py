"""The batching policies, one class each, on the one engine. Each docstring gives the rule and its source."""

from __future__ import annotations

from collections import deque

from .config import POLICY_NAMES, EngineConfig
from .kv_cache import BlockManager
from .request import Batch, Sequence
from .scheduler import Scheduler


class FasterTransformer(Scheduler):
    """Request-level static batches: prefill up to ``max_num_seqs`` waiting requests in one iteration, decode
    until all of them have finished, then take the next batch. No token budget.

    Finished requests leave no padding rows behind, which flatters the real system. Blocks for the whole
    output are reserved at admission.
    Source: NVIDIA FasterTransformer, as Orca (OSDI'22), section 2, and Sarathi-Serve (OSDI'24), section 2.5, have it.
    """

    reserves_output = True

    def schedule(self) -> Batch:
        if self.decoding:
            return self.make_batch(self.grow_decodes())
        return self.make_batch([], *_admit_whole_prompts(self))


class Orca(Scheduler):
    """Iteration-level hybrid batches: every decode, and as many whole prompts as the request count allows, in
    one iteration. The batch is bounded by ``max_num_seqs`` alone, so no token budget.

    Blocks for the whole output are reserved at admission, as the paper does for its key/value slots.
    Source: Orca (OSDI'22), algorithm 1; the hybrid batch as Sarathi-Serve (OSDI'24), section 2.5, has it.
    """

    reserves_output = True

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        return self.make_batch(decodes, *_admit_whole_prompts(self))


class VllmV0(Scheduler):
    """Prefill first: whenever a waiting request can be admitted, an iteration of whole prompts only, packed up to
    the token budget (one longer prompt goes alone); decodes wait for it. Otherwise an iteration of decodes only.

    Source: vLLM before V1, `Scheduler._schedule_default`; Sarathi-Serve (OSDI'24), algorithm 2.
    """

    def schedule(self) -> Batch:
        chunks, chunk_tokens = _admit_whole_prompts(self, self.budget)
        if chunks:
            return self.make_batch([], chunks, chunk_tokens)
        return self.make_batch(self.grow_decodes())


class Sarathi(Scheduler):
    """Stall-free batches: all decodes first, then the prompts that have begun, then new ones, each by the largest
    chunk that the token budget still holds.

    Source: Sarathi-Serve (OSDI'24), algorithm 3. vLLM V1, SGLang with mixed chunks and nano-vLLM follow it in spirit.
    """

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        left = self.budget - len(decodes)
        chunks: list[Sequence] = []
        chunk_tokens: list[int] = []
        for sequence in self.prefilling:
            if left <= 0:
                break
            tokens = min(sequence.num_uncomputed, left)
            chunks.append(sequence)
            chunk_tokens.append(tokens)
            left -= tokens
        # A sequence preempted just now waits for the blocks it gave up, so it is not admitted back here.
        while left > 0 and not self._num_preempted and (admitted := self.admit_next()) is not None:
            tokens = min(admitted.num_uncomputed, left)
            chunks.append(admitted)
            chunk_tokens.append(tokens)
            left -= tokens
        return self.make_batch(decodes, chunks, chunk_tokens)


def _admit_whole_prompts(scheduler: Scheduler, budget: int | None = None) -> tuple[list[Sequence], list[int]]:
    """Admit waiting sequences and schedule all their tokens; with a budget, stop before it would be exceeded."""
    chunks: list[Sequence] = []
    chunk_tokens: list[int] = []
    used = 0
    while scheduler.waiting:
        tokens = scheduler.waiting[0].num_uncomputed
        if budget is not None and chunks and used + tokens > budget:
            break
        admitted = scheduler.admit_next()
        if admitted is None:
            break
        chunks.append(admitted)
        chunk_tokens.append(tokens)
        used += tokens
    return chunks, chunk_tokens


POLICIES: dict[str, type[Scheduler]] = {
    "faster_transformer": FasterTransformer,
    "orca": Orca,
    "vllm_v0": VllmV0,
    "sarathi": Sarathi,
}
assert tuple(POLICIES) == POLICY_NAMES


def make_scheduler(config: EngineConfig, kv: BlockManager, waiting: deque[Sequence] | None = None) -> Scheduler:
    """The scheduler of ``config.policy`` over the block manager ``kv``, and over a queue that it may share."""
    return POLICIES[config.policy](config, kv, waiting)
