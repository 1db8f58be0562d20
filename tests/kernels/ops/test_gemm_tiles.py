"""Tile arithmetic against the worked examples of NVIDIA's guide and by its properties."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebudget.kernels.gpus import REPRESENTATIVE, device_limits
from tilebudget.kernels.ops.gemm_tiles import (
    GEMM_CONFIGS,
    TileConfig,
    default_gemm_configs,
    gemm_configs,
    gemm_shared_bytes,
    last_wave_fill,
    num_tiles,
    quantization_efficiency,
    select_config,
    tile_edges,
    tile_efficiency,
    tile_waste,
    wave_efficiency,
    waves,
)

BIG = TileConfig(block_m=256, block_n=128, block_k=64, num_warps=8, num_stages=3)


def test_guide_example_wave_quantization() -> None:
    # NVIDIA's guide: A100 (108 SMs), 256x128 tiles; 2304 x N at N=1536 fills one wave exactly (9 x 12 = 108
    # tiles), and N=1537 needs a second wave with a thin tail.
    assert num_tiles(2304, 1536, BIG) == 108
    assert waves(2304, 1536, BIG, 108) == 1
    assert quantization_efficiency(2304, 1536, BIG, 108) == 1.0
    assert waves(2304, 1537, BIG, 108) == 2
    assert last_wave_fill(2304, 1537, BIG, 108) == pytest.approx(9 / 108)
    assert quantization_efficiency(2304, 1537, BIG, 108) == pytest.approx(2304 * 1537 / (2 * 108 * 256 * 128))


def test_guide_example_tile_quantization() -> None:
    # NVIDIA's guide: with 128-wide tiles, N=136 takes as many tiles as N=256.
    cfg = TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)
    assert num_tiles(128, 136, cfg) == num_tiles(128, 256, cfg) == 2
    assert tile_efficiency(128, 136, cfg) == pytest.approx(136 / 256)


@given(m=st.integers(1, 5000), n=st.integers(1, 9000), sms=st.integers(1, 304), ctas=st.integers(1, 4))
def test_waves_hold_every_tile(m: int, n: int, sms: int, ctas: int) -> None:
    for cfg in GEMM_CONFIGS:
        slots = sms * ctas
        total, count = num_tiles(m, n, cfg), waves(m, n, cfg, sms, ctas)
        assert (count - 1) * slots < total <= count * slots
        assert total == (count - 1) * slots + round(last_wave_fill(m, n, cfg, sms, ctas) * slots)
        efficiency = quantization_efficiency(m, n, cfg, sms, ctas)
        assert 0 < efficiency <= 1
        assert efficiency * count * slots * cfg.block_m * cfg.block_n == pytest.approx(m * n)


def test_empty_output_wastes_nothing() -> None:
    assert num_tiles(0, 4096, BIG) == waves(0, 4096, BIG, 108) == 0
    assert last_wave_fill(0, 4096, BIG, 108) == 0.0
    assert wave_efficiency(0, 4096, BIG, 108) == quantization_efficiency(0, 4096, BIG, 108) == 1.0
    assert tile_waste(0, 128) == 0.0


@pytest.mark.parametrize(("m", "waste"), [(128, 0.0), (129, 1 - 129 / 256), (1, 127 / 128), (256, 0.0)])
def test_tile_waste(m: int, waste: float) -> None:
    assert tile_waste(m, 128) == pytest.approx(waste)


def test_edges_are_the_last_cheap_token() -> None:
    edges = tile_edges(1024)
    assert {128, 256, 384, 512, 640, 768, 896, 1024} <= set(edges)
    assert edges == sorted(set(edges))
    for edge in edges:
        assert any(num_tiles(edge + 1, 1, cfg) > num_tiles(edge, 1, cfg) for cfg in GEMM_CONFIGS)
    assert tile_edges(500, (128,)) == [128, 256, 384]
    assert tile_edges(600, (256, 96)) == [96, 192, 256, 288, 384, 480, 512, 576]
    assert tile_edges(63) == []


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="block_m=48"):
        TileConfig(block_m=48, block_n=64, block_k=64, num_warps=4, num_stages=3)
    with pytest.raises(ValueError, match="num_warps=3"):
        TileConfig(block_m=64, block_n=64, block_k=64, num_warps=3, num_stages=3)
    with pytest.raises(ValueError, match="num_stages=0"):
        TileConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=0)
    with pytest.raises(ValueError, match="num_sms=0"):
        waves(1, 1, BIG, 0)
    with pytest.raises(ValueError, match="m=-1"):
        num_tiles(-1, 1, BIG)
    with pytest.raises(ValueError, match="block_sizes=0"):
        tile_edges(100, (0, 64))
    with pytest.raises(ValueError, match="block_sizes"):
        tile_edges(100, ())
    with pytest.raises(ValueError, match="max_tokens=-1"):
        tile_edges(-1)


def test_configurations_are_distinct() -> None:
    assert len({cfg.name for cfg in GEMM_CONFIGS}) == len(GEMM_CONFIGS)


def test_importing_needs_no_torch() -> None:
    code = "import sys, tilebudget.kernels.tiles, tilebudget.kernels.gpus; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_k_step_keeps_its_width_in_bytes() -> None:
    for half, eighth in zip(gemm_configs(2), gemm_configs(1), strict=True):
        assert (half.block_m, half.block_n, 2 * half.block_k) == (eighth.block_m, eighth.block_n, eighth.block_k)
    assert {cfg.num_stages for cfg in gemm_configs(2, "hip")} == {2}
    with pytest.raises(ValueError, match="element_bytes=3"):
        gemm_configs(3)


@pytest.mark.parametrize("arch", REPRESENTATIVE)
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_defaults_fit_their_device(arch: str, element_bytes: int) -> None:
    limits = device_limits(arch)
    defaults = default_gemm_configs(limits, element_bytes)
    assert {16, 64, 128} <= {cfg.block_m for cfg in defaults}
    for cfg in defaults:
        assert gemm_shared_bytes(cfg, element_bytes, limits) <= limits.max_shared_per_cta_bytes


def test_selection_grows_with_the_work() -> None:
    h200 = device_limits("h200_sxm")
    chosen = [select_config(m, 28672, 4096, h200, 2) for m in (1, 16, 32, 64, 4096)]
    assert [cfg.block_m for cfg in chosen[:4]] == [16, 16, 32, 64]
    assert chosen[4].block_m * chosen[4].block_n == 128 * 256


@given(m=st.integers(1, 4096), n=st.sampled_from([4096, 6144, 28672]), arch=st.sampled_from(sorted(REPRESENTATIVE)))
def test_selection_is_a_default_with_no_needless_row_of_tiles(m: int, n: int, arch: str) -> None:
    limits = device_limits(arch)
    defaults = default_gemm_configs(limits, 2)
    chosen = select_config(m, n, 4096, limits, 2)
    assert chosen in defaults
    # A smaller tile of the same width that also covers the rows at once would do the same in less time.
    for cfg in defaults:
        if cfg.block_n == chosen.block_n and cfg.block_k == chosen.block_k:
            assert not m <= cfg.block_m < chosen.block_m
