"""The compile matrix: every kernel in every declared configuration, as the compiler sees it for one device."""

from __future__ import annotations

import torch

from ..gpus import DeviceLimits
from ..ops import activation, attention, gemm, norm, rotary
from ..ops.attention_tiles import (
    ATTENTION_CONFIGS,
    ATTENTION_CONFIGS_FP32,
    AttentionConfig,
    select_attention_config,
    stages_on,
)
from ..ops.gemm_tiles import default_gemm_configs, gemm_configs
from .variants import DTYPE_NAMES, Variant

KERNELS = ("gemm", "attention", "rms_norm", "rotary_write", "silu_mul")


def variants(limits: DeviceLimits) -> list[Variant]:
    """Everything that is compiled for a device: bf16 throughout, the GEMM and attention in fp32, the GEMM in fp8.

    fp16 differs from bf16 in one letter of the MMA instruction and is left out.
    """
    found = _gemm(limits, torch.bfloat16) + _gemm(limits, torch.float32)
    if limits.arch in gemm.FP8_ARCHS:
        found += _gemm(limits, gemm.FP8)
    for dtype in (torch.bfloat16, torch.float32):
        found += _attention(limits, dtype)
    for build in (_rms_norm, _rotary_write, _silu_mul):
        found += build(torch.bfloat16)
    return found


def _gemm(limits: DeviceLimits, dtype: torch.dtype) -> list[Variant]:
    """Every declared configuration as the compiler sees it: K a multiple of block_k, rows 16-byte aligned."""
    pointer = "*" + DTYPE_NAMES[dtype]
    out_pointer = "*" + DTYPE_NAMES[gemm.default_out_dtype(dtype)]
    scale = "*fp32" if dtype == gemm.FP8 else None
    defaults = set(default_gemm_configs(limits, dtype.itemsize))
    return [
        Variant(
            kernel="gemm",
            config=cfg.name,
            dtype=DTYPE_NAMES[dtype],
            function="gemm:_gemm_kernel",
            arguments={
                "x_ptr": pointer,
                "w_ptr": pointer,
                "y_ptr": out_pointer,
                "bias_ptr": None,
                "x_scale_ptr": scale,
                "w_scale_ptr": scale,
                **dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wn", "stride_ym"), "i32"),
            },
            constants={**gemm.kernel_constants(cfg, dtype, even_k=True), "WIDEN": False},
            divisible=("x_ptr", "w_ptr", "y_ptr", "N", "K", "stride_xm", "stride_wn", "stride_ym"),
            num_warps=cfg.num_warps,
            num_stages=cfg.num_stages,
            default=cfg in defaults,
            tile=cfg,
        )
        for cfg in gemm_configs(dtype.itemsize, limits.vendor)
    ]


def _attention(limits: DeviceLimits, dtype: torch.dtype) -> list[Variant]:
    """Every declared configuration at head size 128, four heads to a KV head (32 in the 32-row tile), 16-token pages;
    in 16 bits the decode tile also with split keys, and the kernel that reduces the splits."""
    configs = ATTENTION_CONFIGS_FP32 if dtype == torch.float32 else ATTENTION_CONFIGS
    chosen = {
        select_attention_config(limits, head_dim=128, element_bytes=dtype.itemsize, group=group, max_query_len=longest)
        for group, longest in ((4, 1), (4, 8), (4, 4096), (32, 1))
    }
    variants = [_attention_variant(limits, dtype, cfg, 1, cfg in chosen) for cfg in configs]
    if dtype != torch.float32:
        variants.append(_attention_variant(limits, dtype, configs[0], 8, True))
        variants.append(_reduce_variant(dtype))
    return variants


def _attention_variant(
    limits: DeviceLimits, dtype: torch.dtype, cfg: AttentionConfig, splits: int, default: bool
) -> Variant:
    pointer = "*" + DTYPE_NAMES[dtype]
    tensors = ("q_ptr", "k_ptr", "v_ptr", "out_ptr")
    strides = tuple(f"stride_{name}" for name in ("qt", "qh", "ot", "oh", "page", "slot", "head"))
    group = 32 if cfg.block_m == 32 else 4
    return Variant(
        kernel="attention",
        config=cfg.name if splits == 1 else f"{cfg.name}-split{splits}",
        dtype=DTYPE_NAMES[dtype],
        function="attention:_attention_kernel",
        arguments={
            **dict.fromkeys(tensors, pointer),
            **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32" if splits > 1 else None),
            **dict.fromkeys(("table_ptr", "starts_ptr", "contexts_ptr"), "*i32"),
            "scale_log2": "fp32",
            **dict.fromkeys(("num_splits", "num_q_tiles", "num_q_heads", *strides, "stride_table"), "i32"),
        },
        constants={
            **attention.kernel_constants(cfg, dtype, group=group, head_dim=128, page_size=16),
            "SPLIT_KEYS": splits > 1,
            "WIDEN": False,
        },
        divisible=(*tensors, *(("partial_ptr", "lse_ptr") if splits > 1 else ()), *strides),
        num_warps=cfg.num_warps,
        num_stages=stages_on(cfg, limits),
        default=default,
    )


