"""Metrics against hand-computed records and an independent computation with pandas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_executor import FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import (
    SLO,
    TBT_QUANTILE_LEVELS,
    Distribution,
    Engine,
    EngineConfig,
    Iterations,
    Request,
    Requests,
    RunRecord,
    Workload,
    assign_arrivals,
    compute_metrics,
    preset_workload,
    tbt_gaps,
    tbt_quantiles_ms,
)

NAN = float("nan")


def record_of(
    token_s: Sequence[Sequence[float]],
    *,
    arrival_s: Sequence[float] | None = None,
    first_scheduled_s: Sequence[float] | None = None,
    status: Sequence[str] | None = None,
    num_tokens: Sequence[int] = (100, 128, 128, 1),
    token_budget: int | None = 128,
    saturated: bool = False,
    stopped: str | None = None,
) -> RunRecord:
    """A record with these token times by request, and four iterations of 1, 1, 2 and 4 s, the model taking half."""
    count = len(token_s)
    stamps = sorted((time, index) for index, times in enumerate(token_s) for time in times)
    tokens = np.array(num_tokens, dtype=np.int64)
    zeros = np.zeros(len(tokens), dtype=np.int64)
    durations_s = np.array([1.0, 1.0, 2.0, 4.0])[: len(tokens)]
    num_generated = np.array([len(times) for times in token_s], dtype=np.int64)
    return RunRecord(
        config=EngineConfig(token_budget=token_budget),
        num_kv_blocks=50,
        device={},
        workload="hand-made",
        saturated=saturated,
        iterations=Iterations(
            start_s=np.concatenate(([0.0], np.cumsum(durations_s)[:-1])),
            duration_s=durations_s,
            model_s=durations_s / 2,
            num_tokens=tokens,
            num_decodes=zeros,
            num_prefill_tokens=tokens,
            num_requests=zeros + 1,
            kv_blocks_used=zeros + 20,
            num_preemptions=zeros + 1,
        ),
        requests=Requests(
            arrival_s=np.array(arrival_s if arrival_s is not None else [0.0] * count),
            prompt_tokens=np.full(count, 10),
            output_tokens=np.maximum(num_generated, 1),
            first_scheduled_s=np.array(first_scheduled_s if first_scheduled_s is not None else [0.5] * count),
            num_generated=num_generated,
            num_preemptions=np.zeros(count, dtype=np.int64),
            status=tuple(status or ["finished"] * count),
        ),
        token_request=np.array([index for _, index in stamps], dtype=np.int64),
        token_s=np.array([time for time, _ in stamps]),
        overhead_s=1.0,
        stopped=stopped,
    )


def test_gaps_are_within_a_request_and_pooled() -> None:
    record = record_of([[1.0, 2.0, 4.0], [1.5, 1.75], [3.0]])
    assert tbt_gaps(record).tolist() == [1.0, 2.0, 0.25]
    tbt = compute_metrics(record).tbt
    assert tbt.count == 3
    assert tbt.mean == pytest.approx(3.25 / 3)
    assert tbt.p50 == 1.0
    assert tbt.p90 == pytest.approx(1.8)
    assert tbt.p99 == pytest.approx(1.98)
    assert tbt.max == 2.0


def test_latencies_of_a_request() -> None:
    record = record_of(
        [[2.0, 3.0, 6.0], [5.0]], arrival_s=[0.5, 1.0], first_scheduled_s=[1.0, 4.0], status=["finished", "finished"]
    )
    metrics = compute_metrics(record)
    assert (metrics.ttft.count, metrics.ttft.max, metrics.ttft.mean) == (2, 4.0, 2.75)
    assert (metrics.scheduling_delay.p50, metrics.scheduling_delay.max) == (1.75, 3.0)
    assert (metrics.e2e.count, metrics.e2e.max, metrics.e2e.mean) == (2, 5.5, 4.75)
    assert (metrics.tpot.count, metrics.tpot.mean) == (1, 2.0), "(5.5 - 1.5) / 2; one token has no TPOT"


def test_throughput_is_over_the_busy_span() -> None:
    metrics = compute_metrics(record_of([[1.0, 2.0, 4.0], [1.5, 8.0]]))
    assert metrics.busy_s == 8.0
    assert metrics.output_tokens_per_s == 5 / 8
    assert metrics.total_tokens_per_s == 25 / 8
    assert metrics.requests_per_s == 2 / 8
    assert metrics.goodput_requests_per_s is None


def test_iterations() -> None:
    metrics = compute_metrics(record_of([[1.0, 2.0]]))
    assert metrics.num_iterations == 4
    assert metrics.iteration_cv == pytest.approx(np.sqrt(1.5) / 2)
    assert metrics.mean_tokens_per_iteration == 357 / 4
    assert metrics.full_budget_share == 0.5
    assert metrics.tile_waste == pytest.approx((28 / 128 + 127 / 128) / 2)
    assert metrics.num_preemptions == 4
    assert metrics.kv_peak_fraction == 0.4
    assert metrics.overhead_us_per_iteration == 250_000.0
    assert metrics.overhead_fraction == pytest.approx(1 / 5)
    assert metrics.bubble_fractions[2] == pytest.approx(1 - 8 / 2 / 6), "stage times .5 .5 1 2: 0 .5 1 2 / .5 1 2 4, 6"


def test_an_unlimited_budget_is_never_full() -> None:
    metrics = compute_metrics(record_of([[1.0, 2.0]], token_budget=None))
    assert metrics.full_budget_share is None
    assert metrics.tile_waste == pytest.approx((28 + 127) / 128 / 4)


def test_iterations_all_at_the_budget_have_no_rest_to_waste() -> None:
    metrics = compute_metrics(record_of([[1.0, 2.0]], num_tokens=(128, 128)))
    assert (metrics.full_budget_share, metrics.tile_waste) == (1.0, None)


def test_rejected_and_unfinished_requests() -> None:
    record = record_of(
        [[1.0, 2.0], [], [], [1.5, 3.5], []],
        first_scheduled_s=[0.5, NAN, NAN, 1.0, NAN],
        status=["finished", "rejected_model_len", "rejected_kv", "unfinished", "unfinished"],
        stopped="enough",
    )
    metrics = compute_metrics(record)
    assert (metrics.num_finished, metrics.num_rejected_model_len, metrics.num_rejected_kv) == (1, 1, 1)
    assert (metrics.tbt.count, metrics.ttft.count, metrics.scheduling_delay.count) == (2, 2, 2)
    assert (metrics.e2e.count, metrics.tpot.count) == (1, 1)
    assert metrics.total_tokens_per_s == (4 + 20) / 8


def test_goodput_counts_requests_that_met_every_slo() -> None:
    record = record_of(
        [[1.0, 1.1, 1.2], [1.0, 1.1, 2.0], [1.0, 1.05], [4.0]],
        first_scheduled_s=[0.5, 0.5, 3.0, 0.5],
    )
    assert compute_metrics(record, SLO(name="a", tbt_s=0.2)).goodput_requests_per_s == 2 / 8
    assert compute_metrics(record, SLO(name="b", tbt_s=1.0)).goodput_requests_per_s == 3 / 8
    assert compute_metrics(record, SLO(name="c", tbt_s=1.0, max_scheduling_delay_s=None)).goodput_requests_per_s == 0.5


def test_goodput_takes_the_quantile_of_the_requests_own_gaps() -> None:
    """200 gaps of 10 ms and one of 1 s: the request's P99 is 10 ms, its maximum 1 s."""
    times = np.cumsum([1.0] + [0.01] * 100 + [1.0] + [0.01] * 100).tolist()
    record = record_of([times])
    assert compute_metrics(record, SLO(name="p99", tbt_s=0.02)).goodput_requests_per_s == 1 / 8
    assert compute_metrics(record, SLO(name="max", tbt_s=0.02, quantile=1.0)).goodput_requests_per_s == 0.0


