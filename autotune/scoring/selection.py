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

#: What decides among budgets that are equal in the objective, in this order, and the share by which one must be lower.
LATENCY_TIE_BREAKS = ("ttft_p99_ms", "tbt_p99_ms")
TELLING_SHARE = 0.05


def rule(objective: Objective, slo: SLO, indifference: float = 0.0) -> str:
    """How the recommendation is chosen, in words."""
    limits = " and ".join(part for part in ("P99 TBT, median scheduling delay", describe_limits(slo)) if part)
    near = f"within {indifference:.3%} or ".replace(".000%", "%") if indifference else "within "
    return (
        f"Feasible in every repeat ({limits} within the SLO); of those, {objective.noun} {near}the noise of the best; "
        f"of those, at the traffic's own rate, a P99 TTFT that is lower by more than {TELLING_SHARE:.0%}, then a P99 "
        "TBT that is, then the lowest pipeline bubble fraction, noise again a tie; of those, the smallest. Noise: the "
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
class Decision:
    """The rule that decided: ``objective``, ``ttft_p99``, ``tbt_p99``, ``bubble_fraction``, ``smaller_budget``, or
    ``only_one`` where nothing else met the SLO. ``group``: the budgets that count as equal in the objective. ``over``:
    the budget that the rule decided against, with both sides' figures of ``metric`` where the rule has one."""

    rule: str
    group: tuple[int, ...]
    over: int | None = None
    metric: str | None = None
    chosen: float | None = None
    other: float | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The outcome: ``status``, the winner (None when nothing ran), and those that tie with it."""

    status: str
    best: Contender | None
    ties: tuple[Candidate, ...] = ()
    decision: Decision | None = None


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
        # What serves the most within the SLO, if less than arrives, else what is closest to it.
        ranked = sorted(
            usable, key=lambda row: (-_capacity(row), max(row.violations, default=math.inf), row.token_budget)
        )
    best: dict[tuple[int, int | None, str], TrialRow] = {}
    for row in ranked:
        best.setdefault(row.setting, row)
    return list(best.values())[:count]


def _capacity(row: TrialRow) -> float:
    qps = row.metric("capacity_qps")
    return 0.0 if math.isnan(qps) else qps


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Compares contenders: by ``objective``, where those within ``indifference`` (a share) of the best are equal, then
    by P99 TTFT and P99 TBT, then by ``variance_metric``; ``exact`` on a device that repeats itself."""

    objective: Objective
    variance_metric: str
    exact: bool = False
    indifference: float = 0.0

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
            closest = min(ran, key=lambda one: (-_most(one), _distance(one), one.candidate.token_budget))
            return Choice(status="infeasible", best=closest)
        group = self.equals(feasible)
        best, decision = self.decide(group, feasible)
        ties = tuple(
            sorted((one.candidate for one in group if one is not best), key=lambda candidate: candidate.token_budget)
        )
        status = "no_data" if best.feasible is None else "feasible"
        return Choice(status=status, best=best, ties=ties, decision=decision)

    def equals(self, feasible: Sequence[Contender]) -> list[Contender]:
        """Those that count as equal in the objective: not shown to be below the best, or within ``indifference``."""
        leader = self.leader(feasible)
        top = None if leader is None else leader.spread(self.objective.metric)
        if leader is None or top is None:
            return list(feasible)

        def near(one: Contender) -> bool:
            mine = one.spread(self.objective.metric)
            return mine is not None and mine.value >= self.least_equal(top.value)

        return [one for one in feasible if self.compare(one, leader).outcome != "lower" or near(one)]

    def least_equal(self, top: float) -> float:
        """The lowest figure that is within ``indifference`` of ``top`` for certain: either may be off by the resolution
        of its measurement."""
        return (1.0 - self.indifference) * (1.0 + self.objective.resolution) ** 2 * top

    def decide(self, group: Sequence[Contender], feasible: Sequence[Contender]) -> tuple[Contender, Decision]:
        """The winner among equals, and the rule that set it apart from the last one left beside it."""
        left = list(group)
        decided: tuple[str, list[Contender]] | None = None
        for metric in (*LATENCY_TIE_BREAKS, self.variance_metric):
            kept = self._steadiest(left) if metric == self.variance_metric else _lowest(left, metric)
            if len(kept) < len(left):
                decided = metric, [one for one in left if one not in kept]
            left = kept
        best = min(left, key=lambda one: one.candidate.token_budget)
        members = tuple(sorted(one.candidate.token_budget for one in group))
        if len(left) > 1:
            other = min((one for one in left if one is not best), key=lambda one: one.candidate.token_budget)
            return best, Decision(rule="smaller_budget", group=members, over=other.candidate.token_budget)
        if decided is not None:
            metric, beaten = decided
            closest = min(beaten, key=lambda one: (_value(one, metric), one.candidate.token_budget))
            rule = metric.removesuffix("_ms") if metric in LATENCY_TIE_BREAKS else "bubble_fraction"
            return best, _decision(rule, metric, members, best, closest)
        others = [one for one in feasible if one is not best and one not in group]
        if not others:
            return best, Decision(rule="only_one", group=members)
        rival = max(others, key=lambda one: (_value(one, self.objective.metric), -one.candidate.token_budget))
        return best, _decision("objective", self.objective.metric, members, best, rival)

    def _steadiest(self, contenders: Sequence[Contender]) -> list[Contender]:
        """Those whose pipeline variance is not shown to be above the lowest."""
        spreads = [(one, spread) for one in contenders if (spread := one.spread(self.variance_metric))]
        if not spreads:
            return list(contenders)
        lowest = min(spreads, key=lambda pair: pair[1].value)[0]
        return [one for one, _ in spreads if self.compare(one, lowest, self.variance_metric).outcome != "higher"]


def _decision(rule: str, metric: str, group: tuple[int, ...], best: Contender, other: Contender) -> Decision:
    return Decision(
        rule=rule,
        group=group,
        over=other.candidate.token_budget,
        metric=metric,
        chosen=_value(best, metric),
        other=_value(other, metric),
    )


def _lowest(contenders: Sequence[Contender], metric: str) -> list[Contender]:
    """Those whose ``metric`` is no more than ``TELLING_SHARE`` above the lowest; all where one has no data."""
    values = {id(one): _value(one, metric) for one in contenders}
    if any(math.isnan(value) for value in values.values()):
        return list(contenders)
    limit = min(values.values()) * (1.0 + TELLING_SHARE)
    return [one for one in contenders if values[id(one)] <= limit]


def _value(contender: Contender, metric: str) -> float:
    spread = contender.spread(metric)
    return math.nan if spread is None else spread.value


def _most(contender: Contender) -> float:
    """The capacity of a contender; 0 where it has none."""
    qps = _value(contender, "capacity_qps")
    return 0.0 if math.isnan(qps) else qps


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
