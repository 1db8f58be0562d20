"""How well a profile of this CPU predicts engine runs on it: P50 and P99 TBT and throughput at eight token budgets.

    python -P benchmarks/accuracy_cpu.py --json

Profiles each model, runs the Azure conversation trace at every budget, several times, and predicts the same runs from
the profile's latency table. Within each repeat a slice of the profile and the runs of all budgets take turns every few
iterations, each with a cache of its own on the same weights, so that a machine which is slow for a second or a minute
is slow for all of them. The median of as many modelled runs, each of another seed, is held to the median of the
repeats. The order of two budgets counts where the ranges of their
repeats do not overlap. Without the trace file the built-in azure-conv workload takes its place, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter

from tilebudget.autotune.environment import package_versions, source_commit
from tilebudget.engine import Engine, EngineConfig, RunRecord, Workload, assign_arrivals, compute_metrics, load_trace
from tilebudget.engine.model.config import PRESETS, ModelConfig
from tilebudget.engine.profiling.profile import Profile, measure_profile, modelled_as
from tilebudget.engine.run import Progress
from tilebudget.engine.torch_executor import TorchExecutor
from tilebudget.engine.workloads.presets import preset_workload

METRICS = ("tbt_p50_ms", "tbt_p99_ms", "total_tokens_per_s")
BUDGETS = (16, 32, 64, 128, 256, 512, 1024, 2048)
TRACE = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "azure_llm_2023_conv.csv"

#: Twice as wide and half as deep as tiny-llama, with more KV heads, a narrower MLP and a larger vocabulary.
WIDE = replace(
    PRESETS["tiny-llama"],
    name="wide",
    vocab_size=4096,
    hidden_size=512,
    num_layers=2,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1024,
)
MODELS: dict[str, ModelConfig] = {"tiny-llama": PRESETS["tiny-llama"], "wide": WIDE}

#: Seconds that one may work before it is the next one's turn: many iterations, so that few of them find the caches full
#: of what others did, and yet short.
TURN_S = 0.25

#: The bars: median error, and the worst one outside the measured spread, percent.
MEDIAN_BAR_PCT, WORST_BAR_PCT = 5.0, 15.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One metric of one budget: measured over repeats, predicted, and the error against the median."""

    model: str
    token_budget: int
    metric: str
    predicted: float
    measured: float
    low: float
    high: float

    @property
    def error_pct(self) -> float:
        """Relative error, percent."""
        return abs(self.predicted / self.measured - 1.0) * 100

    @property
    def inside_spread(self) -> bool:
        """Whether the prediction lies between the repeats."""
        return self.low <= self.predicted <= self.high


def order_kept(rows: Sequence[Row]) -> tuple[int, int]:
    """Pairs of budgets that the repeats tell apart, and how many of them are predicted in the same order."""
    told = kept = 0
    for one, other in combinations(rows, 2):
        if (one.model, one.metric) != (other.model, other.metric):
            continue
        if one.high < other.low or other.high < one.low:
            told += 1
            kept += (one.measured < other.measured) == (one.predicted < other.predicted)
    return told, kept


class Turns:
    """Several threads of which one works at a time, ``TURN_S`` or a little more; next is who has done the least
    share of its work, so that they all come to their ends together. ``names`` are all who take part."""

    def __init__(self, names: Iterable[str]) -> None:
        self._changed = threading.Condition()
        self._shares = dict.fromkeys(names, 0.0)  # the one who worked last is last
        self._worked_s = dict.fromkeys(self._shares, 0.0)
        self._turn = next(iter(self._shares))
        self._since_s = perf_counter()

    @contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Take part as ``name``: wait for the first turn, and leave for good at the end."""
        with self._changed:
            self._wait(name)
        try:
            yield
        finally:
            with self._changed:
                del self._shares[name]
                self._next()

    def pass_on(self, name: str, share: float) -> None:
        """Of its work, ``name`` has done ``share``: let another one work when the turn is over."""
        if perf_counter() - self._since_s < TURN_S:
            return
        with self._changed:
            self._worked_s[name] = self.worked_s(name)
            del self._shares[name]
            self._shares[name] = share
            self._next()
            self._wait(name)

    def worked_s(self, name: str) -> float:
        """Seconds that ``name``, whose turn it is, has worked."""
        return self._worked_s[name] + perf_counter() - self._since_s

    def _next(self) -> None:
        self._turn = min(self._shares, key=self._shares.__getitem__, default="")
        self._changed.notify_all()

    def _wait(self, name: str) -> None:
        self._changed.wait_for(lambda: self._turn == name)
        self._since_s = perf_counter()


class Contest:
    """A model's profile and its runs at every budget, each on an executor of its own over the same weights."""

    def __init__(self, model: ModelConfig, workload: Workload, options: argparse.Namespace) -> None:
        self.model, self.workload = model, workload
        self.profiled = TorchExecutor.from_model(model, num_threads=options.num_threads, seed=options.seed)
        base = EngineConfig(
            token_budget=max(options.budgets),
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            seed=options.seed,
        )
        self.base = replace(base, num_kv_blocks=self.profiled.default_num_kv_blocks(base))
        self.engines = {budget: Engine(TorchExecutor(self.profiled.model)) for budget in options.budgets}

    def repeat(self, out: Path, profile_s: float) -> tuple[Profile, dict[int, RunRecord]]:
        """``profile_s`` more of the profile in ``out``, and one run at each budget meanwhile."""
        turns = Turns(["profile", *map(str, self.engines)])
        with ThreadPoolExecutor(max_workers=1 + len(self.engines)) as pool:
            profile = pool.submit(self._measure, turns, out, profile_s)
            runs = {budget: pool.submit(self._run, turns, budget) for budget in self.engines}
        return profile.result(), {budget: run.result() for budget, run in runs.items()}

    def _measure(self, turns: Turns, out: Path, profile_s: float) -> Profile:
        def worked_s() -> float:
            return turns.worked_s("profile")

        def on_progress(done: int, of: int) -> None:
            turns.pass_on("profile", done / of)

        with turns.taken("profile"):
            return measure_profile(
                self.profiled,
                self.model,
                self.base,
                time_limit_s=profile_s,
                out=out,
                on_progress=on_progress,
                clock=worked_s,
            )

    def _run(self, turns: Turns, budget: int) -> RunRecord:
        num_gaps = sum(request.output_tokens - 1 for request in self.workload.requests)
        num_done = 0

        def monitor(progress: Progress) -> None:
            nonlocal num_done
            num_done += len(progress.gaps_s)
            turns.pass_on(str(budget), num_done / num_gaps)

        with turns.taken(str(budget)):
            return self.engines[budget].run(self.workload, replace(self.base, token_budget=budget), monitor=monitor)


