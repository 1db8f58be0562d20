"""Paged attention for one flattened batch: chunks of prompts over their prefixes, and decode rows, with grouped heads.

KV pages: k_cache and v_cache are [num_blocks, block_size, num_kv_heads, head_dim]; block_table [num_seqs, max_blocks]
names the pages of each sequence in order. Sequence i owns the query rows query_start_loc[i]:query_start_loc[i + 1],
which are the last ones of its context_lens[i] tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .attention_tiles import (
    AttentionConfig,
    next_power_of_two,
    select_attention_config,
    select_num_splits,
    stages_on,
)
from .cost import OpCost
from .launch import (
    limits_of,
    must_widen,
    require_dtype,
    require_runnable,
    require_same_device,
    require_shape,
    require_unit_stride,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 128
LOG2_E = 1.4426950408889634


def attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """The same result as `attention` in plain PyTorch, sequence by sequence in fp32."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k_cache.shape[2]
    starts, contexts = query_start_loc.tolist(), context_lens.tolist()
    for seq, context in enumerate(contexts):
        rows = slice(starts[seq], starts[seq + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0 or context == 0:
            continue
        pages = block_table[seq, : -(-context // k_cache.shape[1])].long()
        keys = k_cache[pages].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        values = v_cache[pages].flatten(0, 1)[:context].float().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * (scale or q.shape[2] ** -0.5)
        positions = torch.arange(context - num_queries, context, device=q.device)
        visible = torch.arange(context, device=q.device)[None, :] <= positions[:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _attend_tiles(  # type: ignore[no-untyped-def]
    acc,
    row_max,
    row_sum,
    q,
    positions,
    first_key,
    last_key,
    table_ptr,
    k_ptr,
    v_ptr,
    stride_page,
    stride_slot,
    scale_log2,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Online softmax over the key tiles first_key:last_key; MASKED where some row must not see some key."""
    in_tile = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for start in range(first_key, last_key, BLOCK_N):
        keys = start + in_tile
        if PAGE_SIZE % BLOCK_N == 0:
            # The whole tile lies in one page: one table entry, and the rest is plain strides.
            page = tl.load(table_ptr + start // PAGE_SIZE).to(tl.int64)
            offsets = page * stride_page + (start % PAGE_SIZE + in_tile) * stride_slot
        else:
            page = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < last_key, other=0).to(tl.int64)
            offsets = page * stride_page + (keys % PAGE_SIZE) * stride_slot
        pointers = offsets[:, None] + dims[None, :]
        # Slots past the end hold anything, NaN included, and 0 * NaN is NaN: they must be read as zero.
        if MASKED:
            mask = (keys < last_key)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + pointers, mask=mask, other=0.0)
            v = tl.load(v_ptr + pointers, mask=mask, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_ptr + pointers)
            v = tl.load(v_ptr + pointers)
        else:
            k = tl.load(k_ptr + pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptr + pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        p_dtype = v.dtype
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if MASKED:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen no key yet keeps -inf as its maximum; -inf - -inf would be NaN.
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(scores - anchor[:, None])
        decay = tl.exp2(row_max - anchor)
        row_sum = row_sum * decay + tl.sum(p, axis=1)
        p = p.to(p_dtype)
        if WIDEN:
            p = p.to(tl.float32)
        acc = tl.dot(p, v, acc * decay[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


# What changes from one iteration to the next must not make another compiled variant: that would cost a second or more
# in the middle of a run.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["num_splits", "num_q_tiles", "stride_table"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "contexts_ptr"],
)
def _attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    starts_ptr,
    contexts_ptr,
    scale_log2,
    num_splits,
    num_q_tiles,
    num_q_heads,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_page,
    stride_slot,
    stride_head,
    stride_table,
    SPLIT_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # One program: one KV head, and BLOCK_M rows that pair queries with the heads that share it.
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = pid % num_splits
    # The last tile of a chunk sees the most keys: start it first, so that it does not finish alone.
    tile = num_q_tiles - 1 - pid // num_splits % num_q_tiles
    seq = (pid // num_splits // num_q_tiles).to(tl.int64)
    block_q: tl.constexpr = BLOCK_M // GROUP_PADDED
    row_start = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - row_start
    if tile * block_q >= num_queries:
        return
    prefix = tl.load(contexts_ptr + seq) - num_queries
    first_position = prefix + tile * block_q
    end = prefix + tl.minimum((tile + 1) * block_q, num_queries)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = tile * block_q + rows // GROUP_PADDED
    heads = kv_head * GROUP + rows % GROUP_PADDED
    row_mask = (queries < num_queries) & (rows % GROUP_PADDED < GROUP)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (row_start + queries).to(tl.int64)
    q_offsets = tokens * stride_qt + heads * stride_qh
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)

    # Keys lo:hi are this split's; those below `seen_by_all` need no mask.
    keys_per_split = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits) * BLOCK_N
    lo = split * keys_per_split
    hi = tl.minimum(lo + keys_per_split, end)
    seen_by_all = tl.maximum(lo, tl.minimum(hi, (first_position + 1) // BLOCK_N * BLOCK_N))

    row_max = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    pages = table_ptr + seq * stride_table
    k_head = k_ptr + kv_head * stride_head
    v_head = v_ptr + kv_head * stride_head
    positions = prefix + queries
    # fmt: off
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, positions, lo, seen_by_all, pages, k_head, v_head, stride_page, stride_slot,
        scale_log2, False, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, WIDEN,
    )
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q, positions, seen_by_all, hi, pages, k_head, v_head, stride_page, stride_slot,
        scale_log2, True, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, WIDEN,
    )
    # fmt: on

    # A row without any key (the padding of a captured graph) gives zeros.
    result = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if not SPLIT_KEYS:
        o_offsets = tokens * stride_ot + heads * stride_oh
        o_ptrs = out_ptr + o_offsets[:, None] + dims[None, :]
        tl.store(o_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        entry = (tokens * num_q_heads + heads) * num_splits + split
        tl.store(partial_ptr + entry[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        lse = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum)))
        tl.store(lse_ptr + entry, lse, mask=row_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_splits_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    lse_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    num_q_heads,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    entries = (token * num_q_heads + head) * NUM_SPLITS + splits
    lse = tl.load(lse_ptr + entries)
    peak = tl.max(lse, axis=0)
    weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    mask = (weights > 0.0)[:, None] & (dims < HEAD_DIM)[None, :]
    partial = tl.load(partial_ptr + entries[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, axis=0)
    result = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    o_ptrs = out_ptr + token * stride_ot + head * stride_oh + dims
    tl.store(o_ptrs, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    max_query_len: int,
    max_context_len: int,
    num_decodes: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Causal attention of a flattened batch over paged keys and values, [tokens, q_heads, head_dim].

    q [tokens, q_heads, head_dim] in bf16, fp16 or fp32, caches in the same dtype and block_table, query_start_loc
    [num_seqs + 1], context_lens [num_seqs] in int32, as the module describes. The first num_decodes sequences have
    exactly one query each; they run apart from the chunks, in tiles of their own size. max_query_len bounds the
    queries of the others, max_context_len every context. The two bounds and num_decodes are the caller's word: they
    live on the host so that nothing waits for the device. num_splits replaces the choice of `select_num_splits`.
    A row whose context is 0 (padding) gives zeros. Memory is read only where it belongs to a context.
    Raises ValueError on a shape, dtype, stride or device that does not fit.
    Formula: online softmax, Dao et al., "FlashAttention"; split keys, "Flash-Decoding"; pages, "PagedAttention".
    """
    require_shape("q", q, (None, None, None))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _check(q, k_cache, v_cache, block_table, query_start_loc, context_lens, out)
    num_seqs = context_lens.shape[0]
    if not 0 <= num_decodes <= num_seqs:
        raise ValueError(f"num_decodes={num_decodes}: must be between 0 and the {num_seqs} sequences")
    if max_query_len < 0 or max_context_len < 0:
        raise ValueError(f"max_query_len={max_query_len}, max_context_len={max_context_len}: both must be at least 0")
    if num_splits is not None and (num_splits < 1 or num_splits & (num_splits - 1)):
        raise ValueError(f"num_splits={num_splits}: must be a power of two")
    scale_log2 = (q.shape[2] ** -0.5 if scale is None else scale) * LOG2_E
    num_chunk_rows = q.shape[0] - num_decodes
    for first, last, num_rows, longest in (
        (0, num_decodes, num_decodes, 1),
        (num_decodes, num_seqs, num_chunk_rows, min(max_query_len, num_chunk_rows)),
    ):
        if first == last or num_rows <= 0 or longest == 0:
            continue
        part = _Part(
            block_table=block_table[first:last],
            query_start_loc=query_start_loc[first : last + 1],
            context_lens=context_lens[first:last],
            first_row=first,
            num_rows=num_rows,
            max_query_len=longest,
            max_context_len=max_context_len,
        )
        _launch(q, k_cache, v_cache, out, part, scale_log2=scale_log2, num_splits=num_splits)
    return out


class _Part(NamedTuple):
    """The decodes or the chunks of a batch; rows are those of the whole batch."""

    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    context_lens: torch.Tensor
    first_row: int
    num_rows: int
    max_query_len: int
    max_context_len: int


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _, num_q_heads, head_dim = q.shape
    require_dtype("q", q, DTYPES)
    if not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}: must be between 1 and {MAX_HEAD_DIM}")
    require_shape("k_cache", k_cache, (None, None, None, head_dim))
    num_kv_heads = k_cache.shape[2]
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"q_heads={num_q_heads}: must be a multiple of the {num_kv_heads} KV heads")
    require_shape("v_cache", v_cache, k_cache.shape)
    if v_cache.stride() != k_cache.stride():
        raise ValueError(f"v_cache.stride={v_cache.stride()}: must equal k_cache's, {k_cache.stride()}")
    require_shape("out", out, q.shape)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("out", out)):
        require_dtype(name, tensor, (q.dtype,))
        require_unit_stride(name, tensor)
    require_unit_stride("q", q)
    require_shape("context_lens", context_lens, (None,))
    num_seqs = context_lens.shape[0]
    require_shape("query_start_loc", query_start_loc, (num_seqs + 1,))
    require_shape("block_table", block_table, (num_seqs, None))
    indices = {"block_table": block_table, "query_start_loc": query_start_loc, "context_lens": context_lens}
    for name, tensor in indices.items():
        require_dtype(name, tensor, (torch.int32,))
        require_unit_stride(name, tensor)
    require_same_device(q.device, k_cache=k_cache, v_cache=v_cache, out=out, **indices)
    require_runnable(_attention_kernel, q.device)


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    part: _Part,
    *,
    scale_log2: float,
    num_splits: int | None,
) -> None:
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, num_seqs = k_cache.shape[2], part.context_lens.shape[0]
    limits = limits_of(q.device)
    group = num_q_heads // num_kv_heads
    cfg = select_attention_config(
        limits,
        head_dim=head_dim,
        element_bytes=q.element_size(),
        group=group,
        max_query_len=part.max_query_len,
    )
    tiles = -(-part.max_query_len * next_power_of_two(group) // cfg.block_m)
    splits = num_splits or select_num_splits(num_seqs * tiles * num_kv_heads, part.max_context_len, limits.num_sms)
    partial = lse = None
    if splits > 1:
        rows = part.first_row + part.num_rows
        partial = torch.empty((rows, num_q_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((rows, num_q_heads, splits), dtype=torch.float32, device=q.device)
    _attention_kernel[(num_seqs * tiles * splits, num_kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        lse,
        part.block_table,
        part.query_start_loc,
        part.context_lens,
        scale_log2,
        splits,
        tiles,
        num_q_heads,
        *q.stride()[:2],
        *out.stride()[:2],
        *k_cache.stride()[:3],
        part.block_table.stride(0),
        **kernel_constants(cfg, q.dtype, group=group, head_dim=head_dim, page_size=k_cache.shape[1]),
        SPLIT_KEYS=splits > 1,
        WIDEN=must_widen(q),
        num_warps=cfg.num_warps,
        num_stages=stages_on(cfg, limits),
    )
    if partial is not None and lse is not None:
        _reduce_splits_kernel[(part.num_rows, num_q_heads)](
            partial[part.first_row :],
            lse[part.first_row :],
            out[part.first_row :],
            out.stride(0),
            out.stride(1),
            num_q_heads,
            NUM_SPLITS=splits,
            HEAD_DIM=head_dim,
            BLOCK_D=_padded_head_dim(head_dim),
            num_warps=4,
        )


def _padded_head_dim(head_dim: int) -> int:
    # tl.dot multiplies at least 16 elements deep.
    return max(next_power_of_two(head_dim), 16)


def kernel_constants(
    cfg: AttentionConfig, dtype: torch.dtype, *, group: int, head_dim: int, page_size: int
) -> dict[str, int | bool | str]:
    """The attention kernel's compile-time constants, SPLIT_KEYS and WIDEN apart."""
    return {
        "GROUP": group,
        "GROUP_PADDED": next_power_of_two(group),
        "PAGE_SIZE": page_size,
        "HEAD_DIM": head_dim,
        "BLOCK_D": _padded_head_dim(head_dim),
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def attention_cost(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> OpCost:
    """FLOPs and bytes of `attention` for sequences of query_lens queries that end contexts of context_lens tokens.

    FLOPs: two products of head_dim multiply-adds for each query and key it sees, q*(context - q) + q*(q + 1)/2 pairs.
    Bytes: queries and outputs once, each sequence's keys and values once.
    """
    pairs = sum(q * (c - q) + q * (q + 1) // 2 for q, c in zip(query_lens, context_lens, strict=True))
    rows = 2 * sum(query_lens) * num_q_heads
    cached = 2 * sum(c for q, c in zip(query_lens, context_lens, strict=True) if q) * num_kv_heads
    return OpCost(flops=4 * pairs * num_q_heads * head_dim, bytes=(rows + cached) * head_dim * dtype.itemsize)
