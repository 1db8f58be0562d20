"""Occupancy against known results of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest
from tilebudget.kernels.gpus import DEVICES, REPRESENTATIVE, device_limits, occupancy, resident_ctas


@pytest.mark.parametrize(
    ("device", "registers", "shared_bytes", "num_warps", "ctas"),
    [
        ("a100_sxm", 32, 0, 8, 8),  # 2048 threads: full occupancy at 32 registers
        ("a100_sxm", 255, 0, 8, 1),  # 255 -> 256 registers x 256 threads = the whole file
        ("a100_sxm", 128, 0, 4, 4),  # 128 registers x 128 threads = 16384
        ("a100_sxm", 129, 0, 4, 3),  # one more takes a whole unit: 136 registers, 12 warps
        ("a100_sxm", 64, 81 * 1024, 4, 2),  # shared memory: 2 x (81 + 1) KiB = 164 KiB
        ("a100_sxm", 64, 82 * 1024, 4, 1),
        ("a100_sxm", 64, 164 * 1024, 4, 0),  # above 163 KiB for one CTA
        ("l40s", 16, 0, 1, 24),  # CTA slots
        ("l40s", 16, 0, 8, 6),  # 48 warps
        ("h100_sxm", 168, 196 * 1024, 8, 1),
        ("mi300x", 128, 0, 4, 4),  # 512 / 128 = 4 waves per SIMD
        ("mi300x", 256, 32 * 1024, 4, 2),
    ],
)
def test_resident_ctas(device: str, registers: int, shared_bytes: int, num_warps: int, ctas: int) -> None:
    limits = device_limits(device)
    found = resident_ctas(limits, registers_per_thread=registers, shared_bytes=shared_bytes, num_warps=num_warps)
    assert found == ctas


def test_occupancy_is_the_share_of_warp_slots() -> None:
    assert occupancy(device_limits("a100_sxm"), 4, 4) == 0.25
    assert occupancy(device_limits("l40s"), 6, 8) == 1.0


def test_every_architecture_has_a_device() -> None:
    for arch, name in REPRESENTATIVE.items():
        assert device_limits(arch) is DEVICES[name]
        assert DEVICES[name].arch == arch
    assert device_limits("mi300x").vendor == "hip"
    assert device_limits("sm_90").vendor == "cuda"


def test_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device='v100'"):
        device_limits("v100")
    with pytest.raises(ValueError, match="num_warps=0"):
        resident_ctas(device_limits("l40s"), registers_per_thread=1, shared_bytes=0, num_warps=0)
