"""The devices that an engine can run on here, and the executor for one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..engine import Executor
from ..engine.device import device_name
from ..engine.torch_executor import TorchExecutor

DEFAULT_DTYPES = {"cpu": "fp32", "cuda": "bf16"}


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device: its name for ``--device``, what it is, and where its times come from."""

    name: str
    description: str
    source: str
    available: bool


def list_devices() -> list[DeviceInfo]:
    """Every device that ``--device`` takes, those that are absent included."""
    cuda = torch.cuda.is_available()
    description = "no CUDA device is visible to torch"
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        description = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"
        )
    return [
        DeviceInfo(name="cuda", description=description, source="measured", available=cuda),
        DeviceInfo(
            name="cpu",
            description=f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} threads",
            source="measured",
            available=True,
        ),
    ]


def resolve_device(device: str) -> str:
    """``cuda`` or ``cpu`` for ``auto``; ValueError for a device that is not there."""
    names = [info.name for info in list_devices()]
    available = [info.name for info in list_devices() if info.available]
    if device == "auto":
        return available[0]
    if device not in names:
        raise ValueError(f"device={device!r}: must be auto or one of {', '.join(names)}")
    if device not in available:
        raise ValueError(f"device={device!r}: not available here; available: {', '.join(available)}")
    return device


def make_executor(*, model: str, device: str, dtype: str, seed: int, num_threads: int | None) -> Executor:
    """The executor that runs ``model`` (preset or Hugging Face folder) on ``device``; ``auto`` picks defaults."""
    name = resolve_device(device)
    return TorchExecutor.from_model(
        model,
        device=name,
        dtype=DEFAULT_DTYPES[name] if dtype == "auto" else dtype,
        seed=seed,
        num_threads=num_threads,
    )
