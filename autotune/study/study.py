"""The search over budgets, and what else is searched: proposals, run here or by any worker that joins it.

At most ``max_concurrent`` proposals are open at a time, after the ones that every search begins with. One is made from
the rows of those that had to be done by then, even where more are. How many workers run them, in which order they
finish, and where the study was cut off then change nothing. What is recommended in the end is ``selection``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from .pause import Pause
from .sampler import Params, Tried, distributions, propose, start_params
from .space import SearchSpace
from .trial import OnTrial, TrialRow, TrialRunner, next_question
from .trial_queue import Proposal, TrialQueue
from .worker import candidate_of, run_claim, run_name


class BudgetStudy:
    """Searches ``space`` with ``max_concurrent`` budgets open; resumes when the queue already has trials.

    A new search begins with the budgets of ``suggestions`` and of a ladder over the space.
    """

    def __init__(
        self,
        space: SearchSpace,
        runner: TrialRunner,
        queue: TrialQueue,
        *,
        variance_metric: str,
        seed: int,
        max_concurrent: int = 1,
        suggestions: Sequence[int] = (),
    ) -> None:
        self.space = space
        self.runner = runner
        self.queue = queue
        self.variance_metric = variance_metric
        self.seed = seed
        self.max_concurrent = max_concurrent
        self._start = start_params(space, suggestions)
        self._num_candidates = sum(len(variant.params) for variant in space.variants)
        self.num_resumed = len(self.rows())

    def rows(self) -> list[TrialRow]:
        """The outcome of every proposal that has one, in the order of the proposals."""
        return [proposal.row for proposal in self.queue.proposals() if proposal.row is not None]

    def search(
        self,
        num_trials: int,
        on_trial: OnTrial,
        *,
        runs_here: bool = True,
        until_s: float = math.inf,
    ) -> list[TrialRow]:
        """Propose until ``num_trials`` budgets have an outcome or none is left; returns all rows.

        ``runs_here``: run what waits in this process too, else leave everything to workers. Nothing but what a search
        begins with is proposed after ``until_s`` (of ``perf_counter``).
        """
        told = {proposal.index for proposal in self.queue.proposals() if proposal.row is not None}
        pause = Pause()
        while True:
            self.queue.retry_lost(self._failed_row)
            proposals = self.queue.proposals()
            for proposal in proposals:
                if proposal.row is not None and proposal.index not in told:
                    told.add(proposal.index)
                    on_trial(proposal.row, len(told), num_trials)
                    pause = Pause()
            may_propose = not proposals or perf_counter() <= until_s
            if not (may_propose and self._propose_more(proposals, num_trials)) and all(one.row for one in proposals):
                return self.rows()
            claim = self.queue.claim() if runs_here else None
            if claim is not None:
                run_claim(self.queue, self.runner, self.space, claim)
            else:
                pause()

    def _propose_more(self, proposals: Sequence[Proposal], num_trials: int) -> bool:
        """Propose what may be proposed by now; False when that is nothing."""
        begun, num_first = len(proposals), len(self._start)
        num_done = next((index for index, one in enumerate(proposals) if one.row is None), begun)  # without a gap
        racing = self.runner.objective.name == "capacity"  # each budget is asked about the best capacity before it
        end = num_first if num_done < num_first and not racing else num_done + self.max_concurrent
        tried = [Tried(params=one.params, row=None) for one in proposals]
        for index in range(begun, min(end, num_trials, self._num_candidates)):
            num_known = max(0 if racing else num_first, index + 1 - self.max_concurrent)
            known = [Tried(params=one.params, row=one.row) for one in proposals[:num_known]]
            params = self._start[index] if index < num_first else self._propose([*known, *tried[num_known:]])
            ask_rps = next_question([one.row for one in known if one.row is not None], self.runner.objective.resolution)
            proposal = Proposal(index=index, params=params, ask_rps=ask_rps)
            self.queue.add(proposal, distributions(self.space.variant(params)))
            tried.append(Tried(params=params, row=None))
        return len(tried) > begun

    def _propose(self, tried: Sequence[Tried]) -> Params:
        params = propose(self.space, tried, seed=self.seed, variance_metric=self.variance_metric)
        if params is None:
            raise AssertionError("a round is never larger than what is left of the space")
        return params

    def _failed_row(self, proposal: Proposal, reason: str) -> TrialRow:
        return self.runner.failed_row(candidate_of(self.space, proposal), run_name(proposal), "search", reason)
