"""What a real executor runs before a run is timed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import EngineConfig
from .kv_cache import BlockManager
from .request import Batch, Request, Sequence


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The largest prompt chunk and the fullest decode batch of a run, on ``kv``, a table of their own: what they leave
    in the cache is never read. The three bounds are those of the run's iterations, for what is compiled beforehand."""

    kv: BlockManager
    batches: tuple[Batch, ...]
    max_tokens: int
    max_query_len: int
    max_context_len: int


def make_warm_up(config: EngineConfig, kv: BlockManager) -> WarmUp:
    """The warm-up of a run under ``config`` whose blocks ``kv`` manages."""
    scratch = BlockManager(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        max_num_seqs=config.max_num_seqs,
        max_blocks_per_seq=config.max_blocks_per_seq,
    )
    longest = min(config.max_model_len, kv.num_blocks * kv.block_size)
    chunk = min(config.token_budget or longest, longest)
    sequence = _sequence(chunk)
    scratch.hold(sequence, chunk)
    decodes = [_sequence(1) for _ in range(min(config.max_num_seqs, kv.num_blocks))]
    prompt = Batch([], [sequence], [chunk])
    # Released before it runs, so that the decodes fit beside it; its row of the table still lists its blocks, for the
    # first decode takes the row and the first block, which are reused last freed first.
    slot = sequence.slot
    scratch.release(sequence)
    sequence.slot = slot
    for decode in decodes:
        scratch.hold(decode, 1)
    return WarmUp(
        kv=scratch,
        batches=(prompt, prompt, Batch(decodes), Batch(decodes[:1])),
        max_tokens=config.token_budget or config.max_num_seqs * config.max_model_len,
        max_query_len=chunk,
        max_context_len=longest,
    )


def _sequence(num_tokens: int) -> Sequence:
    request = Request(arrival_s=0.0, prompt_tokens=num_tokens, output_tokens=1)
    return Sequence(0, request, np.zeros(num_tokens, dtype=np.int64))
