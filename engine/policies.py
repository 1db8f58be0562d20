"""The batching policies, one class each, on the one engine. Each docstring gives the rule and its source."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate

from .config import POLICY_NAMES, EngineConfig
from .kv_cache import BlockManager
from .request import Batch, Sequence
from .scheduler import Scheduler

#: Least share of the cost of two iterations for which ``tile_aligned`` puts the end of a prompt off.
MIN_SAVING = 0.1


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
    chunk that the token budget still holds. A new one that comes with its cache decodes at once.

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
            if admitted.num_computed and admitted.num_uncomputed == 1:
                self.decoding.append(self.prefilling.pop())
                decodes.append(admitted)
                left -= 1
                continue
            tokens = min(admitted.num_uncomputed, left)
            chunks.append(admitted)
            chunk_tokens.append(tokens)
            left -= tokens
        return self.make_batch(decodes, chunks, chunk_tokens)


class TileAligned(Sarathi):
    """Sarathi's batches, but one that cannot fill the budget is trimmed to the edge where its tokens are cheapest.

    Such an iteration would finish every prompt there is: M tokens, beside D decodes. Trimmed to an edge e of
    ``EngineConfig.token_costs``, it leaves the last M - e prompt tokens to the next iteration, where they ride along
    with the decodes. It takes the e that saves most of the cost of both iterations, if that is MIN_SAVING of it at
    least. Output lengths are not known to it, so every decode counts as one that goes on.

    Bounded deferral: each request is deferred at most once in a run, and by one iteration. The next one serves
    deferred prompts first and whole: D grew by the prompts that ended, which had a token of e each, so decodes and
    deferred tokens are at most M, within the budget; and no edge below their sum is taken. (Only a preemption, which
    Sarathi has too, can put it off further.) So a first token comes at most one iteration, of a full budget at most,
    later than Sarathi's rule would have brought it from the same state. Admission and its order are Sarathi's.
    """

    def __init__(self, config: EngineConfig, kv: BlockManager, waiting: deque[Sequence] | None = None) -> None:
        super().__init__(config, kv, waiting)
        assert config.token_costs is not None
        self.costs = config.token_costs

    def schedule(self) -> Batch:
        batch = super().schedule()
        num_tokens = batch.num_tokens
        if not batch.chunks or batch.num_preempted or num_tokens >= self.budget:
            return batch
        edge = self._cheapest_edge(batch, num_tokens)
        return batch if edge is None else self._trim(batch, num_tokens - edge)

    def _cheapest_edge(self, batch: Batch, num_tokens: int) -> int | None:
        """The edge to trim to; None when whole is cheapest, or nothing may be deferred."""
        cost, edges = self.costs.at, self.costs.edges
        num_decodes = len(batch.decodes)
        ends = list(accumulate(batch.chunk_tokens, initial=num_decodes))  # tokens up to the end of each chunk
        floor = num_decodes + 1  # decodes alone would put all prompts off
        for end, sequence in zip(ends[1:], batch.chunks, strict=True):
            if sequence.was_deferred:
                floor = end
        first, last = bisect_left(edges, floor), bisect_left(edges, num_tokens)
        whole_ms = cost(num_tokens)
        best, most_saved_ms = None, 0.0
        for edge in edges[first:last]:
            following = num_decodes + bisect_right(ends, edge) - 1  # decodes of the next iteration
            following_ms = cost(following)
            trimmed_ms = cost(edge) + cost(following + num_tokens - edge)
            saved_ms = whole_ms + following_ms - trimmed_ms
            if saved_ms > most_saved_ms and saved_ms >= MIN_SAVING * (whole_ms + following_ms):
                best, most_saved_ms = edge, saved_ms
        return best

    def _trim(self, batch: Batch, num_left_out: int) -> Batch:
        """``batch`` without its last prompt tokens, whose requests are deferred."""
        chunks, chunk_tokens = list(batch.chunks), list(batch.chunk_tokens)
        while num_left_out:
            taken = min(num_left_out, chunk_tokens[-1])
            num_left_out -= taken
            chunk_tokens[-1] -= taken
            chunks[-1].was_deferred = True
            if not chunk_tokens[-1]:
                del chunks[-1], chunk_tokens[-1]
        return Batch(batch.decodes, chunks, chunk_tokens)


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
    "tile_aligned": TileAligned,
}
assert tuple(POLICIES) == POLICY_NAMES


def make_scheduler(config: EngineConfig, kv: BlockManager, waiting: deque[Sequence] | None = None) -> Scheduler:
    """The scheduler of ``config.policy`` over the block manager ``kv``, and over a queue that it may share."""
    return POLICIES[config.policy](config, kv, waiting)
