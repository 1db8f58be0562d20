from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from cost_device import CostDevice
from tilebudget.autotune import TuneConfig, tune
from tilebudget.autotune.devices import list_devices, make_executor
from tilebudget.autotune.problem import Problem, read_device, state_problem
from tilebudget.autotune.profiles import default_profile_path, profile_device
from tilebudget.autotune.run_folder.run_folder import RunFolder
from tilebudget.autotune.scoring.prediction import Prediction
from tilebudget.autotune.study.sampler import SHORT_LADDER_RUNGS
from tilebudget.autotune.study.stored_study import STUDY_NAME, StoredStudy
from tilebudget.autotune.study.study import BudgetStudy
from tilebudget.autotune.study.trial import TrialRow, TrialRunner
from tilebudget.autotune.study.warm_start import NUM_SUGGESTIONS, suggest, warm_start
from tilebudget.engine import Workload
from tilebudget.engine.server.engine import engine_on
from tilebudget.kernels.latency.file import load_table

CONFIG = TuneConfig(max_num_seqs=8, max_model_len=1200, tbt_slo="15ms", num_trials=8, max_budget=1024)
EDGES = range(128, 1025, 128)


def ignore(row: TrialRow, done: int, planned: int) -> None:
    """A progress sink."""


def state(workload: Workload, device: CostDevice | None = None) -> Problem:
    executor = device or CostDevice()
    return state_problem(CONFIG, executor, workload, read_device(CONFIG, executor, workload, EDGES))


def runner(problem: Problem, predictions: dict[int, Prediction]) -> TrialRunner:
    return TrialRunner(engine_on(problem.executor), problem.workload, problem.engine_config, problem.slo, predictions)


def test_every_budget_is_predicted_as_it_then_runs(tmp_path: Path, workload: Workload) -> None:
    problem = state(workload)
    warm = warm_start(problem, RunFolder(tmp_path), resumed=False)
    assert set(warm.predictions) == {candidate.token_budget for candidate in problem.space.candidates}
    trials = runner(problem, dict(warm.predictions))
    for candidate in problem.space.candidates:
        row, _ = trials.run(candidate, run="trial", role="search")
        assert row.predicted_tbt_p99_ms == pytest.approx(row.metric("tbt_p99_ms"), rel=0.02)
        assert row.predicted_total_tokens_per_s == pytest.approx(row.metric("total_tokens_per_s"), rel=0.01)
        assert warm.predictions[candidate.token_budget].feasible == row.feasible
    other, _ = trials.run(problem.space.candidates[0], run="policy-orca", role="policy", policy="orca")
    assert other.predicted_tbt_p99_ms is None
    assert "predicted_tbt_p99_ms" not in other.to_row()


def test_the_study_begins_with_the_best_predictions_and_a_shorter_ladder(tmp_path: Path, workload: Workload) -> None:
    problem = state(workload)
    warm = warm_start(problem, RunFolder(tmp_path), resumed=False)
    feasible = [one for one in warm.predictions.values() if one.feasible]
    assert 0 < len(feasible) < len(warm.predictions)
    assert warm.suggestions[0] == max(feasible, key=lambda one: one.total_tokens_per_s).token_budget
    study = BudgetStudy(
        problem.space,
        runner(problem, dict(warm.predictions)),
        StoredStudy(tmp_path / "study.journal", STUDY_NAME, CONFIG.identity()).queue("bubble_fraction_4"),
        variance_metric="bubble_fraction_4",
        seed=0,
        suggestions=warm.suggestions,
    )
    rows = study.search(NUM_SUGGESTIONS + SHORT_LADDER_RUNGS, ignore)
    assert tuple(row.token_budget for row in rows[:NUM_SUGGESTIONS]) == warm.suggestions
    assert {128, 1024} <= {row.token_budget for row in rows}
    assert all(row.predicted_total_tokens_per_s for row in study.rows())


def test_a_resumed_study_keeps_its_predictions(tmp_path: Path, workload: Workload) -> None:
    folder = RunFolder(tmp_path)
    first = warm_start(state(workload), folder, resumed=False)
    again = warm_start(state(workload, CostDevice(token=1.0)), folder, resumed=True)
    assert (again.predictions, again.suggestions) == (first.predictions, first.suggestions)
    assert load_table(tmp_path / "latency.json").device == "cost"
    (tmp_path / "latency.json").write_text("{}")
    with pytest.raises(ValueError, match=r"latency\.json: damaged \(KeyError"):
        warm_start(state(workload), folder, resumed=True)
    (tmp_path / "latency.json").unlink()
    assert warm_start(state(workload), folder, resumed=True).predictions == {}


