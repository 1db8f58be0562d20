"""One iteration as the model sees it: the flattened rows, and which pages each sequence attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kv_cache import BlockManager
from ..request import Batch, Sequence

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


@dataclass(frozen=True, kw_only=True)
class BatchRows:
    """A ``ModelInput`` on the host, as it is sent to another process; int64 ``[num rows]`` each but ``emit_rows``."""

    token_ids: Int64Array
    positions: Int64Array
    pages: Int64Array
    offsets: Int64Array
    emit_rows: Int64Array
    spans: Spans

    def to(self, device: torch.device) -> ModelInput:
        """The same on ``device``."""
        return ModelInput(
            token_ids=torch.from_numpy(self.token_ids).to(device),
            positions=torch.from_numpy(self.positions).to(device),
            pages=torch.from_numpy(self.pages).to(device),
            offsets=torch.from_numpy(self.offsets).to(device),
            emit_rows=torch.from_numpy(self.emit_rows).to(device),
            spans=self.spans,
        )


def build_input(batch: Batch, kv: BlockManager, device: torch.device) -> ModelInput:
    """``lay_out(batch, kv)`` on ``device``."""
    return lay_out(batch, kv).to(device)


def lay_out(batch: Batch, kv: BlockManager) -> BatchRows:
    """Lay ``batch`` out in rows, decodes first. Sequences must carry token ids and hold their blocks."""
    decodes, chunks = batch.decodes, batch.chunks
    count = len(decodes)
    sequences = [*decodes, *chunks] if chunks else decodes
    slots = np.array([sequence.slot for sequence in sequences])
    computed = np.array([sequence.num_computed for sequence in sequences])
    token_ids = np.array([_ids(sequence)[sequence.num_computed] for sequence in decodes], dtype=np.int64)
    num_rows = np.array([1] * count + list(batch.chunk_tokens))
    kv_lens = computed + num_rows
    blocks = kv.block_table[slots, : kv.blocks_for(int(kv_lens.max()))]
    if chunks:
        pieces = [_ids(s)[s.num_computed : s.num_computed + n] for s, n in zip(chunks, batch.chunk_tokens, strict=True)]
        token_ids = np.concatenate([token_ids, *pieces])
        ends = np.cumsum(num_rows)
        first_row = ends - num_rows
        owner = np.repeat(np.arange(len(sequences)), num_rows)
        positions = np.arange(len(token_ids)) + (kv_lens - ends)[owner]
        finishing = [n == s.num_uncomputed for s, n in zip(chunks, batch.chunk_tokens, strict=True)]
        emit_rows = ends[[True] * count + finishing] - 1
    else:  # one row each: everything above is what it starts from
        first_row = owner = emit_rows = np.arange(count)
        positions = computed
    place = positions // kv.block_size
    pages = blocks[owner, place].astype(np.int64)
    spans = Spans(
        num_decodes=count,
        first_row=first_row,
        num_rows=num_rows,
        kv_lens=kv_lens,
        blocks=blocks,
        block_size=kv.block_size,
    )
    return BatchRows(
        token_ids=token_ids,
        positions=positions,
        pages=pages,
        offsets=positions - place * kv.block_size,
        emit_rows=emit_rows,
        spans=spans,
    )


def _ids(sequence: Sequence) -> Int64Array:
    if sequence.token_ids is None:
        raise AssertionError(f"sequence {sequence.index} has no token ids, the real executor needs them")
    return sequence.token_ids
