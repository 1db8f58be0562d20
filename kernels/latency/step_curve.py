"""Latency between measured token counts: a curve that keeps the steps of a staircase.

Between two neighbouring measurements nothing is known but their difference, so the rule depends on its size:

- up to 6%: the line between the two points (inside a step: flat plus slope);
- up to SMALL_JUMP: the line, drawn in towards the middle value so that neither end is missed by much;
- beyond: a step. It lies behind the token count that the prior favours clearly (a multiple of a common tile, or
  an edge seen elsewhere on the device); where none is favoured, latency follows the odds of the step being behind.

Two measurements one candidate apart around an edge thus keep it whole: no line crosses a known edge.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .sweep import SOURCES, FloatArray, IntArray, Sweep

BoolArray = npt.NDArray[np.bool_]

SMALL_JUMP = 0.12
"""Relative difference (in logs) of two neighbours from which there is a step between them, and no slope."""

TILE_ODDS = ((8, 1.0), (16, 1.0), (32, 2.0), (64, 8.0), (128, 30.0), (256, 40.0))
"""Odds that latency rises by 6% or more right after a multiple of so many tokens (GEMMs, public GPU sweeps)."""

_OTHER_ODDS = 0.05
_CLEAR_FAVOURITE = 0.35
_CERTAIN = 0.75
_DRAW_IN = 0.12
_LINE_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgePrior:
    """Where steps are likely: behind multiples of tiles, and where hints say.

    ``alignment`` from 0 (steps anywhere) to 1 (as TILE_ODDS say) is how far this operation's steps follow tiles.
    ``hint_tokens`` (last cheap counts, ascending) with ``hint_odds`` are edges seen in other sweeps.
    """

    alignment: float = 1.0
    hint_tokens: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    hint_odds: FloatArray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not 0 <= self.alignment <= 1:
            raise ValueError(f"alignment is {self.alignment}: it must lie in 0..1")
        if self.hint_tokens.shape != self.hint_odds.shape or np.any(np.diff(self.hint_tokens) <= 0):
            raise ValueError("hint_tokens must rise strictly and have one hint_odds each")

    def odds(self, last_cheap: IntArray, rising: bool = True) -> FloatArray:
        """Relative odds of an edge behind each count. Falling edges (kernel switches) do not follow tiles."""
        tiles = np.full(last_cheap.size, _OTHER_ODDS)
        for multiple, weight in TILE_ODDS:
            tiles[last_cheap % multiple == 0] = weight if rising else 1.0
        odds = np.power(tiles, self.alignment) if rising else tiles
        if self.hint_tokens.size:
            near = np.minimum(np.searchsorted(self.hint_tokens, last_cheap), self.hint_tokens.size - 1)
            odds = odds + np.where(self.hint_tokens[near] == last_cheap, self.hint_odds[near], 0.0)
        return odds


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCurve:
    """Latency of one operation at any token count, from measurements at some.

    ``kind`` "steps" applies the rules above; "lines" joins the points by lines: for tables that measured both
    sides of every multiple. ``std_ms`` is the spread of each point and ``sources`` says where it comes from, as
    indices into sweep.SOURCES.
    """

    op: str
    tokens: IntArray
    latency_ms: FloatArray
    std_ms: FloatArray
    sources: npt.NDArray[np.int8]
    kind: str = "steps"
    prior: EdgePrior = field(default_factory=EdgePrior)
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("steps", "lines"):
            raise ValueError(f"kind is {self.kind!r}: it must be steps or lines")
        Sweep(op=self.op, tokens=self.tokens, latency_ms=self.latency_ms, std_ms=self.std_ms)  # validates
        if self.sources.shape != self.tokens.shape or np.any((self.sources < 0) | (self.sources >= len(SOURCES))):
            raise ValueError(f"sources of {self.op} must hold one index into {SOURCES} for each token count")

    @classmethod
    def of(cls, sweep: Sweep, *, kind: str = "steps", prior: EdgePrior | None = None) -> StepCurve:
        """The curve through a sweep's points."""
        return cls(
            op=sweep.op,
            tokens=sweep.tokens,
            latency_ms=sweep.latency_ms,
            std_ms=np.zeros(sweep.tokens.size) if sweep.std_ms is None else sweep.std_ms,
            sources=np.full(sweep.tokens.size, SOURCES.index(sweep.source), dtype=np.int8),
            kind=kind,
            prior=prior or EdgePrior(),
            note=sweep.note,
        )

    def at(self, tokens: npt.ArrayLike) -> FloatArray:
        """Latency in ms at each count; 0 at 0 tokens. ValueError for negative counts.

        Below the first measured count its latency holds. Beyond the last one the average slope of the upper half
        of the measured range goes on (`extrapolated` marks those counts).
        """
        wanted = np.atleast_1d(np.asarray(tokens, dtype=np.int64))
        if np.any(wanted < 0):
            raise ValueError(f"tokens is {int(wanted.min())}: a token count cannot be negative")
        out = np.interp(wanted, self.tokens, self.latency_ms)
        if self.kind == "steps":
            inside = np.searchsorted(self.tokens, wanted, side="left") - 1
            for index in np.unique(inside[(inside >= 0) & (inside < self.tokens.size - 1)]):
                mask = inside == index
                out[mask] = self._between(int(index), wanted[mask], out[mask])
        beyond = wanted > self.tokens[-1]
        out[beyond] = self.latency_ms[-1] + self._last_slope() * (wanted[beyond] - self.tokens[-1])
        out[wanted == 0] = 0.0
        return out

    def extrapolated(self, tokens: npt.ArrayLike) -> BoolArray:
        """Which counts lie outside the measured range (0 does not)."""
        wanted = np.atleast_1d(np.asarray(tokens, dtype=np.int64))
        outside: BoolArray = ((wanted < self.tokens[0]) | (wanted > self.tokens[-1])) & (wanted != 0)
        return outside

    def spread_at(self, tokens: npt.ArrayLike) -> FloatArray:
        """One standard deviation in ms: the neighbours' own, plus a third of the difference between them."""
        wanted = np.atleast_1d(np.asarray(tokens, dtype=np.int64))
        above = np.clip(np.searchsorted(self.tokens, wanted), 0, self.tokens.size - 1)
        below = np.maximum(above - (self.tokens[above] > wanted), 0)
        own = np.maximum(self.std_ms[above], self.std_ms[below])
        return own + np.abs(self.latency_ms[above] - self.latency_ms[below]) / 3

    def source_at(self, tokens: int) -> str:
        """Where the points around a count come from (the less direct of the two)."""
        above = min(int(np.searchsorted(self.tokens, tokens)), self.tokens.size - 1)
        below = max(above - int(self.tokens[above] > tokens), 0)
        return SOURCES[int(max(self.sources[above], self.sources[below]))]

    def _last_slope(self) -> float:
        start = int(np.searchsorted(self.tokens, self.tokens[-1] // 2))
        if start >= self.tokens.size - 1:
            return float(self.latency_ms[-1] / self.tokens[-1])  # one point there: in proportion
        rise = float(self.latency_ms[-1] - self.latency_ms[start])
        return max(0.0, rise / float(self.tokens[-1] - self.tokens[start]))

    def _between(self, index: int, wanted: IntArray, line_ms: FloatArray) -> FloatArray:
        low, high = float(self.latency_ms[index]), float(self.latency_ms[index + 1])
        jump = abs(float(np.log(high / low)))
        at_point = wanted == self.tokens[index + 1]
        if jump <= _DRAW_IN / 2:
            return line_ms
        counts = np.arange(self.tokens[index], self.tokens[index + 1])
        odds = self.prior.odds(counts, rising=high >= low)
        share = odds / odds.sum()
        favourite = int(np.argmax(share))
        stepped = np.where(wanted <= counts[favourite], low, high)
        if jump < SMALL_JUMP:
            if share[favourite] > _CERTAIN:
                return np.where(at_point, high, stepped)
            middle = np.sqrt(low * high)
            drawn = middle + (line_ms - middle) * min(1.0, _DRAW_IN / jump - 1)
            return np.where(at_point, high, drawn)
        if share[favourite] > _CLEAR_FAVOURITE:
            return np.where(at_point, high, stepped)
        behind = np.cumsum(share)[np.maximum(wanted - counts[0] - 1, 0)]
        mixed = _LINE_SHARE * line_ms + (1 - _LINE_SHARE) * (low + (high - low) * behind)
        return np.where(at_point, high, mixed)
