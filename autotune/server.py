"""The server that a study tunes: its command line, the engine in front of it, and what is asked of it beforehand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import torch

from ..engine import EngineConfig, Workload
from ..engine.device import device_name
from ..engine.model.config import ModelConfig
from ..engine.model.hf_config import resolve_model
from ..engine.server.command import CommandLine, template_command
from ..engine.server.engine import ServerEngine, Target
from ..engine.slo import SLO_MULTIPLES
from ..kernels.ops.gemm_tiles import tile_edges
from .config import TuneConfig
from .devices import make_executor
from .problem import TILE_SOURCE, DeviceFacts, budget_bounds, make_engine_config, read_device
from .recommendation import exports
from .recommendation.exports import Argument
from .study.space import thin_edges

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def make_target(config: TuneConfig, log_dir: Path) -> Target:
    """What serves the runs of ``config``: an executor for our engine, or a server, whose logs go to ``log_dir``."""
    return make_server_engine(config, log_dir) if config.engine == "server" else make_executor(config)


def read_target(config: TuneConfig, target: Target, workload: Workload, edges: Iterable[int] | None) -> DeviceFacts:
    """What is read off ``target`` before its study; ``edges`` take the place of those that would be found."""
    if isinstance(target, ServerEngine):
        return read_server(config, target, workload, edges)
    return read_device(config, target, workload, edges)


def make_server_engine(config: TuneConfig, log_dir: Path) -> ServerEngine:
    """The engine that starts the server of ``config`` for each run, or asks the one that runs at its ``base_url``."""
    model = _known_model(config.model)
    engine = ServerEngine(
        command=None if config.base_url is not None else _command_line(config),
        base_url=config.base_url,
        log_dir=log_dir,
        facts=_describe(config),
        port=config.port,
        start_timeout_s=config.start_timeout,
        stall_timeout_s=config.stall_timeout,
    )
    if model is not None:
        engine.max_position, engine.vocab_size = model.max_position, model.vocab_size
    return engine


def read_server(
    config: TuneConfig, engine: ServerEngine, workload: Workload, edges: Iterable[int] | None
) -> DeviceFacts:
    """What a study of a server begins with: budgets at tile multiples (nothing is measured beside a server that wants
    the whole device), and the reference decode iteration where the SLO is a multiple of it.

    That is measured on a server started once with the largest budget. Raises ServerError when that fails.
    """
    _, max_budget = budget_bounds(config, workload)
    found = thin_edges(tile_edges(max_budget)) if edges is None else thin_edges(edges)
    reference = None
    if config.tbt_slo.strip().lower() in SLO_MULTIPLES:
        reference = engine.reference_decode(
            replace(make_engine_config(config, engine, None, None), token_budget=max_budget)
        )
    return DeviceFacts(
        reference=reference,
        num_kv_blocks=None,
        edges=found,
        edge_sources=(TILE_SOURCE if edges is None else "given",) * len(found),
    )


def check_server_study(config: TuneConfig) -> None:
    """Refuse a study of a running server over several budgets: its budget was fixed when it started.

    Raises ValueError.
    """
    if config.base_url is None or (config.min_budget is not None and config.min_budget == config.max_budget):
        return
    raise ValueError(
        f"base_url={config.base_url!r}: a running server has one budget, which it does not tell; give it as both "
        "min_budget and max_budget, or measure it with `tilebudget run --base-url`"
    )


def _command_line(config: TuneConfig) -> CommandLine:
    if config.server_command is not None:
        return template_command(config.server_command, model=config.launch_model)
    server = str(config.server)

    def preset(engine_config: EngineConfig, port: int) -> str:
        settings = exports.ServerSettings(
            token_budget=engine_config.token_budget or engine_config.max_model_len,
            max_num_seqs=engine_config.max_num_seqs,
            max_model_len=engine_config.max_model_len,
            dtype=config.dtype,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            block_size=config.block_size,
            num_kv_blocks=config.num_kv_blocks,
        )
        arguments: dict[str, Argument] = {**exports.SERVER_ARGS[server](settings), "port": port}
        if server == "sglang":
            arguments["enable_metrics"] = True
        return f"{exports.launch_line(server, config.launch_model, arguments)} {config.server_args}".rstrip()

    return preset


def _known_model(name: str) -> ModelConfig | None:
    """The model's shape, from which prompts take their vocabulary; None for a name that we cannot look up."""
    try:
        return resolve_model(name)[0]
    except ValueError:
        return None


def _describe(config: TuneConfig) -> dict[str, str | int | float]:
    kind, name, uuid = _host_device()
    if config.base_url is not None and urlsplit(config.base_url).hostname not in _LOCAL_HOSTS:
        kind, name, uuid = "unknown", "unknown", None
    facts: dict[str, str | int | float] = {
        "device": kind if config.device == "auto" else config.device,
        "device_name": name,
        "model": config.launch_model,
        "dtype": config.dtype,
    }
    if uuid is not None:
        facts["gpu_uuid"] = uuid
    if config.server_command is not None:
        facts["command"] = config.server_command
    if config.server is not None:
        facts["server"] = f"{config.server} {config.server_args}".rstrip()
    return facts


def _host_device() -> tuple[str, str, str | None]:
    """Kind, name and UUID (of a GPU) of what a server here runs on, found without taking any of a GPU's memory."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=name,uuid", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
        name, separator, uuid = result.stdout.partition("\n")[0].partition(", ")
        if result.returncode == 0 and separator:
            return "cuda", name.strip(), uuid.strip().removeprefix("GPU-")
    return "cpu", device_name(torch.device("cpu")), None