def compare(model: ModelConfig, workload: Workload, options: argparse.Namespace) -> tuple[list[Row], dict[str, object]]:
    """The rows of one model, and what its profile says of itself."""
    contest = Contest(model, workload, options)
    found: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            profile, records = contest.repeat(Path(folder) / "profile.json", options.profile_s / options.repeats)
            for budget, record in records.items():
                values = compute_metrics(record).to_row()
                for metric in METRICS:
                    found.setdefault((budget, metric), []).append(float(values[metric] or 0.0))
            print(f"{model.name} {repeat + 1}/{options.repeats}", file=sys.stderr)
    modelled = [Engine(modelled_as(profile, model, seed=seed)) for seed in range(options.repeats)]
    rows = []
    for budget in options.budgets:
        config = replace(contest.base, token_budget=budget)
        predicted = [compute_metrics(engine.run(workload, config)).to_row() for engine in modelled]
        for metric in METRICS:
            values_found = found[budget, metric]
            rows.append(
                Row(
                    model=model.name,
                    token_budget=budget,
                    metric=metric,
                    predicted=median(float(values[metric] or 0.0) for values in predicted),
                    measured=median(values_found),
                    low=min(values_found),
                    high=max(values_found),
                )
            )
    about = {
        "points": profile.num_points,
        "samples": profile.num_samples,
        "run_iterations": profile.num_run_iterations,
        "factors": dict(profile.factors),
        "median_iteration_error": profile.median_error,
    }
    return rows, about


def load_requests(options: argparse.Namespace) -> Workload:
    """The requests of the trace, or of the preset where there is no such file."""
    if options.trace.is_file():
        workload = load_trace(
            options.trace, num_requests=options.num_requests, max_model_len=options.max_model_len, overlong="clip"
        )
    else:
        print(f"{options.trace} is not there: using the built-in azure-conv workload", file=sys.stderr)
        workload = preset_workload("azure-conv", options.num_requests, max_model_len=options.max_model_len)
    arrivals = options.arrivals if workload.has_arrivals else "saturated"
    return assign_arrivals(workload, kind=arrivals, seed=options.seed)


def report(rows: Sequence[Row]) -> dict[str, object]:
    """The contract's figures and the rows."""
    errors = [row.error_pct for row in rows]
    outside = [row.error_pct for row in rows if not row.inside_spread]
    told, kept = order_kept(rows)
    worst_outside = max(outside, default=0.0)
    return {
        "median_error_pct": round(median(errors), 3),
        "worst_error_pct": round(max(errors), 3),
        "worst_error_outside_spread_pct": round(worst_outside, 3),
        "order_kept": told == kept,
        "pairs_told_apart": told,
        "pairs_in_order": kept,
        "within_bars": median(errors) <= MEDIAN_BAR_PCT and worst_outside <= WORST_BAR_PCT and told == kept,
        "rows": [
            {**asdict(row), "error_pct": round(row.error_pct, 3), "inside_spread": row.inside_spread} for row in rows
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 on a usage error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--arrivals", default="saturated", choices=["saturated", "trace"], help="all at once, or timed")
    parser.add_argument("--num-requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile-s", type=float, default=60.0, help="seconds to profile each model for, in all")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-threads", type=int, default=1, help="CPU threads of an operation")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = perf_counter()
    try:
        workload = load_requests(options)
        compared = {name: compare(MODELS[name], workload, options) for name in options.models}
    except (ValueError, OSError) as error:
        print(f"accuracy_cpu: {error}", file=sys.stderr)
        return 2
    rows = [row for found, _ in compared.values() for row in found]
    document = report(rows)
    document |= {
        "workload": workload.source or workload.name,
        "arrivals": options.arrivals,
        "num_requests": len(workload.requests),
        "repeats": options.repeats,
        "profiles": {name: about for name, (_, about) in compared.items()},
        "seconds": round(perf_counter() - began, 1),
        "seed": options.seed,
        "versions": package_versions(),
        "commit": source_commit(),
    }
    if options.json:
        print(json.dumps(document, indent=1))
        return 0
    heads = "".join(f"{head:>10}" for head in ("measured", "low", "high"))
    print(f"{'model':<12}{'budget':>7}  {'metric':<20}{heads}{'predicted':>11}{'error':>8}")
    for row in rows:
        print(
            f"{row.model:<12}{row.token_budget:>7}  {row.metric:<20}{row.measured:>10.4g}{row.low:>10.4g}"
            f"{row.high:>10.4g}{row.predicted:>11.4g}{row.error_pct:>7.1f}%{' in spread' if row.inside_spread else ''}"
        )
    print({name: value for name, value in document.items() if name not in ("rows", "versions")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
