"""Limits on TTFT and E2E: parsing, feasibility, and what each request is held to."""

from __future__ import annotations

import pytest
from fake_executor import FakeExecutor
from tilebudget.engine import SLO, Engine, EngineConfig, Request, Workload, compute_metrics
from tilebudget.engine.metrics import Limit
from tilebudget.engine.slo import describe_limits, parse_limit
from tilebudget.engine.workloads.workload import scale_load

LOAD = Workload(
    name="load",
    requests=tuple(Request(arrival_s=0.5 * index, prompt_tokens=40, output_tokens=4) for index in range(12)),
)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("2s", Limit(limit_s=2.0)),
        ("p90:500ms", Limit(limit_s=0.5, quantile=0.9)),
        ("P99.9: 30 s", Limit(limit_s=30.0, quantile=0.999)),
    ],
)
def test_a_limit_is_at_p99_unless_it_says(text: str, limit: Limit) -> None:
    assert parse_limit("ttft_slo", text) == limit


@pytest.mark.parametrize("text", ["fast", "0s", "p95:2s", "2", ":2s"])
def test_bad_limits_name_field_value_and_rule(text: str) -> None:
    with pytest.raises(ValueError, match=f"ttft_slo='{text}': must be a positive duration"):
        parse_limit("ttft_slo", text)


def test_a_run_is_feasible_only_within_every_limit() -> None:
    metrics = compute_metrics(Engine(FakeExecutor()).run(LOAD, EngineConfig(token_budget=64, max_num_seqs=4)))
    assert metrics.ttft.p90 is not None
    assert metrics.e2e.p99 is not None
    within = Limit(limit_s=metrics.ttft.p90 * 1.01, quantile=0.9)
    beyond = Limit(limit_s=metrics.e2e.p99 * 0.99)
    slo = SLO(name="a", tbt_s=100.0, max_scheduling_delay_s=None)
    assert metrics.feasible(SLO(name="a", tbt_s=100.0, max_scheduling_delay_s=None, ttft=within)) is True
    both = SLO(name="b", tbt_s=100.0, max_scheduling_delay_s=None, ttft=within, e2e=beyond)
    assert metrics.feasible(both) is False
    excesses = metrics.excesses(both)
    assert excesses["e2e"] == pytest.approx(1.0 / 0.99 - 1.0)
    assert excesses["scheduling_delay"] is None
    assert metrics.excesses(slo)["ttft"] is None
    assert describe_limits(both) == f"P90 TTFT {within.limit_s:g} s and P99 E2E {beyond.limit_s:g} s"


def test_goodput_counts_requests_within_every_limit() -> None:
    record = Engine(FakeExecutor()).run(LOAD, EngineConfig(token_budget=64, max_num_seqs=4))
    slo = SLO(name="a", tbt_s=100.0, max_scheduling_delay_s=None)
    every = compute_metrics(record, slo)
    assert every.goodput_requests_per_s == every.requests_per_s
    assert every.e2e.p50 is not None
    assert every.requests_per_s is not None
    half = SLO(name="b", tbt_s=100.0, max_scheduling_delay_s=None, e2e=Limit(limit_s=every.e2e.p50))
    good = compute_metrics(record, half).goodput_requests_per_s
    e2e_s = [
        max(record.token_s[record.token_request == index]) - arrival_s
        for index, arrival_s in enumerate(record.requests.arrival_s)
    ]
    assert good == pytest.approx(sum(value <= every.e2e.p50 for value in e2e_s) / every.busy_s)


def test_load_scales_the_clock_alone() -> None:
    fast = scale_load(LOAD, 2.0)
    assert [r.arrival_s for r in fast.requests] == [0.25 * index for index in range(12)]
    with pytest.raises(ValueError, match=r"factor=0.0: must be a positive number"):
        scale_load(LOAD, 0.0)
    with pytest.raises(ValueError, match="arrives at once"):
        scale_load(Workload(name="x", requests=(LOAD.requests[0],)), 2.0)
