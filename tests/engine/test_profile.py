from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cost_device import CostDevice
from tilebudget.engine import Engine, EngineConfig, preset_workload
from tilebudget.engine.model.config import PRESETS
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.engine.profiling.fit import TimedIteration, calibrate, midmean
from tilebudget.engine.profiling.grid import ProfileGrid
from tilebudget.engine.profiling.profile import measure_profile
from tilebudget.engine.profiling.timer import loop_overhead_ms
from tilebudget.engine.torch_executor import TorchExecutor
from tilebudget.kernels.latency.file import LatencyFileError, load_table
from tilebudget.kernels.latency.table import IterationShape, LatencyTable

MODEL = PRESETS["tiny-llama"]
LIMITS = EngineConfig(token_budget=1024, max_num_seqs=16, max_model_len=1024)


def run_s(executor: object, config: EngineConfig) -> float:
    """When an engine run of a preset ends."""
    workload = preset_workload("azure-conv", num_requests=24, seed=3, max_model_len=config.max_model_len)
    iterations = Engine(executor).run(workload, config).iterations  # type: ignore[arg-type]
    return float(iterations.start_s[-1] + iterations.duration_s[-1])


@pytest.mark.parametrize("budget", [16, 100, 512, 1024])
def test_a_device_of_known_cost_is_predicted(budget: int) -> None:
    device = CostDevice()
    profile = measure_profile(device, MODEL, LIMITS, time_limit_s=30)
    assert profile.num_samples == profile.num_points == len(device.batches)
    config = replace(LIMITS, token_budget=budget)
    assert run_s(ModelledExecutor(profile.table, MODEL), config) == pytest.approx(run_s(CostDevice(), config), rel=0.01)


def test_parts_are_told_apart() -> None:
    table = measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=30).table
    # Eight chunks of 16 cost seven times 0.1 ms more than one of 128, but for their pairs.
    one = table.iteration(IterationShape(chunks=((128, 0),))).latency_ms
    eight = table.iteration(IterationShape(chunks=((16, 0),) * 8)).latency_ms
    pairs_ms = 2e-5 * (8 * 16 * 17 - 128 * 129) / 2
    assert eight - one == pytest.approx(0.7 + pairs_ms, rel=0.02)
    assert table.logits_ms([1, 16]) == pytest.approx([0.01, 0.16], rel=1e-3)
    mixed = IterationShape(chunks=((100, 300), (40, 0)), num_decodes=7, decode_kv_tokens=7 * 333, num_logits=8)
    expected = 1.0 + 0.02 * 147 + 0.2 + 2e-5 * (100 * 300 + 100 * 101 / 2 + 40 * 41 / 2) + 5e-4 * 7 * 333 + 0.08
    assert table.iteration(mixed).latency_ms == pytest.approx(expected, rel=0.01)


def test_the_coarse_grid_is_finished_however_short_the_time() -> None:
    profile = measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=1e-9)
    assert profile.num_points < measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=30).num_points
    assert run_s(ModelledExecutor(profile.table, MODEL), LIMITS) == pytest.approx(run_s(CostDevice(), LIMITS), rel=0.1)


def test_a_prefix_too_long_to_be_timed_follows_its_own_chunk() -> None:
    """One token takes another kernel, here forty times as dear by prefix: its slope says nothing of longer chunks."""

    class OtherKernel(CostDevice):
        def execute(self, batch):  # type: ignore[no-untyped-def]
            result = super().execute(batch)
            alone = sum(
                s.num_computed for s, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True) if tokens == 1
            )
            return replace(result, model_s=result.model_s + 40 * 2e-8 * alone)

    table = measure_profile(OtherKernel(), MODEL, LIMITS, time_limit_s=30).table
    timed = IterationShape(chunks=((128, 890),))
    expected = 1.0 + 0.02 * 128 + 0.1 + 2e-5 * (128 * 890 + 128 * 129 / 2)
    assert table.iteration(timed).latency_ms == pytest.approx(expected, rel=0.02)


def test_a_staircase_keeps_its_steps() -> None:
    class Stairs(CostDevice):
        def execute(self, batch):  # type: ignore[no-untyped-def]
            result = super().execute(batch)
            return replace(result, model_s=result.model_s + 4e-3 * -(-batch.num_tokens // 256))

    table = measure_profile(Stairs(token=0.0), MODEL, LIMITS, time_limit_s=30).table
    times = table.tokens_ms([256, 257, 512, 513, 768, 769])
    assert np.diff(times)[::2] == pytest.approx([4.0] * 3, rel=0.05)
    assert np.diff(times)[1::2] == pytest.approx([0.0] * 2, abs=0.2)


def test_a_profile_is_continued_from_its_file(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    coarse = measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=1e-9, out=out)
    again = CostDevice()
    fine = measure_profile(again, MODEL, LIMITS, time_limit_s=30, out=out)
    assert len(again.batches) == fine.num_points - coarse.num_points
    assert load_table(out).iteration(IterationShape(chunks=((64, 64),))) == fine.table.iteration(
        IterationShape(chunks=((64, 64),))
    )
    done = CostDevice()
    measure_profile(done, MODEL, LIMITS, time_limit_s=30, out=out)
    assert done.batches == []


def test_a_profile_of_something_else_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=1e-9, out=out)
    with pytest.raises(ValueError, match="profile with device='cost', this one has 'other'"):
        measure_profile(CostDevice(name="other"), MODEL, LIMITS, time_limit_s=1, out=out)
    with pytest.raises(ValueError, match="max_num_seqs=16, this one has 8"):
        measure_profile(CostDevice(), MODEL, replace(LIMITS, max_num_seqs=8), time_limit_s=1, out=out)
    out.write_text('{"schema": "tilebudget.latency_table/1"}')
    with pytest.raises(LatencyFileError, match=r"profile\.json cannot be read as a profile"):
        measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=1, out=out)