def test_a_profile_that_fails_leaves_the_study_without_predictions(
    tmp_path: Path, workload: Workload, caplog: pytest.LogCaptureFixture
) -> None:
    problem = state(workload)

    class Broken(CostDevice):
        def execute(self, batch):  # type: ignore[no-untyped-def]
            raise RuntimeError("the device fell off")

    warm = warm_start(replace(problem, executor=Broken()), RunFolder(tmp_path), resumed=False)
    assert warm.predictions == {}
    assert warm.suggestions == ()
    assert "the profile failed (RuntimeError: the device fell off)" in warm.note
    assert "the device fell off" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_enough_feasible_budgets_the_nearest_to_the_slo_come_next() -> None:
    def one(budget: int, tbt_ms: float, rate: float, feasible: bool) -> Prediction:
        return Prediction(
            token_budget=budget, tbt_p99_ms=tbt_ms, total_tokens_per_s=rate, feasible=feasible, score=rate
        )

    found = [one(512, 40.0, 900.0, False), one(64, 9.0, 500.0, True), one(256, 25.0, 800.0, False)]
    assert suggest([*found, one(1024, 80.0, 950.0, False)]) == (64, 256, 512)


def test_tune_on_the_device_here_stores_predictions_beside_what_it_measured(tmp_path: Path) -> None:
    config = TuneConfig(
        device="cpu",
        workload="fixed:40:6",
        num_requests=4,
        max_num_seqs=4,
        max_model_len=64,
        num_trials=3,
        num_contenders=1,
        repeats=2,
        num_threads=1,
        tbt_slo="10s",
    )
    tune(config, edges=[16, 32, 64], run_dir=tmp_path / "run")
    trials = pd.read_parquet(tmp_path / "run" / "trials.parquet")
    measured = trials[trials["role"] != "policy"]
    assert (measured[["predicted_tbt_p99_ms", "predicted_total_tokens_per_s"]] > 0).all(axis=None)
    assert load_table(tmp_path / "run" / "latency.json").model.name == "tiny-llama"
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "budgets predicted in" in environment["warm_start"]


def test_a_saved_profile_is_a_device(tmp_path: Path, store: Path) -> None:
    config = TuneConfig(max_num_seqs=4, max_model_len=64)
    device = CostDevice()
    out = default_profile_path("tiny-llama", device)
    assert out == store / "profiles" / "tiny-llama--cost--fp32.json"
    profile_device(device, config, out=out, time_limit_s=10, max_tokens=64)
    listed = {info.name: info for info in list_devices()}[str(out)]
    assert (listed.source, listed.description) == ("measured", "profile of tiny-llama fp32 on cost")

    profiled = TuneConfig(
        device=str(out), max_num_seqs=4, max_model_len=64, workload="fixed:40:6", tbt_slo="10s", num_trials=3
    )
    assert profiled.modelled
    assert profiled.num_requests == TuneConfig().num_requests
    assert make_executor(profiled).describe()["kind"] == "modelled"
    recommendation = tune(replace(profiled, num_requests=4), run_dir=tmp_path / "run")
    assert recommendation.status == "feasible"
    assert recommendation.key.device == "cost"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "llama-2-7b"}, r"model='llama-2-7b': the profile .* is of tiny-llama"),
        ({"dtype": "bf16"}, r"dtype='bf16': the profile .* was measured with fp32"),
        ({"kernels": "vllm"}, "neither kernels nor tensor_parallel .*can be set"),
        ({"tensor_parallel": 2}, "neither kernels nor tensor_parallel .*can be set"),
        ({"device": "nowhere.json"}, r"device='nowhere\.json': there is no such profile"),
    ],
)
def test_a_profile_is_of_one_model_and_dtype(tmp_path: Path, settings: dict[str, str | int], message: str) -> None:
    out = tmp_path / "p.json"
    sizes = TuneConfig(max_num_seqs=2, max_model_len=16)
    profile_device(CostDevice(), sizes, out=out, time_limit_s=1e-9, max_tokens=16)
    with pytest.raises(ValueError, match=message):
        make_executor(TuneConfig(**{"device": str(out), **settings}))  # type: ignore[arg-type]
