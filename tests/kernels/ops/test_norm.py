"""RMSNorm against its reference and torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tilebudget.kernels.ops.norm import MAX_HIDDEN, rms_norm, rms_norm_cost, rms_norm_ref

Compare = Callable[[torch.Tensor, torch.Tensor], None]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("tokens", [1, 15, 17, 129])
@pytest.mark.parametrize("hidden", [1, 61, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_residual(
    tokens: int, hidden: int, dtype: torch.dtype, device: torch.device, assert_close: Compare
) -> None:
    x, residual = (torch.randn(tokens, hidden, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(hidden, device=device).to(dtype)
    out, stream = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    result = rms_norm(x, weight, eps=1e-5, residual=residual, out=out, residual_out=stream)
    assert result[0] is out
    assert result[1] is stream
    want, want_stream = rms_norm_ref(x, weight, eps=1e-5, residual=residual)
    assert_close(stream, want_stream)
    assert_close(out, want)


@pytest.mark.parametrize("tokens", [0, 1, 16, 127])
def test_without_residual_is_torchs(tokens: int, device: torch.device, assert_close: Compare) -> None:
    x, weight = torch.randn(tokens, 96, device=device), torch.randn(96, device=device)
    out = torch.full_like(x, float("nan"))
    result, stream = rms_norm(x, weight, eps=1e-6, out=out)
    assert stream is x
    assert_close(result, torch.nn.functional.rms_norm(x, (96,), weight, eps=1e-6))


def test_strided_rows_and_in_place_residual(device: torch.device, assert_close: Compare) -> None:
    wide = torch.full((5, 90), float("nan"), device=device)
    x = wide[:, 7:60]
    x.copy_(torch.randn(5, 53, device=device))
    residual, weight = torch.randn(5, 53, device=device), torch.randn(53, device=device)
    want, want_stream = rms_norm_ref(x, weight, eps=1e-5, residual=residual)
    result, stream = rms_norm(x, weight, eps=1e-5, residual=residual, residual_out=residual)
    assert stream is residual
    assert_close(stream, want_stream)
    assert_close(result, want)


def test_bad_input_is_named(device: torch.device) -> None:
    x, weight = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"weight\.shape=\(8,\): must be \(7\)"):
        rms_norm(x[:, :7], weight, eps=1e-5)
    with pytest.raises(ValueError, match=r"residual\.dtype=torch\.float16"):
        rms_norm(x, weight, eps=1e-5, residual=x.half())
    with pytest.raises(ValueError, match=f"hidden={MAX_HIDDEN + 1}"):
        rms_norm(torch.ones(1, MAX_HIDDEN + 1), weight, eps=1e-5)


def test_cost() -> None:
    assert rms_norm_cost(3, 8, torch.bfloat16).bytes == 2 * (2 * 24 + 8)
    assert rms_norm_cost(3, 8, torch.bfloat16, residual=True).bytes == 2 * (4 * 24 + 8)
