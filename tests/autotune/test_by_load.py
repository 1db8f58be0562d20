"""Where each budget wins: held against running every budget at every load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up_device import EDGES, modelled
from tilebudget.autotune import Recommendation, TuneConfig, tune
from tilebudget.autotune.recommendation.by_load import LOADS
from tilebudget.engine import SLO, Engine, EngineConfig, Workload, compute_metrics
from tilebudget.engine.workloads.workload import assign_arrivals, mean_rate, scale_load

CONFIG = TuneConfig(
    device="made_up", max_num_seqs=8, max_model_len=4096, tbt_slo="4.1ms", num_trials=14, max_budget=1024
)


@pytest.fixture
def timed(workload: Workload) -> Workload:
    many = replace(workload, requests=workload.requests * 6)
    return replace(assign_arrivals(many, "poisson", qps=1.0, seed=3), has_arrivals=True)


def recommend(tmp_path: Path, workload: Workload, **settings: object) -> Recommendation:
    config = replace(CONFIG, **settings)  # type: ignore[arg-type]
    return tune(config, executor=modelled(), workload=workload, edges=EDGES, run_dir=tmp_path / "run")


def test_the_best_budget_by_load_is_that_of_running_every_budget_there(tmp_path: Path, timed: Workload) -> None:
    found = recommend(tmp_path, timed)
    assert [win.load for win in found.best_by_load] == list(LOADS)
    capacity = found.best_by_load[-1].rate_rps
    assert capacity == pytest.approx(found.capacity_rps, rel=0.011)
    engine, slo = Engine(modelled()), SLO(name="test", tbt_s=0.0041, max_scheduling_delay_s=2.0)
    for win in found.best_by_load:
        assert win.rate_rps == pytest.approx(win.load * capacity)
        there = scale_load(timed, win.rate_rps / mean_rate(timed))
        ttft_ms, tbt_ms, holds = {}, {}, {}
        for budget in (*range(64, 1025, 64), found.token_budget):
            settings = EngineConfig(token_budget=budget, max_num_seqs=8, max_model_len=4096)
            metrics = compute_metrics(engine.run(there, settings), slo)
            row = metrics.to_row()
            holds[budget] = metrics.feasible(slo)
            ttft_ms[budget], tbt_ms[budget] = float(row["ttft_p99_ms"] or 0.0), row["tbt_p99_ms"]
        assert win.token_budget is not None
        assert win.ttft_p99_s is not None
        assert holds[win.token_budget]
        assert 1e3 * win.ttft_p99_s == pytest.approx(ttft_ms[win.token_budget])
        assert 1e3 * win.ttft_p99_s <= 1.05 * min(ttft_ms[budget] for budget in holds if holds[budget]) * (1.0 + 1e-9)
        assert win.recommended_ttft_p99_s == pytest.approx(1e-3 * ttft_ms[found.token_budget])
        assert win.recommended_tbt_p99_ms == pytest.approx(tbt_ms[found.token_budget])
        assert win.recommended_holds is holds[found.token_budget]


def test_without_a_capacity_there_are_no_loads(tmp_path: Path, workload: Workload) -> None:
    assert recommend(tmp_path, workload).best_by_load == []


def test_it_survives_the_file(tmp_path: Path, timed: Workload) -> None:
    found = recommend(tmp_path, timed)
    assert Recommendation.load(tmp_path / "run").best_by_load == found.best_by_load
