"""The runs after the search: contenders repeated and interleaved, and the policies side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from ...engine import PAPER_POLICIES, RunRecord
from ...engine.server.engine import ServerEngine
from ...engine.workloads.workload import scale_load
from ..problem import Problem
from ..scoring.selection import Choice, Contender, promising, shortlist
from .parallel import side_by_side
from .space import Candidate
from .trial import TrialRow, TrialRunner

#: Told of every finished run: phase (``search``, ``repeat``, ``anchor``, ``policy``), how many of how many are done in
#: it, and the row.
ProgressSink = Callable[[str, int, int, TrialRow | None], None]


#: Budgets that are asked, after a race for capacity, whether they are equal to its winner.
MAX_ASKED = 12

#: Rounds at most, for each of the settings' ``repeats``.
MAX_ROUNDS_PER_REPEAT = 2

RunPair = tuple[TrialRow, RunRecord | None]


def repeat_contenders(
    problem: Problem,
    runner: TrialRunner,
    search_rows: Sequence[TrialRow],
    progress: ProgressSink,
    until_s: float = math.inf,
) -> tuple[list[Contender], list[RunPair]]:
    """Repeat the best budgets interleaved until they are told apart; when none of them holds the SLO in every repeat,
    the next best too."""
    contenders: list[Contender] = []
    pairs = ask_equals(problem, runner, search_rows, progress)
    search_rows = [*search_rows, *(row for row, _ in pairs)]
    count = max(problem.config.num_contenders, sum(row.state == "complete" for row, _ in pairs) + 1)
    while True:
        tried = [contender.candidate for contender in contenders]
        left = [row for row in search_rows if problem.space.find(*row.setting) not in tried]
        best = shortlist(left, count)
        if not best or (contenders and not any(promising(row) for row in left)):
            return contenders, pairs
        batch = _with_company(problem, best, tried, search_rows)
        if problem.judge.exact:
            batch_contenders, runs = _once(problem, runner, batch, search_rows, progress)
        else:
            batch_contenders, runs = _rounds(problem, runner, batch, search_rows, progress, until_s)
        pairs += runs
        contenders += batch_contenders
        if problem.judge.choose(contenders).status != "infeasible":
            return contenders, pairs


def ask_equals(
    problem: Problem, runner: TrialRunner, search_rows: Sequence[TrialRow], progress: ProgressSink
) -> list[RunPair]:
    """Under capacity, on a device that repeats itself: the budgets that the search only knows to serve less than the
    best, but not by how much, are asked whether they are its equal; those nearest in size, ``MAX_ASKED`` at most."""
    best = next(iter(shortlist(search_rows, 1)), None)
    top = math.nan if best is None else best.metric("capacity_qps")
    if best is None or problem.objective.name != "capacity" or not problem.judge.exact or not top > 0.0:
        return []
    ask_rps = problem.judge.least_equal(top)
    unsure = [row for row in search_rows if row.state == "pruned" and row.metric("capacity_at_most_qps") > ask_rps]
    unsure.sort(key=lambda row: abs(math.log(row.token_budget / best.token_budget)))
    candidates = [found for row in unsure[:MAX_ASKED] if (found := problem.space.find(*row.setting)) is not None]

    def ask(candidate: Candidate) -> RunPair:
        return runner.run(
            candidate, run=f"equal-{candidate.run_suffix}", role="repeat", round_number=0, ask_rps=ask_rps
        )

    runs: list[RunPair] = []
    for pair in side_by_side(ask, candidates):
        runs.append(pair)
        progress("repeat", len(runs), len(candidates), pair[0])
    return runs


def _with_company(
    problem: Problem, best: Sequence[TrialRow], tried: Sequence[Candidate], search_rows: Sequence[TrialRow]
) -> list[Candidate]:
    """The candidates of the ``best`` runs, the other side of the first one's edge, and whole prompts, at the settings
    of the first, if they ran well."""
    found = (problem.space.find(*row.setting) for row in best)
    batch = [candidate for candidate in found if candidate is not None]
    if problem.objective.name == "capacity":
        return batch  # a budget that serves less is known to; nothing is learned by finding out how much less
    variant = problem.space.variant_of(batch[0])
    partner, whole = variant.partner(batch[0]), variant.whole_prompt
    whole_ran = any(whole and problem.space.find(*row.setting) == whole and promising(row) for row in search_rows)
    for extra in (partner, whole if whole_ran else None):
        if extra is not None and extra not in batch and extra not in tried:
            batch.append(extra)
    return batch


def _rounds(
    problem: Problem,
    runner: TrialRunner,
    batch: Sequence[Candidate],
    search_rows: Sequence[TrialRow],
    progress: ProgressSink,
    until_s: float,
) -> tuple[list[Contender], list[RunPair]]:
    """Every candidate once per round, in alternating order, so that drift of the machine hits all of them alike.

    After ``repeats`` rounds only those go on of which it is not shown whether they are worse than the leader, for as
    many rounds again at most, and none is begun after ``until_s`` (of ``perf_counter``).
    """
    fewest = problem.config.repeats
    most = MAX_ROUNDS_PER_REPEAT * problem.config.repeats
    runs: list[RunPair] = []
    capacities = {
        problem.space.find(*row.setting): qps for row in search_rows if (qps := row.metric("capacity_qps")) > 0.0
    }
    active, planned = list(batch), fewest * len(batch)
    for number in range(most):
        for candidate in active if number % 2 == 0 else reversed(active):
            run = f"repeat-{candidate.run_suffix}-{number}"
            near_rps = capacities.get(candidate)
            runs.append(runner.run(candidate, run=run, role="repeat", round_number=number, near_rps=near_rps))
            progress("repeat", len(runs), max(planned, len(runs)), runs[-1][0])
        contenders = [_contender(problem, candidate, runs) for candidate in batch]
        if number + 1 < fewest:
            continue
        contested = problem.judge.contested(contenders)
        if not contested or perf_counter() > until_s:
            break
        active = [one.candidate for one in contested]
        planned = len(runs) + (most - number - 1) * len(active)
    return contenders, runs


def _once(
    problem: Problem,
    runner: TrialRunner,
    batch: Sequence[Candidate],
    search_rows: Sequence[TrialRow],
    progress: ProgressSink,
) -> tuple[list[Contender], list[RunPair]]:
    """Every candidate once, on a device that repeats itself to the bit: what the search ran to its end is not run
    again, its row stands for the repeat."""
    known = {problem.space.find(*row.setting): row for row in search_rows if row.state == "complete"}
    runs: list[RunPair] = []
    for candidate in batch:
        run, row = f"repeat-{candidate.run_suffix}-0", known.get(candidate)
        if row is None:
            runs.append(runner.run(candidate, run=run, role="repeat", round_number=0))
        else:
            runs.append((replace(row, run=run, role="repeat", round=0, elapsed_s=0.0), None))
        progress("repeat", len(runs), len(batch), runs[-1][0])
    return [_contender(problem, candidate, runs) for candidate in batch], runs


def _contender(problem: Problem, candidate: Candidate, runs: Sequence[RunPair]) -> Contender:
    mine = (row for row, _ in runs if problem.space.find(*row.setting) == candidate)
    return Contender(candidate=candidate, rows=tuple(row for row in mine if row.state == "complete"))


def check_drift(
    problem: Problem, runner: TrialRunner, search_rows: Sequence[TrialRow], progress: ProgressSink
) -> tuple[float | None, list[RunPair]]:
    """How much the first budget of the search that ran to its end does better now than then, percent, and the run that
    shows it. 0 without a run on a device that repeats itself; None when nothing ran to its end."""
    first = next((row for row in search_rows if row.state == "complete" and row.score > 0.0), None)
    if problem.judge.exact:
        return 0.0, []
    candidate = None if first is None else problem.space.find(*first.setting)
    if first is None or candidate is None:
        return None, []
    pair = runner.run(candidate, run=f"anchor-{candidate.run_suffix}", role="anchor")
    progress("anchor", 1, 1, pair[0])
    if pair[0].state != "complete":
        return None, [pair]
    return 100.0 * (pair[0].score / first.score - 1.0), [pair]


def compare_policies(problem: Problem, runner: TrialRunner, choice: Choice, progress: ProgressSink) -> list[RunPair]:
    """The paper's policies, and the study's own where it is another, once on the same requests at the chosen budget;
    under ``capacity`` at that budget's rate."""
    if choice.best is None or isinstance(problem.executor, ServerEngine):  # a server has its own policy and no other
        return []
    policies = tuple(dict.fromkeys((*PAPER_POLICIES, problem.config.policy)))
    runner = _at_capacity(runner, choice.best)
    candidate = choice.best.candidate

    def run(policy: str) -> RunPair:
        return runner.run(candidate, run=f"policy-{policy}", role="policy", policy=policy)

    runs: list[RunPair] = []
    for pair in side_by_side(run, policies) if problem.judge.exact else map(run, policies):
        runs.append(pair)
        progress("policy", len(runs), len(policies), pair[0])
    return runs


def _at_capacity(runner: TrialRunner, best: Contender) -> TrialRunner:
    """A runner of single runs at the capacity of ``best``, where that is what ``runner`` searches for."""
    if runner.objective.name != "capacity":
        return runner
    qps = best.spread(runner.objective.metric)
    factor = 0.0 if qps is None else qps.value / runner.rate_rps
    workload = scale_load(runner.workload, factor) if factor > 0.0 else runner.workload
    return TrialRunner(runner.engine, workload, runner.base, runner.slo)
