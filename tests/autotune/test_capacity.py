from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from stair_device import StairDevice
from tilebudget.autotune import TuneConfig, tune
from tilebudget.autotune.problem import unit_rate
from tilebudget.autotune.scoring.capacity import bisect_rate, find_capacity
from tilebudget.autotune.scoring.objective import CAPACITY_RESOLUTION, OBJECTIVES, parse_share, resolve_objective
from tilebudget.autotune.study.space import Candidate
from tilebudget.autotune.study.trial import TrialRow, TrialRunner, next_question
from tilebudget.engine import SLO, Engine, EngineConfig, Monitor, RunRecord, Workload
from tilebudget.engine.metrics import compute_metrics
from tilebudget.engine.workloads.workload import scale_load

CONFIG = TuneConfig(indifference="0%", max_num_seqs=8, max_model_len=4096, max_budget=2048, objective="capacity")
ENGINE = EngineConfig(token_budget=512, max_num_seqs=8, max_model_len=4096)


@pytest.mark.parametrize("start_qps", [0.1, 3.0, 50.0])
@pytest.mark.parametrize("truth", [0.9, 3.7, 12.0])
def test_the_rate_is_bracketed_from_either_side(start_qps: float, truth: float) -> None:
    found, _ = bisect_rate(lambda qps: qps <= truth, start_qps, 0.02)
    assert truth / 1.02 <= found <= truth


def test_a_rate_that_nothing_meets_is_zero() -> None:
    found, lowest = bisect_rate(lambda qps: False, 8.0, 0.02)
    assert found == 0.0
    assert lowest < 8.0 / 2**8


def test_capacity_is_where_an_exhaustive_scan_of_rates_turns(workload: Workload) -> None:
    """The limit on the queue decides here: 24 requests, median scheduling delay 20 ms."""
    slo = SLO(name="test", tbt_s=0.03, max_scheduling_delay_s=0.02)
    engine, arriving = Engine(StairDevice()), unit_rate(CONFIG, workload)
    found = find_capacity(engine, arriving, ENGINE, slo)
    assert found.qps is not None

    def excess(qps: float) -> float:
        metrics = compute_metrics(engine.run(scale_load(arriving, qps), ENGINE), slo)
        return max(value for value in metrics.excesses(slo).values() if value is not None)

    # With so few requests the queue does not grow with every step of the rate, so look a little further.
    assert excess(found.qps) <= 0.0
    assert max(excess(found.qps * (1.0 + step / 200.0)) for step in range(5)) > 0.0
    assert min(excess(found.qps * (1.1 + step / 10.0)) for step in range(10)) > 0.0
    assert found.metrics.feasible(slo) is True


def test_every_rate_serves_the_same_requests_in_the_same_pattern(workload: Workload) -> None:
    arriving = unit_rate(CONFIG, workload)
    slow, fast = ([r.arrival_s for r in scale_load(arriving, qps).requests] for qps in (2.0, 8.0))
    assert slow == pytest.approx([4.0 * arrival_s for arrival_s in fast])
    assert [r.prompt_tokens for r in arriving.requests] == [r.prompt_tokens for r in workload.requests]


def test_tune_maximises_capacity(tmp_path: Path, workload: Workload) -> None:
    config = replace(CONFIG, tbt_slo="30ms", num_trials=6, num_contenders=2, repeats=2)
    recommendation = tune(
        config, executor=StairDevice(), workload=workload, edges=range(128, 2049, 128), run_dir=tmp_path / "run"
    )
    trials = pd.read_parquet(tmp_path / "run" / "trials.parquet")
    search = trials[(trials["role"] == "search") & trials["feasible"].eq(True)]
    best = search["capacity_qps"].max()
    figure = recommendation.expected["capacity_qps"]
    assert recommendation.objective == "capacity"
    assert figure.value >= best / 1.02
    assert f"Capacity is {figure.value:.3g} requests/s" in recommendation.verdict
    assert recommendation.slo.scheduling_delay_p50_s == 2.0


def test_capacity_needs_requests_that_arrive_over_time() -> None:
    with pytest.raises(ValueError, match="arrivals='saturated': objective=capacity"):
        TuneConfig(objective="capacity", arrivals="saturated")


def test_goodput_and_a_limit_on_ttft_reach_trials_rule_and_verdict(tmp_path: Path, workload: Workload) -> None:
    """All 24 requests are there at once, so half of them wait longer than the median TTFT of any budget."""
    config = replace(CONFIG, objective="goodput", tbt_slo="30ms", ttft_slo="p50:200ms", num_trials=8, repeats=2)
    recommendation = tune(
        config, executor=StairDevice(), workload=workload, edges=range(128, 2049, 128), run_dir=tmp_path / "run"
    )
    trials = pd.read_parquet(tmp_path / "run" / "trials.parquet")
    complete = trials[(trials["role"] == "search") & (trials["state"] == "complete")]
    within = (complete["tbt_p99_ms"] <= 30.0) & (complete["ttft_p50_ms"] <= 200.0)
    assert (complete["feasible"].astype(bool) == within).all()
    assert "P50 TTFT 0.2 s" in recommendation.rule
    assert "P50 TTFT is" in recommendation.verdict
    assert (recommendation.slo.ttft_ms, recommendation.slo.ttft_quantile) == (200.0, 0.5)
    if within.any():
        best = complete[within]["goodput_requests_per_s"].max()
        assert recommendation.expected["goodput_requests_per_s"].value >= 0.99 * best
    else:
        assert recommendation.status == "infeasible"