def test_feasible_needs_both_limits() -> None:
    record = record_of([[1.0, 1.1], [1.0, 1.2]], first_scheduled_s=[1.0, 4.0])
    metrics = compute_metrics(record)
    assert metrics.feasible(SLO(name="met", tbt_s=0.21, max_scheduling_delay_s=2.5)) is True
    assert metrics.feasible(SLO(name="slow", tbt_s=0.19, max_scheduling_delay_s=2.5)) is False
    assert metrics.feasible(SLO(name="queued", tbt_s=0.21, max_scheduling_delay_s=2.4)) is False
    assert metrics.feasible(SLO(name="no queue limit", tbt_s=0.21, max_scheduling_delay_s=None)) is True


def test_a_saturated_workload_is_not_held_to_the_queue() -> None:
    record = record_of([[1.0, 1.1]], first_scheduled_s=[50.0], saturated=True)
    slo = SLO(name="met", tbt_s=0.2)
    metrics = compute_metrics(record, slo)
    assert metrics.feasible(slo) is True
    assert metrics.goodput_requests_per_s == 1 / 8


def test_a_stopped_run_is_never_feasible() -> None:
    metrics = compute_metrics(record_of([[1.0, 1.1]], stopped="enough"))
    assert metrics.feasible(SLO(name="loose", tbt_s=0.2)) is None
    assert metrics.feasible(SLO(name="tight", tbt_s=0.05)) is False


