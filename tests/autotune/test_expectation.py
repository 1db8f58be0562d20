from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stair_device import StairDevice
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.study.expectation import Expectation
from tilebudget.autotune.study.sampler import NUM_TURNS, STEP_DOWN_TURN, Tried, propose, start_params
from tilebudget.autotune.study.space import SearchSpace
from tilebudget.autotune.study.trial import TrialRow, TrialRunner
from tilebudget.engine import SLO, Engine, EngineConfig, Request, TokenCosts, Workload

EDGES = range(128, 2049, 128)
COSTS = TokenCosts.from_edges(EDGES)
SPACE = SearchSpace(EDGES, min_budget=128, max_budget=2048, costs=COSTS)
LOAD = Workload(
    name="load",
    requests=tuple(Request(arrival_s=0.0, prompt_tokens=300 + 13 * index, output_tokens=20) for index in range(60)),
)


def runner(tbt_s: float) -> TrialRunner:
    config = EngineConfig(token_budget=128, max_num_seqs=32, max_model_len=4096)
    return TrialRunner(Engine(StairDevice()), LOAD, config, SLO(name="test", tbt_s=tbt_s))


def rows_of(budgets: list[int], tbt_s: float = 0.03) -> list[TrialRow]:
    runs = runner(tbt_s)
    candidates = {one.token_budget: one for one in SPACE.candidates}
    return [runs.run(candidates[budget], run="a", role="search", prune=True)[0] for budget in budgets]


def test_four_runs_tell_what_the_others_do() -> None:
    """The lengths of the requests move throughput by some percent, and the tail of TBT by more."""
    expectation = Expectation.fit(COSTS, rows_of([128, 512, 1024, 2048], tbt_s=1.0), [])
    assert expectation is not None
    for row in rows_of([256, 384, 385, 768, 1025, 1536], tbt_s=1.0):
        assert expectation.score(row.token_budget) == pytest.approx(row.score, rel=0.1)
        assert expectation.share(row.token_budget) == pytest.approx(1.0 + row.violations[0], rel=0.15)
    assert expectation.score(513) < 0.95 * expectation.score(512)


def test_doubt_is_none_beside_a_run_and_whole_far_from_all() -> None:
    expectation = Expectation.fit(COSTS, rows_of([128, 256, 512]), [2048])
    assert expectation is not None
    assert expectation.doubt(256) == 0.0
    assert expectation.doubt(2048) == 0.0
    assert 0.0 < expectation.doubt(513) < 0.1
    assert expectation.doubt(1024) == 1.0


def test_too_few_runs_give_no_expectation() -> None:
    assert Expectation.fit(COSTS, rows_of([128, 512]), []) is None
    # Runs that were stopped early have no throughput.
    assert Expectation.fit(COSTS, rows_of([128, 512, 1536, 2048], tbt_s=0.021), []) is None


@pytest.mark.parametrize("tbt_s", [0.009, 0.021, 0.03, 0.045, 0.2])
def test_ten_trials_find_what_an_exhaustive_search_finds(tmp_path: Path, tbt_s: float) -> None:
    runs = runner(tbt_s)
    every = [runs.run(candidate, run="all", role="search")[0] for candidate in SPACE.candidates]
    best = max(row.score for row in every if row.feasible)

    def outcome(params: dict[str, int | str]) -> Tried:
        candidate = SPACE.at(int(params["edge_index"]), str(params["kind"]))
        assert candidate is not None
        return Tried(params=params, row=runs.run(candidate, run="one", role="search", prune=True)[0])

    tried = [outcome(params) for params in start_params(SPACE, ())]
    while len(tried) < 10:
        params = propose(SPACE, tried, seed=TuneConfig().seed, variance_metric="bubble_fraction_4")
        assert params is not None
        tried.append(outcome(params))
    assert max(one.row.score for one in tried if one.row is not None and one.row.feasible) >= 0.99 * best


def test_under_capacity_runs_at_rates_that_differ_do_not_mislead() -> None:
    """What P99 TBT kept from a rate says nothing of the queue; what was overloaded says what it can serve."""
    true_rps = {budget: 1e3 * budget / (8.0 + 4.0 * -(-budget // 128)) / 500.0 for budget in EDGES}

    def row(budget: int, state: str, at_most: float, share: float, busy: float | None = None) -> TrialRow:
        known = true_rps[budget] if state == "complete" else None
        return TrialRow(
            run=str(budget),
            role="search",
            state=state,
            reason=None,
            token_budget=budget,
            kind="aligned",
            edge_tokens=budget,
            policy="sarathi",
            feasible=True,
            started_at="",
            elapsed_s=0.0,
            score=true_rps[budget] if state == "complete" else 0.0,
            violations=(-0.5, -0.5, 0.0, 0.0),
            tbt_share=share,
            busy_rps=busy,
            metrics={"capacity_qps": known, "capacity_at_most_qps": at_most},
        )

    rows = [
        row(128, "complete", true_rps[128] * 1.0025, 0.3),
        row(512, "complete", true_rps[512] * 1.0025, 0.6),
        # Held back by the queue at a rate far above what it serves.
        row(256, "pruned", 3.0 * true_rps[256], 0.4, busy=true_rps[256]),
        # Held back by P99 TBT, far below what the queue would allow.
        replace(row(2048, "complete", 0.3, 1.001), score=0.3),
    ]
    expectation = Expectation.fit(COSTS, rows, [])
    assert expectation is not None
    assert expectation.score(384) == pytest.approx(true_rps[384], rel=0.05)
    assert expectation.score(1024) == pytest.approx(true_rps[1024], rel=0.1)


@pytest.mark.parametrize(("margin", "below"), [(-0.3, False), (-0.05, True)])
def test_a_budget_below_the_incumbent_is_proposed_where_its_tbt_is_near_the_limit(margin: float, below: bool) -> None:
    """The limits that are not there, 0 among the violations, say nothing."""
    tried = [
        Tried(params={"edge_index": index, "kind": "aligned"}, row=replace(row, violations=(margin, 0.0, 0.0, 0.0)))
        for index, row in zip((0, 3, 5, 7, 15), rows_of([128, 512, 768, 1024, 2048], tbt_s=1.0), strict=True)
    ]
    assert len(tried) % NUM_TURNS == STEP_DOWN_TURN
    leader = max(tried, key=lambda one: one.row.score if one.row else 0.0)
    chosen = propose(SPACE, tried, seed=0, variance_metric="bubble_fraction_4")
    assert chosen is not None
    assert leader.row is not None
    step_down = SPACE.at(int(chosen["edge_index"]), str(chosen["kind"])) == max(
        (one for one in SPACE.candidates if one.kind == "aligned" and one.token_budget < leader.row.token_budget),
        key=lambda one: one.token_budget,
    )
    assert step_down is below
