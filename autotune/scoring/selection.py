"""The recommendation rule: which budgets are repeated, and which one wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ...engine.metrics import SLO
from ...engine.slo import describe_limits
from ..study.space import Candidate
from ..study.trial import TrialRow
from .comparison import PAIRED_TEST, Comparison, compare
from .objective import Objective


def rule(objective: Objective, slo: SLO) -> str:
    """How the recommendation is chosen, in words."""
    limits = " and ".join(part for part in ("P99 TBT, median scheduling delay", describe_limits(slo)) if part)
    return (
        f"Feasible in every repeat ({limits} within the SLO); of those, {objective.noun} within the noise of the best; "
        "of those, the lowest pipeline bubble fraction, noise again a tie; of those, the smallest budget. Noise: the "
        f"{PAIRED_TEST}, does not show a difference."
    )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over repeats: median, lowest, highest, and how many."""

    value: float
    low: float
    high: float
    repeats: int


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

    def by_round(self, metric: str) -> dict[int, float]:
        """``metric`` by the round of its repeat; rounds without data are left out."""
        numbered = ((index if row.round is None else row.round, row) for index, row in enumerate(self.rows))
        return {number: value for number, row in numbered if not math.isnan(value := row.metric(metric))}

    @property
    def feasible(self) -> bool | None:
        """True when every repeat met the SLO, False when any broke it, None when none has data."""
        verdicts = [row.feasible for row in self.rows]
        if not verdicts or False in verdicts:
            return False
        return None if None in verdicts else True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome: ``status``, the winner (None when nothing ran), and those that tie with it."""

    status: str
    best: Contender | None
    ties: tuple[Candidate, ...] = ()


def promising(row: TrialRow) -> bool:
    """Whether a run of the search met the SLO, or had no TBT to miss it with."""
    return row.state == "complete" and row.feasible is not False


def shortlist(rows: Sequence[TrialRow], count: int) -> list[TrialRow]:
    """The ``count`` runs of a search, one a setting, that are worth repeating, best first.

    Feasible ones (or those without TBT data) by the objective; when there are none, those closest to the SLO.
    """
    usable = [row for row in rows if row.state != "failed"]
    good = [row for row in usable if promising(row)]
    if good:
        ranked = sorted(good, key=lambda row: (-row.score, row.token_budget))
    else:
        ranked = sorted(usable, key=lambda row: (max(row.violations, default=math.inf), row.token_budget))
    best: dict[tuple[int, int | None, str], TrialRow] = {}
    for row in ranked:
        best.setdefault(row.setting, row)
    return list(best.values())[:count]


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Compares contenders: by ``objective``, then by ``variance_metric``; ``exact`` on a device that repeats itself."""

    objective: Objective
    variance_metric: str
    exact: bool = False

    def compare(self, one: Contender, other: Contender, metric: str | None = None) -> Comparison:
        """How much higher ``one`` is in ``metric``, by default the objective's."""
        name = metric or self.objective.metric
        resolution = self.objective.resolution if metric is None else 0.0
        return compare(one.by_round(name), other.by_round(name), exact=self.exact, resolution=resolution)

    def leader(self, contenders: Sequence[Contender]) -> Contender | None:
        """The one with the highest median of the objective; None when none has any."""
        spreads = [(one, spread) for one in contenders if (spread := one.spread(self.objective.metric))]
        return max(spreads, key=lambda pair: pair[1].value, default=(None, None))[0]

    def contested(self, contenders: Sequence[Contender]) -> list[Contender]:
        """The leader of the feasible contenders and those of which it is not shown whether they are worse; empty when
        every comparison with the leader is decided."""
        usable = [one for one in contenders if one.rows and one.feasible is not False]
        leader = self.leader(usable)
        if leader is None:
            return []
        others = [one for one in usable if one is not leader and self.compare(one, leader).outcome == "open"]
        return [leader, *others] if others else []

    def choose(self, contenders: Sequence[Contender]) -> Choice:
        """Apply the rule to the repeated contenders."""
        ran = [contender for contender in contenders if contender.rows]
        if not ran:
            return Choice(status="no_data", best=None)
        feasible = [contender for contender in ran if contender.feasible is not False]
        if not feasible:
            closest = min(ran, key=lambda contender: (_distance(contender), contender.candidate.token_budget))
            return Choice(status="infeasible", best=closest)
        leader = self.leader(feasible)
        fast = [one for one in feasible if leader is None or self.compare(one, leader).outcome != "lower"]
        steady = self._steadiest(fast)
        best = min(steady, key=lambda contender: contender.candidate.token_budget)
        tied = [one.candidate for one in fast if one is not best]
        ties = tuple(sorted(tied, key=lambda candidate: candidate.token_budget))
        return Choice(status="no_data" if best.feasible is None else "feasible", best=best, ties=ties)

    def _steadiest(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Those whose pipeline variance is not shown to be above the lowest."""
        spreads = [(one, spread) for one in contenders if (spread := one.spread(self.variance_metric))]
        if not spreads:
            return list(contenders)
        lowest = min(spreads, key=lambda pair: pair[1].value)[0]
        return [one for one, _ in spreads if self.compare(one, lowest, self.variance_metric).outcome != "higher"]


def chunking_buys_nothing(
    judge: Judge, contenders: Sequence[Contender], best: Contender, whole_prompt_tokens: int | None
) -> Contender | None:
    """The smallest contender that never splits a prompt, keeps the SLO (or has no TBT) and is as good as the best."""
    if whole_prompt_tokens is None:
        return None
    for contender in sorted(contenders, key=lambda contender: contender.candidate.token_budget):
        whole = contender.candidate.token_budget >= whole_prompt_tokens and contender.feasible is not False
        if whole and contender.rows and judge.compare(contender, best).outcome != "lower":
            return contender
    return None


def _distance(contender: Contender) -> float:
    """How far a contender is from the SLO at its worst repeat, as a share of the limit."""
    return max((max(row.violations, default=math.inf) for row in contender.rows), default=math.inf)