def test_a_time_limit_ends_the_search_and_is_told(tmp_path: Path, workload: Workload) -> None:
    config = replace(CONFIG, objective="throughput", tbt_slo="30ms", num_trials=30, repeats=2, time_limit=1e-3)
    recommendation = tune(
        config, executor=StairDevice(), workload=workload, edges=range(128, 2049, 128), run_dir=tmp_path / "run"
    )
    assert recommendation.confidence is not None
    assert "The time limit of 0.001 s ended the search after" in recommendation.confidence.statement


def test_the_traffic_decides_what_auto_maximises(workload: Workload) -> None:
    timed = unit_rate(CONFIG, workload)
    assert resolve_objective("auto", workload)[0].name == "throughput"
    assert resolve_objective("auto", timed)[0].name == "capacity"
    assert resolve_objective("goodput", timed)[0].name == "goodput"
    assert "ask for capacity instead" in resolve_objective("throughput", timed)[1]


@pytest.mark.parametrize(("text", "share"), [("1%", 0.01), ("0.02", 0.02), ("0", 0.0), ("2.5 %", 0.025)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share("indifference", text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "-1%", "100%", "1", "one", "nan"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"indifference=.*must be a share"):
        TuneConfig(indifference=text)


class CountingEngine(Engine):
    """Counts its runs."""

    num_runs = 0

    def run(self, workload: Workload, config: EngineConfig, *, monitor: Monitor | None = None) -> RunRecord:
        self.num_runs += 1
        return super().run(workload, config, monitor=monitor)


def test_a_race_of_capacities_agrees_with_bisecting_each_in_a_third_of_the_runs(workload: Workload) -> None:
    timed = unit_rate(CONFIG, replace(workload, requests=workload.requests * 8))
    slo = SLO(name="test", tbt_s=0.0301, max_scheduling_delay_s=0.1)
    budgets = [1024, 512, 256, 2048, *range(320, 2048, 96)]
    plain, racing = CountingEngine(StairDevice()), CountingEngine(StairDevice())
    plainly = {
        budget: find_capacity(plain, timed, replace(ENGINE, token_budget=budget), slo).qps or 0.0 for budget in budgets
    }
    runner = TrialRunner(racing, timed, ENGINE, slo, objective=OBJECTIVES["capacity"])
    rows: list[TrialRow] = []
    for budget in budgets:
        candidate = Candidate(token_budget=budget, kind="aligned", edge_tokens=budget)
        rows.append(
            runner.run(candidate, run="race", role="search", ask_rps=next_question(rows, CAPACITY_RESOLUTION))[0]
        )
    winner = max((row for row in rows if row.state == "complete"), key=lambda row: row.score)
    assert winner.score == pytest.approx(max(plainly.values()), rel=0.02)
    assert plainly[winner.token_budget] == pytest.approx(max(plainly.values()), rel=0.02)
    assert racing.num_runs <= plain.num_runs / 3
    for row in rows:
        if row.state == "pruned":  # a no is a bound, and a true one
            assert row.score == 0.0
            assert plainly[row.token_budget] <= row.metric("capacity_at_most_qps")
            assert max(row.violations) > 0.0


def test_a_capacity_that_is_known_is_found_again_in_few_runs(workload: Workload) -> None:
    timed = unit_rate(CONFIG, replace(workload, requests=workload.requests * 8))
    slo = SLO(name="test", tbt_s=0.0301, max_scheduling_delay_s=0.1)
    first = find_capacity(Engine(StairDevice()), timed, ENGINE, slo, resolution=0.01)
    assert first.qps is not None
    again = find_capacity(Engine(StairDevice()), timed, ENGINE, slo, near_rps=first.qps, resolution=0.01)
    assert again.qps == pytest.approx(first.qps, rel=0.01)
    assert again.num_runs <= 4
    # Where it moved by a fifth meanwhile, it is found all the same.
    moved = find_capacity(Engine(StairDevice()), timed, ENGINE, slo, near_rps=1.2 * first.qps, resolution=0.01)
    assert moved.qps == pytest.approx(first.qps, rel=0.01)


def test_a_trial_under_capacity_has_the_metrics_of_the_given_rate(workload: Workload) -> None:
    timed = scale_load(unit_rate(CONFIG, workload), 3.0)
    slo = SLO(name="test", tbt_s=0.0301, max_scheduling_delay_s=0.02)
    runner = TrialRunner(
        Engine(StairDevice()), timed, ENGINE, slo, objective=OBJECTIVES["capacity"], rate_rps=3.0, own_rate=True
    )
    row, record = runner.run(Candidate(token_budget=512, kind="aligned", edge_tokens=512), run="one", role="search")
    assert record is not None
    at_own_rate = compute_metrics(Engine(StairDevice()).run(timed, ENGINE), slo)
    assert at_own_rate.ttft.p99 is not None
    assert row.metric("ttft_p99_ms") == pytest.approx(at_own_rate.ttft.p99 * 1e3)
    assert row.metric("capacity_qps") == row.score > 0.0
