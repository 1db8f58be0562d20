"""The policy ``sarathi``: stall-free batches of decodes and prompt chunks."""

from __future__ import annotations

from ..request import Batch, Sequence
from .reserving import Reserving


class Sarathi(Reserving):
    """Stall-free batches: all decodes first, then the prompts that have begun, then new ones, each by the largest
    chunk that the token budget still holds. A new one that comes with its cache decodes at once.

    Source: Sarathi-Serve (OSDI'24), algorithm 3. vLLM V1, SGLang with mixed chunks and nano-vLLM follow it in spirit.
    """

    name = "sarathi"
    label = "Sarathi"
    since = 2024
    in_paper = True
    heeds_budget = True
    mixes = True
    chunks = True
    takes_cached = True

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        left = self.budget - len(decodes)
        chunks: list[Sequence] = []
        chunk_tokens: list[int] = []
        has_prompts = left > 0 and len(decodes) < len(self.running)
        for sequence in [running for running in self.running if not running.is_decode] if has_prompts else ():
            if left <= 0:
                break
            tokens = min(sequence.num_uncomputed, left)
            chunks.append(sequence)
            chunk_tokens.append(tokens)
            left -= tokens
        # A sequence preempted just now waits for the blocks it gave up, so it is not admitted back here.
        while left > 0 and self.waiting and not self.num_preempted and (admitted := self.admit_next()) is not None:
            if admitted.num_computed and admitted.num_uncomputed == 1:
                admitted.is_decode = True
                decodes.append(admitted)
                left -= 1
                continue
            tokens = min(admitted.num_uncomputed, left)
            chunks.append(admitted)
            chunk_tokens.append(tokens)
            left -= tokens
        return self.make_batch(decodes, chunks, chunk_tokens)