def test_case_9_one_token_each_has_no_tbt() -> None:
    load = preset_workload("fixed:100:1", 20)
    record = Engine(FakeExecutor()).run(load, EngineConfig(max_num_seqs=8, token_budget=64))
    slo = SLO(name="any", tbt_s=1.0)
    metrics = compute_metrics(record, slo)
    assert metrics.tbt == metrics.tpot == Distribution(count=0)
    assert metrics.feasible(slo) is None
    assert metrics.ttft.count == 20
    assert metrics.total_tokens_per_s is not None
    assert metrics.total_tokens_per_s > 0.0
    row = metrics.to_row()
    assert (row["tbt_count"], row["tbt_p99_ms"], row["tpot_mean_ms"]) == (0, None, None)
    assert tbt_quantiles_ms(record) == []


def test_case_13_one_stall_among_a_thousand_gaps() -> None:
    """1,000 gaps, one of 900 ms, the others of 20 ms."""
    executor = FakeExecutor(lambda iteration, batch: 0.9 if iteration == 500 else 0.02)
    load = Workload(name="stall", requests=(Request(arrival_s=0.0, prompt_tokens=4, output_tokens=1001),))
    record = Engine(executor).run(load, EngineConfig(max_num_seqs=1, token_budget=64))
    row = compute_metrics(record).to_row()
    assert row["tbt_count"] == 1000
    assert row["tbt_max_ms"] == pytest.approx(900.0)
    assert row["tbt_p999_ms"] == pytest.approx(20.0 + 0.001 * 880.0), "position 998.001 of 0..999"
    assert row["tbt_p99_ms"] == pytest.approx(20.0)
    assert row["tbt_mean_ms"] == pytest.approx(20.88)
    quantiles_ms = tbt_quantiles_ms(record)
    assert quantiles_ms[99] == pytest.approx(20.0)
    assert quantiles_ms[100] == pytest.approx(900.0)


@pytest.mark.parametrize("qps", [0.425, 1e6])
def test_case_8_any_rate(qps: float) -> None:
    load = assign_arrivals(preset_workload("azure-conv", 30, max_model_len=512), "poisson", qps=qps)
    record = Engine(FakeExecutor()).run(load, EngineConfig(max_num_seqs=8, token_budget=64))
    metrics = compute_metrics(record)
    assert metrics.num_finished == 30
    bubble = metrics.to_row()["bubble_fraction_4"]
    assert bubble is not None
    assert 0.0 < bubble < 1.0
    idle_s = record.token_s[-1] - metrics.busy_s
    assert idle_s > 30.0 if qps < 1.0 else idle_s == pytest.approx(0.0, abs=1e-9)


def test_a_run_that_rejected_everything_has_no_data() -> None:
    load = preset_workload("fixed:100:10", 2)
    record = Engine(FakeExecutor()).run(load, EngineConfig(max_model_len=50, max_num_seqs=2))
    slo = SLO(name="any", tbt_s=1.0)
    metrics = compute_metrics(record, slo)
    assert metrics.feasible(slo) is None
    row = metrics.to_row()
    assert row["num_rejected_model_len"] == 2
    assert row["bubble_fraction_4"] is None
    assert row["total_tokens_per_s"] is None


