"""Under one seed a modelled study gives one recommendation, wherever it is cut off and however often."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_device import EDGES, modelled
from tilebudget.autotune import Recommendation, TuneConfig, tune
from tilebudget.autotune.study import parallel
from tilebudget.engine import BlockManager, EngineConfig, Workload

CONFIG = TuneConfig(
    device="made_up", max_num_seqs=8, max_model_len=4096, tbt_slo="4.1ms", num_trials=12, max_budget=1024
)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are counted, so all of them have to be in this process."""
    monkeypatch.setattr(parallel, "num_cores", lambda: 1)


def recommend(folder: Path, workload: Workload, cut_at: int | None = None) -> Recommendation:
    """The recommendation of a run folder; cut off by Ctrl-C when the ``cut_at``-th engine run begins."""
    executor = modelled()
    start, runs = executor.start, []

    def start_or_stop(config: EngineConfig, kv: BlockManager) -> None:
        runs.append(config.token_budget)
        if len(runs) == cut_at:
            raise KeyboardInterrupt
        start(config, kv)

    executor.start = start_or_stop  # type: ignore[method-assign]
    return tune(
        CONFIG, executor=executor, workload=workload, edges=EDGES, run_dir=folder, num_workers=1, command="test"
    )


def comparable(recommendation: Recommendation) -> dict[str, object]:
    return {name: value for name, value in recommendation.to_json().items() if name != "created_at"}


def test_cut_off_anywhere_the_study_ends_the_same(tmp_path: Path, workload: Workload) -> None:
    """In the beginning of the search, later in it, among the repeats, and in what is asked afterwards."""
    whole = comparable(recommend(tmp_path / "whole", workload))
    assert comparable(recommend(tmp_path / "again", workload)) == whole
    for cut_at in (3, 9, 13, 15, 22):
        folder = tmp_path / f"cut-{cut_at}"
        with pytest.raises(KeyboardInterrupt):
            recommend(folder, workload, cut_at)
        assert comparable(recommend(folder, workload)) == whole


def test_cut_off_again_and_again_it_still_ends_the_same(tmp_path: Path, workload: Workload) -> None:
    whole = comparable(recommend(tmp_path / "whole", workload))
    for cut_at in (5, 3, 4):
        with pytest.raises(KeyboardInterrupt):
            recommend(tmp_path / "cut", workload, cut_at)
    assert comparable(recommend(tmp_path / "cut", workload)) == whole
