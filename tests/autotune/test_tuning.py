from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from stair_device import StairDevice
from tilebudget.autotune import Recommendation, TuneConfig, load_recommendation, tune
from tilebudget.autotune.problem import DeviceFacts
from tilebudget.engine import PAPER_POLICIES, EngineConfig, Request, TokenCosts, Workload

CONFIG = TuneConfig(max_num_seqs=8, max_model_len=4096, tbt_slo="30ms", num_trials=12, max_budget=2048)
EDGES = range(128, 2049, 128)


def run(
    tmp_path: Path,
    device: StairDevice,
    workload: Workload,
    name: str = "run",
    *,
    num_trials: int = CONFIG.num_trials,
    seed: int = 0,
) -> Recommendation:
    config = replace(CONFIG, num_trials=num_trials, seed=seed, indifference="0%")
    return tune(config, executor=device, workload=workload, edges=EDGES, run_dir=tmp_path / name, command="test")


def test_the_fastest_budget_within_the_slo_is_recommended(tmp_path: Path, workload: Workload) -> None:
    # One iteration costs 4 ms and 4 ms a tile of 128, so 24 ms for 640 tokens, the fastest of all on this workload.
    recommendation = run(tmp_path, StairDevice(), workload)
    assert recommendation.status == "feasible"
    assert recommendation.token_budget == 640
    assert recommendation.expected["tbt_p99_ms"].value == pytest.approx(24.0)
    assert recommendation.verdict.startswith("Set the token budget to 640. P99 TBT is 24 ms (24 to 24 over 3 repeats)")
    assert "Crossing the edge (641 instead of 640 tokens) changes throughput by -11.2%." in recommendation.verdict


def test_a_budget_over_the_slo_says_so(tmp_path: Path, workload: Workload) -> None:
    # 23 ms hold 4 tiles (20 ms); 513 tokens begin a fifth.
    config = replace(CONFIG, tbt_slo="23ms")
    recommendation = tune(config, executor=StairDevice(), workload=workload, edges=EDGES, run_dir=tmp_path / "run")
    assert recommendation.token_budget == 512
    by_budget = {entry.token_budget: entry for entry in recommendation.alternatives}
    assert by_budget[513].feasible is False
    assert by_budget[513].reason == "breaks the SLO: P99 TBT up to 24 ms"


def test_the_run_folder_holds_everything(tmp_path: Path, workload: Workload) -> None:
    recommendation = run(tmp_path, StairDevice(), workload)
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "study.journal",
        "trials.parquet",
        "iterations.parquet",
        "requests.parquet",
        "profile.json",
        "environment.json",
        "recommendation.json",
        "report.html",
    }
    assert (tmp_path / "latest").resolve() == folder.resolve()
    assert load_recommendation(folder) == load_recommendation("tiny-llama", device="stair")
    assert json.loads((folder / "recommendation.json").read_text())["token_budget"] == recommendation.token_budget
    trials = pd.read_parquet(folder / "trials.parquet")
    assert (trials["role"].value_counts()[["search", "policy"]] == [12, 4]).all()
    drawn = set(pd.read_parquet(folder / "iterations.parquet")["run"])
    assert {"policy-sarathi", "policy-orca", "policy-vllm_v0", "policy-faster_transformer"} <= drawn
    assert all(run.startswith("policy-") for run in drawn)
    requests = pd.read_parquet(folder / "requests.parquet")
    assert (requests["token_iteration"].map(len) == requests["num_generated"]).all()


def test_our_own_policy_stands_beside_those_of_the_paper(tmp_path: Path, workload: Workload) -> None:
    config = replace(CONFIG, policy="tile_aligned", num_trials=4)
    folder = tmp_path / "own"
    tune(config, executor=StairDevice(), workload=workload, edges=EDGES, run_dir=folder)
    trials = pd.read_parquet(folder / "trials.parquet")
    assert set(trials[trials["role"] == "search"]["policy"]) == {"tile_aligned"}
    assert trials[trials["role"] == "policy"]["policy"].tolist() == [*PAPER_POLICIES, "tile_aligned"]
    facts = DeviceFacts.from_json(json.loads((folder / "profile.json").read_text()))
    assert facts.token_costs == TokenCosts.from_edges(EDGES)
    assert "tile-aligned" in (folder / "report.html").read_text()


def test_nothing_feasible_is_a_result(tmp_path: Path, workload: Workload) -> None:
    recommendation = run(tmp_path, StairDevice(base_s=0.1), workload)
    assert recommendation.status == "infeasible"
    # The closest is the smallest budget: one tile.
    assert recommendation.token_budget == 128
    assert "No budget meets the SLO of 30 ms" in recommendation.verdict
    assert (tmp_path / "run" / "report.html").exists()


