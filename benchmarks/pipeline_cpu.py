"""A real pipeline of CPU processes beside its model: bubble fractions by token budget, in one run.

    python -P benchmarks/pipeline_cpu.py --json

Each stage is a process with one thread. The measured side serves a workload with as many micro-batches in flight as
stages. The modelled side never runs two stages at once: the same scheduler makes its micro-batches, each goes through
the stages alone, and what it took in each of them there, between them and in the host is put together by the model's
rule (``PipelineClock``), so that it is the model that says how the stages overlap. Both sides take turns, and must
generate the same tokens. Beside them, in the rows and without a bar, the same model from nothing but a latency profile
of one process with the whole model and one thread (``profiled``): what a study of a modelled device goes by.

``bubble_gap_points``: the largest difference between measured and modelled bubble fraction of two stages, in percentage
points of the medians. ``order_kept``: whether the model orders by bubble fraction every two budgets that the measured
runs tell apart (whose ranges over the repeats are more than a percentage point from each other). Other depths are in
the rows, without a bar: four stages share this machine's cores where it has fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import combinations
from statistics import median
from time import perf_counter

import torch
from tilebudget.autotune.environment import source_commit
from tilebudget.engine import (
    Batch,
    BlockManager,
    Engine,
    EngineConfig,
    PipelinedStepResult,
    RunRecord,
    Workload,
    find_bubbles,
    preset_workload,
)
from tilebudget.engine.device import device_name
from tilebudget.engine.distributed.executor import PipelineExecutor, distributed_executor
from tilebudget.engine.distributed.partition import Partition
from tilebudget.engine.executor import DeviceWrapper
from tilebudget.engine.model.config import PRESETS, ModelConfig
from tilebudget.engine.modelled.pipeline import Link, ModelledPipeline
from tilebudget.engine.pipeline_clock import PipelineClock
from tilebudget.engine.profiling.profile import measure_profile
from tilebudget.engine.torch_executor import TorchExecutor
from tilebudget.kernels.latency.table import LatencyTable

BUDGETS = (64, 128, 256, 512, 1024, None)
BARRED_STAGES = 2
MAX_NUM_SEQS = 4  # of a micro-batch
TIE = 0.01  # budgets whose bubble fractions are as close as this have no order

MODEL = replace(
    PRESETS["tiny-llama"],
    name="llama-512x8",
    hidden_size=512,
    num_layers=8,
    head_dim=64,
    intermediate_size=1408,
)


class OneAtATime(DeviceWrapper):
    """A pipeline in virtual time whose stages are real and work alone.

    ``submit`` sends a micro-batch through the stages of ``inner`` with nothing else in flight, and lets it enter a
    ``PipelineClock`` with the times it took. It is ready when the host has seen the micro-batch before it, made this
    one, and told the first stage.
    """

    def __init__(self, inner: PipelineExecutor) -> None:
        super().__init__(inner)
        self.virtual_time = True
        self.inner = inner
        self.num_stages = inner.num_stages
        self._in_flight: deque[PipelinedStepResult] = deque()

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Warm the stages up; all are free at 0."""
        super().start(config, kv)
        self._clock = PipelineClock(self.num_stages)
        self._in_flight.clear()
        self._news_s = 0.0  # from the end of a micro-batch to the host's knowing
        self._collected_s: float | None = None

    def submit(self, batch: Batch, now_s: float) -> None:
        """Run ``batch`` alone."""
        asked_s = perf_counter()
        host_s = 0.0 if self._collected_s is None else self._news_s + asked_s - self._collected_s
        self.inner.submit(batch, now_s)
        alone = self.inner.collect()
        self._news_s = perf_counter() - float(alone.stage_end_s[-1])
        host_s += float(alone.stage_start_s[0]) - asked_s
        stage_s = (alone.stage_end_s - alone.stage_start_s).tolist()
        transfer_s = (alone.stage_start_s[1:] - alone.stage_end_s[:-1]).tolist()
        self._in_flight.append(
            PipelinedStepResult(*self._clock.enter(now_s + host_s, stage_s, transfer_s), alone.token_ids)
        )
        self._collected_s = None

    def wait_until(self, until_s: float) -> bool:
        """Whether the oldest has left the last stage by ``until_s``."""
        return bool(self._in_flight[0].stage_end_s[-1] <= until_s)

    def collect(self) -> PipelinedStepResult:
        """The oldest."""
        self._collected_s = perf_counter()
        return self._in_flight.popleft()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of one budget, a value a repeat."""

    bubble_fraction: list[float] = field(default_factory=list)
    total_tokens_per_s: list[float] = field(default_factory=list)
    causes: list[dict[str, float]] = field(default_factory=list)

    def add(self, record: RunRecord, num_tokens: int) -> None:
        """Take in one run."""
        bubbles = find_bubbles(record.iterations)
        self.bubble_fraction.append(bubbles.bubble_fraction)
        self.total_tokens_per_s.append(num_tokens / record.busy_s)
        self.causes.append(bubbles.fractions())

    def to_json(self) -> dict[str, object]:
        """Medians, and the range of the bubble fraction."""
        return {
            "bubble_fraction": median(self.bubble_fraction),
            "bubble_fraction_low": min(self.bubble_fraction),
            "bubble_fraction_high": max(self.bubble_fraction),
            "total_tokens_per_s": median(self.total_tokens_per_s),
            "bubble_causes": {cause: median(one[cause] for one in self.causes) for cause in self.causes[0]},
        }


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Measured and modelled side of one budget."""

    num_stages: int
    token_budget: int | None
    measured: Side = field(default_factory=Side)
    modelled: Side = field(default_factory=Side)
    profiled: Side = field(default_factory=Side)

    @property
    def gap_points(self) -> float:
        """Modelled less measured bubble fraction, in percentage points."""
        return 100.0 * (median(self.modelled.bubble_fraction) - median(self.measured.bubble_fraction))

    def to_json(self) -> dict[str, object]:
        """One row of the document."""
        return {
            "num_stages": self.num_stages,
            "token_budget": "unlimited" if self.token_budget is None else self.token_budget,
            "gap_points": self.gap_points,
            "measured": self.measured.to_json(),
            "modelled": self.modelled.to_json(),
            "profiled": self.profiled.to_json() if self.profiled.causes else None,
        }


