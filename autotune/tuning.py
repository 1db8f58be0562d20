"""One tuning from settings to run folder: reference, search, repeats, policies, recommendation, report."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

from ..engine import Workload
from ..engine.modelled.pipeline import AnyModelled
from ..engine.server.engine import Target
from ..kernels.latency.table import LatencyTable
from ..reports import build_report
from .config import TuneConfig
from .devices import known_spec, visible_gpus
from .disaggregation import Yardstick, compare_disaggregated
from .environment import command_line, package_versions, source_commit
from .problem import Problem, load_workload, state_problem, workload_summary
from .recommendation.by_load import find_best_by_load
from .recommendation.confidence import state_confidence
from .recommendation.recommend import at_choice, recommend
from .recommendation.recommendation import LoadWin, Recommendation, Sensitivity
from .recommendation.sensitivity import find_sensitivity
from .recommendation.store import save_recommendation
from .run_folder.cost_curves import CURVES_FILE, BatchSizes, cost_curves
from .run_folder.importance import IMPORTANCE_FILE, parameter_importance
from .run_folder.run_folder import RunFolder, default_run_dir
from .server import check_server_study, make_target, read_target
from .study.contenders import ProgressSink, check_drift, compare_policies, repeat_contenders
from .study.device_lock import device_lock
from .study.parallel import LocalWorkers, num_cores
from .study.stored_study import STUDY_NAME, StoredStudy
from .study.study import BudgetStudy
from .study.trial import TrialRow, TrialRunner
from .study.warm_start import WarmStart, warm_start
from .study.worker import spawned_work, work


def tune(
    config: TuneConfig | None = None,
    *,
    executor: Target | None = None,
    workload: Workload | None = None,
    edges: Iterable[int] | None = None,
    run_dir: Path | None = None,
    storage: str | None = None,
    study_name: str | None = None,
    num_workers: int | None = None,
    yardstick: Yardstick | None = None,
    command: str | None = None,
    progress: ProgressSink | None = None,
    **settings: str | int | float | Path | None,
) -> Recommendation:
    """Tune the token budget and return the recommendation; the run folder holds the evidence and the report.

    ``settings`` override fields of ``config``, as in ``tune(model="tiny-llama", tbt_slo="20ms")``. ``executor``,
    ``workload`` and ``edges`` (token counts after which one more token costs a step) take the place of what the
    settings name. A ``run_dir`` that holds an unfinished study is resumed.

    The study is kept in ``storage`` (a journal file, a database URL or ``grpc://HOST:PORT``; None is a journal in the
    run folder) under ``study_name``, where workers of any machine may join its search. ``num_workers`` run it here,
    this process being one of them; 0 leaves it to others, None takes one a core on a modelled device and this process
    alone on one that is here.

    ``yardstick`` holds a modelled device against prefill and decode on GPUs apart, in ``disaggregation.json``.

    Raises ValueError on bad settings (naming field, value and rule) and TileBudgetError when the device cannot do the
    work at all; a single run that fails is a failed trial. Ctrl-C leaves a study that resumes.
    """
    # Settings alone make a config of their own, for some defaults depend on the device.
    config = replace(config, **settings) if config else TuneConfig(**settings)  # type: ignore[arg-type]
    check_server_study(config)
    if yardstick is not None:
        yardstick.num_instances(config)  # refuses what it cannot compare before the study, not after it
    folder = RunFolder(run_dir or default_run_dir(config.model))
    command = command or command_line()
    report_progress = progress or (lambda phase, done, planned, row: None)
    with folder.locked():
        searched = _search(
            config,
            folder,
            executor,
            workload,
            edges=edges,
            storage=storage,
            study_name=study_name,
            num_workers=num_workers,
            command=command,
            progress=report_progress,
        )
        recommendation = _conclude(searched, folder, yardstick, command, report_progress)
        folder.point_latest()
        build_report(folder.path)
        save_recommendation(recommendation)
        return recommendation


@dataclass(frozen=True, kw_only=True)
class _Searched:
    """A study whose search is done: its rows, what runs more of the same, what the model expected of it, and until when
    (``perf_counter``) repeats may begin."""

    problem: Problem
    runner: TrialRunner
    warm: WarmStart
    rows: Sequence[TrialRow]
    until_s: float


def _search(
    config: TuneConfig,
    folder: RunFolder,
    executor: Target | None,
    workload: Workload | None,
    *,
    edges: Iterable[int] | None,
    storage: str | None,
    study_name: str | None,
    num_workers: int | None,
    command: str,
    progress: ProgressSink,
) -> _Searched:
    """Begin the study, or go on with it, and run its search here and on its workers."""
    nameable = executor is None and workload is None
    executor = executor or make_target(config, folder.logs)
    workload = workload or load_workload(config, executor.max_position)
    where = storage or str(folder.journal)
    name = study_name or (STUDY_NAME if storage is None else folder.path.resolve().name)
    with _start_workers(num_workers, where, name, config, executor, workload) as workers:
        stored = StoredStudy(where, name, config.identity())
        facts = stored.read_facts()
        resumed = facts is not None
        with device_lock(executor):
            facts = facts or read_target(config, executor, workload, edges)
            problem = state_problem(config, executor, workload, facts)
            # A modelled device is the model already.
            asks_model = config.warm_start and not executor.virtual_time
            warm = warm_start(problem, folder, resumed=resumed) if asks_model else WarmStart(predictions={})
        _write_environment(folder, problem, command, warm.note)
        if not resumed:
            stored.write_setting(config if nameable else None, facts, workload, executor)
        runner = problem.make_runner(warm.predictions)
        until_s = math.inf if config.time_limit is None else perf_counter() + config.time_limit
        study = BudgetStudy(
            problem.space,
            runner,
            stored.queue(problem.variance_metric),
            variance_metric=problem.variance_metric,
            seed=config.seed,
            max_concurrent=config.max_concurrent,
            suggestions=warm.suggestions,
        )

        def on_trial(row: TrialRow, done: int, planned: int) -> None:
            folder.write_trials(study.rows())
            progress("search", done, planned, row)

        with stored.leading():
            workers.begin()
            rows = study.search(config.num_trials, on_trial, runs_here=num_workers != 0, until_s=until_s)
    return _Searched(problem=problem, runner=runner, warm=warm, rows=rows, until_s=until_s)


def _conclude(
    searched: _Searched, folder: RunFolder, yardstick: Yardstick | None, command: str, progress: ProgressSink
) -> Recommendation:
    """Repeat the best budgets, choose, compare and recommend; every file of the run folder that follows from it."""
    problem, runner, search_rows = searched.problem, searched.runner, searched.rows
    time_note = _time_note(searched)
    contenders, repeats = repeat_contenders(problem, runner, search_rows, progress, searched.until_s)
    drift_pct, anchors = check_drift(problem, runner, search_rows, progress)
    choice = problem.judge.choose(contenders)
    policies = compare_policies(problem, runner, choice, progress)
    chosen = at_choice(problem, choice)
    confidence = state_confidence(problem.judge, choice, contenders, problem.slo, drift_pct, time_note)
    sensitivity: list[Sensitivity] = []
    wins: list[LoadWin] = []
    if choice.best is not None and choice.status == "feasible":
        alike = [row for row in search_rows if chosen.space.find(*row.setting) is not None]
        sensitivity = find_sensitivity(chosen, choice.best.candidate.token_budget, alike, searched.warm.table)
        wins = find_best_by_load(chosen, choice.best.candidate, alike)
    rows = [*search_rows, *(row for row, _ in (*repeats, *anchors, *policies))]
    recommendation = recommend(
        problem, chosen, choice, contenders, search_rows, rows, command, confidence, sensitivity, wins
    )
    folder.write_trials(rows)
    folder.write_records([(row, record) for row, record in policies if record is not None and row.state == "complete"])
    metrics = (("total_tokens_per_s", True), ("tbt_p99_ms", False), (problem.variance_metric, False))
    importance = parameter_importance(search_rows, metrics)
    if importance is not None:
        folder.write_json(IMPORTANCE_FILE, importance)
    _write_curves(folder, chosen, recommendation.token_budget, problem.table or searched.warm.table)
    folder.write_json("recommendation.json", recommendation.to_json())
    if yardstick is not None and recommendation.token_budget is not None:
        comparison = compare_disaggregated(
            chosen, recommendation.token_budget, yardstick, lambda done: progress("yardstick", done, 0, None)
        )
        folder.write_json("disaggregation.json", comparison)
    return recommendation


def _time_note(searched: _Searched) -> str:
    config, done = searched.problem.config, len(searched.rows)
    if perf_counter() <= searched.until_s or done >= config.num_trials:
        return ""
    return f"The time limit of {config.time_limit:g} s ended the search after {done} of {config.num_trials} trials."


def _start_workers(
    num_workers: int | None,
    storage: str,
    study_name: str,
    config: TuneConfig,
    executor: Target,
    workload: Workload,
) -> LocalWorkers:
    """The workers beside this process, which wait until the study is there."""
    if num_workers is None:
        num_workers = num_cores() if isinstance(executor, AnyModelled) else 1
    if num_workers < 0:
        raise ValueError(f"workers={num_workers}: must be at least 0")
    count, parent = max(0, num_workers - 1), os.getpid()
    if executor.virtual_time:
        given = (config, executor, workload)
        return LocalWorkers(count, lambda number: work(storage, study_name, parent=parent, given=given))
    return LocalWorkers(count, partial(spawned_work, storage, study_name, parent, visible_gpus(executor)), spawned=True)


def _write_curves(folder: RunFolder, problem: Problem, token_budget: int | None, table: LatencyTable | None) -> None:
    """What batches cost on this device, where it has a latency table: a modelled device's own, or the warm start's."""
    if table is None:
        return
    config = problem.engine_config
    sizes = BatchSizes.of(problem.workload, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len)
    spec = known_spec(problem.config.device) if problem.config.modelled else None
    folder.write_json(CURVES_FILE, cost_curves(table, sizes, token_budget=token_budget, spec=spec))


def _write_environment(folder: RunFolder, problem: Problem, command: str, warm_start_note: str) -> None:
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
    candidates = [
        {name: value for name, value in asdict(candidate).items() if value is not None}
        for variant in problem.space.variants
        for candidate in variant.candidates
    ]
    folder.write_json("profile.json", {**problem.facts.to_json(), "candidates": candidates})
    if problem.facts.staircase is not None:
        folder.write_json("tiles.json", problem.facts.staircase.to_json())
