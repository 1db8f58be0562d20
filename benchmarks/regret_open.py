"""`regret.py --traffic open`: scenarios drawn by seed whose requests arrive over time, judged by capacity.

A budget's capacity is the highest request rate at which every limit of the SLO holds, on a ladder of rates ``STEP``
apart. The exhaustive answer is a race over every candidate of the space: each is asked whether it holds one rung above
the best so far, and climbs only where it does. Whatever a way of searching ends with has its capacity found on the same
ladder. None of this is the study's own code, so a fault there is not repeated here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from time import perf_counter

from regret_scenarios import OpenScenario, make_traffic
from regret_ways import RANDOM_SEEDS, VIDUR, VLLM_AUTO_TUNE, WAYS, random_budgets, run_study
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.devices import make_executor
from tilebudget.autotune.problem import Problem, read_device, state_problem
from tilebudget.engine import Workload, assign_arrivals, compute_metrics, sound_stop
from tilebudget.engine.server.engine import engine_on
from tilebudget.engine.workloads.workload import scale_load

MAX_BUDGET = 8192
MAX_MODEL_LEN = 16384
NUM_TRIALS = 20

#: Ratio of neighbouring rates, and how many of them lie on either side of the first rate: a factor of 256.
STEP = 1.0025
REACH = math.ceil(math.log(256.0) / math.log(STEP))
NOTHING_HOLDS = -REACH - 1

#: Where the race begins, and what the given rate is a share of: the best of these.
FIRST_BUDGETS = (512, 2048, 8192)


def config_of(scenario: OpenScenario) -> TuneConfig:
    """The settings of the study, but for a drawn limit on TBT."""
    return TuneConfig(
        device=scenario.device,
        kernels=scenario.kernels,
        dtype=scenario.dtype,
        model=scenario.model,
        tensor_parallel=scenario.tensor_parallel,
        tbt_slo="strict" if scenario.slo == "drawn" else scenario.slo,
        num_requests=scenario.num_requests,
        max_num_seqs=scenario.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        max_budget=MAX_BUDGET,
        num_trials=NUM_TRIALS,
        objective="capacity",
    )


def state(scenario: OpenScenario, rate: float) -> tuple[Problem, Workload]:
    """The problem of a scenario whose requests are given at ``rate`` per second; and these at 1 per second."""
    config = config_of(scenario)
    executor = make_executor(config)
    traffic = make_traffic(scenario, min(config.max_model_len, executor.max_position))
    given = scale_load(traffic, rate)
    facts = read_device(config, executor, given, None)
    if scenario.slo_multiple is not None:
        if facts.reference is None:
            raise AssertionError("a modelled device has a reference decode")
        config = replace(config, tbt_slo=f"{scenario.slo_multiple * facts.reference.duration_s * 1e3:.4f}ms")
    return state_problem(config, executor, given, facts), traffic


class Ladder:
    """Capacities as rungs of the rates, by ``meets(budget, rung)``, which is asked no question twice. A budget that
    turns more than once over the rates has the turn found first, climbing or descending from where it was asked."""

    def __init__(self, meets: Callable[[int, int], bool]) -> None:
        self._meets = meets
        self._answers: dict[tuple[int, int], bool] = {}
        self.found: dict[int, int] = {}

    @property
    def num_runs(self) -> int:
        """Questions asked so far."""
        return len(self._answers)

    def holds(self, budget: int, rung: int) -> bool:
        """Whether every limit holds there."""
        if (budget, rung) not in self._answers:
            self._answers[budget, rung] = self._meets(budget, rung)
        return self._answers[budget, rung]

    def capacity(self, budget: int, start: int) -> int:
        """The highest rung that holds, looked for in widening steps from ``start``; ``NOTHING_HOLDS`` where none."""
        if budget not in self.found:
            self.found[budget] = self._search(budget, min(max(start, -REACH), REACH))
        return self.found[budget]

    def _search(self, budget: int, start: int) -> int:
        up = self.holds(budget, start)
        good, bad = (start, REACH + 1) if up else (NOTHING_HOLDS, start)
        step, rung = 1, start
        while (rung < REACH) if up else (rung > -REACH):
            rung = min(rung + step, REACH) if up else max(rung - step, -REACH)
            if self.holds(budget, rung):
                good = rung
            else:
                bad = rung
            if self.holds(budget, rung) != up:
                break
            step *= 2
        if good == NOTHING_HOLDS:
            return NOTHING_HOLDS
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.holds(budget, middle) else (good, middle)
        return good

    def best_of(self, budgets: Iterable[int], start: int) -> int | None:
        """The budget of the highest capacity, the first of equals; only what holds above the best so far climbs."""
        best: int | None = None
        for budget in budgets:
            reached = None if best is None else self.capacity(best, start)
            if reached is None:
                self.capacity(budget, start)
                best = budget
            elif budget in self.found:
                best = budget if self.found[budget] > reached else best
            elif reached < REACH and self.holds(budget, max(reached + 1, -REACH)):
                best = budget if self.capacity(budget, max(reached + 1, -REACH)) > reached else best
        return best


def run_open(scenario: OpenScenario) -> dict[str, object]:
    """One row of the table."""
    began = perf_counter()
    problem, traffic = state(scenario, 1.0)
    engine, base, slo = engine_on(problem.executor), problem.engine_config, problem.slo
    flood = compute_metrics(engine.run(assign_arrivals(traffic, "saturated"), replace(base, token_budget=2048)))
    if not flood.requests_per_s:
        raise ValueError(f"{scenario.name}: no request finished")
    first_rate = flood.requests_per_s

    def rate(rung: int) -> float:
        return first_rate * STEP**rung if rung != NOTHING_HOLDS else 0.0

    def meets(budget: int, rung: int) -> bool:
        config = replace(base, token_budget=budget)
        record = engine.run(scale_load(traffic, rate(rung)), config, monitor=sound_stop(slo, traffic, base))
        excesses = compute_metrics(record, slo).excesses(slo).values()
        return record.stopped is None and all(excess is None or excess <= 0.0 for excess in excesses)

    ladder = Ladder(meets)
    usable = [budget for budget in FIRST_BUDGETS if budget >= problem.space.min_budget]
    middle = ladder.best_of(usable, 0) or MAX_BUDGET
    estimate = ladder.capacity(middle, 0)
    given = max(estimate + round(math.log(scenario.load) / math.log(STEP)), -REACH)
    candidates = [candidate.token_budget for candidate in problem.space.candidates]
    by_distance = sorted(candidates, key=lambda budget: abs(math.log(budget / middle)))
    top = ladder.capacity(ladder.best_of([middle, *by_distance], estimate) or middle, estimate)

    budget, num_trials = run_study(state(scenario, rate(given))[0])
    picked: dict[str, list[tuple[int | None, int]]] = {"ours": [(budget, num_trials)]}
    lists: dict[str, list[Sequence[int]]] = {
        "random": [random_budgets(problem, num_trials, seed) for seed in RANDOM_SEEDS],
        "vllm_auto_tune": [VLLM_AUTO_TUNE],
        "vidur": [VIDUR],
        "vllm_default": [[scenario.vllm_default]],
    }
    for way, tries in lists.items():
        fitting = [[one for one in tried if one >= problem.space.min_budget] for tried in tries]
        picked[way] = [(ladder.best_of(tried, top), len(tried)) for tried in fitting]
    if budget is not None:
        ladder.capacity(budget, top)
    best_budget, best = max(ladder.found.items(), key=lambda pair: (pair[1], -pair[0]))
    ranked = sorted(ladder.found, key=lambda one: -ladder.found[one])
    possible = any(ladder.holds(one, given) for one in ranked)

    def judge(budget: int | None, num_trials: int) -> dict[str, object]:
        rung = NOTHING_HOLDS if budget is None else ladder.capacity(budget, top)
        return {
            "token_budget": budget,
            "capacity_rps": rate(rung),
            # Where no budget holds the limits at any rate, there is nothing to lose.
            "regret": 0.0 if best == NOTHING_HOLDS else 1.0 - rate(rung) / rate(best),
            "slo_kept": not possible or (budget is not None and ladder.holds(budget, given)),
            "trials": num_trials,
        }

    ways = {way: middle_of([judge(*pair) for pair in pairs]) for way, pairs in picked.items()}
    ours = ways["ours"]
    return {
        "name": scenario.name,
        **{name: ours[name] for name in ("regret", "slo_kept", "trials")},
        "recommended": budget,
        "recommended_capacity_rps": ours["capacity_rps"],
        "best_budget": None if best == NOTHING_HOLDS else best_budget,
        "best_capacity_rps": rate(best),
        "given_rps": rate(given),
        "given_possible": possible,
        # So few requests that no rate tried breaks a limit: every budget up there is as good.
        "unbounded": best == REACH,
        "slo_ms": slo.tbt_s * 1e3,
        "num_budgets": len(candidates),
        "num_runs": ladder.num_runs,
        "ways": ways,
        "scenario": asdict(scenario),
        "elapsed_s": perf_counter() - began,
    }


def middle_of(answers: Sequence[dict[str, object]]) -> dict[str, object]:
    """The answer in the middle by capacity."""
    return sorted(answers, key=lambda one: float(one["capacity_rps"]))[len(answers) // 2]  # type: ignore[arg-type]


def summarise_open(rows: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The figures over all scenarios; the plain ones are our study's. ``nothing_feasible`` counts those in which no
    budget holds the SLO at any rate, where no way can lose."""
    by_way: dict[str, dict[str, object]] = {}
    for way in WAYS:
        answers = [row["ways"][way] for row in rows]  # type: ignore[index]
        lost = [answer["regret"] for answer in answers]
        by_way[way] = {
            "within_1pct": sum(regret <= 0.01 for regret in lost),
            "median": statistics.median(lost) if lost else None,
            "worst": max(lost, default=None),
            "slo_broken": sum(not answer["slo_kept"] for answer in answers),
            "max_trials": max((answer["trials"] for answer in answers), default=0),
        }
    plain = {name: by_way["ours"][name] for name in ("within_1pct", "worst", "slo_broken")}
    nothing = sum(row["best_budget"] is None for row in rows)
    unbounded = sum(bool(row["unbounded"]) for row in rows)
    return {
        "scenarios": list(rows),
        **plain,
        "nothing_feasible": nothing,
        "unbounded": unbounded,
        "by_way": by_way,
    }


def print_open(summary: Mapping[str, object], out: Callable[[str], None] = print) -> None:
    """Budget and capacity lost by scenario, ``!`` where the SLO is broken at the given rate; the figures over all."""
    out(f"{'scenario':78} {'best':>6} {'req/s':>8} " + " ".join(f"{way:>17}" for way in WAYS))
    for row in summary["scenarios"]:  # type: ignore[attr-defined]
        cells = []
        for way in WAYS:
            answer = row["ways"][way]
            lost = f"-{100.0 * answer['regret']:.2f}%"
            cells.append(f"{answer['token_budget']!s:>8} {lost:>7}{' ' if answer['slo_kept'] else '!'}")
        out(f"{row['name']:78} {row['best_budget'] or 'none':>6} {row['best_capacity_rps']:8.3g} " + " ".join(cells))
    for way, figures in summary["by_way"].items():  # type: ignore[attr-defined]
        out(f"{way:16} " + ", ".join(f"{name} {value}" for name, value in figures.items()))
