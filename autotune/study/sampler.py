"""Which budget to run next: from the space, the seed and the runs so far alone, so that no timing enters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ...engine import POLICY_NAMES
from ...engine.metrics import LIMITED
from ..scoring.selection import promising, shortlist
from .expectation import Expectation
from .space import KINDS, WHOLE_PROMPT, Candidate, SearchSpace
from .trial import TrialRow

Params = dict[str, int | str]

DIRECTIONS = (StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE)
LADDER_RUNGS = 5
SHORT_LADDER_RUNGS = 3

#: Proposals take turns; these of every ``NUM_TURNS`` are the next budget below the incumbent, the
#: cheapest around, and TPE's.
NUM_TURNS, STEP_DOWN_TURN, CHEAP_TURN, TPE_TURN = 4, 1, 2, 3

#: What an expectation may be off by far from every run, as a share: of P99 TBT, and of the objective.
SHARE_ERROR, SCORE_ERROR = 0.08, 0.02

#: An incumbent whose P99 TBT is within this share of its limit may break the SLO when it is repeated.
NEAR_SLO = 0.1

_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A budget that was proposed; ``row`` is None while nothing is to be known of its run."""

    params: Params
    row: TrialRow | None


class BudgetSampler(TPESampler):
    """What the staircase leads to expect, and TPE over (edge index, offset kind) with the SLO as its constraint.

    Where the space knows what its budgets cost, the next one is the untried budget of the highest expected objective
    that may hold the SLO (``Expectation``); before that can be fitted, and without costs, the search closes in: it
    halves the untried peaks of the staircase, then the aligned budgets, between the incumbent (the best feasible
    budget, or the one closest to the SLO) and its nearest neighbours that were run, the larger side first. Every fourth
    proposal is TPE's, which looks where that picture may be wrong, and another fourth a budget below an incumbent at
    the edge of the SLO, which takes its place should it not hold the SLO when repeated. No budget is proposed twice:
    one that was run (or failed) becomes the nearest not run yet, by ratio. The random state depends on ``seed`` and on
    how many budgets were ``tried`` alone, so a resumed study goes on as it would have.
    """

    def __init__(self, space: SearchSpace, tried: Sequence[Tried], *, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate TPE and constraints_func are marked experimental
            super().__init__(
                seed=seed * 100_003 + len(tried),
                n_startup_trials=LADDER_RUNGS,
                multivariate=True,
                constraints_func=_constraints,
            )
        self._space = space
        self._pick = np.random.default_rng([seed, len(tried)])
        self._fresh = fresh_params(space, tried)
        self._rows = [one.row for one in tried if one.row is not None]
        self._peaks = {one.token_budget for one in space.cheapest_around()}
        self._turn = len(tried) % NUM_TURNS
        pending = [candidate for one in tried if one.row is None and (candidate := _candidate(space, one.params))]
        budgets = [candidate.token_budget for candidate in pending]
        self._expectation = None if space.costs is None else Expectation.fit(space.costs, self._rows, budgets)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Both parameters are always sampled together."""
        return _budget_distributions(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, int | str]:
        """TPE's proposal, moved to the nearest budget that has not been run."""
        chosen = self._choose()
        if chosen is not None:
            return {"edge_index": chosen[0], "kind": chosen[1]}
        proposal = super().sample_relative(study, trial, search_space)
        candidate = self._space.at(proposal["edge_index"], proposal["kind"]) if proposal else None
        if candidate is None:
            edge_index, kind = self._fresh[int(self._pick.integers(len(self._fresh)))]
        else:
            budget = candidate.token_budget
            edge_index, kind = min(self._fresh, key=lambda params: _ratio(self._space, params, budget))
        return {"edge_index": edge_index, "kind": kind}

    def _choose(self) -> tuple[int, str] | None:
        """The proposal of this turn; None where it is TPE's."""
        if self._expectation is None:
            return self._close_in() or (self._step_down() if self._turn % 2 == 0 else None)
        if self._turn == STEP_DOWN_TURN and (below := self._step_down()) is not None:
            return below
        if self._turn == TPE_TURN:
            return None
        # The peaks of the staircase are where those of the throughput are, whatever the fit makes of their height.
        peaks = self._peaks if self._turn == CHEAP_TURN else set()
        cheap = [params for params in self._fresh if self._space.budget_at(*params) in peaks]
        return self._expected_best(self._expectation, cheap or self._fresh)

    def _expected_best(self, expectation: Expectation, choices: Sequence[tuple[int, str]]) -> tuple[int, str]:
        """Of ``choices`` the budget of the highest expected objective that may hold the SLO, a little in favour of
        those of which less is known; the one nearest to the SLO where none may."""

        def worth(params: tuple[int, str]) -> tuple[bool, float]:
            budget = self._space.budget_at(*params)
            share, doubt = expectation.share(budget), expectation.doubt(budget)
            may_hold = share <= 1.0 + SHARE_ERROR * (0.2 + doubt)
            return may_hold, expectation.score(budget) * (1.0 + SCORE_ERROR * doubt) if may_hold else -share

        return max(choices, key=worth)

    def _step_down(self) -> tuple[int, str] | None:
        """The next untried aligned budget below the incumbent: what is left to recommend when the incumbent turns out,
        repeated, not to hold the SLO. None when there is none, or the incumbent is well within the SLO."""
        leader = _leader(self._rows)
        close = any(row.token_budget == leader and row.violations[:1] > (-NEAR_SLO,) for row in self._rows)
        if leader is None or not close:
            return None
        below = [params for params in self._fresh if params[1] == "aligned" and self._space.edges[params[0]] < leader]
        return max(below, default=None)

    def _close_in(self) -> tuple[int, str] | None:
        """The middle of the untried peaks of the staircase next to the incumbent, else of the untried aligned budgets
        there; None when there are none."""
        leader = _leader(self._rows)
        if leader is None:
            return None
        tried = sorted({row.token_budget for row in self._rows})
        place = tried.index(leader)
        above = tried[place + 1] if place + 1 < len(tried) else math.inf
        below = tried[place - 1] if place else 0
        aligned = sorted(params for params in self._fresh if params[1] == "aligned")
        peaks = [params for params in aligned if self._space.budget_at(*params) in self._peaks]
        for choices in (peaks, aligned):
            for low, high in ((leader, above), (below, leader)):
                between = [params for params in choices if low < self._space.edges[params[0]] < high]
                if between:
                    return between[len(between) // 2]
        return None


def _leader(rows: Sequence[TrialRow]) -> int | None:
    """The budget of the best run, or of the one closest to the SLO; None without any."""
    return next((row.token_budget for row in shortlist(rows, 1)), None)


def _candidate(space: SearchSpace, params: Params) -> Candidate | None:
    return space.at(int(params["edge_index"]), str(params["kind"]))


def start_params(space: SearchSpace, suggestions: Sequence[int]) -> list[Params]:
    """What every search begins with, at the study's own settings: the budgets suggested, a ladder over the aligned
    ones (a short one where there are suggestions), and chunking switched off."""
    rungs = space.ladder(SHORT_LADDER_RUNGS if suggestions else LADDER_RUNGS)
    budgets = [*suggestions, *(candidate.token_budget for candidate in rungs)]
    if space.whole_prompt is not None:
        budgets.append(space.whole_prompt.token_budget)
    found = (space.params_of(budget) for budget in dict.fromkeys(budgets))
    return [_params(space, params) for params in found if params is not None]


def propose(space: SearchSpace, tried: Sequence[Tried], *, seed: int, variance_metric: str) -> Params | None:
    """The next trial to run after those ``tried``, in the order in which they were proposed; None when none is left.

    Each variant of the space (``max_num_seqs``, policy) has a search over budgets of its own, which sees an in-memory
    study of its own trials, whatever the real storage holds besides; ``_next_variant`` says whose turn it is. One that
    was not tried yet begins at the budget that is the best so far.
    """
    variant = _next_variant(space, tried)
    if variant is None:
        return None
    mine = _trials_of(space, variant, tried)
    budget = _leader([one.row for one in tried if one.row is not None])
    if not mine and tried and budget is not None:
        return _params(variant, min(variant.params, key=lambda params: _ratio(variant, params, budget)))
    study = optuna.create_study(directions=DIRECTIONS, sampler=BudgetSampler(variant, mine, seed=seed))
    study.add_trials([_as_trial(variant, one, variance_metric) for one in mine])
    trial = study.ask(_budget_distributions(variant))
    return _params(variant, (trial.params["edge_index"], trial.params["kind"]))


def _next_variant(space: SearchSpace, tried: Sequence[Tried]) -> SearchSpace | None:
    """Whose turn it is: first every variant once; then every other turn is that of the best one so far, half of the
    others that of the second best, and so on. None when every budget of every variant was tried."""
    trials = {variant: _trials_of(space, variant, tried) for variant in space.variants}
    left = [variant for variant in space.variants if fresh_params(variant, trials[variant])]
    new = next((variant for variant in left if not trials[variant]), None)
    if new is not None or not left:
        return new
    ranked = sorted(left, key=lambda variant: _standing([one.row for one in trials[variant] if one.row is not None]))
    place = (len(tried) & -len(tried)).bit_length() - 1  # how often 2 divides the turn's number
    return ranked[min(place, len(ranked) - 1)]


def _standing(rows: Sequence[TrialRow]) -> tuple[int, float]:
    """What variants are ranked by, the best first: their best run; nothing known is last."""
    best = next(iter(shortlist(rows, 1)), None)
    if best is None:
        return 2, 0.0
    return (0, -best.score) if promising(best) else (1, max(best.violations, default=math.inf))


def _trials_of(space: SearchSpace, variant: SearchSpace, tried: Sequence[Tried]) -> list[Tried]:
    return [one for one in tried if space.variant(one.params) is variant]


def _params(space: SearchSpace, params: tuple[int, str]) -> Params:
    return {"edge_index": params[0], "kind": params[1], **space.settings}


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The parameters of a trial of this variant of a space. Optuna lets the bounds of a number differ from trial to
    trial, but not the choices of a category."""
    found = _budget_distributions(space)
    if space.max_num_seqs is not None:
        found["max_num_seqs"] = IntDistribution(1, space.max_num_seqs)
    if space.policy is not None:
        found["policy"] = CategoricalDistribution(POLICY_NAMES)
    return found


def _budget_distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    return {
        "edge_index": IntDistribution(0, len(space.edges) - 1),
        "kind": CategoricalDistribution((*KINDS, WHOLE_PROMPT)),
    }


def fresh_params(space: SearchSpace, tried: Sequence[Tried]) -> list[tuple[int, str]]:
    """Parameter pairs that were not proposed yet."""
    taken = {(one.params["edge_index"], one.params["kind"]) for one in tried}
    return [params for params in space.params if params not in taken]


def outcome(row: TrialRow, variance_metric: str) -> tuple[TrialState, list[float] | None, list[float]]:
    """A row in Optuna's terms: state, values of the two objectives, and constraints: the relative excess of P99 TBT and
    of the median scheduling delay over their limits, above 0 a violation."""
    constraints = list(row.violations) or [0.0] * len(LIMITED)
    if row.state != "complete":
        return _STATES[row.state], None, constraints
    variance = row.metric(variance_metric)
    # The iterations of a server are not seen: without data on their variance all budgets are alike in it.
    values = [row.score, 0.0 if math.isnan(variance) else variance]
    # Optuna takes no NaN, which a run too short for the pipeline's metric has.
    return (
        (TrialState.FAIL, None, constraints)
        if any(map(math.isnan, values))
        else (TrialState.COMPLETE, values, constraints)
    )


def _as_trial(space: SearchSpace, one: Tried, variance_metric: str) -> FrozenTrial:
    state, values, constraints = (
        (TrialState.RUNNING, None, None) if one.row is None else outcome(one.row, variance_metric)
    )
    return optuna.create_trial(
        state=state,
        values=values,
        params={name: one.params[name] for name in ("edge_index", "kind")},
        distributions=_budget_distributions(space),
        system_attrs={} if constraints is None else {"constraints": constraints},
    )


def _constraints(trial: FrozenTrial) -> Sequence[float]:
    """Never asked: rows bring their constraints along. TPE heeds constraints only when it has such a function."""
    raise AssertionError("the sampler's study is never told a result")


def _ratio(space: SearchSpace, params: tuple[int, str], budget: int) -> float:
    candidate = space.at(*params)
    if candidate is None:
        return float("inf")
    return abs(float(np.log(candidate.token_budget / budget)))
