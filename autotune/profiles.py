"""Profiles measured with ``tilebudget profile``: where they are kept, and the devices that they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ..engine import EngineConfig, Executor
from ..engine.distributed.partition import Partition
from ..engine.model.hf_config import resolve_model
from ..engine.modelled.executor import ModelledExecutor
from ..engine.modelled.pipeline import AnyModelled, Link, ModelledPipeline
from ..engine.profiling.profile import Profile, measure_profile
from ..kernels.latency.file import LatencyFileError, load_table
from ..kernels.latency.sweep import Sweep
from ..kernels.latency.table import LatencyTable
from ..kernels.tiles.tile_report import TileAnalysis, analyse
from .config import TuneConfig
from .recommendation.recommendation import model_key
from .recommendation.store import store_dir
from .words import PROFILE_SUFFIX

#: Largest batch to measure where none is named.
DEFAULT_MAX_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class SavedProfile:
    """A profile's file and its table."""

    path: Path
    table: LatencyTable

    @property
    def description(self) -> str:
        """Model, dtype and device in words."""
        threads = self.table.origin.get("num_threads")
        on = f"{self.table.device}, {threads} threads" if threads else self.table.device
        return f"profile of {self.table.model.name} {self.table.dtype} on {on}"


def profile_dir() -> Path:
    """Where profiles go that are given no other place: ``profiles`` in the store."""
    return store_dir() / "profiles"


def default_profile_path(model: str, executor: Executor) -> Path:
    """The file of a model on an executor's device and dtype."""
    device = executor.describe()
    parts = (model_key(model), str(device["device"]), str(device.get("dtype", "")))
    return profile_dir() / ("--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts) + PROFILE_SUFFIX)


def list_profiles() -> list[SavedProfile]:
    """The finished profiles in the store, by name; files that cannot be read are left out."""
    found = []
    for path in sorted(profile_dir().glob(f"*{PROFILE_SUFFIX}")):
        try:
            found.append(SavedProfile(path=path, table=load_table(path)))
        except LatencyFileError:
            continue  # one that is being measured has no table yet
    return found


def profile_executor(config: TuneConfig) -> AnyModelled:
    """The device of a profile's file, or a pipeline of such devices.

    Raises ValueError when the file is not there, or is of another model or dtype.
    """
    path = Path(config.device)
    if not path.is_file():
        raise ValueError(f"device={config.device!r}: there is no such profile; see `tilebudget devices`")
    table = load_table(path)
    if config.dtype not in ("auto", table.dtype):
        raise ValueError(f"dtype={config.dtype!r}: the profile {path.name} was measured with {table.dtype}")
    model, _ = resolve_model(config.model)
    if table.model.name != model.name:
        raise ValueError(f"model={config.model!r}: the profile {path.name} is of {table.model.name}")
    if config.pipeline_parallel == 1:
        return ModelledExecutor(table, model)
    partition = Partition.of(model, pipeline_parallel=config.pipeline_parallel, stage_layers=config.stage_layers)
    link = Link(bytes_per_s=inf) if config.pipeline_link is None else Link.of_gbit(config.pipeline_link)
    return ModelledPipeline(table, partition, [link] * (config.pipeline_parallel - 1))


def profile_staircase(path: Path, *, min_jump_pct: float) -> TileAnalysis:
    """What one more token costs by a profile: the steps of its token-wise part."""
    table = load_table(path)
    sweeps = [
        Sweep(
            op=curve.op,
            tokens=curve.tokens,
            latency_ms=curve.latency_ms,
            std_ms=curve.std_ms,
            source="measured",
            note=curve.note,
        )
        for curve in table.layer_ops
    ]
    subject: dict[str, str | int] = {
        "model": table.model.name,
        "device": table.device,
        "kernels": table.origin.get("framework", "profile"),
        "dtype": table.dtype,
    }
    return analyse(sweeps, num_layers=table.model.num_layers, min_jump_pct=min_jump_pct, subject=subject)


def profile_device(
    executor: Executor,
    config: TuneConfig,
    *,
    out: Path,
    time_limit_s: float,
    max_tokens: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Profile ``executor``, which runs the model of ``config``, into ``out`` for batches of up to ``max_tokens`` (None
    takes DEFAULT_MAX_TOKENS)."""
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS.get(str(executor.describe()["device"]), 2048)
    if max_tokens < config.max_num_seqs:
        raise ValueError(f"max_tokens={max_tokens}: must be at least max_num_seqs={config.max_num_seqs}")
    limits = EngineConfig(
        token_budget=max_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(config.max_model_len, executor.max_position),
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        seed=config.seed,
    )
    return measure_profile(
        executor, resolve_model(config.model)[0], limits, time_limit_s=time_limit_s, out=out, on_progress=on_progress
    )
