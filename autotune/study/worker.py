"""A worker: runs the trials of a study that another process proposes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...engine import Workload
from ...engine.server.engine import Target
from ..config import TuneConfig
from ..problem import load_workload, state_problem
from ..run_folder.run_folder import default_run_dir
from ..server import make_target
from .parallel import is_orphan
from .pause import Pause
from .space import Candidate, SearchSpace
from .stored_study import StoredStudy
from .trial import TrialRow, TrialRunner
from .trial_queue import Claim, Proposal, TrialQueue

_log = logging.getLogger(__name__)

#: How long a worker stays without a trial to run, unless it is told otherwise.
WAIT_LIMIT_S = 600.0


def work(
    storage: str | Path,
    study_name: str,
    *,
    trace: Path | None = None,
    wait_limit_s: float = WAIT_LIMIT_S,
    parent: int | None = None,
    given: tuple[TuneConfig, Target, Workload] | None = None,
    on_row: Callable[[TrialRow], None] = lambda row: None,
    on_wait: Callable[[str], None] = lambda what: None,
) -> int:
    """Join a study and run its trials until its search is over, or no trial came for ``wait_limit_s``, or the process
    ``parent`` has ended; returns how many were run here.

    Settings come from the study; ``trace`` is where its trace file is on this machine. ``given`` takes the place of
    what they name. ``on_row`` is told of every run, ``on_wait`` once what is waited for, where the study is not there
    yet. Raises ValueError when this machine has not the study's device or
    requests.
    """
    stored = StoredStudy.join(storage, study_name, wait_limit_s=wait_limit_s, on_wait=on_wait)
    if given is None:
        config = stored.read_config()
        config = config if trace is None else replace(config, trace=trace)
        executor = make_target(config, default_run_dir(config.model) / "logs")
        workload = load_workload(config, executor.max_position)
        stored.check_same(workload, executor)
    else:
        config, executor, workload = given
    facts = stored.read_facts()
    if facts is None:
        raise AssertionError("a study is joined once its facts are there")
    problem = state_problem(config, executor, workload, facts)
    return serve(
        stored.queue(problem.variance_metric),
        problem.make_runner(),
        problem.space,
        is_over=lambda: stored.is_over or (parent is not None and is_orphan(parent)),
        wait_limit_s=wait_limit_s,
        on_row=on_row,
    )


def spawned_work(storage: str | Path, study_name: str, parent: int, devices: tuple[str, ...], number: int) -> None:
    """``work`` of a process that ``tune`` has spawned, the ``number``-th beside it: on a GPU of its own where there are
    several in ``devices``, the first of which is ``tune``'s."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[(number + 1) % len(devices)]
    work(storage, study_name, parent=parent)


def run_name(proposal: Proposal) -> str:
    """The run's name in the run folder."""
    return f"trial-{proposal.index}"


def candidate_of(space: SearchSpace, proposal: Proposal) -> Candidate:
    """The budget that a proposal is about."""
    edge_index, kind = int(proposal.params["edge_index"]), str(proposal.params["kind"])
    candidate = space.variant(proposal.params).at(edge_index, kind)
    if candidate is None:
        raise AssertionError(f"edge {edge_index} {kind} is no candidate of the study's space")
    return candidate


def run_claim(queue: TrialQueue, runner: TrialRunner, space: SearchSpace, claim: Claim) -> TrialRow:
    """Run a claimed trial and record its outcome. Interrupted, the trial is given back."""
    candidate = candidate_of(space, claim.proposal)
    try:
        with queue.beating(claim):
            row, _ = runner.run(
                candidate,
                run=run_name(claim.proposal),
                role="search",
                prune=True,
                ask_rps=claim.proposal.ask_rps,
            )
            queue.finish(claim, row)
            return row
    except KeyboardInterrupt:
        try:
            queue.release(claim)
        except Exception as error:  # the interruption may have come in the middle of the storage's own work
            _log.warning("trial %d was not given back, it will be found lost: %s", claim.number, error)
        raise


def serve(
    queue: TrialQueue,
    runner: TrialRunner,
    space: SearchSpace,
    *,
    is_over: Callable[[], bool],
    wait_limit_s: float,
    on_row: Callable[[TrialRow], None],
) -> int:
    """Run trials until the study ``is_over``, or none came for ``wait_limit_s``; returns how many were run here."""
    num_run = 0
    pause, idle_since_s = Pause(), time.monotonic()
    while time.monotonic() - idle_since_s < wait_limit_s:
        claim = queue.claim()
        if claim is not None:
            on_row(run_claim(queue, runner, space, claim))
            num_run += 1
            pause, idle_since_s = Pause(), time.monotonic()
        elif is_over():
            break
        else:
            pause()
    return num_run
