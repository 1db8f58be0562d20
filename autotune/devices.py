"""The devices that an engine can run on here, and the executor for one."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..engine import AnyExecutor
from ..engine.device import device_name
from ..engine.distributed.executor import distributed_executor
from ..engine.distributed.launch import Torchrun
from ..engine.modelled.executor import ModelledExecutor
from ..engine.modelled.pipeline import AnyModelled, Link, ModelledPipeline
from ..engine.server.engine import Target
from ..engine.torch_executor import TorchExecutor
from ..kernels.latency.silicon import (
    FRAMEWORKS,
    Silicon,
    SiliconError,
    SystemInfo,
    SystemSpec,
    list_systems,
    system_spec,
)
from .config import TuneConfig
from .profiles import list_profiles, profile_executor
from .words import check_system, fitting_systems

DEFAULT_DTYPES = {"cpu": "fp32", "cuda": "bf16"}


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One device: its name for ``--device``, what it is, and where its times come from.

    ``source`` is ``measured`` (run here, or a profile of such runs), ``table`` (modelled from measured tables;
    ``kernels`` says of which frameworks, versions and dtypes), or ``specification`` (a data sheet alone: not
    ``available``).
    """

    name: str
    description: str
    source: str
    available: bool
    kernels: tuple[str, ...] = ()


def list_devices() -> list[DeviceInfo]:
    """Every device that ``--device`` takes, those that are absent included; the profiles in the store, and the systems
    of the silicon tables where these are installed."""
    return [*_host_devices(), *_profile_devices(), *(_system_device(system) for system in _systems())]


def _profile_devices() -> list[DeviceInfo]:
    return [
        DeviceInfo(name=str(profile.path), description=profile.description, source="measured", available=True)
        for profile in list_profiles()
    ]


def _system_device(system: SystemInfo) -> DeviceInfo:
    spec = system_spec(system.system)
    kernels = tuple(
        f"{framework} {version} ({', '.join(dtypes) or 'no bf16 or fp8'})"
        for framework, versions in system.frameworks.items()
        for version, dtypes in versions.items()
    )
    gpu = system.system.split("_")[0]
    called = f"; {gpu} means it" if gpu != system.system and fitting_systems(gpu) == [system.system] else ""
    return DeviceInfo(
        name=system.system,
        description=f"{spec.memory_bytes / 1e9:.0f} GB, {spec.bandwidth_bytes_per_s / 1e12:.2f} TB/s{called}",
        source="table" if system.measured else "specification",
        available=system.measured,
        kernels=kernels,
    )


def _systems() -> list[SystemInfo]:
    try:
        return list_systems()
    except SiliconError:
        return []


def known_spec(device: str) -> SystemSpec | None:
    """The data sheet of a system of the tables; None for another device, such as a profile's or a program's own."""
    return system_spec(device) if any(system.system == device for system in _systems()) else None


def silicon_hint() -> str | None:
    """How to get the modelled devices; None when they are there."""
    try:
        list_systems()
    except SiliconError as error:
        return str(error)
    return None


def _host_devices() -> list[DeviceInfo]:
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
    infos = _host_devices()
    names = [info.name for info in infos]
    available = [info.name for info in infos if info.available]
    if device == "auto":
        return available[0]
    if device not in names:
        raise ValueError(f"device={device!r}: must be auto or one of {', '.join(names)}")
    if device not in available:
        raise ValueError(f"device={device!r}: not available here; available: {', '.join(available)}")
    return device


def visible_gpus(executor: Target) -> tuple[str, ...]:
    """The GPUs that this process sees, in the words of ``CUDA_VISIBLE_DEVICES``; none where the executor uses none."""
    if executor.describe()["device"] != "cuda":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")) if named else tuple(map(str, range(torch.cuda.device_count())))


def make_executor(config: TuneConfig) -> AnyExecutor:
    """The executor that runs, or models, ``config``'s model on its device; ``auto`` picks defaults. One of several
    processes starts them, or finds them started by ``torchrun``.

    Raises ValueError for a device that does not exist, or whose tables are not installed, or a combination it does not
    take; SiliconError when the tables lack what is asked for.
    """
    if config.from_profile:
        return profile_executor(config)
    if config.modelled:
        return _modelled_executor(config)
    name = resolve_device(config.device)
    dtype = DEFAULT_DTYPES[name] if config.dtype == "auto" else config.dtype
    kernels = config.kernels or "auto"
    if config.tensor_parallel * config.pipeline_parallel > 1:
        return distributed_executor(
            config.model,
            device=name,
            dtype=dtype,
            seed=config.seed,
            num_threads=config.num_threads,
            kernels=kernels,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            stage_layers=config.stage_layers,
        )
    torchrun = Torchrun.from_env()
    if torchrun is not None:
        raise ValueError(
            f"pipeline_parallel={config.pipeline_parallel}: times tensor_parallel must be the {torchrun.num_ranks} "
            "processes that torchrun started"
        )
    return TorchExecutor.from_model(
        config.model, device=name, dtype=dtype, seed=config.seed, num_threads=config.num_threads, kernels=kernels
    )


def modelled_kernels(config: TuneConfig) -> str:
    """The framework whose tables model the device: the one named, else the first that was measured on it.

    Raises ValueError for a system that there is not or that was not measured so, SiliconError when nothing was measured
    on it.
    """
    check_system(config.device)
    measured = next(system.frameworks for system in list_systems() if system.system == config.device)
    if not measured:
        raise SiliconError(f"nothing was measured on {config.device}: there is only its data sheet")
    if config.kernels is not None and config.kernels not in measured:
        raise ValueError(
            f"kernels={config.kernels!r}: must be one of {', '.join(measured)}, as measured on {config.device}"
        )
    return config.kernels or next(framework for framework in FRAMEWORKS if framework in measured)


def _modelled_executor(config: TuneConfig) -> AnyModelled:
    framework = modelled_kernels(config)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    having = Silicon.open(config.device, framework).gemm_dtypes()
    if dtype not in having:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(having)}, as measured on {config.device}")
    if config.pipeline_parallel == 1:
        return ModelledExecutor.from_silicon(
            config.model,
            system=config.device,
            framework=framework,
            dtype=dtype,
            tensor_parallel=config.tensor_parallel,
        )
    return ModelledPipeline.from_silicon(
        config.model,
        system=config.device,
        framework=framework,
        dtype=dtype,
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        stage_layers=config.stage_layers,
        link=None if config.pipeline_link is None else Link.of_gbit(config.pipeline_link),
    )
