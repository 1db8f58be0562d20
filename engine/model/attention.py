"""Attention over KV pages in plain torch operations, for the mixed batch of one iteration.

Decodes and prompt chunks take different ways:

- All decodes together read the pages *where they are*: each page is scored against the query of its owner in batched
  matrix products over stretches of the pool, and the pages of a sequence are combined by their log-sum-exp (split-KV,
  as FlashDecoding has it). No copy of the cache, no loop over requests, any block table.
- Each chunk attends to its own keys, or, when it has a prefix, to a gathered copy of its pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .input import Int64Array, Spans
from .kv_pages import LayerPages

#: Tokens of foreign pages that decodes rather read over than skip: about what one more matrix product costs.
GAP_TOKENS = 256

#: Below this share of owned pages in what reading in place costs, the pages are copied out instead: a copy moves about
#: 2.5 times the bytes of reading in place.
MIN_IN_PLACE_SHARE = 0.4

#: Query rows per attention call on a CPU, whose kernel skips masked keys only between calls: a chunk's first tile
#: does not pay for its last keys.
TILE_ROWS = 128


def attention_ref(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last ``len(q)`` tokens of one sequence, in fp32, written out.

    q ``[rows, num_heads, head_dim]``; keys and values ``[num_kv_heads, kv_len, head_dim]``. Returns as q.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads, kv_len, _ = keys.shape
    wide_keys, wide_values = (kv.float().repeat_interleave(num_heads // num_kv_heads, dim=0) for kv in (keys, values))
    scores = torch.einsum("qhd,hkd->hqk", q.float(), wide_keys) * head_dim**-0.5
    visible = torch.ones(rows, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - rows)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, wide_values).to(q.dtype)


class DecodeAttention:
    """Attention of the decodes of one iteration, one query row each; built once, called for each layer."""

    def __init__(self, spans: Spans, device: torch.device) -> None:
        count, block_size = spans.num_decodes, spans.block_size
        num_pages = _num_pages(spans)
        held = np.arange(int(num_pages.max())) < num_pages[:, None]
        table = spans.blocks[:count, : held.shape[1]].astype(np.int64)
        pages = table[held]  # in order of owner
        stretches = _Stretches.of(pages, max(1, GAP_TOKENS // block_size))
        in_place = len(pages) >= MIN_IN_PLACE_SHARE * stretches.cost_pages
        local = stretches.place_of(pages) if in_place else np.arange(len(pages))
        num_scored = stretches.num_pages if in_place else len(pages)

        first = np.cumsum(num_pages) - num_pages
        # Pages of nobody (free, or a prompt in the making) get scored too, by owner 0, and are then left out.
        owner = np.zeros(num_scored, dtype=np.int64)
        owner[local] = np.repeat(np.arange(count), num_pages)
        page_of = np.zeros(held.shape, dtype=np.int64)
        page_of[held] = local

        self._count = count
        self._block_size = block_size
        self._table = table
        self._num_pages = num_pages
        self._last = local[first + num_pages - 1]
        self._mask = np.zeros((num_scored, 1, block_size), dtype=np.float32)
        self._mask_tails(spans)

        self._stretches = stretches.slices() if in_place else [(slice(None), slice(None))]
        self._pages = None if in_place else torch.from_numpy(pages).to(device)
        self._owned = torch.from_numpy(local).to(device)
        self._first = torch.from_numpy(first).to(device)
        self._owner = torch.from_numpy(owner).to(device)
        self._tail_mask = torch.from_numpy(self._mask).to(device)
        self._page_of = torch.from_numpy(page_of).to(device)
        self._missing = torch.from_numpy(~held[:, :, None]).to(device)

    def advance(self, spans: Spans) -> bool:
        """Take the next iteration's spans where the decodes hold the same pages as before; False where they do not.

        Most iterations only add one token to each last page, and need no new indices.
        """
        if self._tail_mask.device.type != "cpu" or spans.num_decodes != self._count:
            return False
        num_pages = _num_pages(spans)
        if spans.block_size != self._block_size or not np.array_equal(num_pages, self._num_pages):
            return False
        if not np.array_equal(spans.blocks[: self._count, : self._table.shape[1]], self._table):
            return False
        self._mask_tails(spans)  # the tensor shares the array's memory
        return True

    def _mask_tails(self, spans: Spans) -> None:
        filled = spans.kv_lens[: self._count] - (self._num_pages - 1) * self._block_size
        self._mask[self._last, 0] = np.where(np.arange(self._block_size) < filled[:, None], 0.0, -np.inf)

    def __call__(self, q: Tensor, cache: LayerPages) -> Tensor:
        """Attention output ``[num decodes, num_heads * head_dim]`` for q ``[num decodes, num_heads, head_dim]``."""
        keys, values = cache.keys, cache.values
        if self._pages is not None:
            keys, values = keys.index_select(0, self._pages), values.index_select(0, self._pages)
        num_kv_heads, head_dim, block_size = keys.shape[1:]
        num_pages, num_heads = len(self._owner), q.shape[1]
        group, by_head = num_heads // num_kv_heads, (num_pages, num_heads)

        queries = q.reshape(self._count, -1).index_select(0, self._owner).view(num_pages, num_kv_heads, group, head_dim)
        scores = torch.empty((num_pages, num_kv_heads, group, block_size), dtype=q.dtype, device=q.device)
        self._bmm(queries, keys, scores)
        scores = scores.view(*by_head, block_size)
        scores = torch.add(self._tail_mask, scores, alpha=head_dim**-0.5)  # in fp32
        # log_softmax is score - lse, so its first column gives every page's lse in one fused pass; the first token
        # of a page is never masked.
        page_lse = scores.select(-1, 0) - scores.log_softmax(-1).select(-1, 0)
        split = page_lse.index_select(0, self._page_of.view(-1)).view(*self._page_of.shape, num_heads)
        lse = split.masked_fill_(self._missing, float("-inf")).logsumexp(1)
        weights = scores.sub_(lse.index_select(0, self._owner).unsqueeze(-1)).exp_()
        mixed = torch.empty((num_pages, num_kv_heads, group, head_dim), dtype=q.dtype, device=q.device)
        self._bmm(weights.to(q.dtype).view(num_pages, num_kv_heads, group, block_size), values, mixed)
        # Sums the pages of each owner: an embedding bag is torch's fast ragged sum.
        return F.embedding_bag(self._owned, mixed.view(num_pages, -1), self._first, mode="sum")

    def _bmm(self, rows: Tensor, pool: Tensor, out: Tensor) -> None:
        """``rows @ pages`` for every scored page and KV head, into ``out``."""
        for here, there in self._stretches:
            torch.bmm(
                rows[here].view(-1, *rows.shape[2:]),
                pool[there].view(-1, *pool.shape[2:]),
                out=out[here].view(-1, *out.shape[2:]),
            )


@dataclass(frozen=True, kw_only=True)
class _Stretches:
    """Stretches of the pool that hold given pages and little else, ascending; int64 ``[stretches]`` each: their first
    pages, those after their last, and the place of their first one when all stretches lie end to end."""

    starts: Int64Array
    stops: Int64Array
    places: Int64Array
    max_gap: int

    @classmethod
    def of(cls, pages: Int64Array, max_gap: int) -> _Stretches:
        """Those of ``pages``: a gap of more than ``max_gap`` foreign pages parts two stretches."""
        first, last = int(pages.min()), int(pages.max())
        if last - first < len(pages) + max_gap:  # all gaps together are no wider
            ends = np.array([first, last + 1, 0])
            return cls(starts=ends[:1], stops=ends[1:2], places=ends[2:], max_gap=max_gap)
        ordered = np.sort(pages)
        parted = np.flatnonzero(ordered[1:] - ordered[:-1] > max_gap + 1)
        starts = ordered[np.concatenate([[0], parted + 1])]
        stops = ordered[np.concatenate([parted, [-1]])] + 1
        sizes = stops - starts
        return cls(starts=starts, stops=stops, places=np.cumsum(sizes) - sizes, max_gap=max_gap)

    @property
    def num_pages(self) -> int:
        """Pages in all stretches, foreign ones too."""
        return int(self.places[-1] + self.stops[-1] - self.starts[-1])

    @property
    def cost_pages(self) -> int:
        """What reading them costs, as so many pages in one stretch."""
        return self.num_pages + self.max_gap * (len(self.starts) - 1)

    def place_of(self, pages: Int64Array) -> Int64Array:
        """The place of each page when all stretches lie end to end."""
        shifts = self.places - self.starts
        shift = shifts[0] if len(shifts) == 1 else shifts[np.searchsorted(self.stops, pages, side="right")]
        places: Int64Array = pages + shift
        return places

    def slices(self) -> list[tuple[slice, slice]]:
        """Of each stretch its places and its pages."""
        return [
            (slice(place, place + stop - start), slice(start, stop))
            for place, start, stop in zip(self.places.tolist(), self.starts.tolist(), self.stops.tolist(), strict=True)
        ]


def _num_pages(spans: Spans) -> Int64Array:
    pages: Int64Array = (spans.kv_lens[: spans.num_decodes] + (spans.block_size - 1)) // spans.block_size
    return pages


class ChunkAttention:
    """Attention of one prompt chunk, causal within the chunk and over its whole prefix."""

    def __init__(self, spans: Spans, place: int, device: torch.device) -> None:
        first, num_rows = int(spans.first_row[place]), int(spans.num_rows[place])
        self.rows = slice(first, first + num_rows)
        self._kv_len = int(spans.kv_lens[place])
        self._prefix = self._kv_len - num_rows
        self._pages = None
        if self._prefix:
            blocks = spans.blocks[place, : -(-self._kv_len // spans.block_size)]
            self._pages = torch.from_numpy(blocks.astype(np.int64)).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerPages, mask: Tensor | None) -> Tensor:
        """Attention output ``[rows, num_kv_heads, group, head_dim]``.

        q ``[rows, num_heads, head_dim]``; k and v ``[rows, num_kv_heads, head_dim]`` are the chunk's own and already
        in ``cache``. ``mask`` is that of ``causal_band``, None where the kernel aligns causality by itself.
        """
        num_kv_heads, head_dim = k.shape[1:]
        group = q.shape[1] // num_kv_heads
        if self._pages is None:
            keys, values = k.transpose(0, 1), v.transpose(0, 1)
        else:
            keys, values = cache.gather(self._pages, self._kv_len)
        # Batch = KV head, heads = the query heads that share it: keys are read where they are, not repeated.
        queries = q.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys, values = (kv.unsqueeze(1).expand(-1, group, -1, -1) for kv in (keys, values))
        if mask is None:
            # Here, for it brings in torch's compiler, which takes seconds to load and nothing on a CPU needs.
            from torch.nn.attention.bias import causal_lower_right

            bias = causal_lower_right(queries.shape[2], self._kv_len)
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias).permute(2, 0, 1, 3)
        tiles = []
        reach = mask.shape[1] - TILE_ROWS
        for begin in range(0, queries.shape[2], TILE_ROWS):
            tile = queries[:, :, begin : begin + TILE_ROWS]
            seen = self._prefix + begin + tile.shape[2]
            start = reach - self._prefix - begin
            band = mask[: tile.shape[2], start : start + seen]
            tiles.append(F.scaled_dot_product_attention(tile, keys[:, :, :seen], values[:, :, :seen], attn_mask=band))
        return torch.cat(tiles, dim=2).permute(2, 0, 1, 3) if len(tiles) > 1 else tiles[0].permute(2, 0, 1, 3)


def causal_band(reach: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask ``[TILE_ROWS, reach + TILE_ROWS]``: row ``i`` sees the columns up to ``reach + i``.

    A tile whose first row is token ``t`` (at most ``reach``) takes its columns from ``reach - t`` on, so that one
    tensor serves every chunk, prefix and layer.
    """
    columns = torch.arange(reach + TILE_ROWS, device=device)
    rows = torch.arange(TILE_ROWS, device=device)
    band = torch.zeros((TILE_ROWS, reach + TILE_ROWS), dtype=dtype, device=device)
    return band.masked_fill_(columns > rows[:, None] + reach, float("-inf"))


