"""The GEMM kernel against its reference and torch, on ragged shapes, and its launcher's checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tilebudget.kernels.ops.gemm import FP8, gemm, gemm_cost, gemm_ref
from tilebudget.kernels.ops.gemm_tiles import TileConfig, gemm_configs

Compare = Callable[[torch.Tensor, torch.Tensor], None]


def _nan(m: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((m, n), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("m", [1, 15, 16, 17, 127, 128, 129, 257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ragged_rows(m: int, dtype: torch.dtype, device: torch.device, assert_close: Compare) -> None:
    n, k = (97, 72) if m % 2 else (80, 64)
    x, w = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype)
    out = _nan(m, n, dtype, device)
    assert gemm(x, w, out=out) is out
    assert_close(out, gemm_ref(x, w))


@pytest.mark.parametrize("config", gemm_configs(2), ids=lambda cfg: cfg.name)
def test_every_16_bit_configuration(config: TileConfig, device: torch.device, assert_close: Compare) -> None:
    # One row and one column more than a tile, and K that is neither a multiple of block_k nor of 16.
    m, n, k = config.block_m + 1, config.block_n + 1, config.block_k + 7
    x, w = torch.randn(m, k, device=device).half(), torch.randn(n, k, device=device).half()
    out = _nan(m, n, torch.float16, device)
    gemm(x, w, out=out, config=config)
    assert_close(out, gemm_ref(x, w))


@pytest.mark.parametrize("config", gemm_configs(4), ids=lambda cfg: cfg.name)
def test_every_fp32_configuration(config: TileConfig, device: torch.device, assert_close: Compare) -> None:
    m, n, k = config.block_m + 1, config.block_n + 1, config.block_k + 7
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    out = _nan(m, n, torch.float32, device)
    gemm(x, w, out=out, config=config)
    assert_close(out, torch.nn.functional.linear(x.double(), w.double()).float())


def test_many_tiles_in_groups(device: torch.device, assert_close: Compare) -> None:
    # 11 rows of tiles in groups of 3, the last group short: every tile is computed once.
    config = TileConfig(block_m=16, block_n=16, block_k=16, num_warps=4, num_stages=2, group_m=3)
    x, w = torch.randn(163, 16, device=device).half(), torch.randn(71, 16, device=device).half()
    out = _nan(163, 71, torch.float16, device)
    gemm(x, w, out=out, config=config)
    assert_close(out, gemm_ref(x, w))


def test_bias_and_output_dtype(device: torch.device, assert_close: Compare) -> None:
    x, w = torch.randn(17, 48, device=device).half(), torch.randn(33, 48, device=device).half()
    bias = torch.randn(33, device=device).half()
    result = gemm(x, w, bias, out_dtype=torch.float32)
    want = torch.nn.functional.linear(x.double(), w.double(), bias.double()).float()
    assert_close(result, want)


def test_strided_rows_and_misaligned_start(device: torch.device, assert_close: Compare) -> None:
    # Views into wider buffers that start one element in: no 16-byte alignment anywhere, NaN all around.
    wide = torch.full((17, 101), float("nan"), device=device).half()
    wide[:, 1:51] = torch.randn(17, 50, device=device)
    weights = torch.full((19, 77), float("nan"), device=device).half()
    weights[:, 3:53] = torch.randn(19, 50, device=device)
    target = torch.full((17, 41), 7.0, device=device).half()
    out = target[:, 5:24]
    gemm(wide[:, 1:51], weights[:, 3:53], out=out)
    assert_close(out, gemm_ref(wide[:, 1:51], weights[:, 3:53]))
    assert bool((target[:, :5] == 7).all())
    assert bool((target[:, 24:] == 7).all())


@pytest.mark.parametrize("m", [1, 16, 129])
def test_fp8_with_scales(m: int, device: torch.device, assert_close: Compare) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs sm_89")
    x, w = torch.randn(m, 144, device=device).to(FP8), torch.randn(80, 144, device=device).to(FP8)
    x_scale, w_scale = torch.tensor([0.5], device=device), torch.tensor([0.125], device=device)
    out = _nan(m, 80, torch.bfloat16, device)
    gemm(x, w, out=out, x_scale=x_scale, w_scale=w_scale)
    assert_close(out, gemm_ref(x, w, x_scale=x_scale, w_scale=w_scale))
    assert_close(out, ((x.double() @ w.double().T) / 16).bfloat16())


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (8, 0, 16), (5, 8, 0)])
def test_empty(m: int, n: int, k: int, device: torch.device) -> None:
    out = _nan(m, n, torch.float32, device)
    gemm(torch.ones(m, k, device=device), torch.ones(n, k, device=device), out=out)
    assert bool((out == 0).all())


def test_bad_input_is_named(device: torch.device) -> None:
    x, w = torch.ones(4, 16, device=device), torch.ones(8, 16, device=device)
    with pytest.raises(ValueError, match=r"w\.shape=\(8, 16\): must be \(8, 15\)"):
        gemm(x[:, :15], w)
    with pytest.raises(ValueError, match=r"x\.dtype=torch\.int32"):
        gemm(x.int(), w.int())
    with pytest.raises(ValueError, match=r"w\.dtype=torch\.float16: must be one of torch\.float32"):
        gemm(x, w.half())
    with pytest.raises(ValueError, match=r"x\.stride.*last stride must be 1"):
        gemm(torch.ones(16, 4, device=device).T, w)
    with pytest.raises(ValueError, match=r"bias\.shape=\(7,\)"):
        gemm(x, w, torch.ones(7, device=device))
    with pytest.raises(ValueError, match=r"out\.shape=\(4, 4\)"):
        gemm(x, w, out=torch.ones(4, 4, device=device))
    with pytest.raises(ValueError, match="both or neither"):
        gemm(x, w, x_scale=torch.ones(1, device=device))
    with pytest.raises(ValueError, match="need x_scale and w_scale"):
        gemm(x.to(FP8), w.to(FP8))
    with pytest.raises(ValueError, match=r"w_scale\.shape=\(2,\): must hold one element"):
        gemm(x, w, x_scale=torch.ones(1, device=device), w_scale=torch.ones(2, device=device))


def test_cost_counts_multiply_adds_twice_and_each_matrix_once() -> None:
    cost = gemm_cost(512, 4096, 14336, torch.bfloat16, bias=True)
    assert cost.flops == 2 * 512 * 4096 * 14336
    assert cost.bytes == 2 * (512 * 14336 + 4096 * 14336 + 512 * 4096 + 4096)
    assert gemm_cost(2, 3, 5, FP8).bytes == 2 * 5 + 3 * 5 + 2 * (2 * 3)
    assert (cost + cost).flops_per_byte == pytest.approx(cost.flops_per_byte)
