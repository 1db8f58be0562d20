from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up_device import EDGES, modelled
from stair_device import StairDevice
from tilebudget.autotune import Recommendation, TuneConfig, tune
from tilebudget.autotune.recommendation import sensitivity
from tilebudget.autotune.recommendation.sensitivity import scale_lengths, scale_slo
from tilebudget.engine import SLO, Workload
from tilebudget.engine.metrics import Limit
from tilebudget.engine.workloads.workload import assign_arrivals

CONFIG = TuneConfig(
    device="made_up", max_num_seqs=8, max_model_len=4096, tbt_slo="4.1ms", num_trials=14, max_budget=1024
)


def recommend(tmp_path: Path, workload: Workload, **settings: object) -> Recommendation:
    config = replace(CONFIG, **settings)  # type: ignore[arg-type]
    return tune(config, executor=modelled(), workload=workload, edges=EDGES, run_dir=tmp_path / "run")


def test_the_slo_moves_the_budget_by_as_many_tiles_as_it_holds(tmp_path: Path, workload: Workload) -> None:
    """4.1 ms hold 3 tiles. A fifth less, 3.28 ms, holds 2; a fifth more, 4.92 ms, still 3."""
    recommendation = recommend(tmp_path, workload)
    assert recommendation.token_budget == 192
    by_change = {one.change: one for one in recommendation.sensitivity}
    factors = ("halved", "-20%", "+20%", "doubled")
    assert list(by_change) == [f"{noun} {word}" for noun in ("SLO", "prompts", "outputs") for word in factors]
    assert by_change["SLO -20%"].token_budget == 128
    assert by_change["SLO -20%"].statement == "SLO -20%: 128 instead of 192, which breaks the SLO then."
    assert by_change["SLO +20%"].token_budget == 192
    assert "128 instead of 192" in recommendation.verdict


def test_a_wider_slo_is_answered_by_runs_of_budgets_that_were_stopped_early(tmp_path: Path, workload: Workload) -> None:
    """3.5 ms hold 2 tiles; a fifth more, 4.2 ms, 3, which the search has only seen fail."""
    recommendation = recommend(tmp_path, workload, tbt_slo="3.5ms")
    assert recommendation.token_budget == 128
    by_change = {one.change: one for one in recommendation.sensitivity}
    assert by_change["SLO +20%"].token_budget == 192


def test_a_modelled_device_does_not_drift_and_is_never_called_certain(tmp_path: Path, workload: Workload) -> None:
    confidence = recommend(tmp_path, workload).confidence
    assert confidence is not None
    assert (confidence.level, confidence.drift_pct, confidence.num_rounds) == ("medium", 0.0, 1)
    assert "modelled" in confidence.statement


def test_on_a_real_device_without_a_model_load_and_prompts_are_not_known(tmp_path: Path, workload: Workload) -> None:
    config = TuneConfig(
        max_num_seqs=8, max_model_len=4096, tbt_slo="31ms", num_trials=12, max_budget=2048, indifference="0%"
    )
    edges = range(128, 2049, 128)
    recommendation = tune(config, executor=StairDevice(), workload=workload, edges=edges, run_dir=tmp_path / "run")
    by_change = {one.change: one for one in recommendation.sensitivity}
    # 24.8 ms hold 5 tiles and 4 ms of base, which are the fastest on these prompts.
    assert by_change["SLO -20%"].statement == ("SLO -20%: 640 stays the choice, by the trials that ran to their end.")
    assert by_change["prompts +20%"].token_budget is None
    assert recommendation.confidence is not None
    assert recommendation.confidence.drift_pct == pytest.approx(0.0)
    assert recommendation.confidence.level == "high"


def test_a_machine_that_slows_down_is_found_out(tmp_path: Path, workload: Workload) -> None:
    device = StairDevice()

    def fault(config: object) -> float | None:
        device.base_s = 0.004 * (1.0 + 0.02 * len(device.runs))
        return None

    device.fault = fault
    config = TuneConfig(max_num_seqs=8, max_model_len=4096, tbt_slo="60ms", num_trials=12, max_budget=2048)
    edges = range(128, 2049, 128)
    confidence = tune(config, executor=device, workload=workload, edges=edges, run_dir=tmp_path / "run").confidence
    assert confidence is not None
    assert confidence.drift_pct is not None
    assert confidence.drift_pct < -5.0
    assert confidence.level != "high"
    assert "the device's drift" in confidence.statement


def test_limits_scale_together_and_the_queue_stays(workload: Workload) -> None:
    slo = SLO(name="a", tbt_s=0.1, ttft=Limit(limit_s=2.0, quantile=0.9), e2e=Limit(limit_s=30.0))
    scaled = scale_slo(slo, 0.8)
    assert scaled.ttft is not None
    assert scaled.e2e is not None
    assert (scaled.tbt_s, scaled.ttft.limit_s, scaled.e2e.limit_s) == pytest.approx((0.08, 1.6, 24.0))
    assert (scaled.ttft.quantile, scaled.max_scheduling_delay_s) == (0.9, 2.0)
    longer = scale_lengths(workload, 1100, prompts=1.2)
    assert [r.prompt_tokens for r in longer.requests][:2] == [360, 396]
    assert max(r.total_tokens for r in longer.requests) == 1100
    doubled = scale_lengths(workload, 4096, outputs=2.0)
    assert [r.output_tokens for r in doubled.requests] == [2 * r.output_tokens for r in workload.requests]
    assert [r.prompt_tokens for r in doubled.requests] == [r.prompt_tokens for r in workload.requests]


def test_what_would_change_it_is_asked_with_the_objective_that_chose(tmp_path: Path, workload: Workload) -> None:
    """Under capacity the load is asked too: twice the traffic of a device at three quarters is more than it serves."""
    many = replace(workload, requests=workload.requests * 40)
    timed = assign_arrivals(many, "poisson", qps=40.0, seed=0)
    recommendation = recommend(tmp_path, timed)
    assert recommendation.objective == "capacity"
    assert recommendation.capacity_rps is not None
    assert recommendation.own_rate_rps is not None
    by_change = {one.change: one for one in recommendation.sensitivity}
    assert "load doubled" in by_change
    served = recommendation.capacity_rps / recommendation.own_rate_rps
    for word, factor in (("halved", 0.5), ("doubled", 2.0)):
        expected = recommendation.token_budget if served > factor else None
        assert by_change[f"load {word}"].token_budget == expected, (word, served)


def test_on_a_long_workload_load_and_prompts_are_tried_on_its_beginning(
    tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth longer prompts alter nothing where every budget that holds the SLO holds it still."""
    monkeypatch.setattr(sensitivity, "SAMPLE_REQUESTS", 10)
    by_change = {one.change: one for one in recommend(tmp_path, workload).sensitivity}
    assert by_change["prompts +20%"].statement.endswith(", by the first 10 requests.")
    assert by_change["SLO -20%"].statement == "SLO -20%: 128 instead of 192, which breaks the SLO then."


def test_a_change_leads_beyond_the_neighbours_to_a_peak_of_the_staircase(
    tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no neighbour is asked at all, a doubled SLO still finds the larger budgets at which a token costs least."""
    monkeypatch.setattr(sensitivity, "WINDOW", 0)
    recommendation = recommend(tmp_path, workload)
    found = {one.change: one.token_budget for one in recommendation.sensitivity}["SLO doubled"]
    assert recommendation.token_budget == 192
    assert found is not None
    assert found > 192
