"""Capacity of `sarathi` against `vllm_v0`, `orca` and `faster_transformer`, beside the Sarathi-Serve paper's ratios.

    python -P benchmarks/capacity.py [--json] [--num-requests N] [--processes N]

Mistral-7B on one modelled A100-80G, Poisson arrivals of the paper's two workloads (lengths from its medians and 90th
percentiles), P99 TBT of 0.1 s (strict) and 0.5 s (relaxed), median scheduling delay of 2 s, Sarathi's budgets of 512
and 2048 (OSDI'24, section 5). Capacity is the highest rate that meets both, to within 2%; every policy and rate serves
the same requests in the same pattern. Needs the extra `silicon`; time is modelled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter

import numpy as np
from tilebudget.autotune.environment import source_commit
from tilebudget.autotune.scoring.capacity import Capacity, find_capacity
from tilebudget.engine import (
    SLO,
    Engine,
    EngineConfig,
    Metrics,
    RunRecord,
    Workload,
    assign_arrivals,
    compute_metrics,
    preset_workload,
    sound_stop,
)
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.engine.workloads.workload import scale_load

SLOS = {"strict": 0.1, "relaxed": 0.5}
SARATHI_BUDGETS = {"strict": 512, "relaxed": 2048}
MAX_MODEL_LEN = {"sharegpt": 8192, "arxiv": 16384}
POLICIES = ("sarathi", "vllm_v0", "orca", "faster_transformer")

#: Sarathi-Serve over vLLM for Mistral-7B (OSDI'24, abstract and section 5.1): "2.6x" is the best of its cases.
PAPER_RATIO = "up to 2.6"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One capacity to find."""

    workload: str
    slo: str
    policy: str

    @property
    def config(self) -> EngineConfig:
        """Sarathi at the paper's budget; `vllm_v0` packs prompts up to the longest request, as vLLM v0 did by default;
        the other two have no budget."""
        longest = MAX_MODEL_LEN[self.workload]
        budgets = {"sarathi": SARATHI_BUDGETS[self.slo], "vllm_v0": longest}
        return EngineConfig(
            policy=self.policy,
            token_budget=budgets.get(self.policy, longest),
            max_num_seqs=128,
            max_model_len=longest,
        )


def find(case: Case, kernels: str, num_requests: int) -> dict[str, object]:
    """The capacity of a case, what limits it, and how it does at other rates."""
    began = perf_counter()
    engine, arriving, slo = set_up(case, kernels, num_requests)
    found = find_capacity(engine, arriving, case.config, slo, monitor=lambda: sound_stop(slo, arriving, case.config))
    return {
        "workload": case.workload,
        "slo": case.slo,
        "policy": case.policy,
        "token_budget": case.config.token_budget if case.policy in ("sarathi", "vllm_v0") else None,
        "capacity_qps": found.qps,
        "num_runs": found.num_runs,
        "at_capacity": figures(found.record, found.metrics),
        "beyond": limit_beyond(engine, arriving, case, slo, found),
        "elapsed_s": perf_counter() - began,
    }


def set_up(case: Case, kernels: str, num_requests: int) -> tuple[Engine, Workload, SLO]:
    """Engine, requests at 1 per second, and SLO."""
    engine = Engine(ModelledExecutor.from_silicon("mistral-7b", system="a100_sxm", framework=kernels, dtype="bf16"))
    requests = preset_workload(case.workload, num_requests, seed=0, max_model_len=MAX_MODEL_LEN[case.workload])
    return engine, assign_arrivals(requests, "poisson", qps=1.0, seed=0), SLO(name=case.slo, tbt_s=SLOS[case.slo])


def figures(record: RunRecord, metrics: Metrics) -> dict[str, float | None]:
    """What explains a run: the tail of TBT, the queue, the longest iterations and how full they are."""
    iterations = record.iterations
    mixed = iterations.num_decodes > 0
    waiting = iterations.duration_s[(iterations.num_prefill_tokens > 0) & ~mixed].sum()
    return {
        "tbt_p99_ms": None if metrics.tbt.p99 is None else metrics.tbt.p99 * 1e3,
        "tbt_max_ms": None if metrics.tbt.max is None else metrics.tbt.max * 1e3,
        "scheduling_delay_p50_s": metrics.scheduling_delay.p50,
        "iteration_p99_ms": float(np.quantile(iterations.duration_s, 0.99)) * 1e3,
        "mean_decodes": float(iterations.num_decodes.mean()),
        "prefill_only_share": float(waiting / iterations.duration_s.sum()),
        "output_tokens_per_s": metrics.output_tokens_per_s,
        "num_preemptions": float(metrics.num_preemptions or 0),
    }


