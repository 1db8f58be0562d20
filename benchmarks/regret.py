"""How much throughput the search gives away against trying every budget, and how much the usual lists do.

    python -P benchmarks/regret.py [--json] [--num-requests N] [--processes N] [--only TEXT]
    python -P benchmarks/regret.py --traffic open --seed N [--num-scenarios N] [--json] [...]

24 scenarios: three modelled devices x two models x two traffics x two SLOs. For each, every candidate of the study's
space (on an edge, one past it, between two) and every multiple of 32 up to 16384 is run: the best of those that hold
the SLO is the exhaustive answer. Against it stand our study, Optuna's random sampler with as many trials (the median
over some seeds), vLLM auto_tune's list, Vidur's list, and vLLM's default. A list is given the best of its budgets that
hold the SLO; where none does, it broke the SLO. All runs are saturated: every request is there at time 0.
`--traffic open` compares capacities instead, over scenarios drawn by seed: see `regret_open.py`.

The exhaustive runs serve both SLOs of a case: they are stopped early under the wider one alone, and held to the other
by their P99 TBT. Our study runs its own trials under its own SLO.

Needs the extra `silicon`. Runs on any machine: time is modelled, so load on the machine changes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import optuna
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.devices import make_executor
from tilebudget.autotune.environment import source_commit
from tilebudget.autotune.problem import Problem, load_workload, read_device, state_problem
from tilebudget.autotune.study.space import Candidate
from tilebudget.autotune.study.trial import TrialRow, TrialRunner
from tilebudget.engine import RunRecord

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves the script's own folder out
from regret_open import print_open, run_open, summarise_open
from regret_scenarios import OpenScenario, draw_scenarios
from regret_ways import RANDOM_SEEDS, VIDUR, VLLM_AUTO_TUNE, WAYS, random_budgets, run_study

MAX_BUDGET = 16384
GRID = 32

#: Trials of our study. Its contenders may add the budget across the winner's edge and the unchunked one.
NUM_TRIALS = 18


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One case; ``vllm_default`` is the budget that vLLM's API server sets on that GPU (8192 from 70 GiB on, but not on
    an A100; else 2048)."""

    device: str
    kernels: str
    dtype: str
    model: str
    tensor_parallel: int
    workload: str
    slo: str
    vllm_default: int

    @property
    def name(self) -> str:
        """What tables and ``--only`` call it."""
        return f"{self.device} {self.dtype} {self.model} TP{self.tensor_parallel} {self.workload} {self.slo}"

    def config(self, num_requests: int) -> TuneConfig:
        """The settings of the study."""
        return TuneConfig(
            device=self.device,
            kernels=self.kernels,
            dtype=self.dtype,
            model=self.model,
            tensor_parallel=self.tensor_parallel,
            workload=self.workload,
            tbt_slo=self.slo,
            num_requests=num_requests,
            max_budget=MAX_BUDGET,
            num_trials=NUM_TRIALS,
        )


#: Device, whose kernels, dtype, vLLM's default there, and the smallest TP degree at which llama-2-70b fits. The A100's
#: sglang table has the points behind the edges, which its vLLM table lacks.
DEVICES = (
    ("h200_sxm", "vllm", "fp8", 8192, 1),
    ("a100_sxm", "sglang", "bf16", 2048, 4),
    ("l40s", "vllm", "bf16", 2048, 4),
)

SCENARIOS = tuple(
    Scenario(
        device=device,
        kernels=kernels,
        dtype=dtype,
        model=model,
        tensor_parallel=tensor_parallel if model == "llama-2-70b" else 1,
        workload=workload,
        slo=slo,
        vllm_default=default,
    )
    for device, kernels, dtype, default, tensor_parallel in DEVICES
    for model in ("llama-3.1-8b", "llama-2-70b")
    for workload in ("azure-conv", "azure-code")
    for slo in ("strict", "relaxed")
)


