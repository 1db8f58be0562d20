"""One iteration as the model sees it: the flattened rows, and which pages each sequence attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .kv_cache import BlockManager
from .request import Batch, Sequence

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The rows of each sequence: decodes first (one row each), then chunks; arrays have one entry a sequence.

    Its ``num_rows`` rows start at ``first_row`` and are the last of its ``kv_lens`` cached tokens, which lie in the
    blocks ``blocks[i, : ceil(kv_lens[i] / block_size)]``.
    """

    num_decodes: int
    first_row: Int64Array
    num_rows: Int64Array
    kv_lens: Int64Array
    blocks: Int32Array
    block_size: int


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """The flattened batch, int64 ``[num rows]`` each: token ids, positions, and the page and the offset in it where a
    row's key and value go. ``emit_rows`` are the rows whose logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    pages: Tensor
    offsets: Tensor
    emit_rows: Tensor
    spans: Spans


def build_input(batch: Batch, kv: BlockManager, device: torch.device) -> ModelInput:
    """Lay ``batch`` out in rows, decodes first. Sequences must carry token ids and hold their blocks."""
    decodes, chunks = batch.decodes, batch.chunks
    num_decodes, num_sequences = len(decodes), len(decodes) + len(chunks)
    sequences = [*decodes, *chunks]
    computed = np.array([sequence.num_computed for sequence in sequences], dtype=np.int64)
    slots = np.array([sequence.slot for sequence in sequences], dtype=np.int64)
    num_rows = np.ones(num_sequences, dtype=np.int64)
    num_rows[num_decodes:] = batch.chunk_tokens
    first_row = np.cumsum(num_rows) - num_rows
    total = int(num_rows.sum())

    token_ids = np.empty(total, dtype=np.int64)
    token_ids[:num_decodes] = [_ids(sequence)[sequence.num_computed] for sequence in decodes]
    ends_prefill = np.ones(num_sequences, dtype=bool)
    for place, (sequence, tokens) in enumerate(zip(chunks, batch.chunk_tokens, strict=True), start=num_decodes):
        row, begin = first_row[place], sequence.num_computed
        token_ids[row : row + tokens] = _ids(sequence)[begin : begin + tokens]
        ends_prefill[place] = begin + tokens == sequence.num_tokens

    owner = np.repeat(np.arange(num_sequences), num_rows)
    positions = np.arange(total) + np.repeat(computed - first_row, num_rows)
    place_in_table, offsets = np.divmod(positions, kv.block_size)
    pages = kv.block_table[slots[owner], place_in_table].astype(np.int64)
    kv_lens = computed + num_rows
    spans = Spans(
        num_decodes=num_decodes,
        first_row=first_row,
        num_rows=num_rows,
        kv_lens=kv_lens,
        blocks=kv.block_table[slots, : kv.blocks_for(int(kv_lens.max()))],
        block_size=kv.block_size,
    )
    emit_rows = (first_row + num_rows - 1)[ends_prefill]
    return ModelInput(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        pages=torch.from_numpy(pages).to(device),
        offsets=torch.from_numpy(offsets).to(device),
        emit_rows=torch.from_numpy(emit_rows).to(device),
        spans=spans,
    )


def _ids(sequence: Sequence) -> Int64Array:
    if sequence.token_ids is None:
        raise AssertionError(f"sequence {sequence.index} has no token ids, the real executor needs them")
    return sequence.token_ids
