"""The command line. Results go to stdout, progress and errors to stderr.

Exit codes: 0 done, 1 the work failed, 2 bad input, 3 no budget meets the SLO, 130 interrupted.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from ..engine import EngineConfig, PipelinedExecutor
from ..engine.distributed.launch import Torchrun, dismiss_torchrun_ranks, serve_torchrun_rank
from ..engine.metrics import compute_metrics
from ..engine.server.engine import engine_on
from ..engine.workloads.traces import load_prompts
from ..kernels.errors import TileBudgetError, did_you_mean
from ..reports import COMPARE_NAME, build_comparison, build_report
from .config import TuneConfig
from .console import TuneProgress, counting_progress, describe_row, print_recommendation
from .devices import list_devices, make_executor, silicon_hint
from .disaggregation import Yardstick, make_yardstick, parse_split
from .help import GroupedCommand, GroupedCommands
from .options import DEVICE, ENGINE, RUNTIME, SERVER, STUDY, TRAFFIC, Json, Setting, takes
from .problem import load_workload, read_staircase, staircase_costs, workload_summary
from .profiles import default_profile_path, profile_device
from .recommendation.recommendation import CONTAINER, FORMATS, check_format
from .recommendation.schema import published_schema
from .recommendation.store import NearestMatchWarning, load_recommendation
from .run_folder.run_folder import default_run_dir
from .server import make_target
from .study.device_lock import device_lock
from .study.stored_study import STUDY_NAME
from .study.worker import WAIT_LIMIT_S, work
from .tiles import analyse_device, analyse_sweep_file, predict_configs
from .tuning import tune
from .words import HOST_DEVICES, PROFILE_SUFFIX, device_word

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 1, 2, 3, 130

DEFAULT = TuneConfig()

#: What typer raises for a command line that it cannot read; some of its releases have the class from click, some not.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

#: Fields that are no option's, by the option that sets them.
FIELD_OPTIONS = {
    "stage_layers": "pipeline_split",
    "start_timeout_s": "start_timeout",
    "stall_timeout_s": "stall_timeout",
}

app = typer.Typer(
    cls=GroupedCommands,
    help="Find the token budget to serve an LLM with, and why.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Find the token budget to serve an LLM with, and why."""
    if show_version:
        print(version("tilebudget"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT)


@app.command("tune", cls=GroupedCommand)
@takes(*DEVICE, *SERVER, *TRAFFIC, *STUDY, *ENGINE, *RUNTIME)
def tune_command(
    *,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder; one with an unfinished study is resumed. Default: runs/TIME-MODEL.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            envvar="TILEBUDGET_STORAGE",
            help="Where the study is kept, for workers elsewhere: a database's URL (postgresql://...), "
            "grpc://HOST:PORT, or a journal file. Default: a journal in the run folder.",
        ),
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study there. Default: the run folder's.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes here that run the search; 0 leaves it to `tilebudget worker`. Default: one a core on a "
            "modelled device, else 1.",
        ),
    ] = None,
    yardstick: Annotated[
        str | None,
        typer.Option(
            help="disaggregated: on a modelled system, also compare replicas with chunked prefill to prefill and "
            "decode on GPUs apart; the report has the table."
        ),
    ] = None,
    yardstick_gpus: Annotated[int, typer.Option(help="GPUs of either side.")] = Yardstick.num_gpus,
    yardstick_split: Annotated[
        str | None, typer.Option(help="Prefill and decode instances, such as 1:3. Default: every split.")
    ] = None,
    as_json: Json = False,
    **settings: Setting,
) -> None:
    """Tune the token budget; with no flags, that of a built-in model on the device here."""
    config = _config(settings)
    held_against = None
    if yardstick is not None:
        split = None if yardstick_split is None else parse_split(yardstick_split)
        held_against = make_yardstick(yardstick, yardstick_gpus, split)
    folder = run_dir or default_run_dir(config.model)
    console = Console(stderr=True)
    try:
        with _stopped_by_sigterm(), TuneProgress(console) as progress:
            recommendation = tune(
                config,
                run_dir=folder,
                storage=storage,
                study_name=study,
                num_workers=workers,
                yardstick=held_against,
                progress=progress,
            )
    except KeyboardInterrupt:
        console.print(
            f"interrupted; to go on, run the same command with --run-dir {folder}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print(json.dumps(recommendation.to_json(), indent=2))
    else:
        print_recommendation(Console(), recommendation, str(folder))
    if recommendation.token_budget is None:
        raise typer.Exit(EXIT_FAILED)
    if recommendation.status == "infeasible":
        raise typer.Exit(EXIT_INFEASIBLE)


@app.command("worker")
def worker_command(
    storage: Annotated[
        str,
        typer.Option(
            envvar="TILEBUDGET_STORAGE",
            help="Where the study is kept: a database's URL, grpc://HOST:PORT, a journal file, or a run folder.",
        ),
    ],
    study: Annotated[
        str, typer.Option(help="The study's name: the run folder's, or `tune --study`; in a run folder, the default.")
    ] = STUDY_NAME,
    trace: Annotated[
        Path | None, typer.Option(help="The study's trace file, where it lies elsewhere on this machine.")
    ] = None,
    wait_limit: Annotated[
        float, typer.Option(help="Seconds without a trial to run after which the worker leaves.")
    ] = WAIT_LIMIT_S,
) -> None:
    """Run trials of a study that `tilebudget tune` has begun, on this machine's device, until its search ends."""
    if not wait_limit > 0.0:
        raise ValueError(f"wait_limit={wait_limit}: must be above 0 seconds")
    console = Console(stderr=True)
    try:
        with _stopped_by_sigterm():
            num_run = work(
                storage,
                study,
                trace=trace,
                wait_limit_s=wait_limit,
                on_row=lambda row: console.print(describe_row(row), soft_wrap=True, highlight=False),
                on_wait=lambda what: console.print(what, soft_wrap=True, highlight=False),
            )
    except KeyboardInterrupt:
        console.print("interrupted; a trial that was running was given back", soft_wrap=True, highlight=False)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print(f"ran {num_run} trials of study {study}")


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Within it, SIGTERM (a cluster that takes its machine back) is a Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@app.command("run", cls=GroupedCommand)
@takes(*DEVICE, *SERVER, *TRAFFIC, *ENGINE, *RUNTIME)
def run_command(
    *,
    token_budget: Annotated[str, typer.Option(help="Most tokens per iteration, or `unlimited`.")] = "512",
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL rows {"prompt_token_ids": [...], "output_tokens": n}, all at time 0.')
    ] = None,
    as_json: Json = False,
    **settings: Setting,
) -> None:
    """Run one budget under one policy and print its metrics; with --json and --prompts the greedy outputs too.

    On a server that runs already (--base-url) the budget is the server's own.
    """
    config = _config(settings)
    target = make_target(config, default_run_dir(config.model) / "logs")
    requests = load_prompts(prompts) if prompts is not None else load_workload(config, target.max_position)
    engine_config = EngineConfig(
        token_budget=_parse_budget(token_budget) if config.base_url is None else None,
        policy=config.policy,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(config.max_model_len, target.max_position),
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        token_costs=staircase_costs(read_staircase(config)) if config.policy == "tile_aligned" else None,
        seed=config.seed,
    )
    with device_lock(target):
        record = engine_on(target).run(requests, engine_config)
    metrics = compute_metrics(record).to_row()
    server = {} if record.server is None else record.server.to_json()
    if as_json:
        document = {
            "metrics": metrics,
            "outputs": [list(tokens) for tokens in record.outputs],
            "statuses": list(record.requests.status),
            "device": dict(record.device),
            "workload": workload_summary(requests),
            "engine": asdict(engine_config) | {"num_kv_blocks": record.num_kv_blocks},
            **({"server": server} if server else {}),
        }
        print(json.dumps(document, default=str))
        return
    for name, value in (metrics | server).items():
        print(f"{name:32} {'no data' if value is None else f'{value:,.4g}'}")


