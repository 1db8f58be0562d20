"""Latency between measured counts: the rules of a step curve."""

from __future__ import annotations

import numpy as np
import pytest
from tilebudget.kernels.latency.step_curve import SMALL_JUMP, EdgePrior, StepCurve
from tilebudget.kernels.latency.sweep import Sweep


def curve(points: dict[int, float], kind: str = "steps", prior: EdgePrior | None = None) -> StepCurve:
    sweep = Sweep(op="gemm", tokens=np.array(list(points)), latency_ms=np.array(list(points.values())))
    return StepCurve.of(sweep, kind=kind, prior=prior)


def test_measured_points_are_kept_exactly() -> None:
    points = {1: 0.5, 64: 0.52, 128: 0.55, 136: 0.9, 200: 0.95, 1024: 3.0}
    for kind in ("steps", "lines"):
        assert curve(points, kind).at(list(points)).tolist() == list(points.values())


def test_inside_a_step_it_is_the_line() -> None:
    assert curve({136: 1.0, 256: 1.04}).at(196)[0] == pytest.approx(1.02)


def test_a_known_edge_is_never_crossed() -> None:
    """513 to 519 lie between the last cheap count and the first dear one that was measured."""
    latency = curve({384: 1.0, 512: 1.02, 520: 1.4, 640: 1.42}).at(np.arange(500, 530))
    assert np.all(latency[:13] < 1.03)
    assert np.all(latency[13:] > 1.39)


def test_an_unresolved_step_goes_behind_the_likeliest_tile() -> None:
    latency = curve({200: 1.0, 300: 1.5}).at([256, 257])
    assert latency.tolist() == [1.0, 1.5]
    falling = curve({200: 1.5, 300: 1.0}).at([256, 257])  # kernel switches do not follow tiles
    assert 1.0 < falling[1] < falling[0] < 1.5


def test_hints_outweigh_tiles() -> None:
    prior = EdgePrior(hint_tokens=np.array([240]), hint_odds=np.array([200.0]))
    assert curve({200: 1.0, 300: 1.5}, prior=prior).at([240, 241]).tolist() == [1.0, 1.5]


def test_where_steps_follow_no_tiles_the_odds_spread() -> None:
    middle = curve({200: 1.0, 300: 1.5}, prior=EdgePrior(alignment=0.0)).at(250)[0]
    assert 1.2 < middle < 1.3


def test_a_small_difference_is_missed_by_half_at_most() -> None:
    high = float(np.exp(SMALL_JUMP * 0.95))
    inside = curve({201: 1.0, 255: high}).at(np.arange(202, 255))
    assert np.all(np.abs(np.log(inside)) < 0.07)
    assert np.all(np.abs(np.log(inside / high)) < 0.07)


def test_lines_join_points_however_far_apart() -> None:
    assert curve({256: 1.0, 512: 3.0}, "lines").at(384)[0] == pytest.approx(2.0)


def test_outside_the_range_it_extrapolates_and_says_so() -> None:
    line = curve({8: 1.0, 512: 2.0, 1024: 4.0}, "lines")
    assert line.at([0, 1, 2048]).tolist() == pytest.approx([0.0, 1.0, 4.0 + 1024 * 2 / 512])
    assert line.extrapolated([0, 1, 8, 1024, 1025]).tolist() == [False, True, False, False, True]
    assert curve({64: 2.0}).at(128)[0] == pytest.approx(4.0)  # one point: in proportion
    with pytest.raises(ValueError, match="tokens is -1"):
        line.at(-1)


def test_spread_and_source() -> None:
    sweep = Sweep(
        op="x",
        tokens=np.array([8, 16]),
        latency_ms=np.array([1.0, 1.3]),
        std_ms=np.array([0.01, 0.02]),
        source="transferred",
        note="moved",
    )
    made = StepCurve.of(sweep)
    assert made.spread_at(12)[0] == pytest.approx(0.02 + 0.1)
    assert made.source_at(12) == "transferred"
    assert made.note == "moved"


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="kind is 'cubic'"):
        curve({8: 1.0}, "cubic")
    with pytest.raises(ValueError, match="alignment is 2"):
        EdgePrior(alignment=2)
    with pytest.raises(ValueError, match="hint_tokens must rise"):
        EdgePrior(hint_tokens=np.array([8, 8]), hint_odds=np.array([1.0, 1.0]))
