"""What a budget that was not run is expected to do, from the staircase of the device and the runs so far.

An iteration at budget b takes about a * cost(b) + c * b + d, where cost(b) is what the token-wise layers take at b
tokens (measured by the staircase, steps and all), c * b stands for attention and whatever else grows evenly, and d for
what each iteration takes anyway. Time per token is that over b, and P99 TBT about that itself. The three factors are
fitted to the runs; what they miss is carried over to budgets nearby.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.record import FloatArray
from ...engine.token_costs import TokenCosts
from .space import REACH
from .trial import TrialRow

#: Runs below which nothing is fitted.
MIN_RUNS = 3

#: Runs at rates of at least this share of the best capacity say what P99 TBT is there.
COMPARABLE_RATES = 0.5

#: How many runs' worth the fit is against the runs in reach.
FIT_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class _Curve:
    """A fitted quantity: factors of the three terms, and by how much (in the logarithm) each run lies off the fit."""

    factors: FloatArray
    log_budgets: FloatArray
    misses: FloatArray

    def at(self, terms: FloatArray, log_budget: float) -> float:
        """The expected value at a budget with these terms."""
        weights = np.exp(-0.5 * ((self.log_budgets - log_budget) / REACH) ** 2)
        miss = float((weights * self.misses).sum() / (weights.sum() + FIT_WEIGHT))
        return float(terms @ self.factors) * float(np.exp(miss))


class Expectation:
    """The objective and the share of the SLO that each budget is expected to have; see ``fit``."""

    def __init__(self, costs: TokenCosts, score: _Curve, share: _Curve, tried: FloatArray) -> None:
        self._costs = costs
        self._score = score
        self._share = share
        self._tried = tried

    @classmethod
    def fit(cls, costs: TokenCosts, rows: Sequence[TrialRow], pending: Sequence[int]) -> Expectation | None:
        """An expectation from finished runs; None when they are too few. ``pending`` budgets are being run."""
        scored = [row for row in rows if row.state == "complete" and row.score > 0.0]
        timed = [row for row in rows if row.state in ("complete", "pruned") and row.violations]
        if any(row.tbt_share is not None for row in rows):
            # Under capacity every run has a rate of its own. What P99 TBT kept from a higher rate says nothing of the
            # time per token; and P99 TBT is that of full iterations only near the rates that the search is after.
            best_qps = max((row.score for row in scored), default=0.0)
            timed = [row for row in timed if _broken_at(row) >= best_qps * COMPARABLE_RATES]
            scored = [row for row in rows if _broken_at(row) > 0.0 and 0.0 < (row.tbt_share or 0.0) <= 1.0]
        if len(scored) < MIN_RUNS or len(timed) < MIN_RUNS:
            return None
        # A budget that the queue kept from a rate has a capacity below it: what it served while it had work.
        per_token = np.array([1.0 / (row.score or min(row.busy_rps or math.inf, _broken_at(row))) for row in scored])
        score = _fit([_terms(costs, row.token_budget) / row.token_budget for row in scored], per_token, scored)
        share = _fit(
            [_terms(costs, row.token_budget) for row in timed],
            np.array([max(row.tbt_share or 1.0 + row.violations[0], 1e-3) for row in timed]),
            timed,
        )
        tried = np.log([*(row.token_budget for row in rows), *pending])
        return cls(costs, score, share, tried)

    def score(self, budget: int) -> float:
        """The expected objective."""
        return 1.0 / self._score.at(_terms(self._costs, budget) / budget, float(np.log(budget)))

    def share(self, budget: int) -> float:
        """Expected P99 TBT as a share of its limit; up to 1 holds it."""
        return self._share.at(_terms(self._costs, budget), float(np.log(budget)))

    def doubt(self, budget: int) -> float:
        """How little is known near ``budget``: 0 beside a run, 1 far from all."""
        return float(min(1.0, np.abs(self._tried - np.log(budget)).min() / REACH))


def _broken_at(row: TrialRow) -> float:
    """The lowest rate at which a run of a search for a capacity broke a limit; 0 where there is none."""
    qps = row.metric("capacity_at_most_qps")
    return 0.0 if np.isnan(qps) else qps


def _terms(costs: TokenCosts, budget: int) -> FloatArray:
    return np.array([costs.at(budget), float(budget), 1.0])


def _fit(terms: Sequence[FloatArray], values: FloatArray, rows: Sequence[TrialRow]) -> _Curve:
    """Least squares of the relative error, no factor below 0: a term that would have one is left out."""
    scaled = np.array(terms) / values[:, None]
    used = list(range(scaled.shape[1]))
    factors = np.zeros(scaled.shape[1])
    while used:
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(values)), rcond=None)[0]
        if (found >= 0.0).all():
            factors[used] = found
            break
        del used[int(found.argmin())]
    expected = np.array(terms) @ factors
    if not (expected > 0.0).all():
        factors, expected = np.array([0.0, 0.0, float(values.mean())]), np.full(len(values), float(values.mean()))
    budgets = np.log([row.token_budget for row in rows])
    return _Curve(factors=factors, log_budgets=budgets, misses=np.log(values / expected))
