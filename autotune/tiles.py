"""``tilebudget tiles``: the staircase of a device, from wherever its latencies can be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from ..engine.device import DTYPES
from ..engine.model.hf_config import resolve_model
from ..kernels.errors import did_you_mean
from ..kernels.gpus import device_limits
from ..kernels.latency.measure import GEMM_KERNELS, measure_gemms, token_grid
from ..kernels.latency.silicon import DTYPES as SILICON_DTYPES
from ..kernels.latency.silicon import FRAMEWORKS, Silicon
from ..kernels.latency.sweep import read_sweeps
from ..kernels.model_shape import ModelShape
from ..kernels.tiles.config_map import MEASURED_TOKENS, ConfigMap, measured_map, predicted_map
from ..kernels.tiles.tile_report import TileAnalysis, WaveContext, analyse
from .devices import DEFAULT_DTYPES, resolve_device
from .words import HOST_DEVICES, check_system, device_word, dtype_word

#: Largest token count that is measured on a device here.
MAX_MEASURED_TOKENS = {"cpu": 1024, "cuda": 8192}

#: Largest token count of the map of configurations of a device that is not here.
MAX_PREDICTED_TOKENS = 8192


def analyse_sweep_file(path: Path, *, tensor_parallel: int | None, min_jump_pct: float) -> TileAnalysis:
    """The analysis of a Vidur or ``tokens,latency_ms`` file. Raises ValueError naming what is wrong with it."""
    if not path.is_file():
        raise ValueError(f"sweep={path}: there is no such file")
    file = read_sweeps(path)
    subject: dict[str, str | int] = {"sweep": path.name, "format": file.format, "num_dropped": file.num_dropped}
    return analyse(file.sweeps, tensor_parallel=tensor_parallel, min_jump_pct=min_jump_pct, subject=subject)


def analyse_device(
    model: str,
    *,
    device: str,
    kernels: str | None,
    dtype: str,
    tensor_parallel: int,
    min_jump_pct: float,
    max_tokens: int | None = None,
    time_limit_s: float | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> TileAnalysis:
    """The analysis of a device: ``cpu`` and ``cuda`` are measured here, others are looked up in the silicon tables.

    ``kernels`` is ``torch`` or ``triton`` for a device here, ``vllm``, ``sglang`` or ``trtllm`` for a table. For
    ``triton`` on CUDA every tile configuration is measured too. Raises ValueError for a bad combination and
    SiliconError when the tables do not have it.
    """
    config, _ = resolve_model(model)
    shape = config.shape
    shape.check_degree(tensor_parallel)
    device, dtype = device_word(device), dtype_word(dtype)
    if device in HOST_DEVICES:
        name = resolve_device(device)
        kernel = kernels or "torch"
        if kernel not in GEMM_KERNELS:
            near = did_you_mean(kernel, GEMM_KERNELS)
            raise ValueError(f"kernels={kernel!r}: must be one of {', '.join(GEMM_KERNELS)} on {name}{near}")
        dtype_name = DEFAULT_DTYPES[name] if dtype == "auto" else dtype
        if dtype_name not in DTYPES:
            near = did_you_mean(dtype, DTYPES)
            raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)} on {name}{near}")
        sweeps = measure_gemms(
            shape,
            tokens=token_grid(max_tokens or MAX_MEASURED_TOKENS[name]),
            device=torch.device(name),
            dtype=DTYPES[dtype_name],
            tensor_parallel=tensor_parallel,
            kernel=kernel,
            time_limit_s=time_limit_s,
            on_done=on_done,
        )
    else:
        check_system(device)
        kernel = kernels or FRAMEWORKS[0]
        if kernel not in FRAMEWORKS:
            near = did_you_mean(kernel, FRAMEWORKS)
            raise ValueError(f"kernels={kernel!r}: must be one of {', '.join(FRAMEWORKS)} on {device}{near}")
        name, dtype_name = device, "bf16" if dtype == "auto" else dtype
        if dtype_name not in SILICON_DTYPES:
            near = did_you_mean(dtype, SILICON_DTYPES)
            raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(SILICON_DTYPES)} on {device}{near}")
        silicon = Silicon.open(name, kernel)
        kernel = f"{silicon.framework} {silicon.version}"
        sweeps = [
            silicon.gemm(n, k, dtype_name, op=op, tensor_parallel=tensor_parallel)
            for op, (n, k) in shape.gemms(tensor_parallel).items()
        ]
    subject: dict[str, str | int] = {"model": config.name, "device": name, "kernels": kernel, "dtype": dtype_name}
    analysis = analyse(
        sweeps,
        tensor_parallel=tensor_parallel,
        num_layers=config.num_layers,
        min_jump_pct=min_jump_pct,
        subject=subject,
        wave_context=_wave_context(name, shape, tensor_parallel),
    )
    if name != "cuda" or kernel != "triton":
        return analysis
    largest = max_tokens or MAX_MEASURED_TOKENS[name]
    configs = measured_map(
        shape,
        device=torch.device(name),
        dtype=DTYPES[dtype_name],
        tensor_parallel=tensor_parallel,
        tokens=[tokens for tokens in MEASURED_TOKENS if tokens <= largest],
        on_done=on_done,
    )
    return replace(analysis, configs=tuple(configs))


def predict_configs(
    model: str, *, device: str, dtype: str, tensor_parallel: int, max_tokens: int | None = None
) -> ConfigMap:
    """Which configuration of our own GEMM a GPU that is not here would run where: arithmetic, no latencies.

    Raises ValueError for a device whose limits are not known, or a dtype or degree that does not fit.
    """
    config, _ = resolve_model(model)
    device, dtype = device_word(device), dtype_word(dtype)
    dtype_name = "bf16" if dtype == "auto" else dtype
    return predicted_map(
        config.shape,
        device=device,
        dtype=dtype_name,
        tensor_parallel=tensor_parallel,
        max_tokens=max_tokens or MAX_PREDICTED_TOKENS,
        subject={"model": config.name, "device": device, "kernels": "triton", "dtype": dtype_name},
    )


def _wave_context(device: str, shape: ModelShape, tensor_parallel: int) -> WaveContext | None:
    """What tile arithmetic needs, where the device's limits are known."""
    try:
        limits = device_limits(device)
    except ValueError:
        return None
    return WaveContext(num_sms=limits.num_sms, columns={op: n for op, (n, _) in shape.gemms(tensor_parallel).items()})
