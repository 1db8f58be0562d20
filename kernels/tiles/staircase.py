"""Edges of a latency staircase, found in measurements; no tile size is assumed.

An edge lies between two neighbouring measured token counts: ``tokens`` is the last cheap one. A step counts as
sustained by the plain definition: the latency at the next point is at least ``min_jump_pct`` above the one at
``tokens``, and so is the one three points on from ``tokens``. (The stricter reading "at all of the three next
points" finds 95% of these on public GPU sweeps, and no others.)

Where the sweep is noisy the two single points no longer carry that comparison, so from NOISY up the levels of
the neighbouring plateaus are compared instead; and a jump that noise could make, or that is mere proportional
growth across a gap wider than any small tile, is not an edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..latency.sweep import FloatArray, IntArray, Sweep

SUSTAIN_POINTS = 3
NOISY = 0.02
"""Relative noise of one point from which plateau levels, not single points, are compared."""

SMALLEST_TILE_TOKENS = 16
"""A jump across a gap no wider than this is a step; across a wider one it may be proportional growth."""

KNOWN_TILES = (256, 128, 64, 32, 16)
_MIN_Z = 3.0
_MIN_STEP_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One edge: what one more token (up to ``next_tokens``) costs, and how sure that is.

    ``jump_pct`` and ``jump_ms`` compare the two points themselves, ``level_jump_pct`` the plateaus on either side
    (on a noisy sweep ``jump_pct`` is the latter too). ``jump_uncertainty_pct`` is one standard error of
    ``jump_pct``. ``cheaper_at`` is a larger measured count that costs less than ``next_tokens`` does, if there is
    one: padding up to it pays. ``kind`` is "step" or "drop" (a kernel switch: more tokens, less time).
    """

    op: str
    tensor_parallel: int
    tokens: int
    next_tokens: int
    latency_ms: float
    next_latency_ms: float
    jump_pct: float
    jump_ms: float
    jump_uncertainty_pct: float
    level_jump_pct: float
    us_per_token_before: float
    us_per_token_after: float
    kind: str
    sustained: bool
    multiple_of: int | None
    cheaper_at: int | None
    explanation: str

    def to_json(self) -> dict[str, str | int | float | bool | None]:
        """The edge as a flat dictionary, floats rounded to six digits behind the point."""
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Staircase:
    """The edges of one sweep, ascending, and the sweep's own noise (relative, one standard deviation)."""

    sweep: Sweep
    edges: tuple[Edge, ...]
    noise: float

    def steps(self, min_jump_pct: float = 10.0) -> list[Edge]:
        """Sustained steps of at least this size."""
        return [e for e in self.edges if e.kind == "step" and e.sustained and _at_least(e.jump_pct, min_jump_pct)]

    def drops(self) -> list[Edge]:
        """Token counts after which more tokens take less time."""
        return [edge for edge in self.edges if edge.kind == "drop"]


def find_edges(sweep: Sweep, *, min_jump_pct: float = 10.0, known_tiles: Sequence[int] = KNOWN_TILES) -> Staircase:
    """The staircase of a sweep: every step and drop of at least ``min_jump_pct`` that noise cannot explain.

    A step within the last three gaps of the sweep cannot be confirmed; it is kept with ``sustained`` False.
    ``known_tiles`` (tokens, largest first) only label edges, they never make one. ValueError when
    ``min_jump_pct`` is not above 0.
    """
    if not min_jump_pct > 0:
        raise ValueError(f"min_jump_pct is {min_jump_pct}: it must be above 0")
    noise = estimate_noise(sweep)
    change = np.diff(np.log(sweep.latency_ms))
    # Between plateaus the jump may exceed the one between the two points; half of it must be between them.
    least = np.log1p(min_jump_pct / 100) * (0.9 if noise < NOISY else 0.45)
    edges = []
    for index in np.flatnonzero(np.abs(change) >= min(least, -np.log1p(-min(min_jump_pct, 99.0) / 100) * 0.45)):
        kind = "step" if change[index] > 0 else "drop"
        edge = _edge_at(sweep, int(index), kind, noise, min_jump_pct, known_tiles)
        if edge is not None:
            edges.append(edge)
    return Staircase(sweep=sweep, edges=tuple(edges), noise=noise)


