"""One tuning from settings to run folder: reference, search, repeats, policies, recommendation, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ..engine import POLICY_NAMES, Engine, EngineConfig, Executor, RunRecord, Workload
from ..engine.metrics import SLO
from ..engine.presets import preset_workload
from ..engine.slo import ReferenceDecode, reference_decode, resolve_slo
from ..engine.traces import load_trace
from ..engine.workload import assign_arrivals
from ..kernels.tiles import tile_edges
from ..reports import build_report
from .config import TuneConfig
from .devices import make_executor
from .environment import package_versions, source_commit
from .recommendation import Alternative, EngineSettings, Figure, Key, Recommendation, SLOInfo, model_key
from .run_folder import RunFolder, default_run_dir
from .selection import RULE, Choice, Contender, choose, promising, shortlist
from .space import Candidate, SearchSpace, thin_edges
from .store import save_recommendation
from .study import BudgetStudy
from .trial import TrialRow, TrialRunner
from .verdict import describe_alternative, write_verdict

#: Largest budget tried where the settings name none.
DEFAULT_MAX_BUDGET = 8192

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

#: Told of every finished run: phase (``search``, ``repeat``, ``policy``), runs done and planned in it, the row.
ProgressSink = Callable[[str, int, int, TrialRow], None]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that the runs of one study share."""

    config: TuneConfig
    executor: Executor
    workload: Workload
    engine_config: EngineConfig
    slo: SLO
    reference: ReferenceDecode
    space: SearchSpace

    @property
    def variance_metric(self) -> str:
        """The pipeline variance that the study minimises."""
        return f"bubble_fraction_{self.config.pipeline_stages}"


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
    config = replace(config or TuneConfig(), **settings)  # type: ignore[arg-type]
    executor = executor or make_executor(
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        seed=config.seed,
        num_threads=config.num_threads,
    )
    folder = RunFolder(run_dir or default_run_dir(config.model))
    problem = _state_problem(config, executor, workload or load_workload(config), edges)
    command = command or " ".join(["tilebudget", *sys.argv[1:]])
    _write_setting(folder, problem, command)

    runner = TrialRunner(Engine(executor), problem.workload, problem.engine_config, problem.slo)
    study = BudgetStudy(
        problem.space,
        runner,
        storage=folder.journal,
        identity=config.identity(),
        variance_metric=problem.variance_metric,
        seed=config.seed,
    )
    report_progress = progress or (lambda phase, done, planned, row: None)

    def on_trial(row: TrialRow, done: int, planned: int) -> None:
        folder.write_trials(study.rows())
        report_progress("search", done, planned, row)

    search_rows = study.search(config.num_trials, on_trial)
    contenders, repeats = _repeat_contenders(problem, runner, search_rows, report_progress)
    choice = choose(contenders, problem.variance_metric)
    policies = _compare_policies(problem, runner, choice, report_progress)
    rows = [*search_rows, *(row for row, _ in repeats), *(row for row, _ in policies)]
    records = [(row, record) for row, record in (*repeats, *policies) if record is not None and row.state == "complete"]
    recommendation = _recommend(problem, choice, contenders, search_rows, rows, command, records)
    folder.write_trials(rows)
    folder.write_records(records)
    folder.write_json("recommendation.json", recommendation.to_json())
    folder.point_latest()
    build_report(folder.path)
    save_recommendation(recommendation)
    return recommendation


def load_workload(config: TuneConfig) -> Workload:
    """The requests that ``config`` names, with their arrivals: a trace's own times, a preset saturated, unless
    ``arrivals`` says otherwise."""
    if config.trace is not None:
        workload = load_trace(
            config.trace,
            num_requests=config.num_requests,
            max_model_len=config.max_model_len,
            overlong=config.overlong,
        )
        default_arrivals = "trace" if workload.has_arrivals else "saturated"
    else:
        workload = preset_workload(
            config.workload,
            num_requests=config.num_requests,
            seed=config.seed,
            max_model_len=config.max_model_len,
            overlong=config.overlong,
        )
        default_arrivals = "saturated"
    kind = config.arrivals or ("poisson" if config.qps is not None else default_arrivals)
    return assign_arrivals(workload, kind=kind, qps=config.qps, seed=config.seed)


def _state_problem(config: TuneConfig, executor: Executor, workload: Workload, edges: Iterable[int] | None) -> Problem:
    engine_config = EngineConfig(
        token_budget=config.max_num_seqs,
        policy=config.policy,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(config.max_model_len, executor.max_position),
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        seed=config.seed,
    )
    if engine_config.num_kv_blocks is None:
        engine_config = replace(engine_config, num_kv_blocks=executor.default_num_kv_blocks(engine_config))
    reference = reference_decode(executor, engine_config)
    whole_prompt = max(request.prompt_tokens for request in workload.requests) + config.max_num_seqs
    min_budget = config.min_budget or config.max_num_seqs
    max_budget = config.max_budget or max(min_budget, min(DEFAULT_MAX_BUDGET, workload.num_prompt_tokens))
    space = SearchSpace(
        thin_edges(tile_edges(max_budget) if edges is None else edges),
        min_budget=min_budget,
        max_budget=max_budget,
        whole_prompt=whole_prompt,
    )
    return Problem(
        config=config,
        executor=executor,
        workload=workload,
        engine_config=engine_config,
        slo=resolve_slo(config.tbt_slo, reference),
        reference=reference,
        space=space,
    )


