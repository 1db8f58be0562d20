"""Rotary position embedding of queries and keys, fused with the write of keys and values into their KV pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cost import OpCost
from .launch import require_dtype, require_runnable, require_same_device, require_shape, require_unit_stride

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Heads that one program rotates; the tables are read once for all of them.
BLOCK_HEADS = 8
NUM_WARPS = 2


def rotary_write_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """The same result and the same writes as `rotary_write` in plain PyTorch, computed in fp32."""

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.float().chunk(2, dim=-1)
        c, s = cos[positions.long()][:, None, :].float(), sin[positions.long()][:, None, :].float()
        return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(heads.dtype)

    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_size = k_cache.shape[1]
    k_cache[slots // block_size, slots % block_size] = rotate(k)[kept]
    v_cache[slots // block_size, slots % block_size] = v[kept]
    return rotate(q)


@triton.jit  # type: ignore[untyped-decorator]
def _rotary_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    num_q_heads,
    num_kv_heads,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_page,
    stride_slot,
    stride_head,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    q_blocks = tl.cdiv(num_q_heads, BLOCK_HEADS)
    half = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * HALF + half, mask=half < HALF, other=0.0).to(tl.float32)[None, :]

    if head_block < q_blocks:
        heads = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (heads < num_q_heads)[:, None] & (half < HALF)[None, :]
        source = q_ptr + token * stride_qt + heads[:, None] * stride_qh + half[None, :]
        target = out_ptr + token * stride_ot + heads[:, None] * stride_oh + half[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        heads = (head_block - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        # A negative slot is padding (a captured graph has more rows than the batch): nothing is written.
        mask = (heads < num_kv_heads)[:, None] & (half < HALF)[None, :] & (slot >= 0)
        source = k_ptr + token * stride_kt + heads[:, None] * stride_kh + half[None, :]
        offset = slot // PAGE_SIZE * stride_page + slot % PAGE_SIZE * stride_slot
        inner = heads[:, None] * stride_head + half[None, :]
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        target = k_cache_ptr + offset + inner
        tl.store(target, (first * cos - second * sin).to(k_cache_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (second * cos + first * sin).to(k_cache_ptr.dtype.element_ty), mask=mask)
        source = v_ptr + token * stride_vt + heads[:, None] * stride_vh + half[None, :]
        target = v_cache_ptr + offset + inner
        tl.store(target, tl.load(source, mask=mask, other=0.0), mask=mask)
        tl.store(target + HALF, tl.load(source + HALF, mask=mask, other=0.0), mask=mask)


def rotary_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rotated queries; the rotated keys and the values are written into their pages on the way.

    q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim] in one dtype (bf16, fp16, fp32), as views of
    one fused projection if wanted; cos and sin [max_positions, head_dim / 2] fp32; positions [tokens] integers;
    slot_mapping [tokens] integers, block * block_size + offset, or negative to skip the write; caches
    [num_blocks, block_size, kv_heads, head_dim]. Rotation in halves (GPT-NeoX and Llama), not interleaved. out may be
    q. Positions and slots are not checked against their tables, which would cost a device synchronization.
    Raises ValueError on a shape, dtype, stride or device that does not fit.
    Formula: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    require_shape("q", q, (None, None, None))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _check(q, k, v, cos, sin, positions, slot_mapping, k_cache, v_cache, out)
    tokens, num_q_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    if tokens == 0:
        return out
    require_runnable(_rotary_write_kernel, q.device)
    grid = (tokens, triton.cdiv(num_q_heads, BLOCK_HEADS) + triton.cdiv(num_kv_heads, BLOCK_HEADS))
    _rotary_write_kernel[grid](
        q,
        k,
        v,
        out,
        cos,
        sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        num_q_heads,
        num_kv_heads,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out.stride()[:2],
        *k_cache.stride()[:3],
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=BLOCK_HEADS,
        PAGE_SIZE=block_size,
        num_warps=NUM_WARPS,
    )
    return out


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"q.shape={tuple(q.shape)}: the last dimension must be even")
    num_kv_heads = k.shape[1] if k.dim() == 3 else 0
    block_size = k_cache.shape[1] if k_cache.dim() == 4 else 0
    require_dtype("q", q, DTYPES)
    require_shape("out", out, q.shape)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(name, tensor, (tokens, num_kv_heads, head_dim))
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_shape(name, tensor, (None, block_size, num_kv_heads, head_dim))
    for name, tensor in (("out", out), ("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        require_dtype(name, tensor, (q.dtype,))
        require_unit_stride(name, tensor)
    require_unit_stride("q", q)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"v_cache.stride={v_cache.stride()}: must equal k_cache's, {k_cache.stride()}")
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_shape(name, tensor, (None, head_dim // 2))
        if not tensor.is_contiguous():
            raise ValueError(f"{name}.stride={tensor.stride()}: must be contiguous")
    for name, tensor in (("positions", positions), ("slot_mapping", slot_mapping)):
        require_shape(name, tensor, (tokens,))
        require_dtype(name, tensor, (torch.int32, torch.int64))
        require_unit_stride(name, tensor)
    require_same_device(
        q.device,
        k=k,
        v=v,
        cos=cos,
        sin=sin,
        positions=positions,
        slot_mapping=slot_mapping,
        k_cache=k_cache,
        v_cache=v_cache,
        out=out,
    )


def rotary_write_cost(tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> OpCost:
    """FLOPs (three for each rotated element) and bytes (q, k, v read and written once, the tables read)."""
    rotated = tokens * (num_q_heads + num_kv_heads) * head_dim
    moved = 2 * (rotated + tokens * num_kv_heads * head_dim) * dtype.itemsize
    tables = tokens * head_dim * torch.float32.itemsize
    return OpCost(flops=3 * rotated, bytes=moved + tables)
