"""The policy ``orca``: whole prompts beside the decodes."""

from __future__ import annotations

from ..request import Batch
from .reserving import Reserving


class Orca(Reserving):
    """Iteration-level hybrid batches: every decode, and as many whole prompts as the request count allows, in
    one iteration. The batch is bounded by ``max_num_seqs`` alone, so no token budget.

    Blocks for the whole output are reserved at admission, as the paper does for its key/value slots.
    Source: Orca (OSDI'22), algorithm 1; the hybrid batch as Sarathi-Serve (OSDI'24), section 2.5, has it.
    """

    name = "orca"
    label = "Orca"
    since = 2022
    in_paper = True
    heeds_budget = False
    mixes = True
    chunks = False
    victim = None

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        return self.make_batch(decodes, *self.admit_whole_prompts())
