"""Studies of a pipeline: its own bubbles are the second objective, and the run folder tells where they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_up_table import MODEL, make_table
from tilebudget.autotune import TuneConfig, tune
from tilebudget.autotune.devices import make_executor
from tilebudget.autotune.problem import load_workload, read_device, state_problem
from tilebudget.engine import BUBBLE_CAUSES, Engine, EngineConfig, Workload, compute_metrics
from tilebudget.engine.distributed.partition import Partition
from tilebudget.engine.model.config import ModelConfig
from tilebudget.engine.modelled.pipeline import Link, ModelledPipeline
from tilebudget.kernels.latency.file import save_table

SETTINGS = {"max_num_seqs": 8, "max_model_len": 2048, "max_budget": 512, "tbt_slo": "relaxed", "num_trials": 8}


def test_a_study_of_a_pipeline(tmp_path: Path, workload: Workload) -> None:
    partition = Partition(config=MODEL, tensor_parallel=1, stage_layers=(1, 2))
    pipeline = ModelledPipeline(make_table(), partition, [Link(bytes_per_s=1e9)])
    config = TuneConfig(pipeline_parallel=2, **SETTINGS)  # type: ignore[arg-type]
    recommendation = tune(
        config, executor=pipeline, workload=workload, edges=range(64, 513, 64), run_dir=tmp_path / "run"
    )
    assert recommendation.status == "feasible"
    assert recommendation.key.pipeline_parallel == 2
    assert recommendation.vllm_args()["pipeline_parallel_size"] == 2
    trials = pd.read_parquet(tmp_path / "run" / "trials.parquet")
    complete = trials[trials["state"] == "complete"]
    assert (complete["num_stages"] == 2).all()
    causes = complete[[f"bubble_{cause}" for cause in BUBBLE_CAUSES]].sum(axis=1)
    np.testing.assert_allclose(causes, complete["bubble_fraction"])
    mine = complete[(complete["role"] == "repeat") & (complete["token_budget"] == recommendation.token_budget)]
    assert recommendation.expected["bubble_fraction"].value == pytest.approx(float(mine["bubble_fraction"].iloc[0]))
    # Alternatives have the same figure as the answer, for the reader to compare.
    assert (recommendation.bubble_metric, recommendation.bubble_stages) == ("bubble_fraction", 2)
    repeats = complete[complete["role"] == "repeat"].groupby("token_budget")["bubble_fraction"].median()
    shown = {one.token_budget: one.bubble_fraction for one in recommendation.alternatives}
    assert shown
    assert all(shown[budget] == pytest.approx(value) for budget, value in repeats.items() if budget in shown)
    # Throughput is that of the pipeline: tokens over the span, which is less than the work of its stages.
    config_of = EngineConfig(token_budget=recommendation.token_budget, max_num_seqs=8, max_model_len=2048)
    metrics = compute_metrics(Engine(pipeline).run(workload, config_of))
    assert recommendation.expected["total_tokens_per_s"].value == pytest.approx(metrics.total_tokens_per_s)
    iterations = pd.read_parquet(tmp_path / "run" / "iterations.parquet")
    assert iterations["stage_start_s"].map(len).eq(2).all()
    assert (tmp_path / "run" / "report.html").stat().st_size > 0


def test_the_bubbles_of_the_pipeline_are_the_second_objective() -> None:
    """With one stage there are none to minimise but those of a pipeline that is not there."""
    for stage_layers, expected in (((1, 1, 1), "bubble_fraction"), ((3,), "bubble_fraction_8")):
        partition = Partition(config=MODEL, tensor_parallel=1, stage_layers=stage_layers)
        executor = ModelledPipeline(make_table(), partition, [Link(bytes_per_s=1e9)] * (len(stage_layers) - 1))
        config = TuneConfig(workload="fixed:100:5", pipeline_stages=8, **SETTINGS)  # type: ignore[arg-type]
        load = load_workload(config)
        problem = state_problem(config, executor, load, read_device(config, executor, load, edges=(64, 128)))
        assert problem.variance_metric == expected


def test_a_profile_makes_a_pipeline(tmp_path: Path) -> None:
    tiny = ModelConfig.preset("tiny-llama").shape
    save_table(replace(make_table(), model=tiny), tmp_path / "device.json")
    config = TuneConfig(
        model="tiny-llama", device=str(tmp_path / "device.json"), pipeline_parallel=2, pipeline_split="1,3"
    )
    executor = make_executor(config)
    assert isinstance(executor, ModelledPipeline)
    assert executor.partition.stage_layers == (1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel": 2, "pipeline_split": "1,2,1"}, "pipeline_split='1,2,1': must name the layers of"),
        ({"pipeline_parallel": 2, "pipeline_split": "1,x"}, "pipeline_split='1,x': must be whole numbers"),
        ({"pipeline_parallel": 0}, "pipeline_parallel=0"),
        ({"pipeline_link": 100.0}, "pipeline_link=100.0: must be above 0 Gbit/s, between the stages of a modelled"),
        ({"device": "h200_sxm", "pipeline_link": 0.0}, "pipeline_link=0.0: must be above 0"),
    ],
)
def test_settings_that_disagree(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuneConfig(**settings)  # type: ignore[arg-type]


def test_a_system_of_the_tables_makes_a_pipeline() -> None:
    pytest.importorskip("aiconfigurator_core")
    config = TuneConfig(
        model="llama-3.1-8b",
        device="h200_sxm",
        tensor_parallel=4,
        pipeline_parallel=4,
        pipeline_split="10,6,6,10",
        kernels="vllm",
    )
    described = make_executor(config).describe()
    assert described["stage_layers"] == "10,6,6,10"
    within, between = str(described["stage_links_gb_per_s"]).split(",")[:2]
    assert float(within) > float(between)  # two stages of four fill a node of eight
