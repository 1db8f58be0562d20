"""A search on a device of known cost that any number of processes run, for the tests of workers and faults."""

from __future__ import annotations

from pathlib import Path

from stair_device import StairDevice
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.problem import Problem, read_device, state_problem
from tilebudget.autotune.study.parallel import LocalWorkers
from tilebudget.autotune.study.stored_study import STUDY_NAME, StoredStudy
from tilebudget.autotune.study.study import BudgetStudy
from tilebudget.autotune.study.trial import TrialRow, TrialRunner
from tilebudget.autotune.study.trial_queue import TrialQueue
from tilebudget.autotune.study.worker import serve
from tilebudget.engine import Workload

CONFIG = TuneConfig(
    max_num_seqs=8, max_model_len=4096, tbt_slo="30ms", max_budget=2048, num_trials=14, max_concurrent=4
)
EDGES = range(128, 2049, 128)
#: A machine with much else to do may keep a worker silent for long.
BEAT_S, GRACE_S = 0.2, 60.0


class WorkerStudy:
    """The study at ``storage``, of which ``search`` proposes and this process, or ``num_workers`` forks of it, run the
    trials."""

    def __init__(
        self, storage: str | Path, workload: Workload, device: StairDevice | None = None, *, grace_s: float = GRACE_S
    ) -> None:
        self.storage = storage
        self.grace_s = grace_s
        self.workload = workload
        self.device = device or StairDevice()

    @property
    def problem(self) -> Problem:
        plain = StairDevice()
        return state_problem(CONFIG, self.device, self.workload, read_device(CONFIG, plain, self.workload, EDGES))

    def open(self) -> StoredStudy:
        """The study, begun if it was not there."""
        stored = StoredStudy(self.storage, STUDY_NAME, CONFIG.identity())
        if stored.read_facts() is None:
            stored.write_setting(None, self.problem.facts, self.workload, self.device)
        return stored

    def queue(self, stored: StoredStudy | None = None) -> TrialQueue:
        stored = stored or self.open()
        return stored.queue(self.problem.variance_metric, beat_s=BEAT_S, grace_s=self.grace_s)

    def runner(self) -> TrialRunner:
        return self.problem.make_runner()

    def search(self, num_workers: int = 0, *, num_trials: int = CONFIG.num_trials) -> list[TrialRow]:
        """The rows of the whole search."""
        with LocalWorkers(num_workers, self._work) as workers:
            stored = self.open()
            problem = self.problem
            study = BudgetStudy(
                problem.space,
                self.runner(),
                self.queue(stored),
                variance_metric=problem.variance_metric,
                seed=CONFIG.seed,
                max_concurrent=CONFIG.max_concurrent,
            )
            with stored.leading(beat_s=BEAT_S, grace_s=self.grace_s):
                workers.begin()
                return study.search(num_trials, lambda row, done, planned: None, runs_here=num_workers == 0)

    def _work(self, number: int) -> None:
        stored = StoredStudy.join(self.storage, STUDY_NAME, wait_limit_s=30.0)
        serve(
            self.queue(stored),
            self.runner(),
            self.problem.space,
            is_over=lambda: stored.is_over,
            wait_limit_s=30.0,
            on_row=lambda row: None,
        )


def essence(rows: list[TrialRow]) -> list[tuple[object, ...]]:
    """What of rows must not depend on who ran them, when, and after what."""
    return [(row.run, row.token_budget, row.state, row.feasible, row.violations, row.metrics) for row in rows]
