"""The search over budgets, and what else is searched, in rounds of proposals, run here or by any worker that joins it.

A round is proposed when the one before it is complete, from the rows of the rounds before it alone. How many workers
run it, in which order they finish, and where the study was cut off then change nothing. What is recommended in the end
is ``selection``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from .pause import Pause
from .sampler import Params, Tried, distributions, propose, start_params
from .space import SearchSpace
from .trial import OnTrial, TrialRow, TrialRunner
from .trial_queue import Proposal, TrialQueue
from .worker import candidate_of, run_claim, run_name


class BudgetStudy:
    """Searches ``space`` in rounds of ``round_size`` budgets; resumes when the queue already has trials.

    A new search begins with a round of the budgets of ``suggestions`` and of a ladder over the space.
    """

    def __init__(
        self,
        space: SearchSpace,
        runner: TrialRunner,
        queue: TrialQueue,
        *,
        variance_metric: str,
        seed: int,
        round_size: int = 1,
        suggestions: Sequence[int] = (),
    ) -> None:
        self.space = space
        self.runner = runner
        self.queue = queue
        self.variance_metric = variance_metric
        self.seed = seed
        self.round_size = round_size
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

        ``runs_here``: run what waits in this process too, else leave everything to workers. No round but the first is
        proposed after ``until_s`` (of ``perf_counter``).
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
            if self._round_is_complete(proposals) and (
                (proposals and perf_counter() > until_s) or not self._propose_round(proposals, num_trials)
            ):
                return self.rows()
            claim = self.queue.claim() if runs_here else None
            if claim is not None:
                run_claim(self.queue, self.runner, self.space, claim)
            else:
                pause()

    def _round_is_complete(self, proposals: Sequence[Proposal]) -> bool:
        """Whether there is nothing to wait for; a round that was cut off while it was proposed is filled up first."""
        if not proposals:
            return True
        last = proposals[-1].round_index
        members = [proposal for proposal in proposals if proposal.round_index == last]
        if len(members) < members[0].round_size:
            self._fill_round(proposals, last, members[0].round_size - len(members))
            return False
        return all(proposal.row is not None for proposal in proposals)

    def _propose_round(self, proposals: Sequence[Proposal], num_trials: int) -> bool:
        """Propose the next round; False when there is none."""
        done = len(proposals)
        size = len(self._start) - done if done < len(self._start) else self.round_size
        size = min(size, num_trials - done, self._num_candidates - done)
        round_index = proposals[-1].round_index + 1 if proposals else 0
        if size > 0:
            self._fill_round(proposals, round_index, size)
        return size > 0

    def _fill_round(self, proposals: Sequence[Proposal], round_index: int, count: int) -> None:
        """Add ``count`` proposals to a round, of which ``proposals`` may hold some already."""
        begun = sum(proposal.round_index == round_index for proposal in proposals)
        # Of this round nothing is known, whether or not some of it has been run by now.
        tried = [Tried(params=one.params, row=one.row if one.round_index < round_index else None) for one in proposals]
        for index in range(len(tried), len(tried) + count):
            params = self._start[index] if index < len(self._start) else self._propose(tried)
            proposal = Proposal(index=index, round_index=round_index, round_size=begun + count, params=params)
            self.queue.add(proposal, distributions(self.space.variant(params)))
            tried.append(Tried(params=params, row=None))

    def _propose(self, tried: Sequence[Tried]) -> Params:
        params = propose(self.space, tried, seed=self.seed, variance_metric=self.variance_metric)
        if params is None:
            raise AssertionError("a round is never larger than what is left of the space")
        return params

    def _failed_row(self, proposal: Proposal, reason: str) -> TrialRow:
        return self.runner.failed_row(candidate_of(self.space, proposal), run_name(proposal), "search", reason)
