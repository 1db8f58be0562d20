"""The adaptive sampler sees only what it asked for, and finds steps with few points."""

from __future__ import annotations

import numpy as np
import pytest
from tilebudget.kernels.latency.sampling import AdaptiveSampler, SamplerTuning
from tilebudget.kernels.latency.sweep import FloatArray, IntArray

GRID = np.arange(8, 2049, 8)


def stairs(tokens: IntArray, tile: int) -> FloatArray:
    return np.asarray(0.1 * 1.25 ** ((tokens - 1) // tile) + 1e-5 * tokens, dtype=np.float64)


def run(sampler: AdaptiveSampler, latency_ms: FloatArray) -> list[int]:
    chosen: list[int] = []
    while asked := sampler.ask():
        for tokens in asked:
            sampler.tell(tokens, float(latency_ms[np.searchsorted(GRID, tokens)]))
        chosen += asked
    return chosen


@pytest.mark.parametrize("tile", [256, 200, 320])
def test_planted_steps_survive_a_quarter_of_the_points(tile: int) -> None:
    truth = stairs(GRID, tile)
    sampler = AdaptiveSampler(GRID, 64)
    chosen = run(sampler, truth)
    assert len(chosen) == len(set(chosen)) == 64
    predicted = sampler.curve().at(GRID)
    assert np.median(np.abs(predicted / truth - 1)) < 0.01
    jumps = np.flatnonzero(truth[1:] / truth[:-1] > 1.1)
    assert jumps.size >= 6
    kept = (predicted[jumps + 1] / predicted[jumps] - 1) / (truth[jumps + 1] / truth[jumps] - 1)
    assert kept.mean() > 0.9


def test_latencies_that_were_not_asked_for_change_nothing() -> None:
    truth = stairs(GRID, 256)
    chosen = run(AdaptiveSampler(GRID, 40), truth)
    other = truth * 7.0
    index = np.searchsorted(GRID, chosen)
    other[index] = truth[index]
    assert run(AdaptiveSampler(GRID, 40), other) == chosen


def test_hints_move_points_to_where_others_had_edges() -> None:
    truth = np.where(GRID <= 1096, 1.0, 1.5)
    hints = np.where(GRID == 1096, 1.0, 0.0)
    blind, hinted = AdaptiveSampler(GRID, 22), AdaptiveSampler(GRID, 22, hints=hints)
    run(blind, truth)
    asked = run(hinted, truth)
    assert {1096, 1104} <= set(asked)
    assert asked.index(1104) <= 20
    found = hinted.edges_found()
    assert found[np.searchsorted(GRID, 1096)] == 1.0
    assert found.sum() == 1.0


def test_points_never_exceed_candidates_and_small_budgets_work() -> None:
    small = AdaptiveSampler([8, 16, 24], 64)
    for tokens in small.ask():
        small.tell(tokens, 1.0)
    while asked := small.ask():
        small.tell(asked[0], 1.0)
    assert small.known_tokens() == [8, 16, 24]
    two = AdaptiveSampler(GRID, 2)
    assert two.ask() == [8, 2048]


def test_telling_out_of_order_or_twice_keeps_the_intervals_right() -> None:
    truth = stairs(GRID, 256)
    forward, backward = AdaptiveSampler(GRID, 50), AdaptiveSampler(GRID, 50)
    first = forward.ask()
    for tokens in first:
        forward.tell(tokens, float(truth[np.searchsorted(GRID, tokens)]))
    for tokens in reversed(backward.ask()):
        backward.tell(tokens, float(truth[np.searchsorted(GRID, tokens)]))
    backward.tell(first[3], float(truth[np.searchsorted(GRID, first[3])]))
    assert run(forward, truth) == run(backward, truth)


def test_bad_input_is_named() -> None:
    sampler = AdaptiveSampler(GRID, 10)
    with pytest.raises(ValueError, match="tokens is 7: it is not among the candidates"):
        sampler.tell(7, 1.0)
    with pytest.raises(ValueError, match="latency_ms is nan at 8 tokens"):
        sampler.tell(8, float("nan"))
    with pytest.raises(ValueError, match="num_points is 1"):
        AdaptiveSampler(GRID, 1)
    with pytest.raises(ValueError, match="rise strictly"):
        AdaptiveSampler([8, 8], 2)
    with pytest.raises(ValueError, match="hints must hold one weight"):
        AdaptiveSampler(GRID, 10, hints=np.zeros(3))
    with pytest.raises(ValueError, match="jump_bonus is -1"):
        SamplerTuning(jump_bonus=-1)
