"""SiLU(gate) * up against its reference and torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tilebudget.kernels.ops.activation import BLOCK, silu_mul, silu_mul_cost, silu_mul_ref

Compare = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize(("tokens", "inter"), [(1, 1), (15, 61), (16, 128), (129, 48), (2, BLOCK + 1), (0, 8), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_against_reference(
    tokens: int, inter: int, dtype: torch.dtype, device: torch.device, assert_close: Compare
) -> None:
    x = torch.randn(tokens, 2 * inter, device=device).to(dtype)
    out = torch.full((tokens, inter), float("nan"), dtype=dtype, device=device)
    assert silu_mul(x, out=out) is out
    assert_close(out, silu_mul_ref(x))


def test_is_torchs_silu(device: torch.device, assert_close: Compare) -> None:
    x = torch.randn(7, 34, device=device)
    assert_close(silu_mul(x), torch.nn.functional.silu(x[:, :17]) * x[:, 17:])


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_extreme_gates_stay_finite(device: torch.device) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=device)
    assert silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1)).tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]


def test_strided_rows(device: torch.device, assert_close: Compare) -> None:
    wide = torch.full((5, 50), float("nan"), device=device)
    wide[:, 3:43] = torch.randn(5, 40, device=device)
    assert_close(silu_mul(wide[:, 3:43]), silu_mul_ref(wide[:, 3:43]))


def test_bad_input_is_named(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"x\.shape=\(2, 7\): the last dimension must be even"):
        silu_mul(torch.ones(2, 7, device=device))
    with pytest.raises(ValueError, match=r"out\.shape=\(2, 8\): must be \(2, 4\)"):
        silu_mul(torch.ones(2, 8, device=device), out=torch.ones(2, 8, device=device))


def test_cost() -> None:
    assert silu_mul_cost(3, 8, torch.bfloat16).bytes == 2 * (3 * 24)