class MemoRunner(TrialRunner):
    """Runs each budget once: on a modelled device it would give the same again."""

    rows: dict[int, TrialRow]

    @classmethod
    def of(cls, problem: Problem) -> MemoRunner:
        """The runner of ``problem``."""
        plain = problem.make_runner()
        runner = cls(plain.engine, plain.workload, plain.base, plain.slo)
        runner.rows = {}
        return runner

    def row_of(self, budget: int) -> TrialRow:
        """The row of any budget, a candidate of the study or not."""
        return self.run(Candidate(token_budget=budget, kind="grid", edge_tokens=budget), run="grid", role="search")[0]

    def run(
        self,
        candidate: Candidate,
        *,
        run: str,
        role: str,
        policy: str | None = None,
        prune: bool = False,
        round_number: int | None = None,
        ask_rps: float | None = None,
        near_rps: float | None = None,
    ) -> tuple[TrialRow, RunRecord | None]:
        """The row, from memory where the budget was run before; no record."""
        budget = candidate.token_budget
        if budget not in self.rows:
            self.rows[budget] = super().run(candidate, run=run, role=role, prune=True)[0]
        row = self.rows[budget]
        placed = replace(row, run=run, role=role, round=round_number)
        return replace(placed, kind=candidate.kind, edge_tokens=candidate.edge_tokens), None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one way of searching ends with: the budget, its throughput lost against the exhaustive answer (percent, None
    where there is nothing to compare), whether it holds the SLO, and the budgets that it ran."""

    token_budget: int | None
    loss_pct: float | None
    slo_kept: bool
    num_trials: int


def run_case(pair: Sequence[Scenario], num_requests: int) -> list[dict[str, object]]:
    """The rows of two scenarios that differ in the SLO alone, the wider one last."""
    *_, widest = pair
    exhaustive = MemoRunner.of(state(widest, num_requests))
    return [run_scenario(scenario, num_requests, exhaustive) for scenario in pair]


def state(scenario: Scenario, num_requests: int) -> Problem:
    """The problem of a scenario."""
    config = scenario.config(num_requests)
    executor = make_executor(config)
    workload = load_workload(config, executor.max_position)
    return state_problem(config, executor, workload, read_device(config, executor, workload, None))


def run_scenario(scenario: Scenario, num_requests: int, exhaustive: MemoRunner) -> dict[str, object]:
    """One row of the table; ``exhaustive`` runs what is compared with our study, under an SLO that is no narrower."""
    began = perf_counter()
    problem = state(scenario, num_requests)
    budgets = {candidate.token_budget for candidate in problem.space.candidates}
    budgets |= set(range(-(-problem.space.min_budget // GRID) * GRID, MAX_BUDGET + 1, GRID))

    def row_of(budget: int) -> TrialRow:
        return held_to(exhaustive.row_of(budget), problem.slo.tbt_s)

    rows = {budget: row_of(budget) for budget in sorted(budgets)}
    held = [row for row in rows.values() if row.feasible]
    best = max(held, key=lambda row: (row.score, -row.token_budget), default=None)
    closest = min(rows.values(), key=lambda row: (row.violations[0], row.token_budget))

    def judge(budget: int | None, num_trials: int) -> Answer:
        row = None if budget is None else row_of(budget)
        kept = row is not None and bool(row.feasible)
        loss = 100.0 * (1.0 - row.score / best.score) if row is not None and best is not None and kept else None
        return Answer(token_budget=budget, loss_pct=loss, slo_kept=kept, num_trials=num_trials)

    def best_of(tried: Sequence[int]) -> Answer:
        usable = [budget for budget in tried if budget >= problem.space.min_budget]
        chosen = max(usable, key=lambda budget: (bool(row_of(budget).feasible), row_of(budget).score))
        return judge(chosen, len(usable))

    budget, num_trials = run_study(problem, MemoRunner.of(problem))
    random = [best_of(random_budgets(problem, num_trials, seed)) for seed in RANDOM_SEEDS]
    answers = {
        "ours": judge(budget, num_trials),
        "random": median_of(random),
        "vllm_auto_tune": best_of(VLLM_AUTO_TUNE),
        "vidur": best_of(VIDUR),
        "vllm_default": best_of([scenario.vllm_default]),
    }
    return {
        "scenario": scenario.name,
        **asdict(scenario),
        "slo_ms": problem.slo.tbt_s * 1e3,
        "num_budgets": len(rows),
        "num_feasible": len(held),
        "best_budget": None if best is None else best.token_budget,
        "best_tokens_per_s": None if best is None else best.score,
        # Where nothing holds the SLO the answer is the budget nearest to it.
        "closest_budget": closest.token_budget if best is None else None,
        **{name: asdict(answer) for name, answer in answers.items()},
        "elapsed_s": perf_counter() - began,
    }


def held_to(row: TrialRow, tbt_s: float) -> TrialRow:
    """A run's row under another limit on P99 TBT, no wider than the one under which it may have been stopped early."""
    excess = row.metric("tbt_p99_ms") / (tbt_s * 1e3) - 1.0
    return replace(row, feasible=row.state == "complete" and excess <= 0.0, violations=(excess, *row.violations[1:]))


