"""Tile arithmetic of a GEMM: how many tiles, how many waves, how much of them is padding.

Source of the formulas: NVIDIA, "Matrix Multiplication Background User's Guide", sections "Tile Quantization"
and "Wave Quantization". Tiles tell why an edge is where it is; they do not predict latency (a single tile x
SM model misses by 5-8% on measured tables), so prediction is left to measurements.

Pure arithmetic: importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..gpus import DeviceLimits


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How a GEMM is cut: output tile, K step, warps, pipeline stages, rows of tiles in one L2 group."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def __post_init__(self) -> None:
        for field in ("block_m", "block_n", "block_k"):
            value = getattr(self, field)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{field}={value}: must be a power of two of at least 16")
        if self.num_warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"num_warps={self.num_warps}: must be 1, 2, 4, 8 or 16")
        for field in ("num_stages", "group_m"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"{field}={value}: must be at least 1")

    @property
    def name(self) -> str:
        """Short name, e.g. ``128x256x64-w8-s3``."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}-w{self.num_warps}-s{self.num_stages}"


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> TileConfig:
    return TileConfig(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)


#: What the GEMM may use with 16-bit operands. The 16- and 32-row tiles serve decode batches: few rows, so
#: many stages keep weight loads in flight. From 64 rows up the tile grows with the work available. The two
#: largest come with a short K step too, for MMA units that take their operands from registers.
GEMM_CONFIGS: tuple[TileConfig, ...] = (
    _config(16, 64, 128, 4, 4),
    _config(16, 128, 128, 4, 3),
    _config(32, 64, 64, 4, 5),
    _config(32, 128, 64, 4, 4),
    _config(64, 64, 64, 4, 4),
    _config(64, 128, 64, 8, 4),
    _config(64, 256, 64, 8, 3),
    _config(128, 64, 64, 4, 4),
    _config(128, 128, 64, 8, 3),
    _config(128, 256, 32, 8, 4),
    _config(128, 256, 64, 8, 3),
    _config(256, 128, 32, 8, 4),
    _config(256, 128, 64, 8, 3),
)

#: What the GEMM may use with fp32 operands, which are multiplied without tensor cores (no tf32 rounding).
GEMM_CONFIGS_FP32: tuple[TileConfig, ...] = (
    _config(16, 64, 32, 4, 3),
    _config(32, 64, 32, 4, 3),
    _config(64, 64, 16, 4, 3),
    _config(128, 64, 16, 8, 3),
)

#: Below this BLOCK_M the GEMM is bound by reading the weights, so one more row of tiles costs nothing
#: visible.
MIN_EDGE_BLOCK_M = 64

#: The GEMM's BLOCK_M sizes that can put an edge into the latency staircase.
EDGE_BLOCK_SIZES: tuple[int, ...] = tuple(
    sorted({config.block_m for config in GEMM_CONFIGS if config.block_m >= MIN_EDGE_BLOCK_M})
)


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def num_tiles(m: int, n: int, cfg: TileConfig) -> int:
    """Output tiles, ceil(m / block_m) * ceil(n / block_n); 0 where the output is empty.

    Source: NVIDIA's matrix-multiplication guide, "Tile Quantization".
    """
    if m < 0 or n < 0:
        raise ValueError(f"m={m}, n={n}: both must be at least 0")
    return _ceil_div(m, cfg.block_m) * _ceil_div(n, cfg.block_n)


def waves(m: int, n: int, cfg: TileConfig, num_sms: int, ctas_per_sm: int = 1) -> int:
    """Waves of programs, ceil(tiles / (num_sms * ctas_per_sm)); 0 where the output is empty.

    Source: NVIDIA's matrix-multiplication guide, "Wave Quantization", with the CTAs that are resident on one
    SM at a time counted as slots.
    """
    _require_positive(num_sms=num_sms, ctas_per_sm=ctas_per_sm)
    return _ceil_div(num_tiles(m, n, cfg), num_sms * ctas_per_sm)


def last_wave_fill(m: int, n: int, cfg: TileConfig, num_sms: int, ctas_per_sm: int = 1) -> float:
    """Share of the slots that the last wave fills, in (0, 1]; 0.0 where there is no wave.

    Source: NVIDIA's matrix-multiplication guide, "Wave Quantization" (the "tail").
    """
    slots = num_sms * ctas_per_sm
    num_waves = waves(m, n, cfg, num_sms, ctas_per_sm)
    if num_waves == 0:
        return 0.0
    return (num_tiles(m, n, cfg) - (num_waves - 1) * slots) / slots


def tile_efficiency(m: int, n: int, cfg: TileConfig) -> float:
    """Share of the computed output elements that are wanted, m*n / (tiles * block_m * block_n); 1.0 if empty.

    Source: NVIDIA's matrix-multiplication guide, "Tile Quantization".
    """
    computed = num_tiles(m, n, cfg) * cfg.block_m * cfg.block_n
    return m * n / computed if computed else 1.0


def wave_efficiency(m: int, n: int, cfg: TileConfig, num_sms: int, ctas_per_sm: int = 1) -> float:
    """Share of the slots of all waves that hold a tile, tiles / (waves * slots); 1.0 if empty.

    Source: NVIDIA's matrix-multiplication guide, "Wave Quantization".
    """
    num_waves = waves(m, n, cfg, num_sms, ctas_per_sm)
    return num_tiles(m, n, cfg) / (num_waves * num_sms * ctas_per_sm) if num_waves else 1.0


def quantization_efficiency(m: int, n: int, cfg: TileConfig, num_sms: int, ctas_per_sm: int = 1) -> float:
    """Useful share of what the device could compute in the waves it runs, in (0, 1]; 1.0 if empty.

    The product of `tile_efficiency` and `wave_efficiency`.
    Source: NVIDIA's matrix-multiplication guide, "Tile Quantization" and "Wave Quantization".
    """
    return tile_efficiency(m, n, cfg) * wave_efficiency(m, n, cfg, num_sms, ctas_per_sm)


