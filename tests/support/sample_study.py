"""Run folders for the report's tests, written as ARCHITECTURE.md specifies them, from a small simulation.

The simulator stands in for the engine (reports may import no sibling): an iteration costs 2 ms, 0.02 ms a token and
1.28 ms a tile of 64 tokens, spread over four layers. Its latency model predicts what a run without noise gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

LEVELS = np.linspace(0, 1, 101)
SLO_MS = 14.0
POLICIES = ("faster_transformer", "orca", "vllm_v0", "sarathi")
BUDGETS = {64: "aligned", 65: "plus_one", 96: "mid_tile", 128: "aligned", 129: "plus_one", 160: "mid_tile",
           192: "aligned", 193: "plus_one", 256: "aligned", 257: "plus_one", 512: "aligned",
           None: "whole_prompt"}  # fmt: skip


@dataclass
class Folder:
    """A run folder in the making; tests change the parts and write them."""

    recommendation: dict[str, object]
    environment: dict[str, object]
    profile: dict[str, object]
    tiles: dict[str, object] | None = None
    curves: dict[str, object] | None = None
    importance: dict[str, object] | None = None
    trials: list[dict[str, object]] = field(default_factory=list)
    iterations: list[pd.DataFrame] = field(default_factory=list)
    requests: list[pd.DataFrame] = field(default_factory=list)

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        for name in ("recommendation", "environment", "profile"):
            (path / f"{name}.json").write_text(json.dumps(getattr(self, name)), encoding="utf-8")
        for name, document in (
            ("tiles", self.tiles),
            ("cost_curves", self.curves),
            ("importance", self.importance),
        ):
            if document is not None:
                (path / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
        pd.DataFrame(self.trials).to_parquet(path / "trials.parquet")
        for name, frames in (("iterations", self.iterations), ("requests", self.requests)):
            if frames:
                pd.concat(frames, ignore_index=True).to_parquet(path / f"{name}.parquet")
        return path


@dataclass
class Simulated:
    """One simulated run: its frames and its metrics as a row of trials.parquet."""

    iterations: pd.DataFrame
    requests: pd.DataFrame
    metrics: dict[str, object]


@cache
def simulate(
    policy: str, token_budget: int | None, *, seed: int = 0, num_requests: int = 24, noise: float = 0.0
) -> Simulated:
    """A run of ``policy`` over requests drawn by a fixed seed; ``seed`` and ``noise`` vary the durations only.

    Runs are kept and shared: copy a frame before changing it.
    """
    shape = np.random.default_rng(7)
    arrivals = np.cumsum(shape.exponential(0.03, num_requests)) - 0.01
    arrivals[0] = 0.0
    prompts, outputs = shape.integers(60, 600, num_requests), shape.integers(12, 48, num_requests)
    rng = np.random.default_rng(seed)
    left, done, tokens = prompts.copy(), np.zeros(num_requests, int), [list[float]() for _ in range(num_requests)]
    first_scheduled = np.full(num_requests, np.nan)
    now, rows, static = 0.0, [], np.zeros(0, int)
    while (done < outputs).any():
        waiting = np.flatnonzero((arrivals <= now) & (left > 0))
        decoding = np.flatnonzero((left == 0) & (done < outputs))
        if not len(waiting) and not len(decoding):
            now = arrivals[left > 0].min()
            continue
        if policy == "faster_transformer":
            static = static[done[static] < outputs[static]]
            if not len(static):
                static = waiting[:8]
            chunks = {i: left[i] for i in static if left[i]}
            decodes = [] if chunks else list(static)
        elif policy == "vllm_v0":
            chunks = {i: left[i] for i in waiting[:4]}
            decodes = [] if chunks else list(decoding)
        else:
            decodes, room = list(decoding), (10**9 if policy == "orca" else token_budget or 10**9) - len(decoding)
            chunks = {}
            for i in waiting:
                if room > 0:
                    chunks[i] = min(left[i], room)
                    room -= chunks[i]
        prefill = int(sum(chunks.values()))
        total = prefill + len(decodes)
        duration = 1e-3 * (2 + 0.02 * total + 1.28 * np.ceil(total / 64)) * (1 + noise * rng.standard_normal())
        rows.append(
            (now, duration, 0.97 * duration, total, len(decodes), prefill, len(decodes) + len(chunks), total // 16, 0)
        )
        for i, size in chunks.items():
            first_scheduled[i] = now if np.isnan(first_scheduled[i]) else first_scheduled[i]
            left[i] -= size
        now += duration
        for i in [*decodes, *(i for i in chunks if left[i] == 0)]:
            done[i] += 1
            tokens[i].append(now)
    columns = ["start_s", "duration_s", "model_s", "num_tokens", "num_decodes", "num_prefill_tokens", "num_requests",
               "kv_blocks_used", "num_preemptions"]  # fmt: skip
    requests = pd.DataFrame(
        {
            "request": np.arange(num_requests),
            "arrival_s": arrivals,
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            "first_scheduled_s": first_scheduled,
            "num_generated": done,
            "num_preemptions": 0,
            "status": "finished",
            "token_s": [np.array(times) for times in tokens],
        }
    )
    iterations = pd.DataFrame(rows, columns=columns)
    return Simulated(iterations=iterations, requests=requests, metrics=measure(iterations, requests))


def measure(iterations: pd.DataFrame, requests: pd.DataFrame) -> dict[str, object]:
    """The columns of ``Metrics.to_row`` that the report uses, from first principles."""
    gaps_ms = np.concatenate([1e3 * np.diff(times) for times in requests["token_s"]])
    busy_s = float(iterations["duration_s"].sum())
    cv = float(iterations["duration_s"].std(ddof=0) / iterations["duration_s"].mean())
    ttft_ms = 1e3 * (np.array([times[0] for times in requests["token_s"]]) - requests["arrival_s"])
    return {
        **tbt_columns(gaps_ms),
        "ttft_p50_ms": float(np.median(ttft_ms)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
        "scheduling_delay_p50_ms": float(1e3 * (requests["first_scheduled_s"] - requests["arrival_s"]).median()),
        "output_tokens_per_s": float(requests["output_tokens"].sum() / busy_s),
        "total_tokens_per_s": float((requests["output_tokens"] + requests["prompt_tokens"]).sum() / busy_s),
        "iteration_cv": cv,
        **{f"bubble_fraction_{p}": float((1 - 1 / p) * cv / (1 + cv)) for p in (2, 4, 8)},
    }


def tbt_columns(gaps_ms: np.ndarray) -> dict[str, object]:
    """The TBT columns of a row for these gaps."""
    row: dict[str, object] = {"tbt_count": len(gaps_ms)}
    if not len(gaps_ms):
        return row | {"tbt_quantiles_ms": None}
    for name, level in (("p50", 50), ("p90", 90), ("p99", 99), ("p999", 99.9), ("max", 100)):
        row[f"tbt_{name}_ms"] = float(np.percentile(gaps_ms, level))
    return row | {"tbt_mean_ms": float(gaps_ms.mean()), "tbt_quantiles_ms": np.quantile(gaps_ms, LEVELS).tolist()}


def trial(run: str, token_budget: int | None, metrics: Mapping[str, object], **changes: object) -> dict[str, object]:
    """A row of trials.parquet."""
    p99 = metrics.get("tbt_p99_ms")
    return {
        "run": run,
        "role": "search",
        "state": "complete",
        "reason": None,
        "token_budget": token_budget,
        "kind": BUDGETS.get(token_budget, "aligned"),
        "edge_tokens": token_budget,
        "policy": "sarathi",
        "feasible": None if p99 is None else float(str(p99)) <= SLO_MS,
        "started_at": f"2026-01-05T10:00:{len(run):02d}+00:00",
        "elapsed_s": 1.25,
        **metrics,
        **changes,
    }


def predicted(token_budget: int | None) -> dict[str, object]:
    """The two predicted columns of trials.parquet."""
    metrics = simulate("sarathi", token_budget).metrics
    return {f"predicted_{name}": metrics[name] for name in ("tbt_p99_ms", "total_tokens_per_s")}


def stamp(rows: list[dict[str, object]]) -> None:
    """Start times in the order of the rows."""
    for second, row in enumerate(rows):
        row["started_at"] = f"2026-01-05T10:{second // 60:02d}:{second % 60:02d}+00:00"


def make_folder(*, policies: bool = True, search: bool = True) -> Folder:
    """A feasible study: every budget of BUDGETS, one failed and one pruned trial, three repeats of the contenders."""
    rows: list[dict[str, object]] = []
    if search:
        for number, budget in enumerate(BUDGETS):
            run = simulate("sarathi", budget, seed=number, noise=0.01)
            rows.append(trial(f"trial-{number}", budget, run.metrics, **predicted(budget)))
        failure = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
        rows.insert(4, trial("trial-12", 1024, {}, state="failed", reason=failure, feasible=None))
        pruned = simulate("sarathi", 768).metrics | {"tbt_count": 300}
        reason = "41 of 300 gaps over the SLO, 10 allowed"
        rows.insert(7, trial("trial-13", 768, pruned, state="pruned", reason=reason, feasible=False))
        for repeat in range(1, 4):
            for budget in (96, 128, 160):
                run = simulate("sarathi", budget, seed=100 * repeat + budget, noise=0.03)
                rows.append(trial(f"repeat-{budget}-{repeat}", budget, run.metrics, role="repeat", **predicted(budget)))
    iterations, requests = [], []
    for policy in POLICIES if policies else ():
        run = simulate(policy, 128)
        rows.append(trial(f"policy-{policy}", 128, run.metrics, role="policy", policy=policy))
        iterations.append(_labelled(run.iterations, policy))
        requests.append(_labelled(run.requests, policy))
    stamp(rows)
    repeats = pd.DataFrame([row for row in rows if row["role"] == "repeat" and row["token_budget"] == 128])
    metrics = ("tbt_p50_ms", "tbt_p99_ms", "tbt_p999_ms", "tbt_max_ms", "ttft_p50_ms", "ttft_p99_ms",
               "output_tokens_per_s", "total_tokens_per_s", "bubble_fraction_2", "bubble_fraction_4",
               "bubble_fraction_8", "iteration_cv")  # fmt: skip
    workload = {"name": "azure_llm_2023_conv", "source": "azure_llm_2023_conv.csv", "num_requests": 24,
                "num_prompt_tokens": 7810, "num_output_tokens": 702, "num_dropped": 3, "num_clipped": 5,
                "saturated": False, "notes": ["5 prompts cut to max_model_len 2048"]}  # fmt: skip
    expected = {
        name: {"value": repeats[name].median(), "low": repeats[name].min(), "high": repeats[name].max(), "repeats": 3}
        for name in metrics
        if len(repeats)
    }
    best = simulate("sarathi", 160).metrics
    recommendation: dict[str, object] = {
        "schema_version": "1.0",
        "status": "feasible",
        "token_budget": 128,
        "verdict": "Set the token budget to 128. It is the largest budget on a tile edge that keeps P99 TBT under the "
        "strict SLO, and no feasible budget is faster by more than the noise.",
        "rule": "feasible; then throughput within the noise of the best; then lowest pipeline variance; then smallest",
        "key": {"model": "tiny-llama", "device": "cpu", "dtype": "float32", "tensor_parallel": 1,
                "pipeline_parallel": 1},
        "slo": {"name": "strict", "tbt_p99_ms": SLO_MS, "scheduling_delay_p50_s": 2.0,
                "reference_decode_ms": SLO_MS / 5,
                "note": "5 times the reference decode iteration: 32 decodes at 4096 tokens of context."},
        "expected": expected,
        "alternatives": [
            {"token_budget": 160, "kind": "mid_tile", "feasible": True, "tie": True,
             "reason": "throughput inside the spread; higher bubble fraction", **_pick(best)},
            {"token_budget": 96, "kind": "mid_tile", "feasible": True, "tie": False,
             "reason": "throughput 11% lower", **_pick(simulate("sarathi", 96).metrics)},
            {"token_budget": 512, "kind": "aligned", "feasible": False, "tie": False,
             "reason": "P99 TBT over the SLO", **_pick(simulate("sarathi", 512).metrics)},
        ],
        "engine": {"policy": "sarathi", "max_num_seqs": 32, "max_model_len": 2048, "block_size": 16,
                   "num_kv_blocks": 512},
        "workload": workload,
        "launch": {
            "vllm": "vllm serve tiny-llama --max-num-batched-tokens 128 --max-num-seqs 32 "
                    "--max-model-len 2048 --block-size 16",
            "sglang": "python -m sglang.launch_server --model-path tiny-llama --chunked-prefill-size 96 "
                      "--enable-mixed-chunk",
            "trtllm": "trtllm-serve tiny-llama --max_num_tokens 128 --max_batch_size 32 "
                      "--extra_llm_api_options chunked.yaml",
            "sarathi": "python -m sarathi.entrypoints.openai.api_server --model tiny-llama "
                       "--scheduler_type sarathi --chunk_size 128",
        },
        "flags": {
            "vllm": "--max-num-batched-tokens 128 --max-num-seqs 32 --max-model-len 2048 --block-size 16",
            "sglang": "--chunked-prefill-size 96 --enable-mixed-chunk",
            "trtllm": "--max_num_tokens 128 --max_batch_size 32 --extra_llm_api_options chunked.yaml",
            "sarathi": "--scheduler_type sarathi --chunk_size 128",
        },
        "num_trials": {"complete": 12, "pruned": 1, "failed": 1},
        "seed": 0,
        "command": "tilebudget tune --model tiny-llama",
        "created_at": "2026-01-05T10:02:00+00:00",
    }  # fmt: skip
    environment: dict[str, object] = {
        "tilebudget": "0.1.0",
        "versions": {"torch": "2.13.0", "triton": "3.7.1", "optuna": "5.0.0", "python": "3.11.2"},
        "device": {"name": "cpu", "cores": 2, "threads": 2},
        "command": "tilebudget tune --model tiny-llama",
        "seed": 0,
        "created_at": "2026-01-05T10:02:00+00:00",
        "commit": "2fde3d7",
        "workload": workload,
        "model": {"name": "tiny-llama", "num_layers": 4, "hidden_size": 256},
    }
    profile: dict[str, object] = {
        "edges": [{"tokens": tokens, "source": "gemm block_m"} for tokens in (64, 128, 192, 256, 512)],
        "candidates": [{"token_budget": b, "kind": k, "edge_tokens": b} for b, k in BUDGETS.items()],
        "reference_decode": {"duration_ms": SLO_MS / 5, "num_seqs": 32, "context_tokens": 4096, "note": "measured"},
    }
    return Folder(
        recommendation=recommendation,
        environment=environment,
        profile=profile,
        tiles=make_tiles(),
        curves=make_curves(),
        importance={
            "evaluator": "PED-ANOVA",
            "best_share": 0.25,
            "metrics": {
                "total_tokens_per_s": {"edge_index": 0.8, "kind": 0.2},
                "tbt_p99_ms": {"edge_index": 0.95, "kind": 0.05},
                "bubble_fraction_4": {"edge_index": 0.6, "kind": 0.4},
            },
        },
        trials=rows,
        iterations=iterations,
        requests=requests,
    )


#: Capacity of the budgets that were bisected, and the bound on the others, requests/s.
CAPACITIES = {96: 18.2, 128: 21.4, 129: 20.9, 160: 21.5, 192: 21.6, 256: 19.8}
BOUNDS = {64: 17.5, 65: 17.1, 193: 20.0, 257: 18.8, 512: 12.0, None: 9.1}
OWN_RATE = 9.3
DECISION = "128, 160 and 192 serve equally much within the noise; 128 has the lowest P99 TTFT, 0.412 s against 0.431 s."


def make_capacity_folder() -> Folder:
    """The study of ``make_folder`` where the objective is capacity: six budgets bisected, six with a bound alone."""
    folder = make_folder()
    for row in folder.trials:
        budget, searched = row["token_budget"], row["role"] == "search" and row["state"] == "complete"
        if searched and budget in BOUNDS:
            bound = BOUNDS[budget]
            known = {name: None for name in row if name.endswith(("_ms", "_per_s")) or name.startswith("bubble_")}
            reason = f"asked once: at {bound} requests/s a limit breaks, and the best serves more"
            row |= known | {"state": "pruned", "feasible": None, "reason": reason, "capacity_at_most_qps": bound}
        elif searched:
            row["capacity_qps"] = CAPACITIES.get(budget)  # type: ignore[call-overload]
    answer = folder.recommendation
    ttft = {budget: (_ttft_s(budget, "p50"), _ttft_s(budget, "p99")) for budget in CAPACITIES}
    for item in answer["alternatives"]:  # type: ignore[attr-defined]
        budget = item["token_budget"]
        p50, p99 = ttft.get(budget, (None, None))
        item |= {"ttft_p50_s": p50, "ttft_p99_s": p99, "capacity_rps": CAPACITIES.get(budget)}
        item["capacity_at_most_rps"] = BOUNDS.get(budget)
    loads = ((0.25, 64, True), (0.5, 96, True), (0.75, 128, True), (0.9, 160, True), (1.0, 192, False))
    answer |= {
        "schema_version": "1.6.0",
        "objective": "capacity",
        "objective_note": "Requests arrive over time, so the study maximises capacity: the highest rate at which "
        "every limit holds.",
        "ttft_p99_s": ttft[128][1],
        "capacity_rps": CAPACITIES[128],
        "own_rate_rps": OWN_RATE,
        "decision": {"rule": "ttft_p99", "statement": DECISION, "group": [128, 160, 192], "over": 160,
                     "metric": "ttft_p99_s", "chosen": 0.412, "other": 0.431},
        "best_by_load": [
            {"load": load, "rate_rps": 21.6 * load, "token_budget": budget, "ttft_p99_s": 0.2 + 0.4 * load**2,
             "tbt_p99_ms": 6 + 7 * load, "recommended_ttft_p99_s": 0.22 + 0.4 * load**2 + 0.2 * load**8,
             "recommended_tbt_p99_ms": 6.5 + 7 * load + load**8, "recommended_holds": holds}
            for load, budget, holds in loads
        ],
        "sensitivity": [
            {"change": f"{what} x{factor}", "token_budget": 128 if factor < 2 else 96,
             "statement": "128 stays best." if factor < 2 else "96 serves 4.1% more."}
            for what in ("SLO", "load", "prompts", "outputs") for factor in (0.5, 0.8, 1.2, 2)
        ],
        "num_trials": {"complete": 6, "pruned": 7, "failed": 1},
    }  # fmt: skip
    return folder


def _ttft_s(budget: int, level: str) -> float:
    return 1e-3 * float(str(simulate("sarathi", budget).metrics[f"ttft_{level}_ms"]))


def iteration_ms(tokens: float) -> float:
    """The simulator's iteration."""
    return float(2 + 0.02 * tokens + 1.28 * np.ceil(tokens / 64))


