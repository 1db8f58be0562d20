"""Runs of a search side by side, one process a core: for modelled devices, whose time no neighbour disturbs."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Self

from .space import Candidate
from .trial import TrialRow, TrialRunner

MAX_WORKERS = 8
"""Each holds the tokens of a whole trace, some hundred MB."""

_runner: TrialRunner | None = None


def num_workers() -> int:
    """Processes worth starting: one for each core of this process; 1 where processes cannot fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


class TrialPool:
    """Processes that run budgets of a search with one runner; a context manager.

    They are forked, so that workload and tables are shared and a script needs no main guard.
    """

    def __init__(self, runner: TrialRunner, num_processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_adopt, initargs=(runner,))

    def run(self, jobs: Sequence[tuple[Candidate, str]]) -> list[TrialRow]:
        """The rows of (candidate, run name) pairs, in their order."""
        return list(self._pool.map(_run_search_trial, jobs))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)


def _adopt(runner: TrialRunner) -> None:
    global _runner
    _runner = runner


def _run_search_trial(job: tuple[Candidate, str]) -> TrialRow:
    if _runner is None:
        raise RuntimeError("a worker runs before it was given its runner")
    candidate, run = job
    return _runner.run(candidate, run=run, role="search", prune=True)[0]