def tile_waste(m: int, block_m: int) -> float:
    """Share of the computed rows that are padding, 1 - m / (ceil(m / block_m) * block_m), in [0, 1); 0.0 for
    m=0.

    Source: NVIDIA's matrix-multiplication guide, "Tile Quantization", along M only.
    """
    _require_positive(block_m=block_m)
    if m < 0:
        raise ValueError(f"m={m}: must be at least 0")
    return 1.0 - m / (_ceil_div(m, block_m) * block_m) if m else 0.0


def tile_edges(max_tokens: int, block_sizes: Iterable[int] = EDGE_BLOCK_SIZES) -> list[int]:
    """Token counts up to max_tokens that fill the last row of tiles of some block size, ascending.

    One more token than an edge starts another row of tiles (NVIDIA's matrix-multiplication guide, "Tile
    Quantization"). These are the edges to assume where nothing was measured; the default sizes are those of
    `GEMM_CONFIGS` from `MIN_EDGE_BLOCK_M` up. Empty if max_tokens is below every size.

    Raises ValueError if max_tokens is negative, block_sizes is empty or a size is below 1.
    """
    if max_tokens < 0:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 0")
    sizes = sorted(set(block_sizes))
    if not sizes:
        raise ValueError("block_sizes: must hold at least one size")
    _require_positive(block_sizes=sizes[0])
    return sorted({edge for size in sizes for edge in range(size, max_tokens + 1, size)})


#: L2 bytes that one SM gets per clock: about 5,120 B/clk over 108 SMs on A100, 5.5 TB/s over 132 on H100.
L2_BYTES_PER_SM_CLOCK = 40

#: AMD's compiler double-buffers in registers: two stages are one LDS buffer and one in flight.
MAX_STAGES_HIP = 2


def gemm_configs(element_bytes: int, vendor: str = "cuda") -> tuple[TileConfig, ...]:
    """Every declared tile configuration for operands of 1 (fp8), 2 or 4 bytes, as the launcher would use it.

    A K step keeps its width in bytes, so fp8 takes twice the elements; on ``hip`` the stages are capped.
    """
    if element_bytes not in (1, 2, 4):
        raise ValueError(f"element_bytes={element_bytes}: must be 1, 2 or 4")
    configs = GEMM_CONFIGS_FP32 if element_bytes == 4 else GEMM_CONFIGS
    if element_bytes == 1:
        configs = tuple(replace(cfg, block_k=2 * cfg.block_k) for cfg in configs)
    if vendor == "hip":
        configs = tuple(replace(cfg, num_stages=min(cfg.num_stages, MAX_STAGES_HIP)) for cfg in configs)
    return configs


def gemm_shared_bytes(cfg: TileConfig, element_bytes: int, limits: DeviceLimits) -> int:
    """Shared memory of the pipeline, an upper bound of what the compiler takes.

    Stages of one x tile and one w tile each. Where MMA reads its operands from registers (before sm_90, and
    AMD) the stage being consumed needs no buffer.
    """
    buffers = cfg.num_stages if _mma_reads_shared(limits) else max(cfg.num_stages - 1, 1)
    return buffers * (cfg.block_m + cfg.block_n) * cfg.block_k * element_bytes


def _mma_reads_shared(limits: DeviceLimits) -> bool:
    return limits.arch in ("sm_90", "sm_100")


def default_gemm_configs(limits: DeviceLimits, element_bytes: int) -> tuple[TileConfig, ...]:
    """Configurations that the launcher chooses from on a device: they fit it and do not spill.

    On NVIDIA before sm_90 the operands of a K step live in registers beside the accumulator, and a 128x256
    tile leaves room for 64 bytes of K at most. The compile matrix (`inspect`) checks both rules.
    """
    register_bound = limits.vendor == "cuda" and not _mma_reads_shared(limits)
    return tuple(
        cfg
        for cfg in gemm_configs(element_bytes, limits.vendor)
        if gemm_shared_bytes(cfg, element_bytes, limits) <= limits.max_shared_per_cta_bytes
        and not (register_bound and cfg.block_m * cfg.block_n >= 128 * 256 and cfg.block_k * element_bytes > 64)
    )


def tile_clocks(cfg: TileConfig, k: int, element_bytes: int, limits: DeviceLimits) -> float:
    """Clocks that one tile keeps an SM busy: its multiply-adds at peak plus its operands at L2 speed.

    A rough model whose only use is to rank configurations; nothing is predicted from it.
    """
    rate = limits.mma_per_sm_clock * (2 / element_bytes)
    load = (cfg.block_m + cfg.block_n) * element_bytes / L2_BYTES_PER_SM_CLOCK
    return k * (cfg.block_m * cfg.block_n / rate + load)


@functools.lru_cache(maxsize=65536)
def select_config(m: int, n: int, k: int, limits: DeviceLimits, element_bytes: int) -> TileConfig:
    """The tile configuration to use for an m x n x k GEMM on a device.

    The one that keeps the busiest SM occupied shortest, ceil(tiles / SMs) * `tile_clocks`; of equals the one
    that computes the least padding, then the longest K step.
    """
    _require_positive(m=m, n=n)

    def cost(cfg: TileConfig) -> tuple[float, int, int]:
        tiles = num_tiles(m, n, cfg)
        busiest = _ceil_div(tiles, limits.num_sms) * tile_clocks(cfg, max(k, 1), element_bytes, limits)
        return busiest, tiles * cfg.block_m * cfg.block_n, -cfg.block_k

    return min(default_gemm_configs(limits, element_bytes), key=cost)
