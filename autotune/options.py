"""The options that several commands take, each written once: its flag, its type, its help.

An option here is a field of ``TuneConfig`` and has that field's default. To add one: the field, an entry of
``OPTIONS``, and its name in the group of the commands that take it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ..engine import POLICY_NAMES
from .config import BUDGETED_POLICIES, DEFAULTS_BY_DEVICE, TuneConfig

#: The value of one option.
Setting = str | int | float | Path | None


def _by_device(name: str, more: str = "") -> str:
    """What an option defaults to, in its help."""
    cpu, cuda, modelled = (DEFAULTS_BY_DEVICE[kind][name] for kind in ("cpu", "cuda", "modelled"))
    return f"Default: {cpu} on a CPU, {cuda} on CUDA, {modelled}{more} when modelled."


OPTIONS: dict[str, object] = {
    "model": Annotated[
        str, typer.Option(help="Preset name, its Hugging Face hub id, or a folder (config.json and safetensors).")
    ],
    "model_name": Annotated[
        str | None,
        typer.Option(help="The model's name in launch lines. Default: its hub id, or the folder."),
    ],
    "device": Annotated[
        str,
        typer.Option(
            help="auto (CUDA if there is one), cpu or cuda; or one that is modelled, such as H200 or the .json "
            "file of a profile: see `tilebudget devices`."
        ),
    ],
    "kernels": Annotated[
        str | None,
        typer.Option(
            help="torch, triton or auto (the faster of the two by operation) here; vllm, sglang or trtllm: whose "
            "kernels a modelled device runs. Default: auto, or the first measured."
        ),
    ],
    "dtype": Annotated[
        str,
        typer.Option(help="auto, fp32, bf16 or fp16; bf16 or fp8 when modelled. auto: fp32 on the CPU, else bf16."),
    ],
    "tensor_parallel": Annotated[
        int, typer.Option(help="Tensor-parallel degree: of a modelled device, or processes that share each layer here.")
    ],
    "pipeline_parallel": Annotated[
        int,
        typer.Option(
            help="Pipeline stages, each of --tensor-parallel GPUs; on a device here processes, started by this command "
            "or by torchrun around it, on one host or several. Their bubble fraction is then the second objective."
        ),
    ],
    "pipeline_split": Annotated[
        str | None, typer.Option(help="Layers of each pipeline stage, such as 20,20,20,20. Default: even.")
    ],
    "pipeline_link": Annotated[
        float | None,
        typer.Option(help="Gbit/s between the stages of a modelled pipeline. Default: the system's own links."),
    ],
    "trace": Annotated[
        Path | None,
        typer.Option(
            help="Trace file: Azure or BurstGPT CSV, Mooncake JSONL, ShareGPT JSON, Sarathi/Vidur lengths CSV."
        ),
    ],
    "workload": Annotated[str, typer.Option(help="Built-in workload, used without --trace; fixed:PROMPT:OUTPUT too.")],
    "num_requests": Annotated[
        int | None,
        typer.Option(
            help="Requests to serve: the first of a trace, or drawn from a preset. "
            + _by_device("num_requests", ", or a whole trace,")
        ),
    ],
    "arrivals": Annotated[
        str | None,
        typer.Option(help="trace, poisson, fixed or saturated. Default: a trace's own times, a preset all at once."),
    ],
    "qps": Annotated[
        float | None, typer.Option(help="Requests per second of poisson and fixed arrivals, or of the trace.")
    ],
    "overlong": Annotated[str, typer.Option(help="Requests over --max-model-len: clip or drop; counted either way.")],
    "tbt_slo": Annotated[
        str, typer.Option(help="P99 TBT: strict (5x the reference decode iteration), relaxed (25x), or such as 20ms.")
    ],
    "objective": Annotated[
        str,
        typer.Option(
            help="What to maximise among the budgets that meet the SLO: throughput; capacity (the highest request rate "
            "that meets it); goodput (requests per second that met every limit); auto: capacity for requests that "
            "arrive over time, throughput for those that are all there at once."
        ),
    ],
    "indifference": Annotated[
        str,
        typer.Option(
            help="Budgets within this share of the best objective count as equal; P99 TTFT, P99 TBT, bubbles and size "
            "decide among them."
        ),
    ],
    "ttft_slo": Annotated[
        str | None, typer.Option(help="Limit on TTFT: such as 2s, at P99, or p90:2s (p50, p90, p99, p99.9).")
    ],
    "e2e_slo": Annotated[str | None, typer.Option(help="Limit on the latency of whole requests, as --ttft-slo.")],
    "search": Annotated[
        str,
        typer.Option(
            help="What to search: token_budget; with ,max_num_seqs also that one and the three powers of two below it; "
            f"with ,policy also {' and '.join(BUDGETED_POLICIES)}, the paper's policies that heed a budget. Every "
            "combination has budgets of its own, so give more --num-trials."
        ),
    ],
    "policy": Annotated[str, typer.Option(help=f"Batching policy: {', '.join(POLICY_NAMES)}.")],
    "min_budget": Annotated[int | None, typer.Option(help="Smallest budget. Default: --max-num-seqs.")],
    "max_budget": Annotated[
        int | None, typer.Option(help="Largest budget. Default: 8192, or all prompt tokens if fewer.")
    ],
    "max_num_seqs": Annotated[
        int | None, typer.Option(help=f"Most requests that run at once. {_by_device('max_num_seqs')}")
    ],
    "max_model_len": Annotated[
        int | None, typer.Option(help=f"Most tokens, prompt and output, of one request. {_by_device('max_model_len')}")
    ],
    "block_size": Annotated[int, typer.Option(help="Tokens per KV block.")],
    "num_kv_blocks": Annotated[int | None, typer.Option(help="KV blocks. Default: what free memory holds.")],
    "pipeline_stages": Annotated[
        int,
        typer.Option(
            help="Stages (2, 4 or 8) whose bubble fraction is the second objective without --pipeline-parallel."
        ),
    ],
    "num_trials": Annotated[
        int | None, typer.Option(help=f"Budgets that the search may run. {_by_device('num_trials')}")
    ],
    "max_concurrent": Annotated[
        int | None,
        typer.Option(
            help="Budgets open at a time: how many workers have something to run. " + _by_device("max_concurrent")
        ),
    ],
    "time_limit": Annotated[
        float | None, typer.Option(help="Seconds after which the search begins no further trial. Default: none.")
    ],
    "num_contenders": Annotated[int, typer.Option(help="Best budgets to repeat.")],
    "repeats": Annotated[
        int, typer.Option(help="Interleaved repeats of each of them; up to twice as many of those not told apart.")
    ],
    "seed": Annotated[int, typer.Option(help="Seed of weights, prompts, arrivals and the search.")],
    "num_threads": Annotated[int | None, typer.Option(help="CPU threads. Default: torch's.")],
    "warm_start": Annotated[
        bool,
        typer.Option(help="On a device here: profile it first, and begin with the budgets that a model of it favours."),
    ],
    "engine": Annotated[
        str | None,
        typer.Option(help="builtin, or server: a real one over HTTP. Default: server where one is named."),
    ],
    "server": Annotated[
        str | None, typer.Option(help="vllm, sglang or trtllm: start that server for every run, by its usual command.")
    ],
    "server_command": Annotated[
        str | None,
        typer.Option(
            "--command",
            help="Start this server for every run: a command line with {token_budget} and {port}, and {model}, "
            "{max_num_seqs}, {max_model_len} where wanted; leading NAME=value words are environment.",
        ),
    ],
    "server_args": Annotated[str, typer.Option(help="More arguments for the command of --server.")],
    "base_url": Annotated[
        str | None, typer.Option(help="Measure the server that runs there, as it is, such as http://127.0.0.1:8000.")
    ],
    "port": Annotated[int | None, typer.Option(help="Port of a server that is started. Default: a free one.")],
    "start_timeout": Annotated[float, typer.Option(help="Seconds that a server may take to be healthy.")],
    "stall_timeout": Annotated[
        float, typer.Option(help="Seconds without any token, while requests wait, that fail a run on a server.")
    ],
}

DEVICE = (
    "model",
    "model_name",
    "device",
    "kernels",
    "dtype",
    "tensor_parallel",
    "pipeline_parallel",
    "pipeline_split",
    "pipeline_link",
)
TRAFFIC = ("trace", "workload", "num_requests", "arrivals", "qps", "overlong")
ENGINE = ("policy", "max_num_seqs", "max_model_len", "block_size", "num_kv_blocks")
RUNTIME = ("seed", "num_threads")
SERVER = (
    "engine",
    "server",
    "server_command",
    "server_args",
    "base_url",
    "port",
    "start_timeout",
    "stall_timeout",
)
STUDY = (
    "search",
    "objective",
    "indifference",
    "tbt_slo",
    "ttft_slo",
    "e2e_slo",
    "min_budget",
    "max_budget",
    "pipeline_stages",
    "num_trials",
    "max_concurrent",
    "time_limit",
    "num_contenders",
    "repeats",
    "warm_start",
)

#: The groups in the help of ``tune`` and ``run``, of these options and of those that the commands have besides.
GROUPS = {
    "Common": (
        "model",
        "device",
        "dtype",
        "tensor_parallel",
        "token_budget",
        "trace",
        "workload",
        "qps",
        "tbt_slo",
        "objective",
        "max_num_seqs",
    ),
    "Model": ("model_name", "max_model_len"),
    "Device": ("kernels", "num_threads", "block_size", "num_kv_blocks"),
    "Traffic": ("num_requests", "arrivals", "overlong", "prompts"),
    "Limits": ("ttft_slo", "e2e_slo", "min_budget", "max_budget", "indifference"),
    "Search": (
        "search",
        "policy",
        "num_trials",
        "max_concurrent",
        "workers",
        "time_limit",
        "num_contenders",
        "repeats",
        "seed",
        "warm_start",
        "storage",
        "study",
    ),
    "Server": SERVER,
    "Pipeline": (
        "pipeline_parallel",
        "pipeline_split",
        "pipeline_link",
        "pipeline_stages",
        "yardstick",
        "yardstick_gpus",
        "yardstick_split",
    ),
    "Output": ("run_dir", "as_json", "help"),
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the options ``names``, after those in its own signature; they reach it as its
    ``**settings``, by the name of the field."""
    defaults = {field.name: field.default for field in fields(TuneConfig)}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=OPTIONS[name])
            for name in names
        ]
        parameters = [*(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *shared]

        def run(**given: Setting) -> None:
            command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return with_options
