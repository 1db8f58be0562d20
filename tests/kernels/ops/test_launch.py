"""What launchers learn about the device, and that a compiled kernel is never sent to the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tilebudget.kernels.gpus import device_limits
from tilebudget.kernels.ops import gemm as gemm_module
from tilebudget.kernels.ops import launch
from tilebudget.kernels.ops.launch import limits_of, must_widen, require_runnable, require_same_device
from triton.runtime import JITFunction


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_89"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_89"),
    ],
)
def test_limits_of_a_gpu(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=77)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    launch._gpu_limits.cache_clear()
    limits = limits_of(torch.device("cuda", 3))
    launch._gpu_limits.cache_clear()
    assert (limits.arch, limits.num_sms) == (arch, 77)


def test_the_interpreter_stands_for_one_gpu() -> None:
    assert limits_of(torch.device("cpu")) == device_limits(launch.INTERPRETER_DEVICE)


def test_a_compiled_kernel_is_refused_on_the_cpu() -> None:
    compiled = object.__new__(JITFunction)
    with pytest.raises(ValueError, match="device=cpu: Triton kernels need a GPU, or TRITON_INTERPRET=1"):
        require_runnable(compiled, torch.device("cpu"))
    require_runnable(compiled, torch.device("cuda"))


def test_fp8_is_refused_where_mma_does_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_module, "limits_of", lambda device: device_limits("a100_sxm"))
    monkeypatch.setattr(gemm_module, "require_runnable", lambda kernel, device: None)
    x, scale = torch.ones(16, 16).to(gemm_module.FP8), torch.ones(1)
    with pytest.raises(ValueError, match="needs one of sm_89, sm_90, sm_100, the device is sm_80"):
        gemm_module.gemm(x, x, x_scale=scale, w_scale=scale)


def test_devices_must_agree_and_only_interpreted_bf16_is_widened() -> None:
    with pytest.raises(ValueError, match=r"w\.device=meta: must be cpu"):
        require_same_device(torch.device("cpu"), w=torch.ones(1, device="meta"), bias=None)
    assert must_widen(torch.ones(1).bfloat16())
    assert not must_widen(torch.ones(1).half())
    assert not must_widen(torch.ones(1, device="meta").bfloat16())