def estimate_noise(sweep: Sweep) -> float:
    """Relative standard deviation of one point around the curve, from its own scatter.

    Each interior point is compared with the line through its neighbours; points that touch an apparent edge are
    left out, and the estimate is repeated until that choice settles. An m+1 point of a table of multiples is no
    neighbour. With fewer than eight points left the sweep's own ``std_ms`` stands in where it is known.
    """
    gaps = np.diff(sweep.tokens)
    keep = np.ones(sweep.tokens.size, dtype=bool)
    keep[1:-1] = gaps[:-1] * 8 > gaps[1:]
    tokens, latency_ms = sweep.tokens[keep].astype(np.float64), sweep.latency_ms[keep]
    if tokens.size < 3:
        return _stated_noise(sweep)
    weight = (tokens[1:-1] - tokens[:-2]) / (tokens[2:] - tokens[:-2])
    line_ms = (1 - weight) * latency_ms[:-2] + weight * latency_ms[2:]
    residual = np.abs(latency_ms[1:-1] / line_ms - 1) / np.sqrt(1 + weight**2 + (1 - weight) ** 2)
    gap = np.abs(np.diff(np.log(latency_ms)))
    is_edge = np.zeros(gap.size, dtype=bool)
    # Before any edge is known, up to half of the points touch one: a low quantile resists that.
    noise, quantile, normal = 0.0, 0.3, 0.385
    for _ in range(4):
        kept = residual[~(is_edge[:-1] | is_edge[1:])]
        if kept.size < 8:
            return max(noise, _stated_noise(sweep))
        noise = float(np.quantile(kept, quantile)) / normal
        found = gap > max(0.05, 4 * noise * np.sqrt(2.0))
        if np.array_equal(found, is_edge):
            break
        is_edge, quantile, normal = found, 0.5, 0.6745
    return noise


def _stated_noise(sweep: Sweep) -> float:
    return 0.0 if sweep.std_ms is None else float(np.median(sweep.std_ms / sweep.latency_ms))


def _tick_ms(latency_ms: FloatArray) -> float:
    """The smallest difference between two latencies of a sweep: its clock's tick, where there are many values."""
    gaps = np.diff(np.unique(latency_ms))
    gaps = gaps[gaps > 1e-9]
    return float(gaps.min()) if gaps.size >= 8 else 0.0


def _edge_at(
    sweep: Sweep, index: int, kind: str, noise: float, min_jump_pct: float, known_tiles: Sequence[int]
) -> Edge | None:
    sign = 1.0 if kind == "step" else -1.0
    latency_ms = sweep.latency_ms
    if sign * (latency_ms[index + 1] - latency_ms[index]) <= 0:
        return None
    log_ms = sign * np.log(latency_ms)
    before = _plateau(sweep.tokens, log_ms, index, -1, 3 * noise)
    after = _plateau(sweep.tokens, log_ms, index + 1, 1, 3 * noise)
    level = float(after.mean() - before.mean())
    here, following = float(latency_ms[index]), float(latency_ms[index + 1])
    last = min(index + SUSTAIN_POINTS, latency_ms.size - 1)
    if noise < NOISY:
        jump_pct = (following / here - 1) * 100
        still_pct = (float(latency_ms[last]) / here - 1) * 100
        error = noise * np.sqrt(2.0)
    else:
        if sign * np.log(following / here) < 0.5 * level:
            return None  # the level rises here, but the edge is a point further on
        jump_pct = float(np.expm1(sign * level)) * 100
        still_pct = (
            float(np.expm1(sign * (log_ms[index + 2 : index + 5].mean() - before.mean()))) * 100
            if (index + 2 < latency_ms.size)
            else jump_pct
        )
        error = noise * np.sqrt(1 / before.size + 1 / after.size)
    if not (_at_least(sign * jump_pct, min_jump_pct) and _at_least(sign * still_pct, min_jump_pct)):
        return None
    if not _beyond_noise(log_ms, index, level, before.size, after.size, noise):
        return None
    if kind == "step" and _is_growth(sweep.tokens, latency_ms, index, noise):
        return None
    return _describe(sweep, index, kind, jump_pct, error, sign * level, known_tiles)


def _at_least(jump_pct: float, min_jump_pct: float) -> bool:
    return jump_pct >= min_jump_pct