def test_bad_limits_name_the_rule() -> None:
    with pytest.raises(ValueError, match="time_limit_s=0: must be above 0"):
        measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=0)
    with pytest.raises(ValueError, match="pool_tokens=16: must hold one sequence of max_model_len=64"):
        ProfileGrid(max_num_seqs=1, max_model_len=64, max_tokens=64, pool_tokens=16, block_size=16)


@pytest.mark.parametrize(
    "limits",
    [
        EngineConfig(token_budget=4, max_num_seqs=1, max_model_len=4),
        EngineConfig(token_budget=33, max_num_seqs=3, max_model_len=47, block_size=5),
        EngineConfig(token_budget=4096, max_num_seqs=4, max_model_len=300),
        EngineConfig(token_budget=64, max_num_seqs=64, max_model_len=128, num_kv_blocks=40),
    ],
    ids=["one short sequence", "odd sizes", "budget beyond a sequence", "little cache"],
)
def test_odd_limits_give_a_table(limits: EngineConfig) -> None:
    table = measure_profile(CostDevice(), MODEL, limits, time_limit_s=30).table
    shape = IterationShape(chunks=((2, 1),), num_decodes=limits.max_num_seqs, decode_kv_tokens=3 * limits.max_num_seqs)
    assert np.isfinite(table.iteration(shape).latency_ms)


def test_factors_of_whole_runs_are_found() -> None:
    table = measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=30).table
    random = np.random.default_rng(0)
    runs = []
    for _ in range(400):
        decodes = int(random.integers(0, 16))
        chunk, prefix = int(random.integers(1, 400)), int(random.integers(0, 600))
        shape = IterationShape(
            chunks=((chunk, prefix),), num_decodes=decodes, decode_kv_tokens=decodes * 700, num_logits=decodes
        )
        parts = table.iteration(shape).parts_ms
        attention = parts["prefill_attention"], parts.get("decode_attention", 0.0)
        duration_ms = 0.9 * (sum(parts.values()) - sum(attention)) + 1.2 * attention[0] + 1.5 * attention[1]
        runs.append(TimedIteration(shape=shape, duration_ms=duration_ms, run=0))
    scaled, factors = calibrate(table, runs)
    assert list(factors.values()) == pytest.approx([0.9, 1.2, 1.5], rel=0.05)
    for run in runs[:20]:
        assert scaled.iteration(run.shape).latency_ms == pytest.approx(run.duration_ms, rel=0.02)
    assert calibrate(table, [])[0] is table


def test_the_middle_half_counts() -> None:
    assert midmean([5.0]) == 5.0
    assert midmean([1.0, 2.0]) == 1.5
    assert midmean([1.0, 4.0, 2.0, 900.0]) == 3.0


def test_a_slow_minute_during_one_run_is_not_taken_for_a_dear_part() -> None:
    """Prefills alone in a slow minute, decodes alone in a quick one: nothing tells their parts apart."""
    table = measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=30).table
    runs = timed(table, PREFILL, 1.3, run=0, count=50) + timed(table, DECODE, 0.8, run=1, count=200)
    factors = list(calibrate(table, runs)[1].values())
    assert max(factors) / min(factors) < 1.05
    assert 0.8 < factors[0] < 1.3


def test_the_level_is_that_of_the_median_run() -> None:
    table = measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=30).table
    runs = [
        one
        for number, slow in enumerate((1.1, 1.6, 1.1, 1.0, 1.2))
        for one in timed(table, PREFILL, slow, run=number, count=10) + timed(table, DECODE, slow, run=number, count=40)
    ]
    assert list(calibrate(table, runs)[1].values()) == pytest.approx([1.1] * 3, rel=0.02)


PREFILL = IterationShape(chunks=((512, 256),))
DECODE = IterationShape(num_decodes=16, decode_kv_tokens=16 * 700, num_logits=16)


def timed(table: LatencyTable, shape: IterationShape, slow: float, *, run: int, count: int) -> list[TimedIteration]:
    duration_ms = slow * table.iteration(shape).latency_ms
    return [TimedIteration(shape=shape, duration_ms=duration_ms, run=run)] * count


def test_the_real_executor_is_profiled_whole_runs_included(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    executor = TorchExecutor.from_model("tiny-llama", num_threads=1)
    limits = EngineConfig(token_budget=64, max_num_seqs=4, max_model_len=96)
    profile = measure_profile(executor, MODEL, limits, time_limit_s=2.0, out=out)
    assert profile.num_samples > profile.num_points
    table = load_table(out)
    assert table.origin["tool"] == "tilebudget profile"
    assert table.overhead_ms > 0
    lookup = table.iteration(IterationShape(chunks=((8, 20),), num_decodes=4, decode_kv_tokens=200, num_logits=4))
    assert lookup.source == "measured"
    assert lookup.extrapolated == ()
    stored = json.loads(out.read_text())["profile"]
    assert len(stored["samples"]) == profile.num_points
    assert len(stored["runs"]) == profile.num_run_iterations


def test_the_loop_costs_something_and_no_less_for_more_requests() -> None:
    loop_ms, request_ms = loop_overhead_ms(LIMITS)
    assert loop_ms > 0
    assert request_ms >= 0
