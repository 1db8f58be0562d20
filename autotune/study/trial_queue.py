"""The trials of a study on its storage: proposed by one process, run by any, each counted once.

A trial waits until a worker claims it, which Optuna's storages grant to one alone. While it runs, its worker raises a
counter in the trial every ``BEAT_S``; this serves every storage alike, where Optuna's own heartbeat needs a database.
A trial whose worker has died, or whose counter stood still for ``GRACE_S`` by the watcher's clock, is failed and
proposed once more. A result that its worker hands in after that is dropped. A budget that is lost twice counts as a
failed one, for it may be what kills its workers.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from .holder import Holder
from .sampler import Params, outcome
from .storages import RECONNECT_LIMIT_S, patiently
from .trial import TrialRow

_log = logging.getLogger(__name__)

BEAT_S = 10.0
GRACE_S = 60.0
MAX_ATTEMPTS = 2

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One budget that the study is to run. ``index`` is its place among them; ``row`` is None until it has one. Under
    capacity, ``ask_rps`` is the rate that it is asked about first, None where no budget has a capacity yet."""

    index: int
    params: Params
    row: TrialRow | None = None
    ask_rps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A trial that this process runs."""

    proposal: Proposal
    number: int
    trial_id: int


class TrialQueue:
    """The trials of ``study``, which is on ``storage``. ``name`` is what messages call the storage.

    Every call bears a lost connection: it tries again for ``limit_s``, then raises StorageError.
    """

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        *,
        name: str,
        variance_metric: str,
        beat_s: float = BEAT_S,
        grace_s: float = GRACE_S,
        limit_s: float = RECONNECT_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.study = study
        self._storage = storage
        self._name = name
        self._variance_metric = variance_metric
        self._beat_s = beat_s
        self._grace_s = grace_s
        self._limit_s = limit_s
        self._clock = clock
        self._seen: dict[int, tuple[int, float]] = {}

    def proposals(self) -> list[Proposal]:
        """Every proposal, in order, with its outcome where there is one."""
        return self._patiently(lambda: _proposals(self._trials(), self._variance_metric))

    def add(self, proposal: Proposal, distributions: Mapping[str, BaseDistribution]) -> None:
        """Put a proposal up for running; nothing happens where its index is taken."""

        def step() -> None:
            if all(_index(trial) != proposal.index for trial in self._trials()):
                self._add_trial(proposal, distributions)

        self._patiently(step)

    def claim(self) -> Claim | None:
        """The first trial that waits, now this process's; None when none does."""
        return self._patiently(self._claim)

    @contextmanager
    def beating(self, claim: Claim) -> Iterator[None]:
        """Within it, the trial's counter is raised by a thread of its own."""
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(claim, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def finish(self, claim: Claim, row: TrialRow) -> bool:
        """Record the outcome of a trial; False, with a message, when it was given to another worker meanwhile."""
        text = json.dumps(asdict(row))

        def step() -> bool:
            try:
                self._storage.set_trial_user_attr(claim.trial_id, "row", text)
                self._set_outcome(claim.trial_id, row)
            except UpdateFinishedTrialError:
                # Done before the connection was lost, or failed by the process that watches.
                stored = self._storage.get_trial(claim.trial_id)
                return stored.user_attrs.get("row") == text and _counts(stored, self._variance_metric)
            return True

        kept = self._patiently(step)
        if not kept:
            _log.warning(
                "trial %d was taken for lost and given to another worker: this result is dropped", claim.number
            )
        return kept

    def release(self, claim: Claim) -> None:
        """Give a trial back that will not be finished here, unless its outcome is there; this is not counted as a
        loss."""
        try:
            row = _stored_row(self._storage.get_trial(claim.trial_id))
            if row is not None:
                self._set_outcome(claim.trial_id, row)
                return
            self._storage.set_trial_user_attr(claim.trial_id, "released", True)
            self._storage.set_trial_state_values(claim.trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            pass  # it was finished, or given away

    def retry_lost(self, failed_row: Callable[[Proposal, str], TrialRow]) -> None:
        """Fail the trials whose workers are gone, and put what has neither an outcome nor a trial up for running again;
        what was lost ``MAX_ATTEMPTS`` times gets ``failed_row``, of the proposal and the reason, instead.

        One process does this for a study. It may be cut off anywhere and called again.
        """
        self._patiently(lambda: self._retry_lost(failed_row))

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _claim(self) -> Claim | None:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        for trial in self._trials():
            if trial.state != TrialState.WAITING:
                continue
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            try:
                if not self._storage.set_trial_state_values(trial_id, TrialState.RUNNING):
                    continue
            except UpdateFinishedTrialError:
                continue
            self._storage.set_trial_user_attr(trial_id, "worker", json.dumps(Holder.here().to_json()))
            return Claim(proposal=_proposal(trial, None), number=trial.number, trial_id=trial_id)
        return None

    def _beat(self, claim: Claim, stop: threading.Event) -> None:
        beats = 0
        while not stop.wait(self._beat_s):
            beats += 1
            try:
                self._storage.set_trial_user_attr(claim.trial_id, "beat", beats)
            except UpdateFinishedTrialError:
                return
            except Exception as error:  # the worker itself meets it, and says so, when it records the outcome
                _log.debug("heartbeat of trial %d: %s", claim.number, error)

    def _retry_lost(self, failed_row: Callable[[Proposal, str], TrialRow]) -> None:
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and (reason := self._lost(trial)) is not None:
                self._end_lost(trial, reason)
        self._seen = {number: seen for number, seen in self._seen.items() if self._is_running(number)}
        by_index: dict[int, list[FrozenTrial]] = {}
        for trial in self._trials():
            by_index.setdefault(_index(trial), []).append(trial)
        for trials in by_index.values():
            open_trials = any(not trial.state.is_finished() for trial in trials)
            if open_trials or any(_counts(trial, self._variance_metric) for trial in trials):
                continue
            losses = [trial for trial in trials if "released" not in trial.user_attrs]
            if len(losses) < MAX_ATTEMPTS:
                self._add_trial(_proposal(trials[0], None), trials[0].distributions)
            else:
                self._give_up(trials[-1], failed_row)

    def _lost(self, trial: FrozenTrial) -> str | None:
        """Why a running trial is taken for lost; None while it is not."""
        worker = trial.user_attrs.get("worker")
        holder = None if worker is None else Holder.from_json(json.loads(worker))
        name = "its worker" if holder is None else str(holder)
        if holder is not None and holder.gone:
            return f"{name} has ended"
        beat = int(trial.user_attrs.get("beat", 0))
        seen, since = self._seen.get(trial.number, (-1, 0.0))
        if beat != seen:
            self._seen[trial.number] = (beat, self._clock())
            return None
        silent_s = self._clock() - since
        return f"{name} gave no sign of life for {silent_s:.0f} s" if silent_s > self._grace_s else None

    def _is_running(self, number: int) -> bool:
        return self._trials()[number].state == TrialState.RUNNING

    def _end_lost(self, trial: FrozenTrial, reason: str) -> None:
        study_id = self._storage.get_study_id_from_name(self.study.study_name)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        row = _stored_row(trial)
        try:
            if row is not None:  # it ended after the run and before the trial was closed
                self._set_outcome(trial_id, row)
                return
            self._storage.set_trial_user_attr(trial_id, "lost", reason)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return  # it was finished in this moment
        _log.warning("trial %d is lost: %s", trial.number, reason)

    def _give_up(self, trial: FrozenTrial, failed_row: Callable[[Proposal, str], TrialRow]) -> None:
        """Record a failed run in the place of one that was lost too often."""
        proposal = _proposal(trial, None)
        reason = f"lost {MAX_ATTEMPTS} times, the last time as {trial.user_attrs.get('lost', 'its result came late')}"
        row = failed_row(proposal, reason)
        self._add_trial(proposal, trial.distributions, state=TrialState.FAIL, row=json.dumps(asdict(row)))

    def _add_trial(
        self,
        proposal: Proposal,
        distributions: Mapping[str, BaseDistribution],
        state: TrialState = TrialState.WAITING,
        **more: str,
    ) -> None:
        self.study.add_trial(
            optuna.create_trial(
                state=state,
                params=dict(proposal.params),
                distributions=dict(distributions),
                user_attrs={
                    "proposal": proposal.index,
                    **({} if proposal.ask_rps is None else {"ask_rps": proposal.ask_rps}),
                    **more,
                },
            )
        )

    def _set_outcome(self, trial_id: int, row: TrialRow) -> None:
        state, values, constraints = outcome(row, self._variance_metric)
        self._storage.set_trial_system_attr(trial_id, "constraints", constraints)  # for Optuna's dashboard
        self._storage.set_trial_state_values(trial_id, state, values)

    def _patiently(self, step: Callable[[], Result]) -> Result:
        return patiently(self._name, step, limit_s=self._limit_s)


def _index(trial: FrozenTrial) -> int:
    return int(trial.user_attrs["proposal"])


def _stored_row(trial: FrozenTrial) -> TrialRow | None:
    text = trial.user_attrs.get("row")
    return None if text is None else _parse_row(text)


@lru_cache(maxsize=4096)
def _parse_row(text: str) -> TrialRow:
    return TrialRow.from_json(json.loads(text))


def _counts(trial: FrozenTrial, variance_metric: str) -> bool:
    """Whether the trial's row is its outcome: a trial that was failed as lost may have one that came too late."""
    row = _stored_row(trial)
    return row is not None and trial.state == outcome(row, variance_metric)[0]


def _proposal(trial: FrozenTrial, row: TrialRow | None) -> Proposal:
    return Proposal(index=_index(trial), params=dict(trial.params), row=row, ask_rps=trial.user_attrs.get("ask_rps"))


def _proposals(trials: list[FrozenTrial], variance_metric: str) -> list[Proposal]:
    found: dict[int, Proposal] = {}
    for trial in trials:
        index = _index(trial)
        if index in found and found[index].row is not None:
            continue
        row = _stored_row(trial) if _counts(trial, variance_metric) else None
        if index not in found or row is not None:
            found[index] = _proposal(trial, row)
    return [found[index] for index in sorted(found)]
