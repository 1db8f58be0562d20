"""The policy ``vllm_v0``: prompts first."""

from __future__ import annotations

from ..request import Batch
from .reserving import Reserving


class VllmV0(Reserving):
    """Prefill first: whenever a waiting request can be admitted, an iteration of whole prompts only, packed up to
    the token budget (one longer prompt goes alone); decodes wait for it. Otherwise an iteration of decodes only.

    Source: vLLM before V1, `Scheduler._schedule_default`; Sarathi-Serve (OSDI'24), algorithm 2.
    """

    name = "vllm_v0"
    label = "vLLM v0"
    since = 2023
    in_paper = True
    heeds_budget = True
    mixes = False
    chunks = False

    def schedule(self) -> Batch:
        chunks, chunk_tokens = self.admit_whole_prompts(self.budget)
        if chunks:
            return self.make_batch([], chunks, chunk_tokens)
        return self.make_batch(self.grow_decodes())