def _reduce_variant(dtype: torch.dtype) -> Variant:
    return Variant(
        kernel="attention_reduce",
        config="split8-w4",
        dtype=DTYPE_NAMES[dtype],
        function="attention:_reduce_splits_kernel",
        arguments={
            "partial_ptr": "*fp32",
            "lse_ptr": "*fp32",
            "out_ptr": "*" + DTYPE_NAMES[dtype],
            **dict.fromkeys(("stride_ot", "stride_oh", "num_q_heads"), "i32"),
        },
        constants={"NUM_SPLITS": 8, "HEAD_DIM": 128, "BLOCK_D": 128},
        divisible=("partial_ptr", "lse_ptr", "out_ptr", "stride_ot", "stride_oh"),
        num_warps=4,
        num_stages=1,
        default=True,
    )


def _rms_norm(dtype: torch.dtype) -> list[Variant]:
    """The kernel with its residual, at hidden sizes from 1,024 to 16,384; the same on every device."""
    pointer = "*" + DTYPE_NAMES[dtype]
    tensors = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "stream_ptr")
    strides = ("stride_x", "stride_residual", "stride_out", "stride_stream")
    return [
        Variant(
            kernel="rms_norm",
            config=f"hidden{block}-w{norm.num_warps_of(block)}",
            dtype=DTYPE_NAMES[dtype],
            function="norm:_rms_norm_kernel",
            arguments={
                **dict.fromkeys(tensors, pointer),
                "hidden": "i32",
                "eps": "fp32",
                **dict.fromkeys(strides, "i32"),
            },
            constants={"BLOCK": block},
            divisible=(*tensors, "hidden", *strides),
            num_warps=norm.num_warps_of(block),
            num_stages=1,
            default=True,
        )
        for block in (1024, 4096, 16384)
    ]


def _rotary_write(dtype: torch.dtype) -> list[Variant]:
    """The kernel at head sizes 64 and 128 with 16-token pages; the same on every device."""
    pointer = "*" + DTYPE_NAMES[dtype]
    tensors = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_cache_ptr", "v_cache_ptr")
    strides = tuple(
        f"stride_{name}" for name in ("qt", "qh", "kt", "kh", "vt", "vh", "ot", "oh", "page", "slot", "head")
    )
    return [
        Variant(
            kernel="rotary_write",
            config=f"head{head_dim}-w{rotary.NUM_WARPS}",
            dtype=DTYPE_NAMES[dtype],
            function="rotary:_rotary_write_kernel",
            arguments={
                **dict.fromkeys(tensors, pointer),
                **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
                **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
                **dict.fromkeys(("num_q_heads", "num_kv_heads", *strides), "i32"),
            },
            constants={
                "HALF": head_dim // 2,
                "BLOCK_HALF": head_dim // 2,
                "BLOCK_HEADS": rotary.BLOCK_HEADS,
                "PAGE_SIZE": 16,
            },
            divisible=(*tensors, "cos_ptr", "sin_ptr", "positions_ptr", "slots_ptr", *strides),
            num_warps=rotary.NUM_WARPS,
            num_stages=1,
            default=True,
        )
        for head_dim in (64, 128)
    ]


def _silu_mul(dtype: torch.dtype) -> list[Variant]:
    """The kernel's one configuration, the same on every device."""
    pointer = "*" + DTYPE_NAMES[dtype]
    return [
        Variant(
            kernel="silu_mul",
            config=f"block{activation.BLOCK}-w{activation.NUM_WARPS}",
            dtype=DTYPE_NAMES[dtype],
            function="activation:_silu_mul_kernel",
            arguments={
                "x_ptr": pointer,
                "out_ptr": pointer,
                **dict.fromkeys(("inter", "stride_x", "stride_out"), "i32"),
            },
            constants={"BLOCK": activation.BLOCK},
            divisible=("x_ptr", "out_ptr", "inter", "stride_x", "stride_out"),
            num_warps=activation.NUM_WARPS,
            num_stages=1,
            default=True,
        )
    ]
