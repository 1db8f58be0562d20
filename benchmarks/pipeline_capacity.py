"""Capacity and bubbles by budget of two large models on modelled A100 pipelines, beside the Sarathi-Serve paper.

    python -P benchmarks/pipeline_capacity.py [--json] [--models M,..] [--workloads W,..] [--num-requests N] [--flood]

Falcon-180B and LLaMA2-70B, TP4-PP2 on two nodes of four A100-80G with 100 Gbit/s between them (OSDI'24, table 1 and
section 5), `sarathi` at several budgets against `orca` (whole prompts in hybrid batches). Capacity is the highest
Poisson rate with P99 TBT within the SLO and a median scheduling delay of 2 s at most. SLOs are the paper's own seconds
for Falcon, whose GPUs these are; for the 70B the paper's rule, 5 and 25 times the modelled reference decode iteration.

With `--flood` all requests are there at once instead: what each budget gets out of a pipeline that never lacks work.

What is not the paper's: the kernels (sglang's, from measured tables; heads of 64 taken for half as many of 128), no CPU
time between iterations, A100s under the 70B (the paper had A40s), lengths drawn from the published quantiles, and
fewer requests: a run that is short against the requests in flight flatters every capacity.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tilebudget.autotune.environment import package_versions, source_commit
from tilebudget.autotune.scoring.capacity import Capacity, find_capacity
from tilebudget.engine import (
    BUBBLE_CAUSES,
    SLO,
    SLO_MULTIPLES,
    Engine,
    EngineConfig,
    Metrics,
    Workload,
    assign_arrivals,
    compute_metrics,
    preset_workload,
    reference_decode,
    sound_stop,
)
from tilebudget.engine.distributed.partition import Partition
from tilebudget.engine.model.config import ModelConfig
from tilebudget.engine.modelled.pipeline import Link, ModelledPipeline
from tilebudget.kernels.latency.silicon import Silicon, system_spec
from tilebudget.kernels.latency.silicon_table import silicon_table

SYSTEM, FRAMEWORK = "a100_sxm", "sglang"
TENSOR_PARALLEL, PIPELINE_PARALLEL = 4, 2
#: 100 Gbit/s between the nodes (the paper's Ethernet); the latency is the system's own between two GPUs.
LINK_BYTES_PER_S = 100e9 / 8
BUDGETS = (512, 1024, 1536, 2048)
#: Longest request that each workload has; the models' contexts are stretched to it, as the paper's must have been.
WORKLOADS = {"sharegpt": 8192, "arxiv": 16384}
MAX_NUM_SEQS = 128
PAPER_SLO_S = {"falcon-180b": {"strict": 1.0, "relaxed": 5.0}}
PAPER = {
    "falcon-180b": "TP4-PP2 with Sarathi over hybrid batching alone: 3.6x capacity under strict, 1.48x under relaxed",
    "llama-2-70b": "relaxed budget 1536, not 2048, 'to reduce the impact of pipeline bubbles' (on A40s)",
}


def make_pipeline(model: str) -> ModelledPipeline:
    config = replace(ModelConfig.preset(model), max_position=max(WORKLOADS.values()))
    partition = Partition.of(config, tensor_parallel=TENSOR_PARALLEL, pipeline_parallel=PIPELINE_PARALLEL)
    table = silicon_table(Silicon.open(SYSTEM, FRAMEWORK), config.shape, "bf16", TENSOR_PARALLEL)
    spec = system_spec(SYSTEM)
    link = Link(bytes_per_s=LINK_BYTES_PER_S, latency_s=spec.link_latency_s)
    return ModelledPipeline(table, partition, [link] * (PIPELINE_PARALLEL - 1), memory_bytes=spec.memory_bytes)


def slos_of(model: str, reference_s: float) -> list[SLO]:
    """Loosest first."""
    seconds = PAPER_SLO_S.get(model) or {name: factor * reference_s for name, factor in SLO_MULTIPLES.items()}
    slos = [SLO(name=name, tbt_s=tbt_s) for name, tbt_s in seconds.items()]
    return sorted(slos, key=lambda slo: -slo.tbt_s)


def bubbles_of(metrics: Metrics) -> dict[str, float | None]:
    return {"bubble_fraction": metrics.bubble_fraction, **metrics.bubble_causes}


def settings_of(base: EngineConfig, budgets: Sequence[int]) -> list[EngineConfig]:
    """Sarathi at every budget, then Orca."""
    sarathi = [replace(base, policy="sarathi", token_budget=budget) for budget in budgets]
    return [*sarathi, replace(base, policy="orca", token_budget=None)]


def flood_rows(
    model: str, workload_name: str, *, num_requests: int, seed: int, budgets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """One row for each policy and budget: all requests at once."""
    engine = Engine(make_pipeline(model))
    base = EngineConfig(
        token_budget=budgets[0], max_num_seqs=MAX_NUM_SEQS, max_model_len=WORKLOADS[workload_name], seed=seed
    )
    workload = preset_workload(
        workload_name, num_requests, seed=seed, max_model_len=base.max_model_len, overlong="drop"
    )
    for config in settings_of(base, budgets):
        metrics = compute_metrics(engine.run(workload, config))
        yield {
            "model": model,
            "workload": workload_name,
            "policy": config.policy,
            "token_budget": config.token_budget,
            "requests_per_s": metrics.requests_per_s,
            "total_tokens_per_s": metrics.total_tokens_per_s,
            "tbt_p99_s": metrics.tbt.p99,
            **bubbles_of(metrics),
        }


def rows_of(
    model: str, workload_name: str, *, num_requests: int, seed: int, budgets: Sequence[int], resolution: float
) -> Iterator[dict[str, Any]]:
    """One row for each policy, budget and SLO."""
    engine = Engine(make_pipeline(model))
    base = EngineConfig(
        token_budget=budgets[0], max_num_seqs=MAX_NUM_SEQS, max_model_len=WORKLOADS[workload_name], seed=seed
    )
    reference = reference_decode(engine.executor, base)
    workload = preset_workload(
        workload_name, num_requests, seed=seed, max_model_len=base.max_model_len, overlong="drop"
    )
    arriving = assign_arrivals(workload, "poisson", qps=1.0, seed=seed)
    for config in settings_of(base, budgets):
        found: Capacity | None = None
        for slo in slos_of(model, reference.duration_s):
            # What a looser SLO allowed and this one does too is its capacity as well.
            if found is None or (found.metrics.tbt.p99 or 0.0) > slo.tbt_s:
                found = capacity_of(engine, arriving, config, slo, resolution)
            yield {
                "model": model,
                "workload": workload_name,
                "slo": slo.name,
                "tbt_slo_s": slo.tbt_s,
                "reference_decode_s": reference.duration_s,
                "policy": config.policy,
                "token_budget": config.token_budget,
                "capacity_qps": found.qps,
                "tbt_p99_s": found.metrics.tbt.p99,
                "scheduling_delay_p50_s": found.metrics.scheduling_delay.p50,
                **bubbles_of(found.metrics),
            }


def capacity_of(engine: Engine, workload: Workload, config: EngineConfig, slo: SLO, resolution: float) -> Capacity:
    monitor = partial(sound_stop, slo, workload, config)
    return find_capacity(engine, workload, config, slo, monitor=monitor, resolution=resolution)


def summary_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model, workload and SLO: the best budget of Sarathi, and how much more it serves than Orca."""
    summary = []
    for key in dict.fromkeys((row["model"], row["workload"], row["slo"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["workload"], row["slo"]) == key]
        sarathi = [row for row in mine if row["policy"] == "sarathi"]
        orca = next(row for row in mine if row["policy"] == "orca")
        best = max(sarathi, key=lambda row: (row["capacity_qps"], -row["token_budget"]))
        summary.append(
            {
                "model": key[0],
                "workload": key[1],
                "slo": key[2],
                "best_budget": best["token_budget"],
                "capacity_qps": best["capacity_qps"],
                "orca_qps": orca["capacity_qps"],
                "over_orca": best["capacity_qps"] / orca["capacity_qps"] if orca["capacity_qps"] else None,
                "by_budget": {row["token_budget"]: row["capacity_qps"] for row in sarathi},
                "paper": PAPER[key[0]],
            }
        )
    return summary


def print_flood(arguments: argparse.Namespace) -> None:
    rows = [
        row
        for model in arguments.models.split(",")
        for workload in arguments.workloads.split(",")
        for row in flood_rows(
            model,
            workload,
            num_requests=arguments.num_requests,
            seed=arguments.seed,
            budgets=[int(budget) for budget in arguments.budgets.split(",")],
        )
    ]
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        print(
            f"{row['model']:12} {row['workload']:9} {row['policy']:8} {row['token_budget'] or 'unlimited':>9} "
            f"{row['total_tokens_per_s']:8.0f} tokens/s {row['tbt_p99_s']:6.3f} s {row['bubble_fraction']:6.1%} "
            + ", ".join(f"{cause} {row[cause] or 0.0:.1%}" for cause in BUBBLE_CAUSES)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(PAPER))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--resolution", type=float, default=0.05, help="share by which a rate that fails is higher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flood", action="store_true", help="all requests at once: no SLO, no capacity")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.flood:
        print_flood(arguments)
        return
    rows = [
        row
        for model in arguments.models.split(",")
        for workload in arguments.workloads.split(",")
        for row in rows_of(
            model,
            workload,
            num_requests=arguments.num_requests,
            seed=arguments.seed,
            budgets=[int(budget) for budget in arguments.budgets.split(",")],
            resolution=arguments.resolution,
        )
    ]
    summary = summary_of(rows)
    if arguments.json:
        setting = {
            "commit": source_commit(),
            "versions": package_versions(),
            "system": f"{SYSTEM}, {FRAMEWORK} tables, bf16, TP{TENSOR_PARALLEL}-PP{PIPELINE_PARALLEL}",
            "num_requests": arguments.num_requests,
            "resolution": arguments.resolution,
            "seed": arguments.seed,
            "max_num_seqs": MAX_NUM_SEQS,
        }
        print(json.dumps({"setting": setting, "summary": summary, "rows": rows}, indent=1))
        return
    print(f"{'model':12} {'workload':9} {'slo':14} {'policy':8} {'budget':>9} {'qps':>6} {'TBT':>8} {'bubbles':>8}")
    for row in rows:
        print(
            f"{row['model']:12} {row['workload']:9} {row['slo']:14} {row['policy']:8} "
            f"{row['token_budget'] or 'unlimited':>9} {row['capacity_qps']:6.3f} {row['tbt_p99_s'] or 0.0:7.3f}s "
            f"{row['bubble_fraction'] or 0.0:8.1%}"
        )
    for row in summary:
        over = "none" if row["over_orca"] is None else f"{row['over_orca']:.2f}x"
        print(f"{row['model']} {row['workload']} {row['slo']}: budget {row['best_budget']}, {over} what orca serves")
    for model, says in PAPER.items():
        print(f"paper, {model}: {says}")


if __name__ == "__main__":
    main()
