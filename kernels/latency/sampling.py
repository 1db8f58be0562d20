"""Which token counts to measure next, when not all can be: a coarse sweep, then bisection where it pays.

The sampler sees only the latencies that it has asked for. Every interval between two measured counts has a price:
what a wrong guess inside it would cost, from the difference of its ends (a step lies inside) or from what
intervals of this operation have hidden so far (a bump may lie inside). The dearest interval is split, where the
odds of the step being on either side are even. Constants were chosen on eleven of Vidur's public GPU sweeps and
checked on seven others.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .step_curve import EdgePrior, StepCurve
from .sweep import FloatArray, IntArray, Sweep

_HINT_ODDS = 15.0
"""Odds that one sure edge of another sweep adds behind the same count (TILE_ODDS is the scale)."""


@dataclass(frozen=True, kw_only=True)
class SamplerTuning:
    """How the sampler weighs an interval. Differences are of log latency.

    ``coarse_share`` of the points make the first sweep. An interval of n unmeasured candidates whose ends differ
    by d costs n**size_power * (min(d - ignored_jump, capped_jump) * r + h) and ``jump_bonus`` * d * r more where d
    exceeds ``jump``; r is how far points have been off the line inside differing intervals (relative to d), h how far
    inside level ones, both starting from a guess that counts as ``guess_weight`` observations.
    """

    coarse_share: float = 0.25
    level_jump: float = 0.02
    ignored_jump: float = 0.02
    capped_jump: float = 0.04
    jump: float = 0.095
    jump_bonus: float = 11.0
    size_power: float = 0.9
    hidden_power: float = 0.75
    guess_off_line: float = 0.2
    guess_hidden: float = 0.006
    guess_weight: float = 16.0
    ignored_hidden: float = 0.0
    hint_hazard: float = 12.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name} is {value}: it must be 0 or more")


class _Interval(NamedTuple):
    num_inside: int
    jump: float
    hidden_factor: float


class AdaptiveSampler:
    """Chooses ``num_points`` of ``candidates`` by what it has been told of the earlier ones.

    Call `ask` for the next counts to measure (the coarse sweep first, then one at a time; empty when done) and
    `tell` with their latencies; `curve` is the prediction from what is known. ``hints`` (one weight for each
    candidate: how often other operations had an edge right behind it) come from `edges_found` of earlier samplers.
    """

    def __init__(
        self,
        candidates: npt.ArrayLike,
        num_points: int,
        *,
        hints: FloatArray | None = None,
        tuning: SamplerTuning | None = None,
    ) -> None:
        self.candidates: IntArray = np.asarray(candidates, dtype=np.int64)
        if self.candidates.size < 2 or np.any(np.diff(self.candidates) <= 0) or self.candidates[0] < 1:
            raise ValueError("candidates must be two or more token counts that rise strictly from 1 or more")
        if num_points < 2:
            raise ValueError(f"num_points is {num_points}: it must be 2 or more")
        self.num_points = min(num_points, self.candidates.size)
        self.tuning = tuning or SamplerTuning()
        self._hints = np.zeros(self.candidates.size)
        self._known: dict[int, float] = {}
        self._std: dict[int, float] = {}
        self._intervals: dict[tuple[int, int], _Interval] = {}
        self._off_line: list[float] = []
        self._hidden: list[float] = []
        self._num_aligned = self._num_unaligned = 0
        self._pending: dict[int, tuple[int, int]] = {}
        if hints is not None:
            self.set_hints(hints)

    def set_hints(self, hints: FloatArray) -> None:
        """Take new hints: for each candidate how surely other sweeps have an edge right behind it."""
        hints = np.asarray(hints, dtype=np.float64)
        if hints.shape != self.candidates.shape or np.any(hints < 0):
            raise ValueError("hints must hold one weight of 0 or more for each candidate")
        self._hints = hints
        for left, right in self._intervals:
            self._intervals[left, right] = self._interval(left, right)

    @property
    def num_known(self) -> int:
        """How many counts have been told."""
        return len(self._known)

    def known_tokens(self) -> list[int]:
        """The counts that have been told, ascending."""
        return [int(self.candidates[index]) for index in sorted(self._known)]

    def ask(self) -> list[int]:
        """The token counts to measure next; empty once ``num_points`` are known or nothing is left to split."""
        if not self._known:
            return [int(self.candidates[i]) for i in self._coarse()]
        if len(self._known) >= self.num_points or not self._intervals:
            return []
        ends = self._dearest()
        index = self._split(*ends)
        self._pending = {index: ends}
        return [int(self.candidates[index])]

    def tell(self, tokens: int, latency_ms: float, std_ms: float = 0.0) -> None:
        """Record a measurement; ValueError when the count is no candidate or the latency is not above 0."""
        index = int(np.searchsorted(self.candidates, tokens))
        if index >= self.candidates.size or self.candidates[index] != tokens:
            raise ValueError(f"tokens is {tokens}: it is not among the candidates")
        if not (np.isfinite(latency_ms) and latency_ms > 0):
            raise ValueError(f"latency_ms is {latency_ms} at {tokens} tokens: it must be finite and above 0")
        ends = self._pending.pop(index, None)
        if ends is not None:
            self._learn(index, latency_ms, *ends)
        already = index in self._known
        self._known[index], self._std[index] = latency_ms, std_ms
        if already:
            return
        known = sorted(self._known)
        place = known.index(index)
        left = known[place - 1] if place else None
        right = known[place + 1] if place + 1 < len(known) else None
        if left is not None and right is not None:
            self._intervals.pop((left, right), None)
        if left is not None:
            self._add(left, index)
        if right is not None:
            self._add(index, right)

    def curve(self, op: str = "latency", source: str = "measured") -> StepCurve:
        """The curve through what is known, with the prior that has been learnt."""
        known = sorted(self._known)
        sweep = Sweep(
            op=op,
            tokens=self.candidates[known],
            latency_ms=np.array([self._known[i] for i in known]),
            std_ms=np.array([self._std[i] for i in known]),
            source=source,
        )
        return StepCurve.of(sweep, prior=self._prior())

    def edges_found(self) -> FloatArray:
        """For each candidate how surely an edge lies right behind it (1: both sides measured), for use as hints."""
        found = np.zeros(self.candidates.size)
        known = sorted(self._known)
        for left, right in pairwise(known):
            if right - left <= 2 and abs(np.log(self._known[right] / self._known[left])) > 0.05:
                found[left:right] += 1 / (right - left)
        return found

    def _coarse(self) -> list[int]:
        """Evenly spread candidates; every other one on a likely edge, the rest a third of a gap off."""
        count = max(2, min(self.num_points, round(self.num_points * self.tuning.coarse_share)))
        last = self.candidates.size - 1
        chosen = {0, last}
        odds = self._prior(with_hints=False).odds(self.candidates)
        for number, position in enumerate(np.linspace(0, last, count)):
            middle = round(float(position))
            near = np.arange(max(0, middle - 4), min(last, middle + 4) + 1)
            index = int(near[np.argmax(odds[near] - 0.01 * np.abs(near - middle))])
            if number % 2:
                index = min(last, index + max(1, round(last / (count - 1) / 3)))
            chosen.add(index)
        return [*sorted(chosen - {last})[: self.num_points - 1], last]

    def _alignment(self) -> float:
        """How far this operation's steps follow multiples of 64: 0 at the share that chance gives, 1 at a GEMM's."""
        share = (self._num_aligned + 1.3) / (self._num_aligned + self._num_unaligned + 2)
        return min(1.0, max(0.0, (share - 0.16) / 0.5))

    def _prior(self, with_hints: bool = True) -> EdgePrior:
        if not with_hints or not np.any(self._hints):
            return EdgePrior(alignment=self._alignment())
        hinted = np.flatnonzero(self._hints)
        return EdgePrior(
            alignment=self._alignment(),
            hint_tokens=self.candidates[hinted],
            hint_odds=_HINT_ODDS * self._hints[hinted],
        )

    def _add(self, left: int, right: int) -> None:
        ratio = self._known[right] / self._known[left]
        if right - left > 1:
            self._intervals[left, right] = self._interval(left, right)
        elif ratio > 1.06:
            if self.candidates[left] % 64 == 0:
                self._num_aligned += 1
            else:
                self._num_unaligned += 1

    def _interval(self, left: int, right: int) -> _Interval:
        inside = right - left - 1
        factor = (inside / 8) ** self.tuning.hidden_power
        factor *= 1 + self.tuning.hint_hazard * float(self._hints[left:right].sum())
        return _Interval(inside, abs(float(np.log(self._known[right] / self._known[left]))), factor)

    def _learn(self, index: int, latency_ms: float, left: int, right: int) -> None:
        """Note how far off the line a split point was."""
        low, high = self._known[left], self._known[right]
        ends = self.candidates[[left, index, right]].astype(np.float64)
        line_ms = low + (high - low) * (ends[1] - ends[0]) / (ends[2] - ends[0])
        off = abs(float(np.log(latency_ms / line_ms)))
        jump = abs(float(np.log(high / low)))
        if jump > self.tuning.level_jump:
            self._off_line.append(min(1.0, off / jump))
        else:
            self._hidden.append(min(0.1, max(0.0, off - self.tuning.ignored_hidden)))

    def _dearest(self) -> tuple[int, int]:
        """The interval with the highest price; of equals the leftmost."""
        tuning, weight = self.tuning, self.tuning.guess_weight
        off_line = (sum(self._off_line) + tuning.guess_off_line * weight) / (len(self._off_line) + weight)
        hidden = (sum(self._hidden) + tuning.guess_hidden * weight) / (len(self._hidden) + weight)

        def price(ends: tuple[int, int]) -> tuple[float, int]:
            num_inside, jump, hidden_factor = self._intervals[ends]
            inside = min(tuning.capped_jump, max(0.0, jump - tuning.ignored_jump)) * off_line
            bonus = tuning.jump_bonus * jump * off_line if jump > tuning.jump else 0.0
            return num_inside**tuning.size_power * (inside + hidden * hidden_factor) + bonus, -ends[0]

        return max(self._intervals, key=price)

    def _split(self, left: int, right: int) -> int:
        """The candidate to measure inside an interval."""
        rising = self._known[right] >= self._known[left]
        odds = self._prior().odds(self.candidates[left:right], rising)
        inside = right - left - 1
        centre = np.abs(np.arange(inside) - (inside - 1) / 2)
        if self._intervals[left, right].jump < self.tuning.level_jump:
            # Level ends: look right behind the likeliest edge, where a hidden bump would begin.
            return left + 1 + int(np.argmax(odds[:-1] - 1e-3 * centre))
        before = (np.cumsum(odds) / odds.sum())[:-1]
        return left + 1 + int(np.argmax(np.minimum(before, 1 - before) - 1e-4 * centre))
