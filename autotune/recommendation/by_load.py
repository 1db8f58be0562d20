"""Where each budget wins: at shares of the best capacity, the best budget and how the recommended one does there.

A modelled device is asked the study's own budgets that could win somewhere: the contenders, those of the search that
ran to their end, and the peaks of the staircase. Every budget that holds the limits at a rate serves all of that rate,
so there the rules decide that tell equals apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.server.engine import engine_on
from ...engine.workloads.workload import scale_load
from ..problem import Problem
from ..scoring.selection import Contender
from ..study.parallel import side_by_side
from ..study.space import Candidate
from ..study.trial import TrialRow, TrialRunner
from .recommendation import LoadWin

#: Shares of the best capacity.
LOADS = (0.25, 0.5, 0.75, 0.9, 1.0)


def find_best_by_load(problem: Problem, recommended: Candidate, search_rows: Sequence[TrialRow]) -> list[LoadWin]:
    """A win for each of ``LOADS``; empty where the device is not modelled or no capacity was found. A budget that does
    not hold a load is not asked about a higher one."""
    finished = [row for row in search_rows if row.state == "complete"]
    best_rps = max((row.metric("capacity_qps") for row in finished), default=0.0)
    if problem.objective.name != "capacity" or not problem.exact or not best_rps > 0.0:
        return []
    tried = (problem.space.find(*row.setting) for row in finished)
    holding = {one for one in (recommended, *tried, *problem.space.cheapest_around()) if one is not None}
    wins = []
    for load in LOADS:
        rate_rps = load * best_rps
        runner = TrialRunner(
            engine_on(problem.executor),
            scale_load(problem.workload, rate_rps / problem.rate_rps),
            problem.engine_config,
            problem.slo,
        )

        def run(candidate: Candidate, runner: TrialRunner = runner) -> TrialRow:
            return runner.run(candidate, run="by-load", role="by_load", prune=candidate != recommended)[0]

        asked = sorted(holding | {recommended}, key=lambda one: one.token_budget)
        ran = {one: row for one, row in zip(asked, side_by_side(run, asked), strict=True) if row.state == "complete"}
        held = [Contender(candidate=one, rows=(row,)) for one, row in ran.items() if row.feasible is not False]
        holding = {one.candidate for one in held}
        wins.append(_win(problem, load, rate_rps, held, ran.get(recommended)))
    return wins


def _win(problem: Problem, load: float, rate_rps: float, held: Sequence[Contender], own: TrialRow | None) -> LoadWin:
    best = problem.judge.decide(held, held)[0].rows[0] if held else None
    return LoadWin(
        load=load,
        rate_rps=rate_rps,
        token_budget=None if best is None else best.token_budget,
        ttft_p99_s=_figure(best, "ttft_p99_ms", 1e-3),
        tbt_p99_ms=_figure(best, "tbt_p99_ms"),
        recommended_ttft_p99_s=_figure(own, "ttft_p99_ms", 1e-3),
        recommended_tbt_p99_ms=_figure(own, "tbt_p99_ms"),
        recommended_holds=None if own is None else own.feasible,
    )


def _figure(row: TrialRow | None, metric: str, scale: float = 1.0) -> float | None:
    value = None if row is None else row.metrics.get(metric)
    return None if value is None else value * scale
