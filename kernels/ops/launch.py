"""What every launcher checks about its tensors, and what it asks about the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from triton.runtime import JITFunction

from ..gpus import DeviceLimits, device_limits

#: Stands in for the GPU where kernels run in Triton's interpreter on the CPU.
INTERPRETER_DEVICE = "h200_sxm"


def require_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raises ValueError unless the tensor has one of the dtypes."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}.dtype={tensor.dtype}: must be one of {allowed}")


def require_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raises ValueError unless the tensor has the shape; None stands for any size."""
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and have != want for have, want in zip(found, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}.shape={found}: must be ({wanted})")


def require_unit_stride(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is dense in memory."""
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}.stride={tensor.stride()}: the last stride must be 1")


def require_same_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless all tensors are on the device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}.device={tensor.device}: must be {device}")


def require_runnable(kernel: object, device: torch.device) -> None:
    """Raises ValueError if a compiled kernel is asked to run on the CPU; there only the interpreter can."""
    if device.type == "cpu" and isinstance(kernel, JITFunction):
        raise ValueError("device=cpu: Triton kernels need a GPU, or TRITON_INTERPRET=1 set before triton is imported")


def must_widen(tensor: torch.Tensor) -> bool:
    """Whether a kernel must widen operands to fp32 before tl.dot: Triton's interpreter multiplies bf16 bit patterns
    (triton-lang/triton issue 11584). On a GPU never."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16


def limits_of(device: torch.device) -> DeviceLimits:
    """Limits of the GPU behind a torch device, with its own SM count.

    A GPU that is not in the table gets the limits of its architecture's closest relative: the one with the
    same amount of shared memory. On the CPU (the interpreter) they are those of `INTERPRETER_DEVICE`.
    """
    if device.type != "cuda":
        return device_limits(INTERPRETER_DEVICE)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _gpu_limits(index)


@functools.cache
def _gpu_limits(index: int) -> DeviceLimits:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return replace(device_limits("gfx942"), num_sms=properties.multi_processor_count)
    arch = {(8, 0): "sm_80", (9, 0): "sm_90"}.get((properties.major, properties.minor), "sm_89")
    if properties.major in (10, 11):
        arch = "sm_100"
    return replace(device_limits(arch), num_sms=properties.multi_processor_count)
