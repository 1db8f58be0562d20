"""The rules of the queue that the tests of workers cannot time: claims, silence, results that come too late."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from optuna.trial import TrialState
from tilebudget.autotune.study.holder import Holder
from tilebudget.autotune.study.sampler import distributions, start_params
from tilebudget.autotune.study.trial import TrialRow
from tilebudget.autotune.study.trial_queue import GRACE_S, Claim, Proposal, TrialQueue
from tilebudget.autotune.study.worker import candidate_of
from tilebudget.engine import Workload
from worker_study import WorkerStudy, essence


class Setup:
    """Two proposals on a queue whose clock the test moves."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.now_s = 0.0
        self.study = WorkerStudy(folder / "study.journal", workload)
        self.space = self.study.problem.space
        self.queue = self.open()
        for index, params in enumerate(start_params(self.space, ())[:2]):
            proposal = Proposal(index=index, params=params)
            self.queue.add(proposal, distributions(self.space))
            self.queue.add(proposal, distributions(self.space))  # as after a lost connection

    def open(self) -> TrialQueue:
        queue = self.study.queue()
        queue._clock = lambda: self.now_s
        queue._grace_s = GRACE_S
        return queue

    def run(self, claim: Claim) -> TrialRow:
        return self.study.runner().run(candidate_of(self.space, claim.proposal), run="trial", role="search")[0]

    def retry_lost(self) -> None:
        self.queue.retry_lost(lambda proposal, reason: pytest.fail(reason))

    def claim(self) -> Claim:
        claim = self.queue.claim()
        assert claim is not None
        return claim


@pytest.fixture
def setup(tmp_path: Path, workload: Workload) -> Setup:
    return Setup(tmp_path, workload)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims look as if a process of another machine had made them."""
    here = replace(Holder.here(), machine="another", host="far")
    monkeypatch.setattr(Holder, "here", lambda: here)


def test_a_trial_is_claimed_once(setup: Setup) -> None:
    other = setup.open()
    first, second = setup.claim(), other.claim()
    assert second is not None
    assert [first.proposal.index, second.proposal.index] == [0, 1]
    assert setup.queue.claim() is None
    assert other.claim() is None


def test_a_silent_worker_elsewhere_loses_its_trial_after_the_grace_period(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere(monkeypatch)
    claim = setup.claim()
    setup.retry_lost()
    setup.now_s = GRACE_S - 1.0
    setup.queue._storage.set_trial_user_attr(claim.trial_id, "beat", 1)
    setup.retry_lost()
    setup.now_s = 2 * GRACE_S - 2.0
    setup.retry_lost()
    assert "is lost" not in caplog.text
    setup.now_s = 2 * GRACE_S
    setup.retry_lost()
    assert f"trial 0 is lost: pid {Holder.here().pid} on far " in caplog.text
    assert "gave no sign of life for 61 s" in caplog.text
    # Its result comes too late, and is that of the second attempt's budget all the same.
    row = setup.run(claim)
    assert setup.queue.finish(claim, row) is False
    assert "this result is dropped" in caplog.text
    assert [proposal.row for proposal in setup.queue.proposals()] == [None, None]
    claims = [setup.claim(), setup.claim()]
    assert sorted(one.proposal.index for one in claims) == [0, 1]
    again = next(one for one in claims if one.proposal.index == 0)
    assert again.number == 2
    assert setup.queue.finish(again, setup.run(again)) is True
    assert essence([one.row for one in setup.queue.proposals() if one.row is not None]) == essence([row])


def test_an_outcome_is_recorded_once_however_often_it_is_sent(setup: Setup) -> None:
    claim = setup.claim()
    row = setup.run(claim)
    assert setup.queue.finish(claim, row) is True
    assert setup.queue.finish(claim, row) is True
    assert [one.row for one in setup.queue.proposals()] == [row, None]


def test_a_row_without_a_state_is_made_an_outcome(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)
    claim = setup.claim()
    row = setup.run(claim)
    monkeypatch.setattr(TrialQueue, "_set_outcome", lambda *arguments: None)
    setup.queue.finish(claim, row)
    monkeypatch.undo()
    setup.retry_lost()
    setup.now_s = GRACE_S + 1.0
    setup.retry_lost()
    assert [one.row for one in setup.queue.proposals()] == [row, None]
    assert len(setup.queue.study.trials) == 2


def test_a_trial_that_is_given_back_is_no_loss(setup: Setup) -> None:
    for _ in range(5):
        claim = setup.claim()
        setup.queue.release(claim)
        setup.retry_lost()  # would fail the test where it gave a budget up
    states = [trial.state for trial in setup.queue.study.trials]
    assert states.count(TrialState.FAIL) == 5
    assert states.count(TrialState.WAITING) == 2


def test_the_worker_is_named_in_its_trial(setup: Setup) -> None:
    setup.claim()
    assert json.loads(setup.queue.study.trials[0].user_attrs["worker"]) == Holder.here().to_json()
