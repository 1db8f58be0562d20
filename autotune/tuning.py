"""One tuning from settings to run folder: reference, search, repeats, policies, recommendation, report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from ..engine import Engine, Executor, RunRecord, Workload
from ..engine.modelled_executor import ModelledExecutor
from ..kernels.latency import LatencyTable
from ..reports import build_report
from .config import TuneConfig
from .contenders import ProgressSink, compare_policies, repeat_contenders
from .devices import make_executor
from .environment import package_versions, source_commit
from .parallel import num_workers
from .problem import Problem, load_workload, read_device, state_problem, workload_summary
from .recommendation import Alternative, EngineSettings, Figure, Key, Recommendation, SLOInfo, model_key
from .run_folder import RunFolder, default_run_dir
from .selection import RULE, Choice, Contender, choose
from .store import save_recommendation
from .study import BudgetStudy
from .trial import TrialRow, TrialRunner
from .verdict import describe_alternative, write_verdict
from .warm_start import WarmStart, warm_start

EXPECTED_METRICS = (
    "tbt_p50_ms",
    "tbt_p99_ms",
    "tbt_p999_ms",
    "tbt_max_ms",
    "ttft_p50_ms",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "bubble_fraction_2",
    "bubble_fraction_4",
    "bubble_fraction_8",
    "iteration_cv",
)


def tune(
    config: TuneConfig | None = None,
    *,
    executor: Executor | None = None,
    workload: Workload | None = None,
    edges: Iterable[int] | None = None,
    run_dir: Path | None = None,
    command: str | None = None,
    progress: ProgressSink | None = None,
    **settings: str | int | float | Path | None,
) -> Recommendation:
    """Tune the token budget and return the recommendation; the run folder holds the evidence and the report.

    ``settings`` override fields of ``config``, as in ``tune(model="tiny-llama", tbt_slo="20ms")``. ``executor``,
    ``workload`` and ``edges`` (token counts after which one more token costs a step) take the place of what the
    settings name. A ``run_dir`` that holds an unfinished study is resumed.

    Raises ValueError on bad settings (naming field, value and rule) and TileBudgetError when the device cannot do the
    work at all; a single run that fails is a failed trial. Ctrl-C leaves a study that resumes.
    """
    # Settings alone make a config of their own, for some defaults depend on the device.
    config = replace(config, **settings) if config else TuneConfig(**settings)  # type: ignore[arg-type]
    executor = executor or make_executor(config)
    folder = RunFolder(run_dir or default_run_dir(config.model))
    workload = workload or load_workload(config, executor.max_position)
    facts = folder.read_facts() or read_device(config, executor, workload, edges)
    problem = state_problem(config, executor, workload, facts)
    command = command or " ".join(["tilebudget", *sys.argv[1:]])
    # A modelled device is the model already.
    asks_model = config.warm_start and not executor.virtual_time
    warm = warm_start(problem, folder) if asks_model else WarmStart(predictions={})
    _write_setting(folder, problem, command, warm.note)

    runner = TrialRunner(Engine(executor), problem.workload, problem.engine_config, problem.slo, warm.predictions)
    study = BudgetStudy(
        problem.space,
        runner,
        storage=folder.journal,
        identity=config.identity(),
        variance_metric=problem.variance_metric,
        seed=config.seed,
        num_parallel=num_workers() if isinstance(executor, ModelledExecutor) else 1,
        suggestions=warm.suggestions,
    )
    report_progress = progress or (lambda phase, done, planned, row: None)

    def on_trial(row: TrialRow, done: int, planned: int) -> None:
        folder.write_trials(study.rows())
        report_progress("search", done, planned, row)

    search_rows = study.search(config.num_trials, on_trial)
    contenders, repeats = repeat_contenders(problem, runner, search_rows, report_progress)
    choice = choose(contenders, problem.variance_metric)
    policies = compare_policies(problem, runner, choice, report_progress)
    rows = [*search_rows, *(row for row, _ in repeats), *(row for row, _ in policies)]
    records = [(row, record) for row, record in policies if record is not None and row.state == "complete"]
    recommendation = _recommend(problem, choice, contenders, search_rows, rows, command, records)
    folder.write_trials(rows)
    folder.write_records(records)
    folder.write_json("recommendation.json", recommendation.to_json())
    folder.point_latest()
    build_report(folder.path)
    save_recommendation(recommendation)
    return recommendation


def _recommend(
    problem: Problem,
    choice: Choice,
    contenders: Sequence[Contender],
    search_rows: Sequence[TrialRow],
    rows: Sequence[TrialRow],
    command: str,
    records: Sequence[tuple[TrialRow, RunRecord]],
) -> Recommendation:
    config, best = problem.config, choice.best
    device = problem.executor.describe()
    expected: dict[str, Figure] = {}
    for metric in EXPECTED_METRICS:
        spread = best.spread(metric) if best is not None else None
        if spread is not None:
            expected[metric] = Figure(**asdict(spread))
    return Recommendation(
        status=choice.status,
        token_budget=None if best is None else best.candidate.token_budget,
        verdict=write_verdict(choice, contenders, problem.space, problem.slo, _table(problem.executor)),
        rule=RULE,
        key=Key(
            model=model_key(config.model),
            device=str(device["device"]),
            dtype=str(device["dtype"]),
            tensor_parallel=config.tensor_parallel,
        ),
        slo=SLOInfo(
            name=problem.slo.name,
            tbt_p99_ms=problem.slo.tbt_s * 1e3,
            scheduling_delay_p50_s=None if problem.workload.saturated else problem.slo.max_scheduling_delay_s,
            reference_decode_ms=problem.facts.reference.duration_s * 1e3,
            note=problem.facts.reference.note,
        ),
        expected=expected,
        alternatives=_alternatives(problem, choice, contenders, search_rows),
        engine=EngineSettings(
            model=config.model,
            policy=config.policy,
            max_num_seqs=config.max_num_seqs,
            max_model_len=problem.engine_config.max_model_len,
            block_size=config.block_size,
            num_kv_blocks=problem.facts.num_kv_blocks,
        ),
        workload=workload_summary(problem.workload),
        num_trials={state: sum(row.state == state for row in rows) for state in ("complete", "pruned", "failed")},
        seed=config.seed,
        command=command,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _table(executor: Executor) -> LatencyTable | None:
    return executor.table if isinstance(executor, ModelledExecutor) else None


def _alternatives(
    problem: Problem, choice: Choice, contenders: Sequence[Contender], search_rows: Sequence[TrialRow]
) -> list[Alternative]:
    """The repeated contenders, then the other budgets of the search that ran to their end."""
    repeated = {contender.candidate.token_budget for contender in contenders}
    by_budget = {candidate.token_budget: candidate for candidate in problem.space.candidates}
    others = [
        Contender(candidate=by_budget[row.token_budget], rows=(row,))
        for row in search_rows
        if row.state == "complete" and row.token_budget in by_budget and row.token_budget not in repeated
    ]
    alternatives = []
    for contender in (*contenders, *others):
        if choice.best is not None and contender.candidate == choice.best.candidate:
            continue
        figures = {
            metric: None if (spread := contender.spread(metric)) is None else spread.value
            for metric in ("tbt_p99_ms", "total_tokens_per_s", "bubble_fraction_4", "iteration_cv")
        }
        alternatives.append(
            Alternative(
                token_budget=contender.candidate.token_budget,
                kind=contender.candidate.kind,
                feasible=contender.feasible,
                tie=contender.candidate.token_budget in choice.ties,
                reason=describe_alternative(contender, choice, problem.slo),
                **figures,
            )
        )
    return alternatives


def _write_setting(folder: RunFolder, problem: Problem, command: str, warm_start_note: str) -> None:
    folder.write_json(
        "environment.json",
        {
            "tilebudget": package_versions().get("tilebudget"),
            "versions": package_versions(),
            "device": dict(problem.executor.describe()),
            "model": problem.config.model,
            "command": command,
            "seed": problem.config.seed,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": source_commit(),
            "workload": workload_summary(problem.workload),
            **({"warm_start": warm_start_note} if warm_start_note else {}),
        },
    )
    candidates = [asdict(candidate) for candidate in problem.space.candidates]
    folder.write_json("profile.json", {**problem.facts.to_json(), "candidates": candidates})
    if problem.facts.staircase is not None:
        folder.write_json("tiles.json", problem.facts.staircase.to_json())