RunPair = tuple[TrialRow, RunRecord | None]


def _repeat_contenders(
    problem: Problem, runner: TrialRunner, search_rows: Sequence[TrialRow], progress: ProgressSink
) -> tuple[list[Contender], list[RunPair]]:
    """Repeat the best budgets interleaved; when none of them holds the SLO in every repeat, the next best too."""
    contenders: list[Contender] = []
    pairs: list[RunPair] = []
    while True:
        tried = [contender.candidate.token_budget for contender in contenders]
        left = [row for row in search_rows if row.token_budget not in tried]
        budgets = shortlist(left, problem.config.num_contenders)
        if not budgets or (contenders and not any(promising(row) for row in left)):
            return contenders, pairs
        batch = _with_company(problem, budgets, tried, search_rows)
        runs = _interleave(problem, runner, batch, progress)
        pairs += runs
        for candidate in batch:
            completed = tuple(
                row for row, _ in runs if row.token_budget == candidate.token_budget and row.state == "complete"
            )
            contenders.append(Contender(candidate=candidate, rows=completed))
        if choose(contenders, problem.variance_metric).status != "infeasible":
            return contenders, pairs


def _with_company(
    problem: Problem, budgets: Sequence[int], tried: Sequence[int], search_rows: Sequence[TrialRow]
) -> list[Candidate]:
    """The candidates of ``budgets``, the other side of the first one's edge, and whole prompts if they ran well."""
    by_budget = {candidate.token_budget: candidate for candidate in problem.space.candidates}
    batch = [by_budget[budget] for budget in budgets if budget in by_budget]
    partner = problem.space.partner(batch[0])
    whole = problem.space.whole_prompt
    whole_ran = any(whole and row.token_budget == whole.token_budget and promising(row) for row in search_rows)
    for extra in (partner, whole if whole_ran else None):
        if extra is not None and extra not in batch and extra.token_budget not in tried:
            batch.append(extra)
    return batch


def _interleave(
    problem: Problem, runner: TrialRunner, batch: Sequence[Candidate], progress: ProgressSink
) -> list[RunPair]:
    """Every candidate once per round, in alternating order, so that drift of the machine hits all of them alike."""
    planned = len(batch) * problem.config.repeats
    runs: list[RunPair] = []
    for repeat in range(problem.config.repeats):
        for candidate in batch if repeat % 2 == 0 else reversed(batch):
            pair = runner.run(candidate, run=f"repeat-{candidate.token_budget}-{repeat}", role="repeat")
            runs.append(pair)
            progress("repeat", len(runs), planned, pair[0])
    return runs


def _compare_policies(problem: Problem, runner: TrialRunner, choice: Choice, progress: ProgressSink) -> list[RunPair]:
    """Every policy once on the same requests at the chosen budget."""
    if choice.best is None:
        return []
    runs: list[RunPair] = []
    for policy in POLICY_NAMES:
        pair = runner.run(choice.best.candidate, run=f"policy-{policy}", role="policy", policy=policy)
        runs.append(pair)
        progress("policy", len(runs), len(POLICY_NAMES), pair[0])
    return runs


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
        verdict=write_verdict(choice, contenders, problem.space, problem.slo),
        rule=RULE,
        key=Key(model=model_key(config.model), device=str(device["device"]), dtype=str(device["dtype"])),
        slo=SLOInfo(
            name=problem.slo.name,
            tbt_p99_ms=problem.slo.tbt_s * 1e3,
            scheduling_delay_p50_s=None if problem.workload.saturated else problem.slo.max_scheduling_delay_s,
            reference_decode_ms=problem.reference.duration_s * 1e3,
            note=problem.reference.note,
        ),
        expected=expected,
        alternatives=_alternatives(problem, choice, contenders, search_rows),
        engine=EngineSettings(
            model=config.model,
            policy=config.policy,
            max_num_seqs=config.max_num_seqs,
            max_model_len=problem.engine_config.max_model_len,
            block_size=config.block_size,
            num_kv_blocks=problem.engine_config.num_kv_blocks or 0,
        ),
        workload=workload_summary(problem.workload),
        num_trials={state: sum(row.state == state for row in rows) for state in ("complete", "pruned", "failed")},
        seed=config.seed,
        command=command,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


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


def workload_summary(workload: Workload) -> dict[str, object]:
    """What ``environment.json`` and the recommendation say of a workload."""
    return {
        "name": workload.name,
        "source": workload.source,
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "num_dropped": workload.num_dropped,
        "num_clipped": workload.num_clipped,
        "saturated": workload.saturated,
        "notes": list(workload.notes),
    }


def _write_setting(folder: RunFolder, problem: Problem, command: str) -> None:
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
        },
    )
    folder.write_json(
        "profile.json",
        {
            "edges": [{"tokens": edge, "source": "multiples of the GEMM's BLOCK_M"} for edge in problem.space.edges],
            "candidates": [asdict(candidate) for candidate in problem.space.candidates],
            "reference_decode": {
                "duration_ms": problem.reference.duration_s * 1e3,
                "num_seqs": problem.reference.num_seqs,
                "context_tokens": problem.reference.context_tokens,
                "note": problem.reference.note,
            },
        },
    )
