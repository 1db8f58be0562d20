"""The ways of searching that `regret.py` compares, for saturated and for open-loop traffic alike."""

from __future__ import annotations

import tempfile
from pathlib import Path

import optuna
from tilebudget.autotune.problem import Problem
from tilebudget.autotune.study.contenders import repeat_contenders
from tilebudget.autotune.study.stored_study import STUDY_NAME, StoredStudy
from tilebudget.autotune.study.study import BudgetStudy
from tilebudget.autotune.study.trial import TrialRunner

RANDOM_SEEDS = (0, 1, 2, 3, 4)

#: vLLM's benchmarks/auto_tune.sh, and Vidur's configuration explorer.
VLLM_AUTO_TUNE = (512, 1024, 2048, 4096)
VIDUR = (256, 512, 1024, 2048, 4096)

WAYS = ("ours", "random", "vllm_auto_tune", "vidur", "vllm_default")


def run_study(problem: Problem, runner: TrialRunner | None = None) -> tuple[int | None, int]:
    """The budget that our study recommends, the way `tune` does, and how many budgets it ran. ``runner``: None takes
    the problem's own."""
    runner = runner or problem.make_runner()
    with tempfile.TemporaryDirectory() as folder:
        stored = StoredStudy(str(Path(folder) / "study.journal"), STUDY_NAME, problem.config.identity())
        study = BudgetStudy(
            problem.space,
            runner,
            stored.queue(problem.variance_metric),
            variance_metric=problem.variance_metric,
            seed=problem.config.seed,
            max_concurrent=problem.config.max_concurrent,
        )
        rows = study.search(problem.config.num_trials, lambda row, done, planned: None)
    contenders, pairs = repeat_contenders(problem, runner, rows, lambda phase, done, planned, row: None)
    best = problem.judge.choose(contenders).best
    budgets = {row.token_budget for row in (*rows, *(row for row, _ in pairs))}
    return None if best is None else best.candidate.token_budget, len(budgets)


def random_budgets(problem: Problem, num_trials: int, seed: int) -> list[int]:
    """The budgets that Optuna's random sampler draws, log-uniformly."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    trials = [study.ask() for _ in range(num_trials)]
    low, high = problem.space.min_budget, problem.space.max_budget
    return [trial.suggest_int("token_budget", low, high, log=True) for trial in trials]
