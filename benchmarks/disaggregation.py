"""Replicas with chunked prefill against prefill and decode on GPUs apart (Splitwise-style), on modelled devices.

    python -P benchmarks/disaggregation.py [--json] [--num-gpus 4] [--num-requests 2000]

llama-3.1-8b on a100_sxm bf16 (sglang's tables) and h200_sxm fp8 (vllm's), the Azure conversation and code traces, four
GPUs in one node. Capacity: the highest request rate (Poisson, one seed) at which P99 TBT keeps a limit of 1
(tightest), 2 (tight), 5 (strict) or 25 (relaxed) reference decode iterations, the median scheduling delay 2 s, and P99
TTFT 2 s: at these rates the requests arrive within a minute or so, in which a queue that grows does not move the median
far. Replicas at every budget of autotune.disaggregation.BUDGETS, prefill and decode at every split;
engine/disaggregated.py says what is modelled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from tilebudget.autotune import TuneConfig
from tilebudget.autotune.devices import make_executor
from tilebudget.autotune.disaggregation import Yardstick, compare_disaggregated
from tilebudget.autotune.environment import package_versions, source_commit
from tilebudget.autotune.problem import load_workload, read_device, state_problem

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = ("azure_llm_2023_conv.csv", "azure_llm_2023_code.csv")
DEVICES = (("h200_sxm", "vllm", "fp8"), ("a100_sxm", "sglang", "bf16"))
BUDGET = 512


def compare(device: tuple[str, str, str], trace: Path, num_requests: int, num_gpus: int) -> dict[str, Any]:
    """The object of ``disaggregation.json`` for one device and trace."""
    system, framework, dtype = device
    config = TuneConfig(
        model="llama-3.1-8b",
        device=system,
        kernels=framework,
        dtype=dtype,
        trace=trace,
        num_requests=num_requests,
        arrivals="poisson",
        qps=1.0,
        ttft_slo="2s",
    )
    executor = make_executor(config)
    workload = load_workload(config, executor.max_position)
    problem = state_problem(config, executor, workload, read_device(config, executor, workload, None))
    document = compare_disaggregated(problem, BUDGET, Yardstick(num_gpus=num_gpus))
    return {"device": f"{system} {framework} {dtype}", "trace": trace.name, **document}


def lines(case: Mapping[str, Any]) -> list[str]:
    """The table of one case: capacities of every arrangement under each limit, and who wins by how much."""
    limits = case["limits"]
    heads = "".join(f"{limit['name']} {limit['tbt_p99_ms']:.0f} ms".rjust(16) for limit in limits)
    rows = [f"{case['device']}, {case['trace']}, {case['num_gpus']} GPUs", f"{'capacity, requests/s':<28}{heads}"]
    for place, arrangement in enumerate(limits[0]["arrangements"]):
        cells = "".join(f"{limit['arrangements'][place]['capacity_qps']:>16.1f}" for limit in limits)
        rows.append(f"{arrangement['name']:<28}{cells}")
    gains = "".join(f"{gain:>+15.0f}%" if (gain := gain_pct(limit)) is not None else f"{'-':>16}" for limit in limits)
    return [*rows, f"{'best replicas to best split':<28}{gains}", ""]


def gain_pct(limit: Mapping[str, Any]) -> float | None:
    """How much more the best replicas serve than the best split, percent; None where the split serves nothing."""
    rows = limit["arrangements"]
    replicas = max(float(row["capacity_qps"]) for row in rows if row["num_prefill"] is None)
    split = max(float(row["capacity_qps"]) for row in rows if row["num_prefill"] is not None)
    return 100 * (replicas / split - 1) if split else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-gpus", type=int, default=4)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the two traces")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = []
    for device in DEVICES:
        for trace in TRACES:
            case = compare(device, arguments.data / trace, arguments.num_requests, arguments.num_gpus)
            cases.append(case)
            print("\n".join(lines(case)), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        document: dict[str, object] = {
            "model": "llama-3.1-8b",
            "seed": 0,
            "commit": source_commit(),
            "versions": cast(object, package_versions()),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "cases": cases,
        }
        print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