def median_of(answers: Sequence[Answer]) -> Answer:
    """The answer in the middle by throughput lost; one that broke the SLO is worse than any that held it."""
    ordered = sorted(answers, key=lambda one: float("inf") if one.loss_pct is None else one.loss_pct)
    return ordered[len(ordered) // 2]


def summarise(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The figures over all scenarios; ``within_1pct``, ``worst_loss_pct`` and so on are those of our study."""
    by_way: dict[str, object] = {}
    for way in WAYS:
        answers = [row[way] for row in rows if row["best_budget"] is not None]
        losses = [answer["loss_pct"] for answer in answers if answer["loss_pct"] is not None]  # type: ignore[index]
        by_way[way] = {
            "within_1pct": sum(loss <= 1.0 for loss in losses),
            "median_loss_pct": statistics.median(losses) if losses else None,
            "worst_loss_pct": max(losses, default=None),
            "max_trials": max((answer["num_trials"] for answer in answers), default=0),  # type: ignore[index]
            "slo_broken": sum(not answer["slo_kept"] for answer in answers),  # type: ignore[index]
        }
    ours = by_way["ours"]
    assert isinstance(ours, dict)
    nothing = [row for row in rows if row["best_budget"] is None]
    return {
        "scenarios": len(rows),
        "within_1pct": ours["within_1pct"],
        "worst_loss_pct": ours["worst_loss_pct"],
        "max_trials": ours["max_trials"],
        "slo_broken": ours["slo_broken"],
        "nothing_feasible": len(nothing),
        "closest_found": sum(row["ours"]["token_budget"] == row["closest_budget"] for row in nothing),  # type: ignore[index]
        "by_way": by_way,
        "rows": list(rows),
    }


def print_table(summary: Mapping[str, object], out: Callable[[str], None] = print) -> None:
    """Budget and throughput lost by scenario, then the figures over all."""
    out(f"{'scenario':52} {'best':>6} " + " ".join(f"{way:>20}" for way in WAYS))
    for row in summary["rows"]:  # type: ignore[attr-defined]
        cells = []
        for way in WAYS:
            answer = row[way]
            loss = "breaks SLO" if not answer["slo_kept"] else f"-{answer['loss_pct']:.2f}%"
            cells.append(f"{answer['token_budget']!s:>8} {loss:>11}")
        out(f"{row['scenario']:52} {row['best_budget'] or 'none':>6} " + " ".join(cells))
    for way, figures in summary["by_way"].items():  # type: ignore[attr-defined]
        out(f"{way:16} " + ", ".join(f"{name} {value}" for name, value in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", choices=("saturated", "open"), default="saturated")
    parser.add_argument("--seed", type=int, help="of the scenarios of open traffic")
    parser.add_argument("--num-scenarios", type=int, default=24, help="of open traffic")
    parser.add_argument("--num-requests", type=int, help="256; of open traffic 500 to 1000, drawn")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose name has this text")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if (arguments.traffic == "open") != (arguments.seed is not None):
        parser.error("--traffic=open and --seed go together")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    began = perf_counter()
    run, show = (run_all_open, print_open) if arguments.traffic == "open" else (run_all_saturated, print_table)
    summary = run(arguments) | {
        "elapsed_s": perf_counter() - began,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": source_commit(),
    }
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        show(summary)


def run_all_saturated(arguments: argparse.Namespace) -> dict[str, object]:
    """The figures of the saturated scenarios."""
    num_requests = arguments.num_requests or 256
    chosen = only(SCENARIOS, arguments.only)
    cases: dict[str, list[Scenario]] = {}
    for scenario in chosen:
        cases.setdefault(scenario.name.removesuffix(scenario.slo), []).append(scenario)
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("fork")) as pool:
        for pair in pool.map(run_case, cases.values(), [num_requests] * len(cases)):
            rows += pair
            print(f"{len(rows)}/{len(chosen)} {pair[0]['scenario']} and so on", file=sys.stderr)
    return summarise(rows) | {"num_requests": num_requests}


def run_all_open(arguments: argparse.Namespace) -> dict[str, object]:
    """The figures of the scenarios of open traffic."""
    chosen = only(draw_scenarios(arguments.seed, arguments.num_scenarios, arguments.num_requests), arguments.only)
    rows: list[dict[str, object]] = []
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("fork")) as pool:
        for row in pool.map(run_open, chosen):
            rows.append(row)
            print(f"{len(rows)}/{len(chosen)} {row['name']}: {row['elapsed_s']:.0f} s", file=sys.stderr)
    return summarise_open(rows) | {"traffic": "open", "seed": arguments.seed}


Named = TypeVar("Named", Scenario, OpenScenario)


def only(scenarios: Sequence[Named], text: str) -> list[Named]:
    """Those whose name has ``text``; the program ends where none has."""
    chosen = [scenario for scenario in scenarios if text in scenario.name]
    if not chosen:
        raise SystemExit(f"--only={text!r}: no scenario has this text; they are {[one.name for one in scenarios]}")
    return chosen


if __name__ == "__main__":
    main()