def make_curves() -> dict[str, object]:
    """What batches cost in the simulator, as cost_curves.json holds it; 2 MFLOPs and 4 kB for each token, 8 MB of
    weights."""

    def batch(size: int, tokens: int) -> dict[str, float]:
        ms = iteration_ms(tokens)
        return {"batch_size": size, "num_tokens": tokens, "latency_ms": ms, "tokens_per_s": 1e3 * tokens / ms}

    def point(tokens: int) -> dict[str, float]:
        ms, flops, size = iteration_ms(tokens), 2e6 * tokens, 8e6 + 4e3 * tokens
        return {"num_tokens": tokens, "flops_per_byte": flops / size, "tflops_per_s": flops / ms / 1e9,
                "gbytes_per_s": size / ms / 1e6}  # fmt: skip

    return {
        "device": "cpu", "model": "tiny-llama", "dtype": "float32", "tensor_parallel": 1, "prompt_tokens": 256,
        "context_tokens": 300,
        "prefill": [batch(size, 256 * size) for size in (1, 2, 4, 8)],
        "decode": [batch(size, size) for size in (1, 2, 4, 8, 16, 32)],
        "roofline": {"points": [point(2**power) for power in range(12)], "peak_tflops_per_s": None,
                     "peak_gbytes_per_s": None},
        "free_prefill": [
            {"num_decodes": decodes, "points": [{"prefill_tokens": chunk, "latency_ms": iteration_ms(decodes + chunk)}
                                                for chunk in (0, 8, 16, 32, 64, 128, 256, 512)]}
            for decodes in (1, 8, 32)
        ],
        "chunking": [
            {"prompt_tokens": prompt, "whole_ms": iteration_ms(prompt),
             "points": [{"chunk_tokens": chunk, "latency_ms": prompt / chunk * iteration_ms(chunk)}
                        for chunk in (64, 128, 256)]}
            for prompt in (512, 1024)
        ],
    }  # fmt: skip


