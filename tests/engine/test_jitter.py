"""Iterations scatter around the table as those of real runs did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost_device import CostDevice
from tilebudget.engine import Engine, EngineConfig, compute_metrics, preset_workload
from tilebudget.engine.model.config import PRESETS
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.engine.modelled.jitter import Jitter, JitteredExecutor
from tilebudget.engine.profiling.fit import TimedIteration, predict_runs
from tilebudget.engine.profiling.profile import Profile, measure_profile, modelled_as
from tilebudget.kernels.latency.sweep import FloatArray, IntArray
from tilebudget.kernels.latency.table import IterationShape

MODEL = PRESETS["tiny-llama"]
LIMITS = EngineConfig(token_budget=1024, max_num_seqs=16, max_model_len=1024)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return measure_profile(CostDevice(), MODEL, LIMITS, time_limit_s=30)


def paused(
    profile: Profile, pause_ms: float, share: float, slow: float = 1.0
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Iterations of 1 to 600 tokens in two runs, of which a share was held up, the second run's ``slow`` times longer:
    predicted, measured, and the run's number."""
    random = np.random.default_rng(1)
    runs = []
    for number, tokens in enumerate(random.integers(1, 600, 4000).tolist()):
        shape = IterationShape(chunks=((tokens, 0),))
        held_ms = pause_ms if random.random() < share else 0.0
        duration_ms = profile.table.iteration(shape).latency_ms + held_ms
        run = number % 2
        runs.append(TimedIteration(shape=shape, duration_ms=duration_ms * (slow if run else 1.0), run=run))
    return predict_runs(profile.table, runs)


def test_a_pause_is_much_to_a_short_iteration_and_little_to_a_long_one(profile: Profile) -> None:
    jitter = Jitter.of(*paused(profile, pause_ms=10.0, share=0.05))
    assert jitter is not None
    level = float(np.median(jitter.ratios))
    assert level < 1.0 < jitter.ratios.mean()
    assert np.median(jitter.ratios, axis=1).tolist() == pytest.approx([level] * len(jitter.ratios), rel=0.01)
    tails = np.quantile(jitter.ratios, 0.97, axis=1)
    assert (np.diff(tails) < 0).all()
    assert tails[0] > 4.0
    assert tails[-1] < 2.0


def test_a_run_in_a_slow_minute_is_no_scatter(profile: Profile) -> None:
    steady, slow = (Jitter.of(*paused(profile, pause_ms=10.0, share=0.05, slow=slow)) for slow in (1.0, 1.5))
    assert steady is not None
    assert slow is not None
    assert slow.ratios == pytest.approx(steady.ratios)


def test_runs_get_the_tail_and_the_same_one_every_time(profile: Profile) -> None:
    jitter = Jitter.of(*paused(profile, pause_ms=10.0, share=0.05))
    assert jitter is not None
    workload = preset_workload("azure-conv", num_requests=24, seed=3, max_model_len=1024)
    config = replace(LIMITS, token_budget=64)
    plain = ModelledExecutor(profile.table, MODEL)
    without = compute_metrics(Engine(plain).run(workload, config))
    first, second = (compute_metrics(Engine(JitteredExecutor(plain, jitter)).run(workload, config)) for _ in range(2))
    assert first == replace(second, tbt_gaps_s=first.tbt_gaps_s)
    assert first.tbt_gaps_s.tolist() == second.tbt_gaps_s.tolist()
    assert first.busy_s == pytest.approx(without.busy_s, rel=0.1)  # the table's level holds the pauses already
    assert first.tbt.p50 == pytest.approx((without.tbt.p50 or 0.0) * float(np.median(jitter.ratios)), rel=0.01)
    assert first.tbt.p99 == pytest.approx((first.tbt.p50 or 0.0) + 0.010, rel=0.25)
    other = compute_metrics(Engine(JitteredExecutor(plain, jitter, seed=1)).run(workload, config))
    assert other.busy_s != first.busy_s


def test_a_profile_without_runs_has_no_jitter_to_model(profile: Profile) -> None:
    assert profile.jitter is None
    assert isinstance(modelled_as(profile, MODEL), ModelledExecutor)
    predicted_ms, measured_ms, runs = paused(profile, 1.0, 0.5)
    assert Jitter.of(predicted_ms[:99], measured_ms[:99], runs[:99]) is None
