"""Edges from measurements: against planted staircases, and against the plain definition on real GPU sweeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tilebudget.kernels.latency.sweep import FloatArray, IntArray, Sweep, read_sweeps
from tilebudget.kernels.tiles.staircase import estimate_noise, find_edges

VIDUR_GRID = np.array([1, 2, 4, *range(8, 1025, 8), *range(1040, 2049, 16), *range(2080, 4097, 32)])


def sweep_of(tokens: IntArray, latency_ms: FloatArray) -> Sweep:
    return Sweep(op="gemm", tokens=tokens, latency_ms=latency_ms)


def planted(
    tokens: IntArray, tile: int, noise: float, rng: np.random.Generator, lowest: float = 0.15, drop_share: float = 0.1
) -> tuple[Sweep, set[int], set[int]]:
    """A noisy staircase, its planted steps (by index) and drops; no step lies between 8% and ``lowest``."""
    num_levels = int(tokens[-1]) // tile + 2
    jumps = np.where(
        rng.random(num_levels) < drop_share,
        rng.uniform(-0.3, -0.15, num_levels),
        np.where(rng.random(num_levels) < 0.5, rng.uniform(lowest, 0.5, num_levels), 0.03),
    )
    levels = np.concatenate([[1.0], np.cumprod(1 + jumps)])
    clean = levels[(tokens - 1) // tile] * (1 + 0.01 * ((tokens - 1) % tile) / tile)
    last = tokens.size - 3
    ratio = clean[1:] / clean[:-1] - 1
    third = np.array([clean[i + 3] / clean[i] - 1 for i in range(last)])
    steps = {i for i in range(last) if ratio[i] >= 0.1 and third[i] >= 0.1}
    drops = {i for i in range(last) if ratio[i] <= -0.1}
    return sweep_of(tokens, clean * np.exp(noise * rng.standard_normal(tokens.size))), steps, drops


def plain_definition(sweep: Sweep) -> set[int]:
    """Token counts after which the next point is 10% dearer, and the third point on still is."""
    y = sweep.latency_ms
    return {
        int(sweep.tokens[i]) for i in range(y.size - 3) if y[i + 1] / y[i] - 1 >= 0.1 and y[i + 3] / y[i] - 1 >= 0.1
    }


def strict_definition(sweep: Sweep) -> set[int]:
    """The same, but all of the next three points are 10% dearer."""
    y = sweep.latency_ms
    return {int(sweep.tokens[i]) for i in range(y.size - 3) if (y[i + 1 : i + 4] / y[i] - 1 >= 0.1).all()}


@pytest.mark.parametrize("name", ["vidur_a100_llama2_7b_mlp.csv", "vidur_h100_llama2_7b_mlp.csv"])
def test_real_sweeps_agree_with_the_plain_definition(shared: Callable[[str], Path], name: str) -> None:
    found = true = hits = strict_true = strict_hits = 0
    for sweep in read_sweeps(shared(f"data/{name}")).sweeps:
        reported = {edge.tokens for edge in find_edges(sweep).steps()}
        truth, strict = plain_definition(sweep), strict_definition(sweep)
        found, true, hits = found + len(reported), true + len(truth), hits + len(reported & truth)
        strict_true, strict_hits = strict_true + len(strict), strict_hits + len(reported & strict)
    assert true > 300
    assert hits >= 0.95 * true
    assert hits >= 0.95 * found
    assert strict_hits >= 0.95 * strict_true


def test_h100_edges_of_the_record(shared: Callable[[str], Path]) -> None:
    sweep = next(s for s in read_sweeps(shared("data/vidur_h100_llama2_7b_mlp.csv")).select(1) if s.op == "mlp_up_proj")
    edges = {edge.tokens: edge for edge in find_edges(sweep).steps()}
    # FACTS section 1: 512 -> 520 .134 -> .170 ms (+27%), 640 -> 648 .173 -> .242 (+40%).
    assert edges[512].next_tokens == 520
    assert edges[512].jump_pct == pytest.approx(27, abs=1)
    assert edges[640].jump_pct == pytest.approx(40, abs=1)
    assert edges[512].multiple_of == 256
    assert edges[640].multiple_of == 128


@pytest.mark.parametrize("stride", [2, 3])
def test_thinned_real_sweeps_keep_their_steps(shared: Callable[[str], Path], stride: int) -> None:
    true = hits = found = 0
    for sweep in read_sweeps(shared("data/vidur_a100_llama2_7b_mlp.csv")).sweeps:
        keep = np.arange(sweep.tokens.size)[::-1][::stride][::-1]
        thin = sweep_of(sweep.tokens[keep], sweep.latency_ms[keep])
        truth = plain_definition(thin)
        reported = {edge.tokens for edge in find_edges(thin).steps()}
        true, hits, found = true + len(truth), hits + len(reported & truth), found + len(reported)
    assert true > 300
    assert hits >= 0.93 * true
    assert hits >= 0.95 * found


@pytest.mark.parametrize("tile", [96, 128, 200, 256])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02, 0.03])
def test_planted_steps_are_found_under_noise(tile: int, noise: float) -> None:
    rng = np.random.default_rng(7)
    true = hits = found = 0
    for _ in range(8):
        sweep, steps, _ = planted(VIDUR_GRID, tile, noise, rng, lowest=0.2)
        reported = {int(np.searchsorted(VIDUR_GRID, edge.tokens)) for edge in find_edges(sweep).steps()}
        true, hits, found = true + len(steps), hits + len(reported & steps), found + len(reported)
    assert true > 40
    assert hits >= 0.95 * true
    assert hits >= 0.95 * found


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_uneven_grid_with_plus_one_points(noise: float) -> None:
    rng = np.random.default_rng(3)
    grid = np.unique(np.concatenate([np.arange(64, 4097, 64), np.arange(64, 4097, 64) + 1, rng.integers(1, 4096, 40)]))
    true = hits = found = 0
    for _ in range(8):
        sweep, steps, _ = planted(grid, 192, noise, rng, lowest=0.2)
        reported = {int(np.searchsorted(grid, edge.tokens)) for edge in find_edges(sweep).steps()}
        true, hits, found = true + len(steps), hits + len(reported & steps), found + len(reported)
    assert hits >= 0.95 * true
    assert hits >= 0.95 * found


@pytest.mark.parametrize("grid", [np.arange(64, 2049, 64), 2 ** np.arange(5, 14), np.array([100, 130, 400, 450, 900])])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_work_that_grows_with_its_tokens_has_no_edges(grid: IntArray, noise: float) -> None:
    rng = np.random.default_rng(1)
    line = (0.2 + grid * 0.01) * np.exp(noise * rng.standard_normal(grid.size))
    assert find_edges(sweep_of(grid, line.astype(np.float64))).steps() == []


def test_flat_noise_has_no_edges() -> None:
    rng = np.random.default_rng(5)
    for noise in (0.005, 0.01, 0.02, 0.03):
        edges = [
            find_edges(sweep_of(VIDUR_GRID, np.exp(noise * rng.standard_normal(VIDUR_GRID.size)))).steps()
            for _ in range(20)
        ]
        assert sum(map(len, edges)) < 0.001 * 20 * VIDUR_GRID.size


def test_drops_are_named_and_are_not_steps() -> None:
    grid = np.arange(8, 801, 8)
    latency = np.where(grid <= 256, 1.0, np.where(grid <= 512, 1.5, 1.1))
    stairs = find_edges(sweep_of(grid, latency))
    assert [(e.tokens, e.kind) for e in stairs.edges] == [(256, "step"), (512, "drop")]
    drop = stairs.drops()[0]
    assert drop.jump_pct == pytest.approx((1.1 / 1.5 - 1) * 100)
    assert "change of kernel" in drop.explanation
    assert [e.tokens for e in stairs.steps()] == [256]


def test_edge_figures() -> None:
    grid = np.arange(8, 161, 8)
    edge = find_edges(sweep_of(grid, np.where(grid <= 80, 2.0, 2.5))).edges[0]
    assert (edge.tokens, edge.next_tokens, edge.kind, edge.sustained) == (80, 88, "step", True)
    assert edge.jump_pct == pytest.approx(25)
    assert edge.jump_ms == pytest.approx(0.5)
    assert edge.us_per_token_before == pytest.approx(2000 / 80)
    assert edge.us_per_token_after == pytest.approx(2500 / 88)
    assert edge.multiple_of == 16
    assert edge.to_json()["jump_pct"] == pytest.approx(25)


def test_a_spike_is_not_sustained_and_a_late_step_is_not_confirmed() -> None:
    grid = np.arange(8, 161, 8)
    flat = np.full(grid.size, 1.0)
    spike = flat.copy()
    spike[8] = 1.6
    assert find_edges(sweep_of(grid, spike)).steps() == []
    late = flat.copy()
    late[-1] = 1.6
    stairs = find_edges(sweep_of(grid, late))
    assert stairs.steps() == []
    assert [(e.tokens, e.sustained) for e in stairs.edges] == [(152, False)]


def test_plus_one_pair_that_is_dearer_than_the_next_multiple_is_told_apart() -> None:
    """FACTS section 2: a +1 point may speak of odd M; 768 tokens cheaper than 513 say so."""
    grid = np.array([256, 257, 512, 513, 768, 769, 1024, 1025])
    latency = np.array([0.142, 0.310, 0.199, 0.404, 0.280, 0.520, 0.359, 0.619])
    edges = {edge.tokens: edge for edge in find_edges(sweep_of(grid, latency)).edges if edge.kind == "step"}
    assert edges[512].jump_pct == pytest.approx(103, abs=1)
    assert edges[512].cheaper_at == 768
    assert "odd M" in edges[512].explanation


def test_noise_estimate_is_close_with_and_without_steps() -> None:
    rng = np.random.default_rng(11)
    for noise in (0.01, 0.03):
        sweep, _, _ = planted(VIDUR_GRID, 128, noise, rng)
        assert estimate_noise(sweep) == pytest.approx(noise, rel=0.35)


def test_short_sweeps_and_bad_thresholds() -> None:
    assert find_edges(sweep_of(np.array([8]), np.array([1.0]))).edges == ()
    assert find_edges(sweep_of(np.array([8, 16]), np.array([1.0, 1.0]))).edges == ()
    with pytest.raises(ValueError, match="min_jump_pct is 0"):
        find_edges(sweep_of(np.array([8]), np.array([1.0])), min_jump_pct=0)
