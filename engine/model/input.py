"""One iteration as the model sees it: the flattened rows, and which pages each sequence attends to."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate

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
class BatchRows:
    """The flattened batch on the host, int64 ``[num rows]`` each: token ids, positions, and the page and the offset in
    it where a row's key and value go. ``emit_rows`` are the rows whose logits are wanted; None is all of them."""

    token_ids: Int64Array
    positions: Int64Array
    pages: Int64Array
    offsets: Int64Array
    emit_rows: Int64Array | None
    spans: Spans

    def to(self, device: torch.device) -> ModelInput:
        """The input of a model on ``device``."""
        if self.emit_rows is None:
            return ModelInput(token_ids=send([self.token_ids], device)[0], emit_rows=None, rows=self)
        token_ids, emit_rows = send([self.token_ids, self.emit_rows], device)
        return ModelInput(token_ids=token_ids, emit_rows=emit_rows, rows=self)


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """What the forward pass reads, int64 on the device; of the other ``rows`` attention sends what it needs."""

    token_ids: Tensor
    emit_rows: Tensor | None
    rows: BatchRows


def send(
    parts: SequenceOf[npt.NDArray[np.integer]], device: torch.device, dtype: npt.DTypeLike = np.int64
) -> list[Tensor]:
    """The arrays, flattened, as tensors of ``dtype`` on ``device``, in one copy.

    On CUDA each begins at a multiple of 16 bytes: kernels are compiled anew for arguments aligned otherwise.
    """
    if device.type == "cpu" and all(part.dtype == dtype for part in parts):
        return [torch.from_numpy(part.reshape(-1)) for part in parts]
    itemsize = np.dtype(dtype).itemsize
    begins = list(accumulate((aligned(part.size, itemsize) for part in parts), initial=0))
    packed = np.zeros(begins[-1], dtype=dtype)
    for begin, part in zip(begins, parts, strict=False):
        packed[begin : begin + part.size] = part.reshape(-1)
    sent = torch.from_numpy(packed).to(device)
    return [sent[begin : begin + part.size] for begin, part in zip(begins, parts, strict=False)]


def aligned(count: int, itemsize: int) -> int:
    """``count`` numbers of ``itemsize`` bytes, rounded up to a multiple of 16 bytes."""
    step = 16 // itemsize
    return -(-count // step) * step


def build_input(batch: Batch, kv: BlockManager, device: torch.device) -> ModelInput:
    """``lay_out(batch, kv)`` on ``device``."""
    return lay_out(batch, kv).to(device)


def lay_out(batch: Batch, kv: BlockManager) -> BatchRows:
    """Lay ``batch`` out in rows, decodes first. Sequences must carry token ids and hold their blocks."""
    decodes, chunks = batch.decodes, batch.chunks
    count = len(decodes)
    sequences = [*decodes, *chunks] if chunks else decodes
    slots = _ints([sequence.slot for sequence in sequences])
    computed = _ints([sequence.num_computed for sequence in sequences])
    token_ids = last_token_ids(decodes)
    num_rows = _ints([1] * count + list(batch.chunk_tokens))
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
        first_row = owner = np.arange(count)
        positions = computed
        emit_rows = None
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


def last_token_ids(decodes: SequenceOf[Sequence]) -> Int64Array:
    """The token of each that is not in the cache yet."""
    return _ints([_ids(sequence).item(sequence.num_computed) for sequence in decodes])


def _ints(values: list[int]) -> Int64Array:
    return np.fromiter(values, np.int64, len(values))  # twice as quick as np.array


def _ids(sequence: Sequence) -> Int64Array:
    if sequence.token_ids is None:
        raise AssertionError(f"sequence {sequence.index} has no token ids, the real executor needs them")
    return sequence.token_ids