def engine_config(workload: Workload, token_budget: int | None) -> EngineConfig:
    """Settings of every run."""
    return EngineConfig(
        token_budget=token_budget,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=max(request.total_tokens for request in workload.requests),
        num_kv_blocks=1024,
    )


def profile_table(model: ModelConfig, workload: Workload, time_limit_s: float) -> LatencyTable:
    """The latency table of one process with one thread."""
    executor = TorchExecutor.from_model(model, num_threads=1)
    return measure_profile(executor, model, engine_config(workload, None), time_limit_s=time_limit_s).table


def add_profiled(pairs: Sequence[Pair], table: LatencyTable, workload: Workload) -> None:
    """The pipeline of ``table`` at every budget; hidden states take no time from stage to stage."""
    for pair in pairs:
        partition = Partition.of(MODEL, pipeline_parallel=pair.num_stages)
        links = [Link(bytes_per_s=float("inf"))] * (pair.num_stages - 1)
        record = Engine(ModelledPipeline(table, partition, links)).run(
            workload, engine_config(workload, pair.token_budget)
        )
        pair.profiled.add(record, workload.num_prompt_tokens + workload.num_output_tokens)


def compare(
    model: ModelConfig, workload: Workload, num_stages: int, budgets: Sequence[int | None], repeats: int
) -> list[Pair]:
    """Both sides of every budget on ``num_stages`` stages, in turn."""
    executor = distributed_executor(model, pipeline_parallel=num_stages, num_threads=1)
    assert isinstance(executor, PipelineExecutor)
    pairs = [Pair(num_stages=num_stages, token_budget=budget) for budget in budgets]
    engines = {"measured": Engine(executor), "modelled": Engine(OneAtATime(executor))}
    num_tokens = workload.num_prompt_tokens + workload.num_output_tokens
    try:
        for repeat in range(repeats):
            for pair in pairs:
                config = engine_config(workload, pair.token_budget)
                outputs = []
                for name, engine in engines.items():
                    record = engine.run(workload, config)
                    side: Side = getattr(pair, name)
                    side.add(record, num_tokens)
                    outputs.append(record.outputs)
                    print(
                        f"{num_stages} stages, budget {pair.token_budget}, {name} {repeat + 1}/{repeats}: bubbles "
                        f"{side.bubble_fraction[-1]:.1%}, {side.total_tokens_per_s[-1]:.0f} tokens/s",
                        file=sys.stderr,
                    )
                if outputs[0] != outputs[1]:
                    raise SystemExit(f"budget {pair.token_budget}: the sides generated different tokens")
    finally:
        executor.close()
    return pairs


