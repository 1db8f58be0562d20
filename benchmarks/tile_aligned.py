"""What the tile_aligned policy gains and loses against sarathi, on modelled devices.

    python -P benchmarks/tile_aligned.py [--json] [--trace FILE] [--num-requests 4000]

llama-3.1-8b, the Azure conversation trace, h200_sxm fp8 (vllm's tables) and a100_sxm bf16 (sglang's: vllm's have no
points past the multiples), budgets on the device's edges and off them. Saturated: every request at time 0. Half-loaded:
Poisson at half of the highest rate at which sarathi meets the relaxed SLO with that budget. Both policies serve the
same requests at the same times.

The bound on what a request's TTFT may lose to sarathi's run is two of the longest iterations: the policy puts a first
token off by one at most (its docstring; tests/engine/test_tile_aligned.py), and the two runs are not in step, so that a
request may come just before an iteration begins in one and just after it in the other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tilebudget.autotune.environment import package_versions, source_commit
from tilebudget.autotune.problem import staircase_costs
from tilebudget.autotune.scoring.capacity import find_capacity
from tilebudget.autotune.tiles import analyse_device
from tilebudget.engine import (
    Engine,
    EngineConfig,
    RunRecord,
    Workload,
    assign_arrivals,
    compute_metrics,
    load_trace,
    reference_decode,
    resolve_slo,
)
from tilebudget.engine.modelled.executor import ModelledExecutor

DEFAULT_TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "azure_llm_2023_conv.csv"
MODEL = "llama-3.1-8b"
DEVICES = (("h200_sxm", "vllm", "fp8"), ("a100_sxm", "sglang", "bf16"))
BUDGETS = (512, 513, 640, 1024, 2048, 2049)
POLICIES = ("sarathi", "tile_aligned")
FIGURES = ("total_tokens_per_s", "tbt_p50_ms", "tbt_p99_ms", "ttft_p50_ms", "ttft_p99_ms")

Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One device: its engine, and the settings but for the budget."""

    name: str
    engine: Engine
    base: EngineConfig

    @classmethod
    def of(cls, system: str, framework: str, dtype: str) -> Bench:
        executor = ModelledExecutor.from_silicon(MODEL, system=system, framework=framework, dtype=dtype)
        staircase = analyse_device(
            MODEL, device=system, kernels=framework, dtype=dtype, tensor_parallel=1, min_jump_pct=10.0
        )
        base = EngineConfig(max_num_seqs=128, max_model_len=16384, token_costs=staircase_costs(staircase))
        return cls(name=f"{system} {framework} {dtype}", engine=Engine(executor), base=base)

    def half_load(self, pattern: Workload, budget: int) -> float:
        """Half of sarathi's capacity at a budget, requests/s."""
        slo = resolve_slo("relaxed", reference_decode(self.engine.executor, self.base))
        return (find_capacity(self.engine, pattern, replace(self.base, token_budget=budget), slo).qps or 0.0) / 2

    def compare(self, load: Workload, budget: int) -> Row:
        """Both policies on one workload."""
        records = {
            policy: self.engine.run(load, replace(self.base, token_budget=budget, policy=policy)) for policy in POLICIES
        }
        sarathi, ours = records["sarathi"], records["tile_aligned"]
        worse_s = first_tokens_s(ours) - first_tokens_s(sarathi)
        longest_s = float(ours.iterations.duration_s.max())
        before, after = figures(sarathi), figures(ours)
        assert self.base.token_costs is not None
        return {
            "device": self.name,
            "token_budget": budget,
            "on_edge": budget in self.base.token_costs.edges,
            "full_budget_share": compute_metrics(sarathi).full_budget_share,
            "sarathi": before,
            "tile_aligned": after,
            "throughput_gain_pct": 100 * (after["total_tokens_per_s"] / before["total_tokens_per_s"] - 1),
            "bound_ms": 2e3 * longest_s,
            "max_ttft_worse_ms": float(worse_s.max()) * 1e3,
            "median_ttft_worse_ms": float(np.median(worse_s)) * 1e3,
            "num_over_bound": int((worse_s > 2 * longest_s).sum()),
            "num_over_one_iteration": int((worse_s > longest_s).sum()),
        }


def figures(record: RunRecord) -> dict[str, float]:
    values = compute_metrics(record).to_row()
    return {name: float(values[name] or 0.0) for name in FIGURES}


def first_tokens_s(record: RunRecord) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    first_s = np.full(len(record.requests), np.nan)
    first_s[record.token_request[::-1]] = record.token_s[::-1]
    return first_s


def rows(trace: Path, num_requests: int) -> Iterator[Row]:
    load = load_trace(trace, num_requests=num_requests, max_model_len=16384, overlong="clip")
    pattern = assign_arrivals(load, "poisson", qps=1.0, seed=0)
    for device in DEVICES:
        bench = Bench.of(*device)
        for budget in BUDGETS:
            yield {"load": "saturated", "qps": None} | bench.compare(assign_arrivals(load, "saturated"), budget)
        for budget in BUDGETS:
            qps = bench.half_load(pattern, budget)
            half = assign_arrivals(load, "poisson", qps=qps, seed=0)
            yield {"load": "half", "qps": qps} | bench.compare(half, budget)


def line(row: Row) -> str:
    before, after = (row[policy] for policy in POLICIES)
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    changes = "".join(f"{before[name]:>10.1f} {after[name]:>8.1f}" for name in FIGURES[1:])
    budget = f"{row['token_budget']}{'' if row['on_edge'] else '*'}"
    qps = "" if row["qps"] is None else f"{row['qps']:.1f}"
    return (
        f"{row['device']:<22}{row['load']:<10}{qps:>6}{budget:>7}{row['throughput_gain_pct']:>+8.2f}%{changes}"
        f"{row['max_ttft_worse_ms']:>9.1f}{row['bound_ms']:>8.1f}{row['num_over_bound']:>5}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--num-requests", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    if not arguments.json:
        heads = "".join(f"{name:>19}" for name in ("TBT P50 ms", "P99", "TTFT P50 ms", "P99"))
        print(
            f"{'device':<22}{'load':<10}{'qps':>6}{'budget':>7}{'tokens/s':>9}{heads}{'worst':>9}{'bound':>8}{'over':>5}"
        )
    for row in rows(arguments.trace, arguments.num_requests):
        found.append(row)
        if not arguments.json:
            print(line(row), flush=True)
    num_over = sum(int(str(row["num_over_bound"])) for row in found)
    if arguments.json:
        document = {
            "model": MODEL,
            "trace": arguments.trace.name,
            "num_requests": arguments.num_requests,
            "seed": 0,
            "commit": source_commit(),
            "versions": package_versions(),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "num_over_bound": num_over,
            "rows": found,
        }
        print(json.dumps(document, indent=1))
        return
    print("* off the edges. Each pair: sarathi, tile_aligned. worst: the largest TTFT that a request lost, ms; bound:")
    print("two of the longest iterations, ms; over: requests that lost more than the bound.")
    print(f"No request's TTFT worse than the bound: {'yes' if not num_over else f'NO, {num_over} requests'}")


if __name__ == "__main__":
    main()
