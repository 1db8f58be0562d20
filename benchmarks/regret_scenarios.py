"""The scenarios of `regret_open.py`: drawn by seed, and the requests of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.devices import make_executor
from tilebudget.autotune.problem import read_device
from tilebudget.engine import OutOfMemoryError, Workload, assign_arrivals, preset_workload
from tilebudget.engine.workloads.traces import load_trace

#: Device, kernels, dtype, and the budget that vLLM's API server sets there (see ``regret.Scenario``).
SYSTEMS = (
    ("h200_sxm", "vllm", "fp8", 8192),
    ("h200_sxm", "vllm", "bf16", 8192),
    ("h100_sxm", "vllm", "bf16", 8192),
    ("a100_sxm", "sglang", "bf16", 2048),
    ("l40s", "vllm", "bf16", 2048),
    ("b200_sxm", "vllm", "fp8", 8192),
)
SMALL_MODELS = ("llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b")
LARGE_MODELS = ("llama-2-70b", "llama-3.1-70b", "yi-34b")
WORKLOADS = ("azure-conv", "azure-code", "sharegpt", "arxiv", "mooncake-conv")
ARRIVALS = ("poisson", "recorded", "gamma", "phases")
SLOS = ("strict", "relaxed", "drawn")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = {name: DATA / f"azure_llm_2023_{name.removeprefix('azure-')}.csv" for name in ("azure-conv", "azure-code")}


@dataclass(frozen=True, kw_only=True)
class OpenScenario:
    """One drawn case. ``slo_multiple``: times the reference decode, None where ``slo`` is a word. ``load``: the given
    rate, as a share of what ``FIRST_BUDGETS`` serve. ``window``: where in the trace a recorded pattern begins, 0 to 1.
    ``burst_cv``: of gamma gaps. ``burst_size``, ``burst_share``: mean requests of an on phase, its share of the time.
    """

    index: int
    device: str
    kernels: str
    dtype: str
    vllm_default: int
    model: str
    tensor_parallel: int
    workload: str
    arrivals: str
    window: float
    burst_cv: float
    burst_size: float
    burst_share: float
    slo: str
    slo_multiple: float | None
    load: float
    num_requests: int
    max_num_seqs: int
    seed: int

    @property
    def name(self) -> str:
        """What tables and ``--only`` call it."""
        slo = self.slo if self.slo_multiple is None else f"{self.slo_multiple:.1f}x"
        return (
            f"{self.index:02d} {self.device} {self.dtype} {self.model} TP{self.tensor_parallel} {self.workload} "
            f"{self.arrivals} {slo} {self.max_num_seqs} seqs"
        )


def draw_scenarios(
    seed: int,
    count: int,
    num_requests: int | None = None,
    *,
    tensor_parallel: Callable[[Sequence[str], str], int] | None = None,
) -> list[OpenScenario]:
    """The first ``count`` scenarios of ``seed``; every system is met once before any is met again. ``num_requests``:
    None draws 500 to 1000. ``tensor_parallel``: the degree for a system and a model, None asks the tables."""
    degree = tensor_parallel or smallest_degree
    rng = np.random.default_rng(seed)
    found: list[OpenScenario] = []
    order: list[int] = []
    for index in range(count):
        order = order or rng.permutation(len(SYSTEMS)).tolist()
        device, kernels, dtype, default = SYSTEMS[order.pop()]
        model = str(rng.choice(SMALL_MODELS if rng.random() < 0.6 else LARGE_MODELS))
        arrivals, workload = str(rng.choice(ARRIVALS)), str(rng.choice(WORKLOADS))
        recorded = str(rng.choice(list(TRACES)))
        slo, multiple = str(rng.choice(SLOS)), float(np.exp(rng.uniform(np.log(3.0), np.log(20.0))))
        drawn_requests = int(rng.integers(500, 1001))
        if arrivals == "recorded":
            workload = recorded
            arrivals = arrivals if TRACES[recorded].is_file() else "poisson"
        found.append(
            OpenScenario(
                index=index,
                device=device,
                kernels=kernels,
                dtype=dtype,
                vllm_default=default,
                model=model,
                tensor_parallel=1 if model in SMALL_MODELS else degree((device, kernels, dtype), model),
                workload=workload,
                arrivals=arrivals,
                window=float(rng.random()),
                burst_cv=float(rng.uniform(2.0, 4.0)),
                burst_size=float(rng.uniform(10.0, 40.0)),
                burst_share=float(rng.uniform(0.2, 0.6)),
                slo=slo,
                slo_multiple=multiple if slo == "drawn" else None,
                load=float(rng.uniform(0.3, 0.9)),
                num_requests=num_requests or drawn_requests,
                max_num_seqs=int(rng.choice((64, 128, 256))),
                seed=int(rng.integers(2**31)),
            )
        )
    return found


@cache
def smallest_degree(system: Sequence[str], model: str) -> int:
    """The smallest tensor parallel degree at which the model and one longest request fit the system."""
    device, kernels, dtype = system
    workload = preset_workload("fixed:64:8", 4)
    for degree in (1, 2, 4, 8):
        config = TuneConfig(device=device, kernels=kernels, dtype=dtype, model=model, tensor_parallel=degree)
        try:
            read_device(config, make_executor(config), workload, [128])
        except OutOfMemoryError:
            continue
        return degree
    raise ValueError(f"model={model!r}: does not fit 8 x {device}")


def make_traffic(scenario: OpenScenario, max_model_len: int) -> Workload:
    """The requests of a scenario, at 1 per second on average."""
    count, rng = scenario.num_requests, np.random.default_rng(scenario.seed)
    if scenario.arrivals == "recorded":
        whole = load_trace(TRACES[scenario.workload], max_model_len=max_model_len)
        first = int(scenario.window * max(0, len(whole.requests) - count))
        chosen = whole.requests[first : first + count]
        gaps = np.diff([request.arrival_s for request in chosen])
    else:
        whole = preset_workload(scenario.workload, count, seed=scenario.seed, max_model_len=max_model_len)
        chosen = whole.requests
        gaps = rng.exponential(1.0, count - 1)
        if scenario.arrivals == "gamma":
            gaps = rng.gamma(scenario.burst_cv**-2, scenario.burst_cv**2, count - 1)
        elif scenario.arrivals == "phases":
            ends = rng.random(count - 1) < 1.0 / scenario.burst_size
            pauses = rng.exponential(scenario.burst_size * (1.0 - scenario.burst_share), count - 1)
            gaps = gaps * scenario.burst_share + ends * pauses
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    requests = (replace(one, arrival_s=at) for one, at in zip(chosen, times.tolist(), strict=True))
    arriving = replace(whole, requests=tuple(requests), has_arrivals=True)
    return assign_arrivals(arriving, "trace", qps=1.0)