def order_kept(pairs: Sequence[Pair]) -> tuple[bool, int]:
    """Whether the model orders as measured every two budgets whose measured ranges are apart; how many those are."""
    agree = []
    for one, other in combinations(pairs, 2):
        low, high = sorted((one, other), key=lambda pair: median(pair.measured.bubble_fraction))
        if max(low.measured.bubble_fraction) + TIE < min(high.measured.bubble_fraction):
            agree.append(median(low.modelled.bubble_fraction) < median(high.modelled.bubble_fraction))
    return all(agree), len(agree)


def environment() -> dict[str, object]:
    """Where the figures come from."""
    return {
        "commit": source_commit() or "unknown",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": device_name(torch.device("cpu")),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Parse the flags, run, print one table or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=2, help="of two stages; other depths run once")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--num-requests", type=int, default=10)
    parser.add_argument("--profile-seconds", type=float, default=15.0, help="for `profiled`; 0 leaves it out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workload = preset_workload("azure-conv", num_requests=args.num_requests, seed=args.seed, max_model_len=640)
    pairs = []
    for num_stages in args.stages:
        repeats = args.repeats if num_stages == BARRED_STAGES else 1
        pairs += compare(MODEL, workload, num_stages, BUDGETS, repeats)
    if args.profile_seconds > 0:
        add_profiled(pairs, profile_table(MODEL, workload, args.profile_seconds), workload)
    barred = [pair for pair in pairs if pair.num_stages == BARRED_STAGES]
    kept, num_apart = order_kept(barred)
    document = {
        "bubble_gap_points": max((abs(pair.gap_points) for pair in barred), default=None),
        "order_kept": kept,
        "num_pairs_apart": num_apart,
        "rows": [pair.to_json() for pair in pairs],
        "repeats": args.repeats,
        "workload": {
            "name": workload.name,
            "num_requests": len(workload.requests),
            "num_prompt_tokens": workload.num_prompt_tokens,
            "num_output_tokens": workload.num_output_tokens,
            "seed": args.seed,
        },
        "model": {"name": MODEL.name, "num_parameters": MODEL.num_parameters, "dtype": "fp32"},
        "environment": environment(),
    }
    if args.json:
        print(json.dumps(document, indent=2))
        return
    for pair in pairs:
        sides = [median(side.bubble_fraction) for side in (pair.measured, pair.modelled)]
        print(
            f"{pair.num_stages} stages, budget {pair.token_budget or 'unlimited'}: measured {sides[0]:.1%}, modelled "
            f"{sides[1]:.1%}, gap {pair.gap_points:+.1f} points; from a profile "
            + (f"{median(pair.profiled.bubble_fraction):.1%}" if pair.profiled.causes else "no data")
        )
    print(f"largest gap {document['bubble_gap_points']:.1f} points, order kept: {kept} ({num_apart} pairs apart)")


if __name__ == "__main__":
    main()