def test_a_modelled_device_has_no_host_overhead() -> None:
    record = Engine(FakeExecutor()).run(preset_workload("fixed:10:3", 2), EngineConfig(max_num_seqs=2))
    row = compute_metrics(record).to_row()
    assert row["overhead_us_per_iteration"] is None
    assert row["overhead_fraction"] is None


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        compute_metrics(record_of([[1.0, NAN, 2.0]]))


def test_the_row_has_the_columns_of_the_run_folder() -> None:
    """ARCHITECTURE.md lists the columns of trials.parquet that come from here."""
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    listed = text.split("column of `Metrics.to_row()`")[1].split("\n\n")[0]
    names = re.findall(r"`([^`]+)`", listed.replace("\n", ""))
    columns = []
    for name in names:
        parts = [part.split(",") for part in re.findall(r"\{([^}]*)\}|([^{}]+)", name) for part in part if part]
        grown = [""]
        for part in parts:
            grown = [prefix + piece for prefix in grown for piece in part]
        columns += grown
    assert sorted(compute_metrics(record_of([[1.0, 2.0]])).to_row()) == sorted(columns)
    assert len(columns) == 5 * 7 + 27


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30), st.floats(0.0, 0.1)), min_size=1, max_size=20),
    st.sampled_from(["faster_transformer", "orca", "vllm_v0", "sarathi"]),
)
@settings(max_examples=25, deadline=None)
def test_same_as_pandas(rows: list[tuple[int, int, float]], policy: str) -> None:
    requests = [
        Request(arrival_s=at, prompt_tokens=prompt, output_tokens=output)
        for prompt, output, at in sorted(rows, key=lambda row: row[2])
    ]
    load = Workload(name="random", requests=tuple(requests))
    config = EngineConfig(policy=policy, max_num_seqs=4, token_budget=32, block_size=4, num_kv_blocks=40)
    record = Engine(FakeExecutor()).run(load, config)
    slo = SLO(name="middling", tbt_s=1.3e-3, max_scheduling_delay_s=0.02)
    metrics = compute_metrics(record, slo)
    tokens = pd.DataFrame({"request": record.token_request, "at": record.token_s})
    gaps = tokens.groupby("request")["at"].diff().dropna()
    assert metrics.tbt.count == len(gaps) == load.num_output_tokens - len(requests)
    if len(gaps):
        assert metrics.tbt.p99 == pytest.approx(gaps.quantile(0.99))
        assert metrics.tbt_at(0.37) == pytest.approx(gaps.quantile(0.37))
        levels = [float(gaps.quantile(level)) * 1e3 for level in TBT_QUANTILE_LEVELS]
        assert tbt_quantiles_ms(record) == pytest.approx(levels)
    arrivals = pd.Series([request.arrival_s for request in requests])
    ttft = tokens.groupby("request")["at"].min() - arrivals
    assert metrics.ttft.p90 == pytest.approx(ttft.quantile(0.9))
    own = gaps.groupby(tokens["request"]).quantile(0.99).reindex(range(len(requests)), fill_value=0.0)
    delay = record.requests.first_scheduled_s - arrivals
    saturated = arrivals.iloc[-1] == 0.0
    good = ((own <= slo.tbt_s) & ((delay <= 0.02) | saturated)).sum()
    assert metrics.goodput_requests_per_s == pytest.approx(good / metrics.busy_s)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"tbt_s": 0.0}, "tbt_s=0.0: must be a positive"),
        ({"tbt_s": NAN}, "tbt_s=nan: must be a positive"),
        ({"tbt_s": 1.0, "quantile": 0.0}, "quantile=0.0: must be above 0"),
        ({"tbt_s": 1.0, "quantile": 1.1}, "quantile=1.1: must be above 0 and at most 1"),
        ({"tbt_s": 1.0, "max_scheduling_delay_s": 0.0}, "max_scheduling_delay_s=0.0: must be above 0"),
    ],
)
def test_bad_slo(settings_: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SLO(name="bad", **settings_)  # type: ignore[arg-type]
