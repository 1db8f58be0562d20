"""Decode-only iterations as captured CUDA graphs, for batch sizes padded to a declared ladder."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from ..kv_cache import BlockManager
from ..request import Batch
from .input import aligned, last_token_ids
from .model import Model
from .triton_ops import AttentionInput, TritonPagedKV

#: (largest batch of the step, step): 1, 2, 4, 8, 16, 24, 32, 48, ... 128, 160, ... 256, 320, ...
_STEPS = ((32, 8), (128, 16), (256, 32), (512, 64))
_LAST_STEP = 128


def batch_ladder(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured, ascending; the last is ``max_num_seqs``."""
    sizes = {1, 2, 4, max_num_seqs}
    size = 8
    while size < max_num_seqs:
        sizes.add(size)
        size += next((step for largest, step in _STEPS if size < largest), _LAST_STEP)
    return sorted(size for size in sizes if size <= max_num_seqs)


def greedy(logits: Tensor) -> Tensor:
    """The most probable token of every row; -1 in all rows when any logit is NaN or infinite."""
    # One pass: the sum is finite only if every logit is.
    finite = torch.isfinite(logits.sum(dtype=torch.float32))
    return torch.where(finite, logits.argmax(dim=-1), -1)


class DecodeGraphs:
    """Runs batches of decodes through static buffers, padded to the next size of ``batch_ladder``.

    A padding row has a negative slot (nothing is written) and an empty context (its attention is zero). With
    ``capture=False`` the same padded batches run without graphs, which is how they are tested on a CPU.
    """

    def __init__(
        self,
        model: Model,
        pages: TritonPagedKV,
        *,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        capture: bool = True,
    ) -> None:
        device = model.device
        self.sizes = batch_ladder(max_num_seqs)
        self._model = model
        self._pages = pages
        self._max_context_len = max_blocks_per_seq * pages.block_size
        capacity, on_cuda = aligned(max_num_seqs, itemsize=4), device.type == "cuda"
        # Pinned, so that the copies to the device do not wait; a step ends only when its tokens are back.
        self._host_rows = torch.zeros((4, capacity), dtype=torch.int32, pin_memory=on_cuda)
        self._host_table = torch.zeros((max_num_seqs, max_blocks_per_seq), dtype=torch.int32, pin_memory=on_cuda)
        self._rows = torch.zeros((4, capacity), dtype=torch.int32, device=device)
        self._table = torch.zeros((max_num_seqs, max_blocks_per_seq), dtype=torch.int32, device=device)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        if capture:
            self._capture_all()

    def load(self, batch: Batch, kv: BlockManager) -> int:
        """Write the decodes of ``batch`` into the host's buffers; returns the padded size for ``launch``."""
        count = len(batch.decodes)
        size = self.sizes[bisect_left(self.sizes, count)]
        token_ids, positions, slots, contexts = self._host_rows.numpy()
        table = self._host_table.numpy()
        held = [sequence.slot for sequence in batch.decodes]
        computed = np.array([sequence.num_computed for sequence in batch.decodes], dtype=np.int32)
        token_ids[:count] = last_token_ids(batch.decodes)
        num_blocks = kv.blocks_for(int(computed.max()) + 1)
        table[:count, :num_blocks] = kv.block_table[held, :num_blocks]
        places, offsets = np.divmod(computed, kv.block_size)
        positions[:count] = computed
        slots[:count] = table[np.arange(count), places] * kv.block_size + offsets
        contexts[:count] = computed + 1
        for values, padding in ((token_ids, 0), (positions, 0), (slots, -1), (contexts, 0)):
            values[count:size] = padding
        return size

    @torch.inference_mode()
    def launch(self, size: int) -> Tensor:
        """Send the loaded batch of ``size`` padded rows and run it; the next token of every row, on the device."""
        self._rows.copy_(self._host_rows, non_blocking=True)
        self._table[:size].copy_(self._host_table[:size], non_blocking=True)
        if size not in self._graphs:
            return self._forward(size)
        graph, token_ids = self._graphs[size]
        graph.replay()
        return token_ids

    def _forward(self, size: int) -> Tensor:
        token_ids, positions, slots, contexts = (row[:size] for row in self._rows)
        step = AttentionInput(
            positions=positions,
            slots=slots,
            starts=self._starts[: size + 1],
            contexts=contexts,
            block_table=self._table[:size],
            num_decodes=size,
            max_query_len=0,
            max_context_len=self._max_context_len,
        )
        return greedy(self._model.forward(token_ids, None, lambda index, heads: self._pages.attend(step, index, heads)))

    @torch.inference_mode()
    def _capture_all(self) -> None:
        """Capture every size, the largest first: the smaller ones then fit into its memory."""
        self._rows[2].fill_(-1)  # until the first batch every row is padding, and writes nothing
        pool = None
        for size in reversed(self.sizes):
            # Whatever compiles, loads or allocates on first use must do so before the capture.
            for _ in range(2):
                self._forward(size)
            torch.cuda.synchronize(self._model.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                token_ids = self._forward(size)
            pool = pool or graph.pool()
            self._graphs[size] = (graph, token_ids)