def limit_beyond(engine: Engine, arriving: Workload, case: Case, slo: SLO, found: Capacity) -> str:
    """Which limit the policy breaks 5% above its capacity."""
    record = engine.run(scale_load(arriving, 1.05 * found.qps if found.qps else 1e-3), case.config)
    excesses = compute_metrics(record, slo).excesses(slo)
    broken = [name for name, excess in excesses.items() if excess is not None and excess > 0.0]
    return " and ".join({"tbt": "P99 TBT", "scheduling_delay": "the queue"}[name] for name in broken) or "nothing"


def at_rate(case: Case, kernels: str, num_requests: int, qps: float) -> dict[str, float | None]:
    """How a policy does at another one's capacity."""
    engine, arriving, slo = set_up(case, kernels, num_requests)
    record = engine.run(scale_load(arriving, qps), case.config)
    return figures(record, compute_metrics(record, slo))


def ratios(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Sarathi's capacity over each other policy's; None where that has none."""
    by_case = {(row["workload"], row["slo"], row["policy"]): float(row["capacity_qps"]) for row in rows}  # type: ignore[arg-type]
    found: list[dict[str, object]] = []
    for (workload, slo, policy), qps in by_case.items():
        if policy != "sarathi":
            ours = by_case[workload, slo, "sarathi"]
            ratio = ours / qps if qps > 0.0 else None
            found.append({"workload": workload, "slo": slo, "over": policy, "ratio": ratio})
    return found


def print_table(document: Mapping[str, object]) -> None:
    """Capacities, ratios, and what explains them."""
    rows: list[Mapping[str, object]] = document["rows"]  # type: ignore[assignment]
    by_ratio = {(one["workload"], one["slo"], one["over"]): one["ratio"] for one in document["ratios"]}  # type: ignore[attr-defined]
    print(f"{'workload':9} {'SLO':8} {'policy':19} {'capacity':>9} {'sarathi is':>11} {'paper':>10}  limited by")
    for row in rows:
        ratio = by_ratio.get((row["workload"], row["slo"], row["policy"]))
        times = "" if row["policy"] == "sarathi" else "no capacity" if ratio is None else f"{ratio:.2f}x"
        paper = f"{PAPER_RATIO}x" if row["policy"] == "vllm_v0" else ""
        qps = f"{row['capacity_qps']:.3f}/s"
        print(
            f"{row['workload']:9} {row['slo']:8} {row['policy']:19} {qps:>9} {times:>11} {paper:>10}  {row['beyond']}"
        )
    print("\nAt sarathi's capacity:")
    for row in rows:
        at: Mapping[str, float | None] = row["at_sarathi_capacity"]  # type: ignore[assignment]
        print(
            f"{row['workload']:9} {row['slo']:8} {row['policy']:19} P99 TBT {at['tbt_p99_ms'] or 0.0:8.1f} ms, "
            f"P99 iteration {at['iteration_p99_ms']:8.1f} ms, {at['mean_decodes']:5.1f} decodes an iteration, "
            f"{at['prefill_only_share']:5.1%} of the time in prefill that decodes wait for, median scheduling delay "
            f"{at['scheduling_delay_p50_s']:7.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--kernels", default="vllm", help="whose tables model the A100: vllm, sglang or trtllm")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [
        Case(workload=workload, slo=slo, policy=policy)
        for workload in MAX_MODEL_LEN
        for slo in SLOS
        for policy in POLICIES
    ]
    settings = [[value] * len(cases) for value in (arguments.kernels, arguments.num_requests)]
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("fork")) as pool:
        rows = list(pool.map(find, cases, *settings))
        ours = {(row["workload"], row["slo"]): row["capacity_qps"] for row in rows if row["policy"] == "sarathi"}
        rates = [ours[case.workload, case.slo] for case in cases]
        for row, at in zip(rows, pool.map(at_rate, cases, *settings, rates), strict=True):
            row["at_sarathi_capacity"] = at
    document = {
        "rows": rows,
        "ratios": ratios(rows),
        "paper_ratio_over_vllm": PAPER_RATIO,
        "device": f"a100_sxm bf16, {arguments.kernels} tables",
        "num_requests": arguments.num_requests,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": source_commit(),
    }
    if arguments.json:
        print(json.dumps(document, indent=1))
    else:
        print_table(document)


if __name__ == "__main__":
    main()
