from __future__ import annotations

from pathlib import Path

import pytest
from stair_device import StairDevice
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.study.expectation import Expectation
from tilebudget.autotune.study.sampler import Tried, propose, start_params
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
