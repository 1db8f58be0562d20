"""Paged attention against its reference and torch's SDPA, over ragged chunks, prefixes, groups, pages and splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from tilebudget.kernels.gpus import device_limits
from tilebudget.kernels.ops.attention import attention, attention_cost, attention_ref
from tilebudget.kernels.ops.attention_tiles import select_attention_config, select_num_splits

Compare = Callable[[torch.Tensor, torch.Tensor], None]
#: A page index that no cache has: reading it would fault.
NO_PAGE = 2**30


class _Batch(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    context_lens: torch.Tensor


def _batch(
    chunks: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Batch:
    """Sequences of (prefix, queries) with shuffled pages; every slot outside the contexts holds NaN."""
    contexts = [prefix + queries for prefix, queries in chunks]
    pages = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(pages) + 3, device=device)
    slots = (sum(pages) + 3, block_size, heads[1], head_dim)
    k_cache, v_cache = (torch.full(slots, float("nan"), device=device).to(dtype) for _ in range(2))
    table = torch.full((len(chunks), max(pages) + 1), NO_PAGE, dtype=torch.int32, device=device)
    used = 0
    for seq, (context, count) in enumerate(zip(contexts, pages, strict=True)):
        own = order[used : used + count]
        used += count
        table[seq, :count] = own.int()
        tokens = torch.arange(context, device=device)
        for cache in (k_cache, v_cache):
            filled = torch.randn(context, heads[1], head_dim, device=device).to(dtype)
            cache[own[tokens // block_size], tokens % block_size] = filled
    queries = [count for _, count in chunks]
    return _Batch(
        q=torch.randn(sum(queries), heads[0], head_dim, device=device).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=table,
        query_start_loc=torch.tensor([0, *accumulate(queries)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
    )


def _run(batch: _Batch, *, num_decodes: int = 0, num_splits: int | None = None) -> torch.Tensor:
    queries = batch.query_start_loc.diff().tolist()
    out = torch.full_like(batch.q, float("nan"))
    result = attention(
        *batch,
        max_query_len=max(queries[num_decodes:], default=0),
        max_context_len=max(batch.context_lens.tolist(), default=0),
        num_decodes=num_decodes,
        num_splits=num_splits,
        out=out,
    )
    assert result is out
    return out


# Every length, every kind of prefix (0, 1, block - 1, block, long), groups of 1, 4 and 8, and pages of 16, 64 (a whole
# number of key tiles) and 5 tokens, each at least once with each dtype; not the full product.
@pytest.mark.parametrize(
    ("prefix", "queries", "heads", "block_size", "dtype"),
    [
        (0, 1, (1, 1), 16, torch.float32),
        (1, 15, (4, 1), 16, torch.bfloat16),
        (15, 16, (8, 2), 16, torch.float16),
        (16, 17, (8, 1), 16, torch.float32),
        (300, 127, (4, 1), 64, torch.bfloat16),
        (0, 128, (4, 4), 16, torch.float16),
        (63, 129, (8, 1), 64, torch.float16),
        (64, 16, (4, 4), 64, torch.float32),
        (5, 257, (4, 1), 5, torch.float16),
        (4, 17, (1, 1), 5, torch.bfloat16),
        (0, 257, (1, 1), 64, torch.bfloat16),
        (300, 1, (8, 1), 5, torch.bfloat16),
    ],
)
def test_one_chunk(
    prefix: int,
    queries: int,
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Compare,
) -> None:
    batch = _batch([(prefix, queries)], heads, 16, block_size, dtype, device)
    assert_close(_run(batch), attention_ref(*batch))


@pytest.mark.parametrize(("head_dim", "heads"), [(24, (7, 1)), (32, (32, 1)), (48, (3, 3)), (64, (10, 2))])
def test_odd_head_sizes_and_groups(
    head_dim: int, heads: tuple[int, int], device: torch.device, assert_close: Compare
) -> None:
    batch = _batch([(20, 1), (3, 9)], heads, head_dim, 16, torch.float16, device)
    assert_close(_run(batch, num_decodes=1), attention_ref(*batch))


@pytest.mark.parametrize("num_decodes", [0, 3])
@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_mixed_batch(num_decodes: int, num_splits: int | None, device: torch.device, assert_close: Compare) -> None:
    # Three decodes and three chunks in one batch; the same answer whether decodes run apart, and however keys split.
    batch = _batch([(0, 1), (15, 1), (200, 1), (40, 33), (0, 2), (97, 5)], (4, 1), 16, 16, torch.float16, device)
    assert_close(_run(batch, num_decodes=num_decodes, num_splits=num_splits), attention_ref(*batch))


def test_decodes_alone_with_padding_rows(device: torch.device, assert_close: Compare) -> None:
    # The rows that fill a captured graph have a context of 0 and give zeros.
    batch = _batch([(70, 1), (9, 1), (31, 1)], (4, 2), 16, 16, torch.float32, device)
    contexts = torch.tensor([71, 0, 32], dtype=torch.int32, device=device)
    padded = batch._replace(context_lens=contexts)
    for num_splits in (1, 2):
        result = _run(padded, num_decodes=3, num_splits=num_splits)
        assert bool((result[1] == 0).all())
        assert_close(result, attention_ref(*padded))


def test_is_torchs_causal_attention(device: torch.device, assert_close: Compare) -> None:
    batch = _batch([(0, 50)], (4, 4), 32, 16, torch.float32, device)
    pages = batch.block_table[0, :4].long()
    q, k, v = (
        heads.transpose(0, 1)
        for heads in (batch.q, batch.k_cache[pages].flatten(0, 1)[:50], batch.v_cache[pages].flatten(0, 1)[:50])
    )
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    assert_close(_run(batch), want.contiguous())


def test_views_of_a_fused_projection(device: torch.device, assert_close: Compare) -> None:
    batch = _batch([(5, 3), (0, 4)], (4, 2), 16, 16, torch.float32, device)
    fused = torch.full((7, 5, 19), float("nan"), device=device)
    fused[:, 1:, 3:] = batch.q
    batch = batch._replace(q=fused[:, 1:, 3:])
    out = torch.full((7, 9, 16), 7.0, device=device)
    attention(*batch, max_query_len=4, max_context_len=8, out=out[:, ::2][:, :4])
    assert_close(out[:, ::2][:, :4].contiguous(), attention_ref(*batch))
    assert bool((out[:, 1::2] == 7).all())


def test_large_scores_do_not_overflow(device: torch.device, assert_close: Compare) -> None:
    batch = _batch([(10, 20)], (2, 2), 16, 16, torch.float32, device)
    batch = batch._replace(q=batch.q * 1e3)
    assert_close(_run(batch), attention_ref(*batch))


def test_empty(device: torch.device) -> None:
    batch = _batch([(4, 0)], (2, 1), 16, 16, torch.float32, device)
    assert _run(batch).shape == (0, 2, 16)


def test_bad_input_is_named(device: torch.device) -> None:
    batch = _batch([(4, 2)], (4, 2), 16, 16, torch.float32, device)

    def run(changed: _Batch, *, max_query_len: int = 2, num_decodes: int = 0, num_splits: int | None = None) -> None:
        attention(
            *changed,
            max_query_len=max_query_len,
            max_context_len=6,
            num_decodes=num_decodes,
            num_splits=num_splits,
        )

    with pytest.raises(ValueError, match="q_heads=3: must be a multiple of the 2 KV heads"):
        run(batch._replace(q=batch.q[:, :3]))
    with pytest.raises(ValueError, match=r"context_lens\.dtype=torch\.int64"):
        run(batch._replace(context_lens=batch.context_lens.long()))
    with pytest.raises(ValueError, match=r"query_start_loc\.shape=\(1,\): must be \(2\)"):
        run(batch._replace(query_start_loc=batch.query_start_loc[:1]))
    with pytest.raises(ValueError, match=r"v_cache\.shape"):
        run(batch._replace(v_cache=batch.v_cache[:1]))
    with pytest.raises(ValueError, match="num_decodes=2: must be between 0 and the 1 sequences"):
        run(batch, num_decodes=2)
    with pytest.raises(ValueError, match="num_splits=3: must be a power of two"):
        run(batch, num_splits=3)
    with pytest.raises(ValueError, match="max_query_len=-1"):
        run(batch, max_query_len=-1)
    wide = torch.ones(2, 4, 160, device=device)
    with pytest.raises(ValueError, match="head_dim=160: must be between 1 and 128"):
        run(batch._replace(q=wide))


def test_configuration_follows_rows_and_device() -> None:
    def block_m(group: int, longest: int, device: str = "sm_90") -> int:
        limits = device_limits(device)
        cfg = select_attention_config(limits, head_dim=128, element_bytes=2, group=group, max_query_len=longest)
        return cfg.block_m

    assert [block_m(4, longest) for longest in (1, 4, 5, 16, 17, 4096)] == [16, 16, 64, 64, 128, 128]
    assert block_m(29, 1) == 32
    assert block_m(64, 1) == 64
    with pytest.raises(ValueError, match="group=200: at most 128"):
        block_m(200, 1)


def test_splits_fill_the_device_but_keep_their_keys() -> None:
    assert select_num_splits(8, 32768, 132) == 32
    assert select_num_splits(8, 1024, 132) == 4
    assert select_num_splits(132, 32768, 132) == 1
    assert select_num_splits(1, 131072, 132) == 64
    assert select_num_splits(1, 100, 132) == 1


def test_cost_counts_the_pairs_that_causality_leaves() -> None:
    pairs = sum(prefix + row + 1 for prefix, queries in ((7, 3), (0, 5)) for row in range(queries))
    cost = attention_cost([3, 5], [10, 5], num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    assert cost.flops == pairs * 4 * 4 * 16
    assert cost.bytes == 2 * (2 * 8 * 4 * 16 + 2 * 15 * 2 * 16)
