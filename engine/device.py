"""What the executor needs to know about a device: its name, its free memory, and its out-of-memory errors."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .executor import OutOfMemoryError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Share of the free memory that the KV cache may take; the rest is for activations and, on a CPU, for others.
KV_MEMORY_FRACTION = {"cuda": 0.9, "cpu": 0.5}


def resolve_device(device: str) -> torch.device:
    """The torch device for ``cpu``, ``cuda`` or ``cuda:N``; raises ValueError for others or where there is none."""
    kind = device.split(":")[0]
    if kind not in KV_MEMORY_FRACTION:
        raise ValueError(f"device={device!r}: must be cpu, cuda or cuda:N to run the model for real")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch finds no CUDA device on this machine")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}: must be cpu, cuda or cuda:N") from None
    if kind == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r}: must be below cuda:{torch.cuda.device_count()}")
    return resolved


def resolve_dtype(dtype: str) -> torch.dtype:
    """The torch dtype for ``fp32``, ``bf16`` or ``fp16``; raises ValueError for any other name."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def device_name(device: torch.device) -> str:
    """The processor's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that a new allocation may take: free CUDA memory, or the kernel's estimate of available memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        raise OutOfMemoryError("the free memory of this system is unknown: give num_kv_blocks")
    for line in meminfo.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise OutOfMemoryError("/proc/meminfo has no MemAvailable line: give num_kv_blocks")


def require_memory(num_bytes: int, device: torch.device, what: str) -> None:
    """Raise OutOfMemoryError unless ``num_bytes`` are free.

    Linux hands out more memory than it has and kills the process when the pages are touched, so an allocation
    that "succeeds" proves nothing; hence the question beforehand.
    """
    free = free_memory_bytes(device)
    if num_bytes > free:
        raise OutOfMemoryError(f"{what} needs {num_bytes / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB free")


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors, CUDA's and the CPU allocator's, into OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{what}: {error}") from error
    except RuntimeError as error:
        # The CPU allocator raises a plain RuntimeError, known by its text alone.
        if "can't allocate memory" in str(error) or "not enough memory" in str(error):
            raise OutOfMemoryError(f"{what}: {error}") from error
        raise
