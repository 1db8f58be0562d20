"""The runs after the search: contenders repeated and interleaved, and the policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..engine import PAPER_POLICIES, RunRecord
from ..engine.modelled_executor import ModelledExecutor
from .problem import Problem
from .selection import Choice, Contender, choose, promising, shortlist
from .space import Candidate
from .trial import TrialRow, TrialRunner

#: Told of every finished run: phase (``search``, ``repeat``, ``policy``), runs done and planned in it, the row.
ProgressSink = Callable[[str, int, int, TrialRow], None]


RunPair = tuple[TrialRow, RunRecord | None]


def repeat_contenders(
    problem: Problem, runner: TrialRunner, search_rows: Sequence[TrialRow], progress: ProgressSink
) -> tuple[list[Contender], list[RunPair]]:
    """Repeat the best budgets interleaved; when none of them holds the SLO in every repeat, the next best too."""
    contenders: list[Contender] = []
    pairs: list[RunPair] = []
    while True:
        tried = [contender.candidate.token_budget for contender in contenders]
        left = [row for row in search_rows if row.token_budget not in tried]
        budgets = shortlist(left, problem.config.num_contenders)
        if not budgets or (contenders and not any(promising(row) for row in left)):
            return contenders, pairs
        batch = _with_company(problem, budgets, tried, search_rows)
        runs = _interleave(problem, runner, batch, progress)
        pairs += runs
        for candidate in batch:
            completed = tuple(
                row for row, _ in runs if row.token_budget == candidate.token_budget and row.state == "complete"
            )
            contenders.append(Contender(candidate=candidate, rows=completed))
        if choose(contenders, problem.variance_metric).status != "infeasible":
            return contenders, pairs


def _with_company(
    problem: Problem, budgets: Sequence[int], tried: Sequence[int], search_rows: Sequence[TrialRow]
) -> list[Candidate]:
    """The candidates of ``budgets``, the other side of the first one's edge, and whole prompts if they ran well."""
    by_budget = {candidate.token_budget: candidate for candidate in problem.space.candidates}
    batch = [by_budget[budget] for budget in budgets if budget in by_budget]
    partner = problem.space.partner(batch[0])
    whole = problem.space.whole_prompt
    whole_ran = any(whole and row.token_budget == whole.token_budget and promising(row) for row in search_rows)
    for extra in (partner, whole if whole_ran else None):
        if extra is not None and extra not in batch and extra.token_budget not in tried:
            batch.append(extra)
    return batch


def _interleave(
    problem: Problem, runner: TrialRunner, batch: Sequence[Candidate], progress: ProgressSink
) -> list[RunPair]:
    """Every candidate once per round, in alternating order, so that drift of the machine hits all of them alike."""
    # A modelled device gives the same figures every time.
    repeats = 1 if isinstance(problem.executor, ModelledExecutor) else problem.config.repeats
    planned = len(batch) * repeats
    runs: list[RunPair] = []
    for repeat in range(repeats):
        for candidate in batch if repeat % 2 == 0 else reversed(batch):
            pair = runner.run(candidate, run=f"repeat-{candidate.token_budget}-{repeat}", role="repeat")
            runs.append(pair)
            progress("repeat", len(runs), planned, pair[0])
    return runs


def compare_policies(problem: Problem, runner: TrialRunner, choice: Choice, progress: ProgressSink) -> list[RunPair]:
    """The paper's policies, and the study's own where it is another, once on the same requests at the chosen budget."""
    if choice.best is None:
        return []
    policies = tuple(dict.fromkeys((*PAPER_POLICIES, problem.config.policy)))
    runs: list[RunPair] = []
    for policy in policies:
        pair = runner.run(choice.best.candidate, run=f"policy-{policy}", role="policy", policy=policy)
        runs.append(pair)
        progress("policy", len(runs), len(policies), pair[0])
    return runs