@app.command("profile")
@takes("model", "dtype", "max_num_seqs", "max_model_len", "block_size", "num_kv_blocks", *RUNTIME)
def profile_command(
    *,
    device: Annotated[str, typer.Option(help="auto (CUDA if there is one), cpu or cuda.")] = DEFAULT.device,
    kernels: Annotated[
        str | None, typer.Option(help="torch, triton or auto (the faster of the two by operation). Default: auto.")
    ] = DEFAULT.kernels,
    time_limit: Annotated[float, typer.Option(help="Seconds to measure for; a coarse grid is always finished.")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Profile file, ending in .json; one that is there is continued. Default: a file in the store."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Largest batch to measure. Default: 2048 on the CPU, 8192 on CUDA.")
    ] = None,
    as_json: Json = False,
    **settings: Setting,
) -> None:
    """Measure the latency table of the device here; `tune --device FILE` and `run --device FILE` then model it."""
    device = device_word(device)
    if device not in HOST_DEVICES:
        raise ValueError(f"device={device!r}: must be one of {', '.join(HOST_DEVICES)}, only these can be measured")
    if not time_limit > 0:
        raise ValueError(f"time_limit={time_limit}: must be above 0 seconds")
    if out is not None and out.suffix != PROFILE_SUFFIX:
        raise ValueError(f"out={str(out)!r}: must end in {PROFILE_SUFFIX}")
    config = _config({**settings, "device": device, "kernels": kernels})
    executor = make_executor(config)
    assert not isinstance(executor, PipelinedExecutor)  # the command has no option for that
    path = out or default_profile_path(config.model, executor)
    with device_lock(executor), counting_progress(Console(stderr=True), "profiling, % of the time allowed") as on_done:
        profile = profile_device(
            executor,
            config,
            out=path,
            time_limit_s=time_limit,
            max_tokens=max_tokens,
            on_progress=on_done,
        )
    summary = {
        "file": str(path),
        "device": profile.table.device,
        "num_points": profile.num_points,
        "num_samples": profile.num_samples,
        "num_run_iterations": profile.num_run_iterations,
        "factors": dict(profile.factors),
        "median_error": profile.median_error,
    }
    if as_json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        print(f"{name:20} {value}")


