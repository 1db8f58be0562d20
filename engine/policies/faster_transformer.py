"""The policy ``faster_transformer``: static batches."""

from __future__ import annotations

from ..request import Batch
from .reserving import Reserving


class FasterTransformer(Reserving):
    """Request-level static batches: prefill up to ``max_num_seqs`` waiting requests in one iteration, decode
    until all of them have finished, then take the next batch. No token budget.

    Finished requests leave no padding rows behind, which flatters the real system. Blocks for the whole
    output are reserved at admission.
    Source: NVIDIA FasterTransformer, as Orca (OSDI'22), section 2, and Sarathi-Serve (OSDI'24), section 2.5, have it.
    """

    name = "faster_transformer"
    label = "FasterTransformer"
    since = 2019
    in_paper = True
    heeds_budget = False
    mixes = False
    chunks = False
    victim = None

    def schedule(self) -> Batch:
        if self.running:
            return self.make_batch(self.grow_decodes())
        return self.make_batch([], *self.admit_whole_prompts())
