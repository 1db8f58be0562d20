"""The recommendation rule: which budgets are repeated, and which one wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .space import Candidate
from .trial import TrialRow

RULE = (
    "Feasible in every repeat (P99 TBT and median scheduling delay within the SLO); of those, throughput within the "
    "noise of the best; of those, the lowest pipeline bubble fraction, noise again a tie; of those, the smallest "
    "budget. Noise: the ranges over the interleaved repeats overlap."
)
THROUGHPUT = "total_tokens_per_s"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over repeats: median, lowest, highest, and how many."""

    value: float
    low: float
    high: float
    repeats: int

    def overlaps(self, other: Spread) -> bool:
        """Whether a difference between the two is inside the noise."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A budget and its completed repeats."""

    candidate: Candidate
    rows: tuple[TrialRow, ...]

    def spread(self, metric: str) -> Spread | None:
        """The spread of ``metric``; None where no repeat has data."""
        values = [value for row in self.rows if not math.isnan(value := row.metric(metric))]
        if not values:
            return None
        return Spread(value=float(median(values)), low=min(values), high=max(values), repeats=len(values))

    @property
    def feasible(self) -> bool | None:
        """True when every repeat met the SLO, False when any broke it, None when none has data."""
        verdicts = [row.feasible for row in self.rows]
        if not verdicts or False in verdicts:
            return False
        return None if None in verdicts else True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome: ``status``, the winner (None when nothing ran), and the budgets that tie with it."""

    status: str
    best: Contender | None
    ties: tuple[int, ...] = ()


def promising(row: TrialRow) -> bool:
    """Whether a run of the search met the SLO, or had no TBT to miss it with."""
    return row.state == "complete" and row.feasible is not False


def shortlist(rows: Sequence[TrialRow], count: int) -> list[int]:
    """The ``count`` budgets of a search that are worth repeating, best first.

    Feasible ones (or those without TBT data) by throughput; when there are none, those closest to the SLO.
    """
    usable = [row for row in rows if row.state != "failed"]
    good = [row for row in usable if promising(row)]
    if good:
        ranked = sorted(good, key=lambda row: (-row.metric(THROUGHPUT), row.token_budget))
    else:
        ranked = sorted(usable, key=lambda row: (max(row.violations, default=math.inf), row.token_budget))
    return list(dict.fromkeys(row.token_budget for row in ranked))[:count]


def choose(contenders: Sequence[Contender], variance_metric: str) -> Choice:
    """Apply ``RULE`` to the repeated contenders."""
    ran = [contender for contender in contenders if contender.rows]
    if not ran:
        return Choice(status="no_data", best=None)
    feasible = [contender for contender in ran if contender.feasible is not False]
    if not feasible:
        closest = min(ran, key=lambda contender: (_distance(contender), contender.candidate.token_budget))
        return Choice(status="infeasible", best=closest)
    fast = _tied_with_best(feasible, THROUGHPUT, highest=True)
    steady = _tied_with_best(fast, variance_metric, highest=False)
    best = min(steady, key=lambda contender: contender.candidate.token_budget)
    ties = tuple(
        sorted(
            contender.candidate.token_budget for contender in fast if contender is not best and _ties(contender, best)
        )
    )
    return Choice(status="no_data" if best.feasible is None else "feasible", best=best, ties=ties)


def chunking_buys_nothing(
    contenders: Sequence[Contender], best: Contender, whole_prompt_tokens: int | None
) -> Contender | None:
    """The smallest contender that never splits a prompt, keeps the SLO (or has no TBT) and is as fast as the best."""
    chosen = best.spread(THROUGHPUT)
    if whole_prompt_tokens is None or chosen is None:
        return None
    for contender in sorted(contenders, key=lambda contender: contender.candidate.token_budget):
        whole = contender.spread(THROUGHPUT)
        splits = contender.candidate.token_budget < whole_prompt_tokens
        if not splits and whole and contender.feasible is not False and whole.high >= chosen.low:
            return contender
    return None


def _tied_with_best(contenders: Sequence[Contender], metric: str, *, highest: bool) -> list[Contender]:
    spreads = [(contender, spread) for contender in contenders if (spread := contender.spread(metric))]
    if not spreads:
        return list(contenders)
    best = (max if highest else min)((spread for _, spread in spreads), key=lambda spread: spread.value)
    return [contender for contender, spread in spreads if spread.overlaps(best)]


def _ties(one: Contender, other: Contender) -> bool:
    first, second = one.spread(THROUGHPUT), other.spread(THROUGHPUT)
    return first is not None and second is not None and first.overlaps(second)


def _distance(contender: Contender) -> float:
    """How far a contender is from the SLO at its worst repeat, as a share of the limit."""
    return max((max(row.violations, default=math.inf) for row in contender.rows), default=math.inf)