@app.command("tiles")
@takes("model")
def tiles_command(
    *,
    sweep: Annotated[
        Path | None, typer.Option(help="Measured CSV: Vidur's profiling format, or tokens,latency_ms columns.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda (measured here), or a system of the silicon tables such as h200_sxm.")
    ] = "auto",
    kernels: Annotated[
        str | None,
        typer.Option(
            help="torch or triton for a device here; vllm, sglang or trtllm for a table; triton for the "
            "configurations that our own kernels would use on a GPU that is not here (arithmetic)."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16 for a device here; bf16 or fp8 for a table.")] = "auto",
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Tensor-parallel degree. Default: 1, or the smallest in the sweep.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Largest token count to measure here.")] = None,
    min_jump_pct: Annotated[float, typer.Option(help="Smallest step, in percent, to list as an edge.")] = 10.0,
    as_json: Json = False,
    **settings: Setting,
) -> None:
    """Show where one more token costs a step, and the budgets worth trying."""
    model, device = str(settings["model"]), device_word(device)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 1")
    if sweep is None and kernels == "triton" and device not in HOST_DEVICES:
        configs = predict_configs(
            model, device=device, dtype=dtype, tensor_parallel=tensor_parallel or 1, max_tokens=max_tokens
        )
        print(json.dumps(configs.to_json()) if as_json else configs.to_text())
        return
    if sweep is not None:
        analysis = analyse_sweep_file(sweep, tensor_parallel=tensor_parallel, min_jump_pct=min_jump_pct)
    else:
        with counting_progress(Console(stderr=True), "measuring linear layers") as on_done:
            analysis = analyse_device(
                model,
                device=device,
                kernels=kernels,
                dtype=dtype,
                tensor_parallel=tensor_parallel or 1,
                min_jump_pct=min_jump_pct,
                max_tokens=max_tokens,
                on_done=on_done,
            )
    print(json.dumps(analysis.to_json()) if as_json else analysis.to_text())


@app.command("report")
def report_command(
    run_folder: Annotated[Path, typer.Argument(help="Run folder of a study, e.g. runs/latest.")],
) -> None:
    """Rebuild report.html of a run folder from its other files."""
    print(build_report(run_folder))


@app.command("compare")
def compare_command(
    run_folders: Annotated[list[Path], typer.Argument(help="Two or more run folders, in the order to show them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path(COMPARE_NAME),
) -> None:
    """Put several studies on one page: GPUs, models, SLOs side by side."""
    print(build_comparison(run_folders, output))


@app.command("show")
def show_command(
    recommendation: Annotated[
        str | None, typer.Argument(help="Run folder, recommendation.json, or a model or entry of the store.")
    ] = None,
    format_name: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "vllm",
    device: Annotated[str | None, typer.Option(help="Must be the device that it was tuned for.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Must be the dtype that it was tuned for.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Must be the degree that it was tuned for.")] = None,
    page_size: Annotated[int, typer.Option(help="SGLang's page size; the chunk is a multiple of it.")] = 1,
    container: Annotated[str, typer.Option(help="The container that a Kubernetes patch is for.")] = CONTAINER,
    allow_nearest: Annotated[
        bool, typer.Option("--allow-nearest", help="Take the store's nearest entry of the model, with a warning.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of recommendation.json.")] = False,
) -> None:
    """Print a recommendation for a server: flags, environment, YAML, Kubernetes patch, or JSON."""
    if schema:
        print(published_schema(), end="")
        return
    if recommendation is None:
        raise ValueError("recommendation=None: name a run folder, a recommendation.json, or a model in the store")
    check_format(format_name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NearestMatchWarning)
        found = load_recommendation(
            recommendation, device=device, dtype=dtype, tensor_parallel=tensor_parallel, allow_nearest=allow_nearest
        )
    for warning in caught:
        print(f"tilebudget: {warning.message}", file=sys.stderr)
    if found.launch_notice is not None and format_name in ("vllm-yaml", "kubernetes"):
        print(f"tilebudget: {found.launch_notice}", file=sys.stderr)
    print(found.export(format_name, page_size=page_size, container=container))


@app.command("devices")
def devices_command(as_json: Json = False) -> None:
    """List the devices that --device takes, and where their times come from."""
    devices, hint = list_devices(), silicon_hint()
    if as_json:
        rows = [{field.name: getattr(device, field.name) for field in fields(device)} for device in devices]
        print(json.dumps({"devices": rows, "note": hint}))
        return
    for device in devices:
        state = device.source if device.available or device.source == "specification" else "absent"
        print(f"{device.name:22} {state:14} {device.description}")
        for kernels in device.kernels:
            print(f"{'':37} {kernels}")
    if hint is not None:
        print(f"modelled devices: {hint}")


def _config(settings: Mapping[str, Setting]) -> TuneConfig:
    return TuneConfig(**settings)  # type: ignore[arg-type]


def _parse_budget(text: str) -> int | None:
    if text == "unlimited":
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"token_budget={text!r}: must be a whole number of tokens, or unlimited") from None


def main() -> None:
    """The console script: runs the command and turns failures into messages and exit codes.

    Under ``torchrun`` rank 0 runs the command, and the others are stages of its model.
    """
    torchrun = Torchrun.from_env()
    if torchrun is not None and torchrun.rank > 0:
        serve_torchrun_rank(torchrun)
        return
    # Ended by its supervisor as by Ctrl-C: a server that it started ends with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        _fail(_usage_message(error), EXIT_BAD_INPUT)
    except ValueError as error:
        _fail(str(error), EXIT_BAD_INPUT)
    except TileBudgetError as error:
        _fail(str(error), EXIT_FAILED)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    finally:
        if torchrun is not None:
            dismiss_torchrun_ranks(torchrun)
    if code:
        sys.exit(code)


def _commands() -> dict[str, TyperCommand]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return {name: command for name, command in group.commands.items() if isinstance(command, TyperCommand)}


def _usage_message(error: Exception) -> str:
    """What is wrong with the words of a command line, in one line; the nearest option for one that there is not."""
    option, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    if option is None or getattr(error, "possibilities", None) is None:
        text = str(error.format_message()).rstrip(".")  # type: ignore[attr-defined]
        return text if parameter is None else text.replace(f"'{parameter.name}'", str(parameter.name).upper())
    command = _commands().get(sys.argv[1])
    known = [flag for one in command.params for flag in one.opts] if command is not None else []
    return f"{option}: there is no such option{did_you_mean(option, known)}"


def _flags(command: TyperCommand) -> dict[str, str]:
    """What a command line has for each setting of ``command``: the flag, or the argument's name in capitals."""
    flags: dict[str, str] = {}
    for parameter in command.params:
        name = str(parameter.name)
        flags[name] = name.upper()
        for flag in parameter.opts:
            if flag.startswith("--"):
                flags[name] = flags[flag[2:].replace("-", "_")] = flag
    return flags


def translate(message: str, command_name: str) -> str:
    """An error's message in the words of the command line: ``max_num_seqs=8`` is ``--max-num-seqs 8``.

    Settings of the command are translated where a value follows, and wherever they have an underscore; those of other
    commands only where they have one. What stands in quotes, backticks or braces is the user's, and stays.
    """
    commands = _commands()
    own = _flags(commands[command_name]) if command_name in commands else {}
    others = {name: flag for command in commands.values() for name, flag in _flags(command).items() if "_" in name}
    flags = others | own
    flags |= {field: flags[option] for field, option in FIELD_OPTIONS.items() if option in flags}

    def translated(match: re.Match[str]) -> str:
        name, equals, none = match["name"], match["equals"], match["none"]
        if name is None or name not in flags or not (equals or "_" in name):
            return match[0]
        # None is what an option has that was not given.
        return flags[name] + (" " if equals and not none else "")

    # The kernels write "name is value: it must".
    message = re.sub(r"^([a-z_]+) is (.+?): it must", r"\1=\2: must", message)
    quoted = r"(?<!\w)'[^']*'|\"[^\"]*\"|`[^`]*`|\{[^}]*\}"
    return re.sub(
        rf"{quoted}|(?<![\w./-])(?P<name>[a-z][a-z0-9_]*)(?![\w/]|\.\w)(?P<equals>=(?P<none>None\b)?)?",
        translated,
        message,
    )


def _fail(message: str, code: int) -> None:
    print(f"tilebudget: {translate(message, ' '.join(sys.argv[1:2]))}", file=sys.stderr)
    sys.exit(code)
