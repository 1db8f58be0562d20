"""How attention is cut into tiles and splits of the keys, and which cut to use where.

Pure arithmetic: importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..gpus import DeviceLimits
from .gemm_tiles import MAX_STAGES_HIP

#: A split of the keys shorter than this costs more in the reduction than it gains.
MIN_KEYS_PER_SPLIT = 256
MAX_SPLITS = 64


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How attention is cut: rows (query x head pairs) and keys of one tile, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """Short name, e.g. ``128x64-w8-s3``."""
        return f"{self.block_m}x{self.block_n}-w{self.num_warps}-s{self.num_stages}"


def _config(block_m: int, block_n: int, num_warps: int, num_stages: int) -> AttentionConfig:
    return AttentionConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


#: What attention may use with 16-bit operands: 16 rows for decodes (32 where more than 16 heads share a KV head), 64
#: for short chunks, 128 for long ones. 32 keys where MMA keeps its operands in registers, 64 where it does not.
ATTENTION_CONFIGS: tuple[AttentionConfig, ...] = (
    _config(16, 64, 4, 3),
    _config(32, 32, 4, 3),
    _config(64, 32, 4, 3),
    _config(64, 64, 4, 3),
    _config(128, 32, 8, 3),
    _config(128, 64, 8, 3),
)

#: What attention may use with fp32 operands, which are multiplied without tensor cores.
ATTENTION_CONFIGS_FP32: tuple[AttentionConfig, ...] = (_config(16, 16, 4, 2), _config(32, 16, 8, 2))


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is at least value, which is positive."""
    return 1 << (value - 1).bit_length()


def stages_on(cfg: AttentionConfig, limits: DeviceLimits) -> int:
    """Pipeline stages of a configuration on a device; AMD's compiler uses two at most."""
    return min(cfg.num_stages, MAX_STAGES_HIP) if limits.vendor == "hip" else cfg.num_stages


@functools.lru_cache(maxsize=4096)
def select_attention_config(
    limits: DeviceLimits, *, head_dim: int, element_bytes: int, group: int, max_query_len: int
) -> AttentionConfig:
    """The configuration to use for sequences of at most max_query_len queries, group heads sharing a KV head.

    The smallest tile that holds all rows of the longest sequence, or the largest tile. Raises ValueError if the
    group fits no tile.
    """
    padded = next_power_of_two(group)
    if element_bytes == 4:
        fitting = [cfg for cfg in ATTENTION_CONFIGS_FP32 if cfg.block_m >= padded]
        rows_wanted = padded
    else:
        wide = limits.arch in ("sm_90", "sm_100") or head_dim <= 64
        fitting = [
            cfg
            for cfg in ATTENTION_CONFIGS
            if cfg.block_m >= padded and (cfg.block_m < 64 or cfg.block_n == (64 if wide else 32))
        ]
        rows_wanted = padded * max_query_len
        if rows_wanted > 16:
            fitting = [cfg for cfg in fitting if cfg.block_m >= 64 or padded > 16]
    if not fitting:
        raise ValueError(f"group={group}: at most {ATTENTION_CONFIGS[-1].block_m} query heads may share a KV head")
    return next((cfg for cfg in fitting if cfg.block_m >= rows_wanted), fitting[-1])


def select_num_splits(num_programs: int, max_context_len: int, num_sms: int) -> int:
    """Into how many parts to cut the keys: a power of two that fills the device twice, 1 if it is full already.

    Each part keeps at least `MIN_KEYS_PER_SPLIT` keys.
    """
    if num_programs < 1 or num_programs >= num_sms:
        return 1
    wanted = min(2 * num_sms // num_programs, max_context_len // MIN_KEYS_PER_SPLIT, MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
