"""How quick modelled runs are: simulated requests and iterations per second, and the memory they take.

    python -P benchmarks/modelled_speed.py [--json] [--trace FILE]

1,000 requests of the Azure conversation trace, Poisson at 2.5 requests/s, llama-2-7b on a100_sxm, budget 512; then the
whole trace at the same rate. Best of some runs in one process, wall clock; loading the trace, building the table and
scoring are timed apart. On two CPU cores Vidur took 3.0 s for the 1,000 requests (332 requests/s, 7,974 iterations/s),
after 10 to 1,442 s of training.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path
from time import perf_counter

from tilebudget.engine import Engine, EngineConfig, Workload, assign_arrivals, compute_metrics, load_trace
from tilebudget.engine.modelled.executor import ModelledExecutor

DEFAULT_TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "azure_llm_2023_conv.csv"
CONFIG = EngineConfig(token_budget=512, max_num_seqs=128, max_model_len=4096)


def load(trace: Path, num_requests: int | None, qps: float) -> Workload:
    workload = load_trace(trace, num_requests=num_requests, max_model_len=CONFIG.max_model_len, overlong="clip")
    return assign_arrivals(workload, kind="poisson", qps=qps, seed=0)


def measure(trace: Path, *, kernels: str, num_requests: int, qps: float, repeats: int) -> dict[str, float | str]:
    began = perf_counter()
    small, whole = load(trace, num_requests, qps), load(trace, None, qps)
    loaded = perf_counter()
    engine = Engine(ModelledExecutor.from_silicon("llama-2-7b", system="a100_sxm", framework=kernels, dtype="bf16"))
    engine.run(load(trace, 20, qps), CONFIG)  # unrolls the table
    tabled = perf_counter()
    times_s = []
    for _ in range(repeats):
        start = perf_counter()
        record = engine.run(small, CONFIG)
        times_s.append(perf_counter() - start)
    start = perf_counter()
    full = engine.run(whole, CONFIG)
    full_s = perf_counter() - start
    start = perf_counter()
    metrics = compute_metrics(full)
    scored_s = perf_counter() - start
    best_s = min(times_s)
    return {
        "requests_per_s": len(record.requests) / best_s,
        "iterations_per_s": len(record.iterations) / best_s,
        "full_trace_s": full_s,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load_s": loaded - began,
        "table_s": tabled - loaded,
        "simulation_s": best_s,
        "simulation_median_s": sorted(times_s)[len(times_s) // 2],
        "num_requests": len(record.requests),
        "num_iterations": len(record.iterations),
        "full_num_requests": len(full.requests),
        "full_num_iterations": len(full.iterations),
        "full_metrics_s": scored_s,
        "full_tbt_p99_ms": (metrics.tbt.p99 or 0.0) * 1e3,
        "kernels": " ".join(str(engine.executor.describe()[name]) for name in ("framework", "version")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--kernels", default="vllm", help="vllm, sglang or trtllm")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--qps", type=float, default=2.5)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    row = measure(
        arguments.trace,
        kernels=arguments.kernels,
        num_requests=arguments.num_requests,
        qps=arguments.qps,
        repeats=arguments.repeats,
    )
    if arguments.json:
        print(json.dumps(row))
        return
    for name, value in row.items():
        print(f"{name:22} {value if isinstance(value, str) else format(value, ',.6g')}")


if __name__ == "__main__":
    main()
