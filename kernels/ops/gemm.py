"""Linear layer: y = x @ w^T (+ bias), in bf16, fp16, fp32, or fp8 e4m3 with per-tensor scales."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cost import OpCost
from .gemm_tiles import TileConfig, num_tiles, select_config
from .launch import (
    limits_of,
    must_widen,
    require_dtype,
    require_runnable,
    require_same_device,
    require_shape,
    require_unit_stride,
)

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Architectures whose MMA units take fp8 e4m3 operands (gfx942 takes another fp8 encoding, e4m3fnuz).
FP8_ARCHS = ("sm_89", "sm_90", "sm_100")

#: Tiles with fewer rows than this put the weights on the long side of the MMA instruction.
SWAP_BELOW_BLOCK_M = 64


def default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result where none is asked for: the operands', bf16 for fp8."""
    return torch.bfloat16 if dtype == FP8 else dtype


def gemm_ref(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same result as `gemm` in plain PyTorch, accumulated in fp32."""
    y = x.float() @ w.float().T
    if x_scale is not None and w_scale is not None:
        y = y * (x_scale.float() * w_scale.float())
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype or default_out_dtype(x.dtype))


# M changes from one iteration to the next and must not make another compiled variant.
@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def _gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    bias_ptr,
    x_scale_ptr,
    w_scale_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_ym,
    EVEN_K: tl.constexpr,
    SWAP_OPERANDS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Grouped ordering: GROUP_M rows of tiles are walked column by column, so their x and w stay in L2.
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group_tiles = GROUP_M * tiles_n
    first_m = pid // group_tiles * GROUP_M
    group_rows = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % group_tiles % group_rows
    tile_n = pid % group_tiles // group_rows

    # The tile's origin is a 64-bit offset; inside a tile 32 bits are enough and cost half the registers.
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    row_mask = rows < M - tile_m * BLOCK_M
    col_mask = cols < N - tile_n * BLOCK_N
    x_ptrs = x_ptr + (tile_m * BLOCK_M).to(tl.int64) * stride_xm + (rows[:, None] * stride_xm + ks[None, :])
    w_ptrs = w_ptr + (tile_n * BLOCK_N).to(tl.int64) * stride_wn + (cols[:, None] * stride_wn + ks[None, :])

    # With few rows the weights take the MMA's long side: m64nNk16 instructions want at least 64 rows of A.
    if SWAP_OPERANDS:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        if EVEN_K:
            x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=col_mask[:, None], other=0.0)
        else:
            k_mask = ks[None, :] < K - k * BLOCK_K
            x = tl.load(x_ptrs, mask=row_mask[:, None] & k_mask, other=0.0)
            w = tl.load(w_ptrs, mask=col_mask[:, None] & k_mask, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        if SWAP_OPERANDS:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K

    if SWAP_OPERANDS:
        acc = tl.trans(acc)
    if x_scale_ptr is not None:
        acc *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + tile_n * BLOCK_N + cols, mask=col_mask, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    y_tile = y_ptr + (tile_m * BLOCK_M).to(tl.int64) * stride_ym + tile_n * BLOCK_N
    y_ptrs = y_tile + (rows[:, None] * stride_ym + cols[None, :])
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """y [M, N] = x [M, K] @ w [N, K]^T, times x_scale * w_scale if given, plus bias [N] if given.

    x and w have one dtype: bf16, fp16, fp32 or fp8 e4m3; rows may be strided, the last dimension is dense.
    Scales are fp32 tensors of one element, both or neither, and required for fp8. The result is x's dtype
    (bf16 for fp8) unless out_dtype or out says otherwise. config replaces the one `select_config` would
    choose. Raises ValueError on a shape, dtype, stride or device that does not fit.
    """
    require_shape("x", x, (None, None))
    (m, k), n = x.shape, w.shape[0]
    require_shape("w", w, (n, k))
    require_dtype("x", x, DTYPES)
    require_dtype("w", w, (x.dtype,))
    for name, operand in (("x", x), ("w", w)):
        require_unit_stride(name, operand)
    if bias is not None:
        require_shape("bias", bias, (n,))
        require_unit_stride("bias", bias)
    _check_scales(x.dtype, x_scale, w_scale)
    if out is None:
        out = torch.empty((m, n), dtype=out_dtype or default_out_dtype(x.dtype), device=x.device)
    require_shape("out", out, (m, n))
    require_dtype("out", out, OUT_DTYPES if out_dtype is None else (out_dtype,))
    require_unit_stride("out", out)
    require_same_device(x.device, w=w, bias=bias, x_scale=x_scale, w_scale=w_scale, out=out)
    if m == 0 or n == 0:
        return out
    require_runnable(_gemm_kernel, x.device)

    limits = limits_of(x.device)
    if x.dtype == FP8 and limits.arch not in FP8_ARCHS:
        raise ValueError(f"x.dtype={x.dtype}: needs one of {', '.join(FP8_ARCHS)}, the device is {limits.arch}")
    cfg = config or select_config(m, n, k, limits, x.element_size())
    _gemm_kernel[(num_tiles(m, n, cfg),)](
        x,
        w,
        out,
        bias,
        x_scale,
        w_scale,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        out.stride(0),
        **kernel_constants(cfg, x.dtype, even_k=k % cfg.block_k == 0),
        WIDEN=must_widen(x),
        num_warps=cfg.num_warps,
        num_stages=cfg.num_stages,
    )
    return out


def _check_scales(dtype: torch.dtype, x_scale: torch.Tensor | None, w_scale: torch.Tensor | None) -> None:
    if (x_scale is None) != (w_scale is None):
        raise ValueError("x_scale, w_scale: give both or neither")
    if x_scale is None or w_scale is None:
        if dtype == FP8:
            raise ValueError(f"x.dtype={dtype}: fp8 operands need x_scale and w_scale")
        return
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale)):
        require_dtype(name, scale, (torch.float32,))
        if scale.numel() != 1:
            raise ValueError(f"{name}.shape={tuple(scale.shape)}: must hold one element")


def kernel_constants(cfg: TileConfig, dtype: torch.dtype, *, even_k: bool) -> dict[str, int | bool | str]:
    """The kernel's compile-time constants, WIDEN apart."""
    return {
        "EVEN_K": even_k,
        "SWAP_OPERANDS": cfg.block_m < SWAP_BELOW_BLOCK_M,
        # Only fp32 has a choice of precision; tf32 would round its mantissa to 10 bits.
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "BLOCK_K": cfg.block_k,
        "GROUP_M": cfg.group_m,
    }


def gemm_cost(
    m: int, n: int, k: int, dtype: torch.dtype, *, out_dtype: torch.dtype | None = None, bias: bool = False
) -> OpCost:
    """FLOPs (two for each multiply-add) and bytes (x, w, bias once, y once) of `gemm`."""
    out_bytes = (out_dtype or default_out_dtype(dtype)).itemsize
    moved = (m * k + n * k) * dtype.itemsize + (m * n + (n if bias else 0)) * out_bytes
    return OpCost(flops=2 * m * n * k, bytes=moved)
