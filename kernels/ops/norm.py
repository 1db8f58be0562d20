"""RMSNorm, with the residual addition that precedes it fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cost import OpCost
from .launch import require_dtype, require_runnable, require_same_device, require_shape, require_unit_stride

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: One program holds a whole row in registers: 64 fp32 values a thread at 16 warps.
MAX_HIDDEN = 32768


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same result as `rms_norm` in plain PyTorch, with fp32 statistics."""
    stream = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = stream.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), stream


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stream_ptr,
    hidden,
    eps,
    stride_x,
    stride_residual,
    stride_out,
    stride_stream,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * stride_residual + cols, mask=mask, other=0.0).to(tl.float32)
        stream = x.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + row * stride_stream + cols, stream, mask=mask)
        # Statistics are taken of what the next layer will read, so fused and unfused agree.
        x = stream.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized rows [tokens, hidden] and the residual stream (x + residual, or x itself without one).

    bf16, fp16 or fp32; rows may be strided, the last dimension is dense; residual_out may be residual itself.
    Raises ValueError on a shape, dtype, stride or device that does not fit, or hidden above `MAX_HIDDEN`.
    Formula: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    require_shape("x", x, (None, None))
    tokens, hidden = x.shape
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden={hidden}: must be at most {MAX_HIDDEN}")
    require_dtype("x", x, DTYPES)
    require_shape("weight", weight, (hidden,))
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    stream = x
    if residual is not None:
        stream = torch.empty_like(out) if residual_out is None else residual_out
    rows = {"x": x, "out": out, "residual_out": stream, "residual": x if residual is None else residual}
    for name, tensor in rows.items():
        require_shape(name, tensor, (tokens, hidden))
        require_dtype(name, tensor, (x.dtype,))
        require_unit_stride(name, tensor)
    require_unit_stride("weight", weight)
    require_same_device(x.device, weight=weight, **rows)
    if tokens == 0 or hidden == 0:
        return out, stream
    require_runnable(_rms_norm_kernel, x.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        out,
        stream if residual is not None else None,
        hidden,
        eps,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        stream.stride(0),
        BLOCK=block,
        num_warps=num_warps_of(block),
    )
    return out, stream


def num_warps_of(block: int) -> int:
    """Warps of the program that holds a row of block elements."""
    return min(max(block // 512, 1), 16)


def rms_norm_cost(tokens: int, hidden: int, dtype: torch.dtype, *, residual: bool = False) -> OpCost:
    """FLOPs (square, sum, scale and weight for each element, plus the addition) and bytes of `rms_norm`."""
    elements = tokens * hidden
    passes = 4 if residual else 2
    return OpCost(flops=elements * (5 if residual else 4), bytes=(passes * elements + hidden) * dtype.itemsize)
