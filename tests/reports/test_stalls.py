"""Waits of running decodes, on runs short enough to reckon by hand, and on the four simulated policies."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sample_study import POLICIES, simulate
from tilebudget.reports.data.run_folder import TokenTimes
from tilebudget.reports.policies.stalls import find_waits


def tokens_of(*requests: list[float]) -> TokenTimes:
    offsets = np.concatenate([[0], np.cumsum([len(times) for times in requests])]).astype(np.int64)
    return TokenTimes(times_s=np.array([time for times in requests for time in times]), offsets=offsets)


def iterations_of(*rows: tuple[float, float, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["start_s", "duration_s", "num_decodes"])


def test_an_eager_prefill_lengthens_the_wait_of_the_running_request() -> None:
    # Prefill of A to 1.0; A decodes to 1.1; B's prefill keeps A waiting to 2.1; both decode to 2.2.
    iterations = iterations_of((0.0, 1.0, 0), (1.0, 0.1, 1), (1.1, 1.0, 0), (2.1, 0.1, 2))
    waits = find_waits(iterations, tokens_of([1.0, 1.1, 2.2], [2.1, 2.2]))
    np.testing.assert_allclose(waits.start_s, [1.0, 1.1])
    np.testing.assert_allclose(waits.end_s, [1.1, 2.2])
    stalls = waits.longer_than(0.5)
    np.testing.assert_allclose(stalls.durations_s, [1.1])


def test_a_prefill_that_nobody_waits_for_is_no_stall() -> None:
    # A is finished before B's prefill; the idle second between them counts for nobody either.
    iterations = iterations_of((0.0, 1.0, 0), (1.0, 0.1, 1), (2.1, 1.0, 0), (3.1, 0.1, 1))
    waits = find_waits(iterations, tokens_of([1.0, 1.1], [3.1, 3.2]))
    np.testing.assert_allclose(waits.durations_s, [0.1, 0.1])


def test_a_long_hybrid_iteration_is_a_wait_too() -> None:
    iterations = iterations_of((0.0, 0.1, 0), (0.1, 2.0, 1), (2.1, 0.1, 2))
    waits = find_waits(iterations, tokens_of([0.1, 2.1, 2.2], [2.1, 2.2]))
    np.testing.assert_allclose(waits.durations_s, [2.0, 0.1])


def test_no_decodes_no_waits() -> None:
    assert len(find_waits(iterations_of((0.0, 1.0, 0)), tokens_of([1.0]))) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_longest_wait_is_the_longest_gap_of_any_request(policy: str) -> None:
    run = simulate(policy, 128)
    tokens = tokens_of(*[list(times) for times in run.requests["token_s"]])
    longest_ms = 1e3 * find_waits(run.iterations, tokens).durations_s.max()
    assert longest_ms == pytest.approx(run.metrics["tbt_max_ms"])
