"""Attention over KV pages in plain torch operations, for the mixed batch of one iteration.

The cache of one layer is ``[num_slots, 2, num_kv_heads, head_dim]``, keys then values of one token side by side, so
that a run of adjacent blocks is one view and a scattered sequence is one gather of whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .model_input import Spans


def attention_ref(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last ``len(q)`` tokens of one sequence, in fp32, written out.

    q ``[rows, num_heads, head_dim]``; keys and values ``[kv_len, num_kv_heads, head_dim]``. Returns as q.
    """
    rows, num_heads, head_dim = q.shape
    kv_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    wide_keys = keys.float().repeat_interleave(group, dim=1)
    wide_values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), wide_keys) * head_dim**-0.5
    visible = torch.ones(rows, kv_len, dtype=torch.bool).tril(kv_len - rows)
    scores = scores.masked_fill(~visible.to(q.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_values).to(q.dtype)


@dataclass(slots=True)
class _Piece:
    """One sequence's share: its rows, and where its keys and values are."""

    rows: slice
    kv_len: int
    first_slot: int
    blocks: Tensor | None
    mask: Tensor | None
    causal: bool


class PagedAttention:
    """Attention of one iteration; built once from its spans, then called for each layer."""

    def __init__(self, spans: Spans, device: torch.device) -> None:
        self._block_size = spans.block_size
        self._pieces = [self._piece(spans, place, device) for place in range(len(spans.num_rows))]

    def _piece(self, spans: Spans, place: int, device: torch.device) -> _Piece:
        first, rows, kv_len = (int(a[place]) for a in (spans.first_row, spans.num_rows, spans.kv_lens))
        blocks = spans.blocks[place, : -(-kv_len // spans.block_size)]
        contiguous = bool((np.diff(blocks) == 1).all())
        mask = None
        if 1 < rows < kv_len:
            mask = torch.ones(rows, kv_len, dtype=torch.bool, device=device).tril_(kv_len - rows)
        return _Piece(
            rows=slice(first, first + rows),
            kv_len=kv_len,
            first_slot=int(blocks[0]) * spans.block_size,
            blocks=None if contiguous else torch.from_numpy(blocks.astype(np.int64)).to(device),
            mask=mask,
            causal=rows > 1 and rows == kv_len,
        )

    def __call__(self, q: Tensor, cache: Tensor) -> Tensor:
        """Attention output ``[num rows, num_heads * head_dim]`` for q ``[num rows, num_heads, head_dim]``."""
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = cache.shape[2]
        group = num_heads // num_kv_heads
        paged = cache.view(-1, self._block_size, 2, num_kv_heads, head_dim)
        out = torch.empty((num_rows, num_kv_heads, group, head_dim), dtype=q.dtype, device=q.device)
        grouped = q.view(num_rows, num_kv_heads, group, head_dim)
        for piece in self._pieces:
            if piece.blocks is None:
                kv = cache[piece.first_slot : piece.first_slot + piece.kv_len]
            else:
                kv = paged.index_select(0, piece.blocks).flatten(0, 1)[: piece.kv_len]
            # Batch = KV head, heads = the query heads that share it: keys are read once, not repeated.
            queries = grouped[piece.rows].permute(1, 2, 0, 3)
            shape = (num_kv_heads, group, piece.kv_len, head_dim)
            keys = kv[:, 0].transpose(0, 1).unsqueeze(1).expand(shape)
            values = kv[:, 1].transpose(0, 1).unsqueeze(1).expand(shape)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=piece.mask, is_causal=piece.causal)
            out[piece.rows] = mixed.permute(2, 0, 1, 3)
        return out.view(num_rows, num_heads * head_dim)