def _plateau(tokens: IntArray, log_ms: FloatArray, start: int, step: int, tolerance: float) -> FloatArray:
    """Up to three near points from ``start`` outwards that agree with each other within the noise."""
    reach = max(2 * SMALLEST_TILE_TOKENS, int(tokens[start]) // 16)
    points = [float(log_ms[start])]
    index = start + step
    while (
        len(points) < 3
        and 0 <= index < log_ms.size
        and abs(int(tokens[index] - tokens[start])) <= reach
        and abs(log_ms[index] - np.mean(points)) <= tolerance
    ):
        points.append(float(log_ms[index]))
        index += step
    return np.array(points)


def _beyond_noise(log_ms: FloatArray, index: int, level: float, num_before: int, num_after: int, noise: float) -> bool:
    """Whether the plateaus differ, or the point at ``index`` alone stands out, by more than noise allows."""
    if noise <= 0:
        return True
    later = log_ms[index + 1 : index + 1 + SUSTAIN_POINTS]
    z_level = level / (noise * np.sqrt(1 / num_before + 1 / num_after))
    # A single low point among hundreds is likelier than a low plateau: it needs one more sigma.
    z_point = (later.mean() - log_ms[index]) / (noise * np.sqrt(1 + 1 / later.size))
    return bool(max(z_level, z_point - 1) >= _MIN_Z)


def _is_growth(tokens: IntArray, latency_ms: FloatArray, index: int, noise: float) -> bool:
    """Whether a wide gap's rise is no more than the neighbouring gaps rise by, token for token."""
    width = int(tokens[index + 1] - tokens[index])
    if width <= SMALLEST_TILE_TOKENS:
        return False
    rise = float(latency_ms[index + 1] - latency_ms[index])
    beyond = 1 + 2 * np.sqrt(2.0) * noise
    if latency_ms[index + 1] / latency_ms[index] >= beyond * tokens[index + 1] / tokens[index]:
        return False
    widths = np.diff(tokens)
    slope = np.diff(latency_ms) / widths
    # The step from m to m+1 says nothing about growth, so only gaps of a comparable width are asked.
    wide = np.flatnonzero((widths * 4 >= width) & (np.arange(widths.size) != index))
    near = np.concatenate([slope[wide[wide < index][-3:]], slope[wide[wide > index][:3]]])
    if near.size == 0:
        return True  # nothing to tell a step from growth with
    expected = max(0.0, float(np.quantile(near, 0.35))) * width
    return rise - expected < _MIN_STEP_SHARE * rise


def _describe(
    sweep: Sweep, index: int, kind: str, jump_pct: float, error: float, level: float, known_tiles: Sequence[int]
) -> Edge:
    tokens, following = int(sweep.tokens[index]), int(sweep.tokens[index + 1])
    here_ms, next_ms = float(sweep.latency_ms[index]), float(sweep.latency_ms[index + 1])
    error = float(np.hypot(error, _tick_ms(sweep.latency_ms) / np.sqrt(12.0) / here_ms))
    tile = next((t for t in known_tiles if tokens % t == 0), None)
    cheaper = sweep.tokens[index + 2 :][sweep.latency_ms[index + 2 :] < next_ms * (1 - max(0.02, 3 * error))]
    words = [f"{tokens} is a multiple of {tile}" if tile else "not a multiple of a known tile"]
    if following - tokens > SMALLEST_TILE_TOKENS:
        words.append(f"the edge lies somewhere in {tokens}..{following - 1}: nothing was measured between")
    previous = int(sweep.tokens[index - 1]) if index else 0
    if kind == "drop":
        after_plus_one = tokens - previous == 1 and following - tokens >= 8
        words.append(
            f"{tokens} is dearer than {following} for being odd or unpadded, or by another kernel"
            if after_plus_one
            else "more tokens take less time, as after a change of kernel"
        )
    elif cheaper.size:
        words.append(f"{int(cheaper[0])} tokens cost less than {following}")
        if following - tokens == 1:
            words.append("so this may be odd M, not the next tile")
    return Edge(
        op=sweep.op,
        tensor_parallel=sweep.tensor_parallel,
        tokens=tokens,
        next_tokens=following,
        latency_ms=here_ms,
        next_latency_ms=next_ms,
        jump_pct=float(jump_pct),
        jump_ms=next_ms - here_ms,
        jump_uncertainty_pct=float(error * (1 + jump_pct / 100) * 100),
        level_jump_pct=float(np.expm1(level)) * 100,
        us_per_token_before=here_ms / tokens * 1e3,
        us_per_token_after=next_ms / following * 1e3,
        kind=kind,
        sustained=index + SUSTAIN_POINTS < sweep.tokens.size,
        multiple_of=tile,
        cheaper_at=int(cheaper[0]) if cheaper.size else None,
        explanation="; ".join(words),
    )
