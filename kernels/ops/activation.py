"""SiLU(gate) * up, from the fused gate-and-up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .cost import OpCost
from .launch import require_dtype, require_runnable, require_same_device, require_shape, require_unit_stride

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Eight elements a thread: one 16-byte load of a 16-bit dtype.
BLOCK = 1024
NUM_WARPS = 4


def silu_mul_ref(x: torch.Tensor) -> torch.Tensor:
    """The same result as `silu_mul` in plain PyTorch, computed in fp32."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, inter, stride_x, stride_out, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inter
    gate = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + inter + cols, mask=mask, other=0.0).to(tl.float32)
    # exp(-gate) overflows to inf for very negative gates, and gate / inf is the right 0.
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * stride_out + cols, result.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """SiLU(x[:, :inter]) * x[:, inter:], shape [tokens, inter], from x [tokens, 2 * inter].

    bf16, fp16 or fp32; rows may be strided, the last dimension is dense.
    Raises ValueError on a shape, dtype, stride or device that does not fit.
    """
    require_shape("x", x, (None, None))
    tokens, width = x.shape
    if width % 2:
        raise ValueError(f"x.shape={tuple(x.shape)}: the last dimension must be even, gate beside up")
    inter = width // 2
    require_dtype("x", x, DTYPES)
    out = torch.empty((tokens, inter), dtype=x.dtype, device=x.device) if out is None else out
    require_shape("out", out, (tokens, inter))
    require_dtype("out", out, (x.dtype,))
    require_unit_stride("x", x)
    require_unit_stride("out", out)
    require_same_device(x.device, out=out)
    if tokens == 0 or inter == 0:
        return out
    require_runnable(_silu_mul_kernel, x.device)
    grid = (tokens, triton.cdiv(inter, BLOCK))
    _silu_mul_kernel[grid](x, out, inter, x.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def silu_mul_cost(tokens: int, inter: int, dtype: torch.dtype) -> OpCost:
    """FLOPs (exponential, sum, division and product for each element) and bytes of `silu_mul`."""
    elements = tokens * inter
    return OpCost(flops=4 * elements, bytes=3 * elements * dtype.itemsize)
