"""The policy ``tile_aligned``: Sarathi's batches, trimmed to where their tokens are cheapest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate

from ..kv_cache import BlockManager
from ..request import Batch, Sequence
from ..scheduler import SchedulerSettings
from .sarathi import Sarathi

#: Least share of the cost of two iterations for which the end of a prompt is put off.
MIN_SAVING = 0.1

#: The note on a request of which a part was put off.
DEFERRED = "deferred"


class TileAligned(Sarathi):
    """Sarathi's batches, but one that cannot fill the budget is trimmed to the edge where its tokens are cheapest.

    Such an iteration would finish every prompt there is: M tokens, beside D decodes. Trimmed to an edge e of
    ``token_costs``, it leaves the last M - e prompt tokens to the next iteration, where they ride along
    with the decodes. It takes the e that saves most of the cost of both iterations, if that is MIN_SAVING of it at
    least. Output lengths are not known to it, so every decode counts as one that goes on.

    Bounded deferral: each request is deferred at most once in a run, and by one iteration. The next one serves
    deferred prompts first and whole: D grew by the prompts that ended, which had a token of e each, so decodes and
    deferred tokens are at most M, within the budget; and no edge below their sum is taken. (Only a preemption, which
    Sarathi has too, can put it off further.) So a first token comes at most one iteration, of a full budget at most,
    later than Sarathi's rule would have brought it from the same state. Admission and its order are Sarathi's.
    """

    name = "tile_aligned"
    label = "tile-aligned"
    since = 2026
    in_paper = False
    takes_cached = False
    needs_token_costs = True

    def __init__(self, config: SchedulerSettings, kv: BlockManager, waiting: deque[Sequence] | None = None) -> None:
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
            if sequence.note == DEFERRED:
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
            chunks[-1].note = DEFERRED
            if not chunk_tokens[-1]:
                del chunks[-1], chunk_tokens[-1]
        return Batch(batch.decodes, chunks, chunk_tokens)
