"""Fixtures of the kernel tests: the device they run on, and the comparison with a reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tilebudget.kernels.ops.gemm import _gemm_kernel
from tilebudget.kernels.ops.tolerances import deviation
from triton.runtime import JITFunction

Compare = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture
def device() -> torch.device:
    """The GPU if there is one, else the CPU, where the kernels must then be interpreted: never a silent skip."""
    torch.manual_seed(0)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if isinstance(_gemm_kernel, JITFunction):
        pytest.fail("triton was imported before tests/conftest.py set TRITON_INTERPRET=1")
    return torch.device("cpu")


@pytest.fixture
def assert_close() -> Compare:
    """Fails unless a result is within its dtype's tolerance of the reference, in its maximum and in its RMS."""

    def compare(result: torch.Tensor, reference: torch.Tensor) -> None:
        found = deviation(result, reference)
        assert found.within, found

    return compare
