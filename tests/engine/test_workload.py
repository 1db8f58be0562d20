"""Assembling a workload (dropping, clipping, sorting) and giving it arrivals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tilebudget.engine import Request, Workload, assign_arrivals, preset_workload
from tilebudget.engine.workloads.workload import RawRequests, assemble_workload, clip_lengths


def raw(*rows: tuple[float, int, int]) -> RawRequests:
    return RawRequests(
        arrival_s=np.array([row[0] for row in rows]),
        prompt_tokens=[row[1] for row in rows],
        output_tokens=[row[2] for row in rows],
    )


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in workload.requests]


def arrivals(workload: Workload) -> list[float]:
    return [request.arrival_s for request in workload.requests]


def test_rows_are_sorted_rebased_and_empty_ones_dropped() -> None:
    workload = assemble_workload(
        raw((9.0, 3, 3), (5.0, 0, 1), (7.0, 1, 1), (7.0, 2, 2), (8.0, 4, 0)), name="w", source="s"
    )
    assert lengths(workload) == [(1, 1), (2, 2), (3, 3)]
    assert arrivals(workload) == [0.0, 0.0, 2.0]
    assert workload.num_dropped == 2
    assert workload.notes == ("2 rows dropped: no prompt or no output tokens",)


def test_rows_of_equal_arrival_keep_their_order() -> None:
    rows = raw(*[(float(index % 3), index + 1, 1) for index in range(300)])
    prompts = [prompt for prompt, _ in lengths(assemble_workload(rows, name="w", source="s"))]
    assert prompts == [*range(1, 301, 3), *range(2, 301, 3), *range(3, 301, 3)]


def test_the_first_requests_that_can_be_served() -> None:
    workload = assemble_workload(
        raw((0.0, 1, 0), (1.0, 1, 1), (2.0, 2, 2), (3.0, 1, 0)), name="w", source="s", num_requests=2
    )
    assert lengths(workload) == [(1, 1), (2, 2)]
    assert workload.num_dropped == 1, "what comes after the last one taken was not dropped, it was not looked at"
    assert workload.notes[0] == "the first 2 requests of 4 rows"


def test_clipping_counts_and_says_so() -> None:
    rows = raw((0.0, 90, 20), (1.0, 80, 20), (2.0, 10, 300))
    workload = assemble_workload(rows, name="w", source="s", max_model_len=100)
    assert lengths(workload) == [(80, 20), (80, 20), (1, 99)]
    assert workload.num_clipped == 2
    assert workload.notes == ("2 rows clipped to max_model_len=100, prompt first",)


def test_dropping_what_is_too_long() -> None:
    rows = raw((0.0, 90, 20), (1.0, 80, 20), (2.0, 10, 300))
    workload = assemble_workload(rows, name="w", source="s", max_model_len=100, overlong="drop")
    assert lengths(workload) == [(80, 20)]
    assert (workload.num_dropped, workload.num_clipped) == (2, 0)
    assert arrivals(workload) == [0.0]


def test_nothing_left_says_why() -> None:
    with pytest.raises(ValueError, match=r"s: no request left of 2 rows: 1 have no prompt .* 1 are longer than"):
        assemble_workload(raw((0.0, 90, 20), (0.0, 0, 1)), name="w", source="s", max_model_len=10, overlong="drop")


@given(st.integers(1, 500), st.integers(1, 500), st.integers(2, 300))
def test_clipped_lengths_fit_and_lose_the_prompt_first(prompt: int, output: int, limit: int) -> None:
    new_prompt, new_output = clip_lengths(prompt, output, limit)
    assert 1 <= new_prompt <= prompt
    assert 1 <= new_output <= output
    assert new_prompt + new_output <= limit
    if output < limit:
        assert new_output == output
    if prompt + output <= limit:
        assert (new_prompt, new_output) == (prompt, output)
    else:
        assert new_prompt + new_output == limit or new_prompt == prompt


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_requests": 0}, "num_requests=0: must be at least 1"),
        ({"max_model_len": 1}, "max_model_len=1: must be at least 2"),
        ({"overlong": "truncate"}, "overlong='truncate': must be one of clip, drop"),
    ],
)
def test_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assemble_workload(raw((0.0, 1, 1)), name="w", source="s", **settings)  # type: ignore[arg-type]


TRACE = Workload(
    name="trace",
    requests=tuple(
        Request(arrival_s=at, prompt_tokens=10 + index, output_tokens=2)
        for index, at in enumerate((0.0, 1.0, 1.5, 6.0))
    ),
)


def test_trace_arrivals_are_kept() -> None:
    assert assign_arrivals(TRACE) is TRACE


def test_a_stretched_trace_keeps_its_bursts() -> None:
    workload = assign_arrivals(TRACE, "trace", qps=1.0)
    assert arrivals(workload) == pytest.approx([0.0, 0.5, 0.75, 3.0])
    assert lengths(workload) == lengths(TRACE)
    assert "stretched to 1 requests/s" in workload.notes[-1]


def test_fixed_arrivals() -> None:
    assert arrivals(assign_arrivals(TRACE, "fixed", qps=0.5)) == [0.0, 2.0, 4.0, 6.0]


def test_saturated_arrivals() -> None:
    workload = assign_arrivals(TRACE, "saturated")
    assert workload.saturated
    assert arrivals(workload) == [0.0] * 4


def test_poisson_arrivals_have_exponential_gaps() -> None:
    """20,000 gaps: mean and standard deviation within 3%, and 1/e of them longer than the mean."""
    workload = assign_arrivals(preset_workload("fixed:10:1", 20_001), "poisson", qps=4.0, seed=1)
    gaps_s = np.diff(arrivals(workload))
    assert arrivals(workload)[0] == 0.0
    assert gaps_s.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps_s.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps_s > 0.25).mean() == pytest.approx(np.exp(-1.0), rel=0.03)


def test_poisson_arrivals_follow_the_seed() -> None:
    made = [arrivals(assign_arrivals(TRACE, "poisson", qps=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("kind", ["poisson", "fixed", "trace"])
@pytest.mark.parametrize("qps", [0.425, 1e6])
def test_case_8_no_rate_is_rounded_to_zero(kind: str, qps: float) -> None:
    load = preset_workload("fixed:10:1", 4000)
    load = assign_arrivals(load, "fixed", qps=3.0) if kind == "trace" else load
    workload = assign_arrivals(load, kind, qps=qps, seed=5)
    assert 3999 / arrivals(workload)[-1] == pytest.approx(qps, rel=0.05)
    assert not workload.saturated
    assert workload.has_arrivals


@pytest.mark.parametrize("qps", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_rates(qps: float) -> None:
    with pytest.raises(ValueError, match=f"qps={qps}: must be a positive number of requests per second"):
        assign_arrivals(TRACE, "poisson", qps=qps)


def test_rates_that_are_missing_or_not_wanted() -> None:
    with pytest.raises(ValueError, match="qps=None: poisson arrivals need a rate"):
        assign_arrivals(TRACE, "poisson")
    with pytest.raises(ValueError, match=r"qps=2\.0: saturated arrivals have no rate"):
        assign_arrivals(TRACE, "saturated", qps=2.0)
    with pytest.raises(ValueError, match="arrivals='bursty': must be one of trace, poisson, fixed, saturated"):
        assign_arrivals(TRACE, "bursty")


def test_trace_arrivals_must_have_been_recorded() -> None:
    load = preset_workload("fixed:10:1", 3)
    with pytest.raises(ValueError, match="arrivals='trace': fixed:10:1 has no recorded arrivals"):
        assign_arrivals(load, "trace")
    assert assign_arrivals(load, "poisson", qps=1.0).has_arrivals


def test_a_clock_that_stands_still_cannot_be_stretched() -> None:
    load = assign_arrivals(TRACE, "saturated")
    with pytest.raises(ValueError, match="every request of trace arrives at once"):
        assign_arrivals(load, "trace", qps=1.0)
