"""The search over budgets: an Optuna study with the SLO as a constraint inside the sampler.

Owns the sampler, the storage and resuming. What is recommended in the end is ``selection``'s business.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from .parallel import TrialPool
from .selection import shortlist
from .space import KINDS, WHOLE_PROMPT, Candidate, SearchSpace
from .trial import OnTrial, TrialRow, TrialRunner

RunJobs = Callable[[Sequence[tuple[Candidate, str]]], list[TrialRow]]

STUDY_NAME = "tilebudget"
LADDER_RUNGS = 5
SHORT_LADDER_RUNGS = 3
_NO_DATA = (0.0, 0.0)


class BudgetSampler(TPESampler):
    """Closes in on the best aligned budget, then TPE over (edge index, offset kind) with the SLO as its constraint.

    Closing in halves the untried aligned budgets between the incumbent (the fastest feasible budget, or the one
    closest to the SLO) and its nearest neighbours that were run, the larger side first: throughput and TBT both
    rise with the budget but for the staircase. TPE then looks where that picture may be wrong, in turn with the next
    budgets below the incumbent, which take its place should it not hold the SLO when repeated. No budget is
    proposed twice: one that was run (or failed) becomes the nearest not run yet, by ratio. The random state
    depends on ``seed`` and the trial's number alone, so a resumed study goes on as it would have.
    """

    def __init__(self, space: SearchSpace, *, seed: int, trial_number: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate TPE and constraints_func are marked experimental
            super().__init__(
                seed=seed * 100_003 + trial_number,
                n_startup_trials=LADDER_RUNGS,
                multivariate=True,
                constraints_func=constraints_of,
            )
        self._space = space
        self._pick = np.random.default_rng([seed, trial_number])

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Both parameters are always sampled together."""
        return distributions(self._space)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, int | str]:
        """TPE's proposal, moved to the nearest budget that has not been run."""
        fresh = fresh_params(self._space, study)
        if not fresh:
            return {}
        closer = self._close_in(study, fresh) or self._step_down(study, fresh, trial.number)
        if closer is not None:
            return {"edge_index": closer[0], "kind": closer[1]}
        proposal = super().sample_relative(study, trial, search_space)
        candidate = self._space.at(proposal["edge_index"], proposal["kind"]) if proposal else None
        if candidate is None:
            edge_index, kind = fresh[int(self._pick.integers(len(fresh)))]
        else:
            budget = candidate.token_budget
            edge_index, kind = min(fresh, key=lambda params: _ratio(self._space, params, budget))
        return {"edge_index": edge_index, "kind": kind}

    def _step_down(
        self, study: optuna.Study, fresh: Sequence[tuple[int, str]], trial_number: int
    ) -> tuple[int, str] | None:
        """Every second trial, the next untried aligned budget below the incumbent: what is left to recommend when the
        incumbent turns out, repeated, not to hold the SLO. None otherwise, or when there is none."""
        leader = next(iter(shortlist(finished_rows(study), 1)), None)
        if leader is None or trial_number % 2:
            return None
        below = [params for params in fresh if params[1] == "aligned" and self._space.edges[params[0]] < leader]
        return max(below, default=None)

    def _close_in(self, study: optuna.Study, fresh: Sequence[tuple[int, str]]) -> tuple[int, str] | None:
        """The middle of the untried aligned budgets next to the incumbent; None when there are none."""
        rows = finished_rows(study)
        leader = next(iter(shortlist(rows, 1)), None)
        if leader is None:
            return None
        tried = sorted({row.token_budget for row in rows})
        place = tried.index(leader)
        above = tried[place + 1] if place + 1 < len(tried) else math.inf
        below = tried[place - 1] if place else 0
        aligned = sorted(params for params in fresh if params[1] == "aligned")
        for low, high in ((leader, above), (below, leader)):
            between = [params for params in aligned if low < self._space.edges[params[0]] < high]
            if between:
                return between[len(between) // 2]
        return None


def finished_rows(study: optuna.Study) -> list[TrialRow]:
    """The rows of every finished trial, in order."""
    return [
        TrialRow.from_json(json.loads(trial.user_attrs["row"]))
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and "row" in trial.user_attrs
    ]


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The study's parameters."""
    return {
        "edge_index": IntDistribution(0, len(space.edges) - 1),
        "kind": CategoricalDistribution((*KINDS, WHOLE_PROMPT)),
    }


def constraints_of(trial: FrozenTrial) -> Sequence[float]:
    """Relative excess of P99 TBT and of the median scheduling delay over their limits; above 0 is a violation."""
    row = trial.user_attrs.get("row")
    return tuple(json.loads(row)["violations"]) or _NO_DATA if row else _NO_DATA


def fresh_params(space: SearchSpace, study: optuna.Study) -> list[tuple[int, str]]:
    """Parameter pairs that no trial of any state has taken."""
    taken = {
        (trial.params["edge_index"], trial.params["kind"])
        for trial in study.get_trials(deepcopy=False)
        if "edge_index" in trial.params and "kind" in trial.params
    }
    return [params for params in space.params if params not in taken]


def open_storage(storage: str | Path) -> BaseStorage:
    """Optuna storage for a journal file's path or a database URL."""
    if isinstance(storage, str) and "://" in storage:
        return RDBStorage(storage)
    return JournalStorage(JournalFileBackend(str(storage)))


class BudgetStudy:
    """Searches ``space`` with at most ``num_trials`` runs; resumes when the storage already has trials.

    A new search begins with the budgets of ``suggestions``. ``identity`` are the settings that give the study its
    meaning. Raises ValueError, naming the setting, when the storage holds a study with other ones.
    """

    def __init__(
        self,
        space: SearchSpace,
        runner: TrialRunner,
        *,
        storage: str | Path,
        identity: dict[str, str | int | float | None],
        variance_metric: str,
        seed: int,
        num_parallel: int = 1,
        suggestions: Sequence[int] = (),
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.runner = runner
        self.seed = seed
        self.num_parallel = num_parallel
        self.variance_metric = variance_metric
        self.study = optuna.create_study(
            study_name=STUDY_NAME,
            storage=open_storage(storage),
            directions=["maximize", "minimize"],
            load_if_exists=True,
            sampler=BudgetSampler(space, seed=seed, trial_number=0),
        )
        self._check_identity(identity)
        self.num_resumed = len(self.rows())
        self._retry_interrupted()
        if not self.study.get_trials(deepcopy=False):
            self._enqueue_start(suggestions)

    def rows(self) -> list[TrialRow]:
        """Every finished trial so far, in order."""
        return finished_rows(self.study)

    def search(self, num_trials: int, on_trial: OnTrial) -> list[TrialRow]:
        """Run trials until ``num_trials`` are finished or no budget is left; returns all rows."""
        rows = self.rows()
        if self.num_parallel > 1 and len(rows) < num_trials:
            with TrialPool(self.runner, self.num_parallel) as pool:
                self._search(rows, num_trials, on_trial, pool.run)
        else:
            self._search(rows, num_trials, on_trial, self._run_here)
        return rows

    def _search(self, rows: list[TrialRow], num_trials: int, on_trial: OnTrial, run_jobs: RunJobs) -> None:
        """Ask for as many trials as run side by side, run them, tell them all: the outcome depends on no timing."""
        while len(rows) < num_trials and self._has_next():
            asked = [self._ask()]
            while len(asked) < min(self.num_parallel, num_trials - len(rows)) and self._has_next():
                asked.append(self._ask())
            jobs = [(candidate, f"trial-{trial.number}") for trial, candidate in asked]
            for (trial, _), row in zip(asked, run_jobs(jobs), strict=True):
                self._tell(trial, row)
                rows.append(row)
                on_trial(row, len(rows), num_trials)

    def _run_here(self, jobs: Sequence[tuple[Candidate, str]]) -> list[TrialRow]:
        return [self.runner.run(candidate, run=run, role="search", prune=True)[0] for candidate, run in jobs]

    def _ask(self) -> tuple[optuna.Trial, Candidate]:
        number = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = BudgetSampler(self.space, seed=self.seed, trial_number=number)
        trial = self.study.ask()
        edge_index = trial.suggest_int("edge_index", 0, len(self.space.edges) - 1)
        kind = str(trial.suggest_categorical("kind", (*KINDS, WHOLE_PROMPT)))
        candidate = self.space.at(edge_index, kind)
        if candidate is None:
            raise AssertionError(f"the sampler proposed edge {edge_index} {kind}, which is no candidate")
        return trial, candidate

    def _tell(self, trial: optuna.Trial, row: TrialRow) -> None:
        trial.set_user_attr("row", json.dumps(asdict(row)))
        if row.state == "complete":
            values = [row.metric("total_tokens_per_s"), row.metric(self.variance_metric)]
            self.study.tell(trial, values)
        else:
            self.study.tell(trial, state=TrialState.PRUNED if row.state == "pruned" else TrialState.FAIL)

    def _has_next(self) -> bool:
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return bool(waiting or fresh_params(self.space, self.study))

    def _enqueue_start(self, suggestions: Sequence[int]) -> None:
        """What every search begins with: the budgets suggested, a ladder over the aligned ones (a short one where there
        are suggestions), and chunking switched off."""
        rungs = self.space.ladder(SHORT_LADDER_RUNGS if suggestions else LADDER_RUNGS)
        budgets = [*suggestions, *(candidate.token_budget for candidate in rungs)]
        if self.space.whole_prompt is not None:
            budgets.append(self.space.whole_prompt.token_budget)
        for budget in dict.fromkeys(budgets):
            self._enqueue(budget)

    def _enqueue(self, token_budget: int) -> None:
        params = self.space.params_of(token_budget)
        if params is not None:
            self.study.enqueue_trial({"edge_index": params[0], "kind": params[1]}, skip_if_exists=False)

    def _retry_interrupted(self) -> None:
        """Trials that a killed run left behind count as failed and their budgets are tried again."""
        for trial in self.study.get_trials(deepcopy=True, states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            if {"edge_index", "kind"} <= trial.params.keys():
                self.study.enqueue_trial(dict(trial.params))

    def _check_identity(self, identity: dict[str, str | int | float | None]) -> None:
        stored = self.study.user_attrs.get("identity")
        if stored is None:
            self.study.set_user_attr("identity", identity)
            return
        for name, value in identity.items():
            if stored.get(name) != value:
                raise ValueError(
                    f"{name}={value!r}: the study to resume was started with {name}={stored.get(name)!r}; "
                    "use the same setting or another run folder"
                )


def _ratio(space: SearchSpace, params: tuple[int, str], budget: int) -> float:
    candidate = space.at(*params)
    if candidate is None:
        return float("inf")
    return abs(float(np.log(candidate.token_budget / budget)))