def make_tiles() -> dict[str, object]:
    """The tile analysis of the simulator's layer, as ``tilebudget tiles --json`` prints it: two operations, the tiles
    all in the first, counts 16 apart and the one past each edge."""
    tokens = sorted({*range(16, 1025, 16), *range(65, 1025, 64)})
    costs = {count: (1.28 * np.ceil(count / 64) / 4, (2 + 0.02 * count) / 4) for count in tokens}
    layer = {count: sum(parts) for count, parts in costs.items()}

    def edge(op: str, at: int, here_ms: float, next_ms: float) -> dict[str, object]:
        return {"op": op, "tensor_parallel": 1, "tokens": at, "next_tokens": at + 1, "latency_ms": here_ms,
                "next_latency_ms": next_ms, "jump_pct": 100 * (next_ms / here_ms - 1), "jump_ms": next_ms - here_ms,
                "jump_uncertainty_pct": 1.5, "kind": "step", "sustained": True,
                "explanation": f"{at} is a multiple of 64", "waves": ["64x64: 1 -> 2 waves"]}  # fmt: skip

    def budget(at: int) -> dict[str, object]:
        after = tokens[tokens.index(at) + 1]
        more_ms = layer[after] - layer[at]
        return {"tensor_parallel": 1, "tokens": at, "place": "past_edge" if at % 64 else "edge",
                "layer_ms": layer[at], "tokens_per_ms": at / layer[at], "tokens_per_ms_if_padded": None,
                "next_tokens": after, "one_more_pct": 100 * more_ms / layer[at], "one_more_ms": more_ms,
                "worth_trying": not at % 64, "edge_of": []}  # fmt: skip

    edges = range(64, 961, 64)
    return {
        "model": "tiny-llama", "device": "cpu", "dtype": "float32", "tensor_parallel": 1, "num_layers": 4,
        "layer_ops": ["mlp_up_proj", "mlp_down_proj"], "min_jump_pct": 10.0,
        "operations": [
            {"op": "mlp_up_proj", "tensor_parallel": 1, "num_points": len(tokens), "noise_pct": 1.1,
             "source": "measured", "note": ""},
            {"op": "mlp_down_proj", "tensor_parallel": 1, "num_points": len(tokens), "noise_pct": 1.2,
             "source": "transferred", "note": "256x688 is not in the table: interpolated"},
            {"op": "emb", "tensor_parallel": 1, "num_points": 9, "noise_pct": 0.4, "source": "table", "note": ""},
        ],
        "edges": [edge("mlp_up_proj", at, costs[at][0], costs[at + 1][0]) for at in edges],
        "layer_edges": [edge("layer", at, layer[at], layer[at + 1]) for at in edges],
        "layer_staircase": [{"tokens": at, "layer_ms": layer[at], "iteration_ms": 4 * layer[at]} for at in tokens],
        "budgets": [budget(at) for at in tokens if at % 64 < 2 and at < 1024],
        "notes": ["counts were measured about 16 apart: an edge lies between tokens and next_tokens"],
    }  # fmt: skip


def _labelled(frame: pd.DataFrame, policy: str) -> pd.DataFrame:
    return frame.assign(run=f"policy-{policy}", token_budget=128, policy=policy)


def _pick(metrics: Mapping[str, object]) -> dict[str, object]:
    return {name: metrics[name] for name in ("tbt_p99_ms", "total_tokens_per_s", "bubble_fraction_4", "iteration_cv")}
