"""The judge and the draws of benchmarks/regret.py's open traffic."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in ("regret_open", "regret_scenarios")}
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def regret_open(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["regret_open"]


@pytest.fixture(scope="module")
def regret_scenarios(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["regret_scenarios"]


@pytest.mark.parametrize("start", [-2000, -3, 0, 40, 2000])
def test_a_capacity_is_found_from_any_start_and_the_race_finds_the_best(regret_open: ModuleType, start: int) -> None:
    lowest, highest = -regret_open.REACH, regret_open.REACH
    tops = {64: 17, 128: regret_open.NOTHING_HOLDS, 256: 90, 512: 90, 1024: highest, 2048: lowest, 4096: -400}
    ladder = regret_open.Ladder(lambda budget, rung: rung <= tops[budget])
    assert ladder.best_of([128, 64, 256, 512, 4096], start) == 256
    assert ladder.best_of(tops, start) == 1024
    assert {budget: ladder.capacity(budget, start) for budget in tops} == tops


def test_the_race_asks_a_slower_budget_once(regret_open: ModuleType) -> None:
    asked: list[int] = []

    def meets(budget: int, rung: int) -> bool:
        asked.append(budget)
        return rung <= budget

    assert regret_open.Ladder(meets).best_of([50, 10, 20, 30], 0) == 50
    assert [asked.count(budget) for budget in (10, 20, 30)] == [1, 1, 1]


def test_a_seed_draws_the_same_scenarios_again_and_more_of_them(regret_scenarios: ModuleType) -> None:
    def draw(seed: int, count: int) -> list[object]:
        return list(regret_scenarios.draw_scenarios(seed, count, tensor_parallel=lambda system, model: 2))

    few, many, others = draw(5, 7), draw(5, 24), draw(6, 24)
    assert many[:7] == few
    assert many != others
    assert len({one.name for one in many}) == 24  # type: ignore[attr-defined]
    assert {one.device for one in many[:6]} == {system[0] for system in regret_scenarios.SYSTEMS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "phases"])
def test_traffic_arrives_at_one_per_second(regret_scenarios: ModuleType, arrivals: str) -> None:
    (scenario,) = regret_scenarios.draw_scenarios(0, 1, 300, tensor_parallel=lambda system, model: 1)
    scenario = replace(scenario, arrivals=arrivals, workload="azure-conv")
    requests = regret_scenarios.make_traffic(scenario, 4096).requests
    assert len(requests) == 300
    assert requests[0].arrival_s == 0.0
    assert requests[-1].arrival_s == pytest.approx(299.0)
    assert max(request.total_tokens for request in requests) <= 4096
