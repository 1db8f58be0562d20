from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import optuna
import pytest
from stair_device import StairDevice
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.study.space import SearchSpace
from tilebudget.autotune.study.stored_study import STUDY_NAME, StoredStudy
from tilebudget.autotune.study.study import BudgetStudy
from tilebudget.autotune.study.trial import TrialRow, TrialRunner
from tilebudget.engine import SLO, Engine, EngineConfig, Workload

SPACE = SearchSpace(range(128, 2049, 128), min_budget=128, max_budget=2048, whole_prompt=1000)


def make_study(
    folder: Path,
    device: StairDevice,
    workload: Workload,
    *,
    tbt_s: float = 0.03,
    seed: int = 0,
    space: SearchSpace = SPACE,
) -> BudgetStudy:
    config = EngineConfig(token_budget=128, max_num_seqs=8, max_model_len=4096)
    runner = TrialRunner(Engine(device), workload, config, SLO(name="test", tbt_s=tbt_s))
    stored = StoredStudy(folder / "study.journal", STUDY_NAME, TuneConfig(seed=seed).identity())
    queue = stored.queue("bubble_fraction_4")
    return BudgetStudy(space, runner, queue, variance_metric="bubble_fraction_4", seed=seed)


def ignore(row: TrialRow, done: int, planned: int) -> None:
    """A progress sink."""


def test_search_runs_every_budget_at_most_once_and_finds_the_feasible_best(tmp_path: Path, workload: Workload) -> None:
    # 30 ms hold 6 tiles of 4 ms and 4 ms of base: 768 tokens is the largest aligned budget within the SLO.
    rows = make_study(tmp_path, StairDevice(), workload).search(20, ignore)
    budgets = [row.token_budget for row in rows]
    assert len(rows) == 20
    assert len(set(budgets)) == 20
    feasible = {row.token_budget for row in rows if row.feasible}
    assert max(feasible) == 768
    assert {row.token_budget for row in rows if row.state == "pruned"} <= {b for b in budgets if b > 768}


@pytest.mark.parametrize("tbt_s", [0.009, 0.021, 0.03, 0.045, 0.2])
def test_the_search_finds_what_an_exhaustive_one_finds(tmp_path: Path, workload: Workload, tbt_s: float) -> None:
    study = make_study(tmp_path, StairDevice(), workload, tbt_s=tbt_s)
    every = [study.runner.run(candidate, run="all", role="search")[0] for candidate in SPACE.candidates]
    best = max(row.metric("total_tokens_per_s") for row in every if row.feasible)
    found = max(row.metric("total_tokens_per_s") for row in study.search(16, ignore) if row.feasible)
    assert found >= 0.99 * best


def test_the_search_ends_when_the_space_is_exhausted(tmp_path: Path, workload: Workload) -> None:
    space = SearchSpace([128, 256], min_budget=128, max_budget=256)
    rows = make_study(tmp_path, StairDevice(), workload, space=space).search(50, ignore)
    assert sorted(row.token_budget for row in rows) == [128, 129, 192, 256]


def test_failed_trials_stay_visible_and_are_never_tried_again(tmp_path: Path, workload: Workload) -> None:
    """Case 10: one trial raises, one returns NaN, one runs out of memory; the study goes on."""
    faults: dict[int, Exception | float] = {
        3: RuntimeError("kernel launch failed"),
        4: float("nan"),
        5: MemoryError("3 GiB"),
    }
    stair = StairDevice()

    def fault(config: EngineConfig) -> float | None:
        fault = faults.get(len(stair.runs))
        if isinstance(fault, Exception):
            raise fault
        return fault

    stair.fault = fault
    rows = make_study(tmp_path, stair, workload, tbt_s=1.0).search(14, ignore)
    assert [row.state for row in rows[2:5]] == ["failed"] * 3
    assert rows[2].reason == "RuntimeError: kernel launch failed"
    assert "nan" in str(rows[3].reason)
    assert rows[4].reason == "MemoryError: 3 GiB"
    assert all(not row.metrics and row.feasible is None for row in rows[2:5])
    assert len({row.token_budget for row in rows}) == 14
    assert [row.state for row in rows[5:]] == ["complete"] * 9


def test_pruned_trials_really_break_the_slo(tmp_path: Path, workload: Workload) -> None:
    study = make_study(tmp_path, StairDevice(), workload)
    pruned = [row for row in study.search(20, ignore) if row.state == "pruned"]
    assert pruned
    for row in pruned:
        candidate = SPACE.at(*(SPACE.params_of(row.token_budget or 0) or (0, "")))
        assert candidate is not None
        whole, _ = study.runner.run(candidate, run="again", role="repeat", prune=False)
        assert whole.feasible is False


def test_an_interrupted_study_resumes_where_it_was(tmp_path: Path, workload: Workload) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    expected = {row.token_budget for row in make_study(tmp_path / "a", StairDevice(), workload).search(12, ignore)}
    stair = StairDevice()

    def interrupt(config: EngineConfig) -> float | None:
        if len(stair.runs) == 8:
            raise KeyboardInterrupt
        return None

    stair.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        make_study(tmp_path / "b", stair, workload).search(12, ignore)
    resumed = make_study(tmp_path / "b", StairDevice(), workload)
    assert resumed.num_resumed == 7
    before = [asdict(row) for row in resumed.rows()]
    rows = resumed.search(12, ignore)
    assert [asdict(row) for row in rows[:7]] == before
    assert len(rows) == 12
    # The trial that was cut off is tried again, at the same budget.
    assert rows[7].token_budget == stair.runs[-1]
    assert len({row.token_budget for row in rows} & expected) >= 8


def test_resuming_with_other_settings_is_refused(tmp_path: Path, workload: Workload) -> None:
    make_study(tmp_path, StairDevice(), workload).search(1, ignore)
    with pytest.raises(ValueError, match=r"seed=1: the study to resume was started with seed=0"):
        make_study(tmp_path, StairDevice(), workload, seed=1)


def test_the_constraint_reaches_the_storage(tmp_path: Path, workload: Workload) -> None:
    study = make_study(tmp_path, StairDevice(), workload)
    study.search(8, ignore)
    by_budget = {row.token_budget: row for row in study.rows()}
    trials = study.queue.study.get_trials(deepcopy=False)
    for trial in trials:
        candidate = SPACE.at(trial.params["edge_index"], trial.params["kind"])
        assert candidate is not None
        row = by_budget[candidate.token_budget]
        assert (max(trial.constraints.values()) > 0) == (row.feasible is False)
    assert any(trial.state == optuna.trial.TrialState.PRUNED for trial in trials)
