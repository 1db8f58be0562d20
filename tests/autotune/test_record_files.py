"""Records written small are the records: times to the nanosecond, counts exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from fake_pipeline import FakePipeline
from stair_device import StairDevice
from tilebudget.autotune.run_folder.records import (
    ITERATIONS_FILE,
    REQUESTS_FILE,
    iteration_table,
    request_table,
    write_tables,
)
from tilebudget.autotune.study.trial import TrialRow
from tilebudget.engine import (
    BUBBLE_CAUSES,
    Engine,
    EngineConfig,
    Request,
    RunRecord,
    Workload,
    find_bubbles,
)

ROW = TrialRow(
    run="policy-sarathi", role="policy", state="complete", reason=None, token_budget=256, kind="aligned",
    edge_tokens=256, policy="sarathi", feasible=True, started_at="2026-01-01T00:00:00+00:00", elapsed_s=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def record() -> RunRecord:
    requests = tuple(
        Request(arrival_s=0.05 * i, prompt_tokens=100 + 37 * i, output_tokens=1 + 3 * i) for i in range(20)
    )
    config = EngineConfig(token_budget=256, max_num_seqs=16, max_model_len=2048, block_size=16, num_kv_blocks=4096)
    return Engine(StairDevice()).run(Workload(name="w", requests=requests), config)


def written(record: RunRecord, path: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    write_tables([iteration_table(ROW, record)], ITERATIONS_FILE, path / ITERATIONS_FILE)
    write_tables([request_table(ROW, record)], REQUESTS_FILE, path / REQUESTS_FILE)
    return pd.read_parquet(path / ITERATIONS_FILE), pd.read_parquet(path / REQUESTS_FILE)


def test_tokens_are_the_ends_of_their_iterations(record: RunRecord, tmp_path: Path) -> None:
    iterations, requests = written(record, tmp_path)
    ends_s = (iterations["start_s"] + iterations["duration_s"]).to_numpy()
    assert requests["token_s"].isna().all()
    for index, numbers in enumerate(requests["token_iteration"]):
        expected = record.token_s[record.token_request == index]
        np.testing.assert_allclose(ends_s[numbers], expected, rtol=0, atol=1e-9)
    for name in ("num_decodes", "num_prefill_tokens", "kv_blocks_used"):
        np.testing.assert_array_equal(iterations[name], getattr(record.iterations, name))
    assert list(requests["status"]) == list(record.requests.status)


def test_tokens_that_came_at_other_times_are_kept_as_times(record: RunRecord, tmp_path: Path) -> None:
    late = replace(record, token_s=record.token_s + 1e-4)
    _, requests = written(late, tmp_path)
    assert requests["token_iteration"].isna().all()
    for index, times_s in enumerate(requests["token_s"]):
        np.testing.assert_array_equal(times_s, late.token_s[late.token_request == index])


def test_each_run_is_a_row_group(record: RunRecord, tmp_path: Path) -> None:
    tables = [request_table(replace(ROW, run=run), record) for run in ("a", "b")]
    write_tables(tables, REQUESTS_FILE, tmp_path / REQUESTS_FILE)
    file = pq.ParquetFile(tmp_path / REQUESTS_FILE)
    assert [set(file.read_row_group(group)["run"].to_pylist()) for group in range(2)] == [{"a"}, {"b"}]


def test_a_pipeline_keeps_its_stages_and_bubbles(tmp_path: Path) -> None:
    requests = tuple(Request(arrival_s=0.0, prompt_tokens=30 + i, output_tokens=5) for i in range(6))
    executor = FakePipeline(2, lambda _, batch: [0.1 + 0.01 * batch.num_tokens] * 2)
    config = EngineConfig(token_budget=32, max_num_seqs=4)
    pipelined = Engine(executor).run(Workload(name="w", requests=requests), config)
    iterations, written_requests = written(pipelined, tmp_path)
    for name in ("stage_start_s", "stage_end_s"):
        np.testing.assert_array_equal(np.stack(iterations[name].tolist()), getattr(pipelined.iterations, name))
    idle_s = iterations[[f"bubble_{cause}_s" for cause in BUBBLE_CAUSES]]
    np.testing.assert_allclose(idle_s, find_bubbles(pipelined.iterations).idle_s, rtol=1e-6)
    assert written_requests["token_s"].isna().all()


def test_without_a_pipeline_there_are_none(record: RunRecord, tmp_path: Path) -> None:
    iterations, _ = written(record, tmp_path)
    assert iterations[["stage_start_s", "stage_end_s", "bubble_empty_slot_s"]].isna().all(axis=None)