class PagedAttention:
    """Attention of one whole iteration; built once from its spans, then called for each layer.

    ``previous``, the iteration before on the same cache, lends its page indices where they still hold; it must not
    be called again.
    """

    def __init__(
        self, spans: Spans, device: torch.device, mask: Tensor | None, previous: PagedAttention | None = None
    ) -> None:
        self._num_decodes = spans.num_decodes
        self._decodes: DecodeAttention | None = None
        if spans.num_decodes:
            self._decodes = previous._decodes if previous is not None else None
            if self._decodes is None or not self._decodes.advance(spans):
                self._decodes = DecodeAttention(spans, device)
        self._chunks = [ChunkAttention(spans, place, device) for place in range(spans.num_decodes, len(spans.num_rows))]
        self._mask = mask

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerPages) -> Tensor:
        """Attention output ``[num rows, num_heads * head_dim]``.

        q ``[num rows, num_heads, head_dim]``; k and v ``[num rows, num_kv_heads, head_dim]``, already in ``cache``.
        """
        if not self._chunks and self._decodes is not None:
            return self._decodes(q, cache)
        num_kv_heads = k.shape[1]
        out = torch.empty(
            (len(q), num_kv_heads, q.shape[1] // num_kv_heads, q.shape[2]), dtype=q.dtype, device=q.device
        )
        if self._decodes is not None:
            count = self._num_decodes
            out[:count] = self._decodes(q[:count], cache).view(count, *out.shape[1:])
        for chunk in self._chunks:
            rows = chunk.rows
            out[rows] = chunk(q[rows], k[rows], v[rows], cache, self._mask)
        return out.flatten(1)
