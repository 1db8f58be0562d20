"""The recommendation of a finished study: what its runs make of every field of ``recommendation.json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from ...engine.metrics import QUANTILE_FIELDS, SLO
from ..problem import Problem, workload_summary
from ..scoring.objective import Objective
from ..scoring.selection import Choice, Contender, rule
from ..study.trial import TrialRow
from .recommendation import (
    Alternative,
    Confidence,
    Decision,
    EngineSettings,
    Figure,
    Key,
    LoadWin,
    Recommendation,
    Sensitivity,
    SLOInfo,
    model_key,
)
from .verdict import describe_alternative, describe_decision, write_verdict

EXPECTED_METRICS = (
    "tbt_p50_ms",
    "tbt_p99_ms",
    "tbt_p999_ms",
    "tbt_max_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "bubble_fraction",
    "bubble_fraction_2",
    "bubble_fraction_4",
    "bubble_fraction_8",
    "iteration_cv",
)


def recommend(
    problem: Problem,
    chosen: Problem,
    choice: Choice,
    contenders: Sequence[Contender],
    search_rows: Sequence[TrialRow],
    rows: Sequence[TrialRow],
    command: str,
    confidence: Confidence,
    sensitivity: Sequence[Sensitivity],
    best_by_load: Sequence[LoadWin],
) -> Recommendation:
    """What ``choice`` recommends: ``chosen`` is the problem at its settings (``at_choice``), ``contenders`` are the
    repeated budgets that it was made among, ``rows`` every run of the study, those of its search included."""
    config, best = chosen.config, choice.best
    device, reference = problem.executor.describe(), problem.facts.reference
    expected: dict[str, Figure] = {}
    for metric in dict.fromkeys((*EXPECTED_METRICS, problem.objective.metric, *_limited_metrics(problem.slo))):
        spread = best.spread(metric) if best is not None else None
        if spread is not None:
            expected[metric] = Figure(**asdict(spread))
    return Recommendation(
        status=choice.status,
        token_budget=_budget(choice),
        verdict=_verdict(chosen, choice, contenders, confidence, sensitivity),
        rule=rule(problem.objective, problem.slo, problem.judge.indifference),
        key=Key(
            model=model_key(config.model),
            device=str(device["device"]),
            dtype=str(device["dtype"]),
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
        ),
        slo=SLOInfo(
            name=problem.slo.name,
            tbt_p99_ms=problem.slo.tbt_s * 1e3,
            scheduling_delay_p50_s=None if problem.workload.saturated else problem.slo.max_scheduling_delay_s,
            reference_decode_ms=None if reference is None else reference.duration_s * 1e3,
            note="" if reference is None else reference.note,
            **_limits(problem.slo),
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
            kv_blocks_fixed=config.num_kv_blocks is not None,
            model_name=config.launch_model,
        ),
        workload=workload_summary(problem.workload),
        num_trials={state: sum(row.state == state for row in rows) for state in ("complete", "pruned", "failed")},
        seed=config.seed,
        command=command,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        objective=problem.objective.name,
        confidence=confidence,
        sensitivity=sensitivity,
        bubble_metric=problem.variance_metric,
        objective_note=problem.objective_note,
        own_rate_rps=problem.rate_rps if problem.own_rate else None,
        ttft_p99_s=_figure(best, "ttft_p99_ms", 1e-3),
        capacity_rps=_figure(best, "capacity_qps"),
        decision=_decision(choice, problem.objective),
        best_by_load=best_by_load,
    )


def _figure(contender: Contender | None, metric: str, scale: float = 1.0) -> float | None:
    """The median of ``metric`` times ``scale``; None without data."""
    spread = None if contender is None else contender.spread(metric)
    return None if spread is None else spread.value * scale


def _decision(choice: Choice, objective: Objective) -> Decision | None:
    """The rule that decided, in words too."""
    made = choice.decision
    if made is None:
        return None
    return Decision(statement=describe_decision(choice, objective), **{**asdict(made), "group": list(made.group)})


def _verdict(
    chosen: Problem,
    choice: Choice,
    contenders: Sequence[Contender],
    confidence: Confidence,
    sensitivity: Sequence[Sensitivity],
) -> str:
    verdict = write_verdict(choice, contenders, chosen.space, chosen.slo, chosen.judge, chosen.table)
    stays = "" if sensitivity else "What would change it was not asked."
    moved = [one.statement for one in sensitivity if one.token_budget != _budget(choice)]
    if sensitivity and not moved:
        nouns = list(dict.fromkeys(one.change.split()[0] for one in sensitivity))
        stays = f"Neither {', '.join(nouns[:-1])} nor {nouns[-1]} 20% up or down, doubled or halved would change it."
    return " ".join(
        part for part in (verdict, f"Confidence: {confidence.level}. {confidence.statement}", *moved, stays) if part
    )


def at_choice(problem: Problem, choice: Choice) -> Problem:
    """The problem at the settings of the choice, where more than the budget was searched."""
    searched_more = len(problem.space.variants) > 1
    return problem.at(choice.best.candidate) if choice.best is not None and searched_more else problem


def _budget(choice: Choice) -> int | None:
    return None if choice.best is None else choice.best.candidate.token_budget


def _limited_metrics(slo: SLO) -> list[str]:
    """The columns that the limits on TTFT and E2E are about."""
    limits = (("ttft", slo.ttft), ("e2e", slo.e2e))
    return [f"{name}_{QUANTILE_FIELDS[limit.quantile]}_ms" for name, limit in limits if limit is not None]


def _limits(slo: SLO) -> dict[str, float]:
    limits = (("ttft", slo.ttft), ("e2e", slo.e2e))
    found = [(name, limit) for name, limit in limits if limit is not None]
    return {f"{name}_ms": limit.limit_s * 1e3 for name, limit in found} | {
        f"{name}_quantile": limit.quantile for name, limit in found
    }


def _alternatives(
    problem: Problem, choice: Choice, contenders: Sequence[Contender], search_rows: Sequence[TrialRow]
) -> list[Alternative]:
    """The repeated contenders, then the other budgets of the search that ran to their end."""
    repeated = {contender.candidate for contender in contenders}
    others = [
        Contender(candidate=candidate, rows=(row,))
        for row in search_rows
        if (row.state == "complete" or "capacity_at_most_qps" in row.metrics)
        and (candidate := problem.space.find(*row.setting)) is not None
        and candidate not in repeated
    ]
    alternatives = []
    for contender in (*contenders, *others):
        if choice.best is not None and contender.candidate == choice.best.candidate:
            continue
        figures = {
            name: _figure(contender, metric, 1e-3 if name.startswith("ttft") else 1.0)
            for name, metric in (
                ("ttft_p50_s", "ttft_p50_ms"),
                ("ttft_p99_s", "ttft_p99_ms"),
                ("capacity_rps", "capacity_qps"),
                ("capacity_at_most_rps", "capacity_at_most_qps"),
                ("tbt_p99_ms", "tbt_p99_ms"),
                ("total_tokens_per_s", "total_tokens_per_s"),
                ("bubble_fraction_4", "bubble_fraction_4"),
                ("bubble_fraction", problem.variance_metric),
                ("iteration_cv", "iteration_cv"),
            )
        }
        alternatives.append(
            Alternative(
                token_budget=contender.candidate.token_budget,
                kind=contender.candidate.kind,
                feasible=contender.feasible,
                tie=contender.candidate in choice.ties,
                reason=describe_alternative(contender, choice, problem.slo, problem.objective),
                **figures,
                max_num_seqs=contender.candidate.max_num_seqs,
                policy=contender.candidate.policy,
            )
        )
    return alternatives