def test_one_token_each_is_no_data(tmp_path: Path) -> None:
    """Cases 9 and 11: no decode to protect, so the SLO has no data and chunking buys nothing."""
    prompts = Workload(
        name="one", requests=tuple(Request(arrival_s=0.0, prompt_tokens=1024, output_tokens=1) for _ in range(16))
    )
    recommendation = run(tmp_path, StairDevice(), prompts)
    assert recommendation.status == "no_data"
    assert "there is no TBT" in recommendation.verdict
    assert "Chunking buys nothing here" in recommendation.verdict
    budgets = {entry.token_budget for entry in recommendation.alternatives} | {recommendation.token_budget}
    assert 1024 + CONFIG.max_num_seqs in budgets
    assert "tbt_p99_ms" not in recommendation.expected
    assert recommendation.expected["total_tokens_per_s"].value > 0


def test_failures_do_not_end_the_study(tmp_path: Path, workload: Workload) -> None:
    """Case 10."""
    stair = StairDevice()

    def fault(config: EngineConfig) -> float | None:
        if config.token_budget == 512:
            raise MemoryError("no room")
        return float("nan") if config.token_budget == 2048 else None

    stair.fault = fault
    recommendation = run(tmp_path, stair, workload)
    assert recommendation.status == "feasible"
    assert recommendation.num_trials["failed"] == 2
    trials = pd.read_parquet(tmp_path / "run" / "trials.parquet")
    failed = trials[trials["state"] == "failed"]
    assert set(failed["reason"].str.split(":").str[0]) == {"MemoryError", "NonFiniteTimeError"}
    assert "MemoryError: no room" in (tmp_path / "run" / "report.html").read_text()


def test_when_every_run_fails_there_is_no_budget_but_a_report(tmp_path: Path, workload: Workload) -> None:
    stair = StairDevice()

    def fault(config: EngineConfig) -> float | None:
        if len(stair.runs) > 1:  # the reference decode iteration works
            raise RuntimeError("broken")
        return None

    stair.fault = fault
    recommendation = run(tmp_path, stair, workload)
    assert (recommendation.status, recommendation.token_budget) == ("no_data", None)
    assert "Every run failed" in recommendation.verdict
    assert (tmp_path / "run" / "report.html").exists()


def test_a_cold_start_is_in_no_score(tmp_path: Path, workload: Workload) -> None:
    """Case 12: the first iteration after the device is made costs a second; the order of trials does not matter."""

    def cold(stair: StairDevice) -> StairDevice:
        seen = []

        def fault(config: EngineConfig) -> float | None:
            seen.append(1)
            return 1.0 if len(seen) == 1 else None

        stair.fault = fault
        return stair

    warm = run(tmp_path, StairDevice(), workload, "warm", num_trials=20)
    first = run(tmp_path, cold(StairDevice()), workload, "first", num_trials=20)
    other_order = run(tmp_path, cold(StairDevice()), workload, "other", num_trials=20, seed=7)
    assert warm.token_budget == first.token_budget == other_order.token_budget == 640


def test_an_interrupted_tuning_gives_the_same_recommendation(tmp_path: Path, workload: Workload) -> None:
    whole = run(tmp_path, StairDevice(), workload, "whole")
    stair = StairDevice()

    def interrupt(config: EngineConfig) -> float | None:
        if len(stair.runs) == 6:
            raise KeyboardInterrupt
        return None

    stair.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stair, workload, "cut")
    assert len(pd.read_parquet(tmp_path / "cut" / "trials.parquet")) == 4
    resumed = run(tmp_path, StairDevice(), workload, "cut")
    assert (resumed.token_budget, resumed.status) == (whole.token_budget, whole.status)


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match="min_budget=4: must be at least max_num_seqs=8"):
        tune(min_budget=4)
    with pytest.raises(ValueError, match="dtype='int4': must be one of auto, fp32, bf16, fp16"):
        tune(dtype="int4")
    with pytest.raises(ValueError, match="device='tpu': must be one of auto, cpu, cuda"):
        tune(device="tpu")


def test_a_resumed_study_keeps_its_slo(tmp_path: Path, workload: Workload) -> None:
    """The reference decode iteration is measured once; a slower machine on resuming does not move the SLO."""
    config = replace(CONFIG, tbt_slo="strict")
    arguments = {"workload": workload, "edges": EDGES, "run_dir": tmp_path / "run", "command": "test"}
    first = tune(config, executor=StairDevice(), **arguments)  # type: ignore[arg-type]
    again = tune(config, executor=StairDevice(base_s=0.05), **arguments)  # type: ignore[arg-type]
    assert first.slo.tbt_p99_ms == again.slo.tbt_p99_ms == pytest.approx(5 * 8.0)
