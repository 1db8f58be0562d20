"""The sections of `gpu_check.py`, which runs each in a process of its own: `gpu_sections.py NAME --out FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F
from tilebudget.kernels.latency.measure import sample_calls
from tilebudget.kernels.latency.sweep import Sweep
from tilebudget.kernels.model_shape import ModelShape
from tilebudget.kernels.ops.attention import attention
from tilebudget.kernels.ops.gemm import gemm
from tilebudget.kernels.tiles.config_map import measured_map
from tilebudget.kernels.tiles.staircase import find_edges

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves the script's own folder out
from gpu_correctness import DEVICE, Rows, check_kernels, random

#: Llama-3.1-8B.
SHAPE = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336, vocab_size=128256
)
ROTATION_BYTES = 256 * 2**20
REPEATS = 15

GEMM_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STAIRCASE_CENTRES = (128, 256, 512, 1024, 2048)
STAIRCASE_REACH = 8


class Clock:
    """The time that a section has."""

    def __init__(self, limit_s: float) -> None:
        self.end_s = perf_counter() + limit_s

    def left_s(self) -> float:
        """Seconds until the section should stop."""
        return self.end_s - perf_counter()


def quantiles(samples_ms: Sequence[float]) -> dict[str, object]:
    """p20, p50 and p80 of the samples, ms."""
    p20, p50, p80 = (float(np.percentile(samples_ms, q)) for q in (20, 50, 80))
    return {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "repeats": len(samples_ms)}


def check_engine(clock: Clock, seed: int) -> dict[str, object]:
    """The same greedy requests through three executors, in fp32, where rounding seldom decides a token."""
    from tilebudget.engine import Engine, EngineConfig
    from tilebudget.engine.torch_executor import TorchExecutor
    from tilebudget.engine.workloads.presets import preset_workload

    workload = preset_workload("fixed:300:40", num_requests=24, seed=seed, max_model_len=512)
    config = EngineConfig(token_budget=256, max_num_seqs=16, max_model_len=512)
    outputs, described = {}, {}
    for name, kernels, graphs in (("torch", "torch", False), ("triton", "triton", False), ("graphs", "triton", True)):
        executor = TorchExecutor.from_model("tiny-llama", device="cuda", kernels=kernels, cuda_graphs=graphs, seed=seed)
        outputs[name] = Engine(executor).run(workload, config).outputs
        described[name] = dict(executor.describe())
    total = len(outputs["torch"])
    same = {
        f"{name}_as_{other}": sum(a == b for a, b in zip(outputs[name], outputs[other], strict=True)) / total
        for name, other in (("triton", "torch"), ("graphs", "triton"))
    }
    captured = str(described["graphs"]["cuda_graphs"]).startswith("decodes")
    auto = TorchExecutor.from_model("tiny-llama", device="cuda", seed=seed).describe()
    return {
        "summary": {"passed": captured and min(same.values()) >= 0.9, "captured": captured, **same},
        "executors": described,
        "auto": dict(auto),
    }


# Speed


def speed(clock: Clock, seed: int) -> dict[str, object]:
    """Our GEMM beside cuBLAS and our attention beside SDPA, the two in turn; ratio: their time over ours."""
    rows: Rows = []
    for op, m, ours, theirs in gemm_sides(GEMM_TOKENS):
        if clock.left_s() < 10:
            break
        rows.append(compare(f"gemm {op}", {"tokens": m}, ours, theirs))
    attention_rows: Rows = []
    for case in (
        attention_prefill(2048),
        attention_prefill(8192),
        attention_decode(64, 4096),
        attention_decode(16, 1024),
    ):
        if clock.left_s() > 2:
            attention_rows.append(compare(*case))
    large = [float(str(row["ratio"])) for row in rows if int(str(row["tokens"])) >= 512]
    long_prefill = [float(str(row["ratio"])) for row in attention_rows if row["op"] == "attention prefill"]
    return {
        "summary": {
            "gemm_vs_cublas_min_from_512_tokens": min(large, default=None),
            "gemm_vs_cublas_median_from_512_tokens": float(np.median(large)) if large else None,
            "attention_vs_sdpa_long_prefill": long_prefill,
            "num_gemm_points": len(rows),
        },
        "gemm": rows,
        "attention": attention_rows,
    }


Call = Callable[[int], torch.Tensor]


def compare(op: str, sizes: dict[str, int], ours: Call, theirs: Call) -> dict[str, object]:
    """Both sides, sampled in two interleaved halves each."""
    samples: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(2):
        for name, call in (("ours", ours), ("theirs", theirs)):
            samples[name] += sample_calls(call, DEVICE, repeats=-(-REPEATS // 2))
    ratio = float(np.median(samples["theirs"]) / np.median(samples["ours"]))
    sides = {name: quantiles(values) for name, values in samples.items()}
    return {"op": op, **sizes, "ratio": ratio, **sides}


def gemm_sides(tokens: Sequence[int]) -> Iterable[tuple[str, int, Call, Call]]:
    """(operation, tokens, our call, cuBLAS's) for every layer, token counts in shuffled order."""
    for op, (n, k) in SHAPE.gemms(1).items():
        copies = max(2, -(-ROTATION_BYTES // (n * k * 2)))
        weights = [random(n, k, dtype=torch.bfloat16) for _ in range(copies)]
        for m in np.random.default_rng(0).permutation(list(tokens)).tolist():
            x = random(m, k, dtype=torch.bfloat16)
            ours = lambda i, x=x, weights=weights: gemm(x, weights[i % len(weights)])  # noqa: E731
            theirs = lambda i, x=x, weights=weights: F.linear(x, weights[i % len(weights)])  # noqa: E731
            yield op, m, ours, theirs


def attention_prefill(tokens: int) -> tuple[str, dict[str, int], Call, Call]:
    """One prompt, nothing cached before it."""
    return _attention_sides("attention prefill", 1, tokens, tokens)


def attention_decode(num_seqs: int, context: int) -> tuple[str, dict[str, int], Call, Call]:
    """One query for each sequence."""
    return _attention_sides("attention decode", num_seqs, 1, context)


def _attention_sides(op: str, num_seqs: int, rows: int, context: int) -> tuple[str, dict[str, int], Call, Call]:
    heads, kv_heads, head_dim = SHAPE.num_heads, SHAPE.num_kv_heads, SHAPE.head_dim
    blocks = -(-context // 16)
    q = random(num_seqs * rows, heads, head_dim, dtype=torch.bfloat16)
    keys, values = (random(num_seqs * blocks, 16, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    table = torch.randperm(num_seqs * blocks, device=DEVICE).to(torch.int32).view(num_seqs, blocks)
    starts = torch.arange(0, (num_seqs + 1) * rows, rows, dtype=torch.int32, device=DEVICE)
    contexts = torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE)
    num_decodes = num_seqs if rows == 1 else 0

    def ours(_: int) -> torch.Tensor:
        return attention(
            q, keys, values, table, starts, contexts,
            max_query_len=rows, max_context_len=context, num_decodes=num_decodes,
        )  # fmt: skip

    dense_q = random(num_seqs, heads, rows, head_dim, dtype=torch.bfloat16)
    dense_k, dense_v = (random(num_seqs, kv_heads, context, head_dim, dtype=torch.bfloat16) for _ in range(2))

    def theirs(_: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=rows > 1, enable_gqa=True)

    return op, {"num_seqs": num_seqs, "tokens": rows, "context": context}, ours, theirs


def staircase(clock: Clock, seed: int) -> dict[str, object]:
    """Both GEMMs at stride 1 around the usual budgets, and the edges of at least 3% in each."""
    tokens = sorted({c + d for c in STAIRCASE_CENTRES for d in range(-STAIRCASE_REACH, STAIRCASE_REACH + 1)})
    rows: Rows = []
    for op, m, ours, theirs in gemm_sides(tokens):
        if clock.left_s() < 3:
            break
        rows.append(compare(op, {"tokens": m}, ours, theirs))
    edges: Rows = []
    for side in ("ours", "theirs"):
        for op in SHAPE.gemms(1):
            points = sorted((int(str(r["tokens"])), float(str(r[side]["p50_ms"]))) for r in rows if r["op"] == op)  # type: ignore[index]
            if len(points) < len(tokens):
                continue  # cut short by the clock
            counts, times_ms = (np.array(column) for column in zip(*points, strict=True))
            sweep = Sweep(op=op, tensor_parallel=1, tokens=counts, latency_ms=times_ms, source="measured")
            edges += [{"side": side, **edge.to_json()} for edge in find_edges(sweep, min_jump_pct=3.0).edges]
    return {"summary": {"num_points": len(rows), "num_edges": len(edges)}, "points": rows, "edges": edges}


def configs(clock: Clock, seed: int) -> dict[str, object]:
    """Which tile configuration of our GEMM wins where."""
    rows = measured_map(SHAPE, device=DEVICE, dtype=torch.bfloat16, tokens=(16, 128, 512, 2048), repeats=7)
    lost = [row.selected_ms / row.latency_ms for row in rows if row.selected_ms and row.latency_ms]
    return {
        "summary": {"num_points": len(rows), "selected_over_best_median": float(np.median(lost)), "worst": max(lost)},
        "configs": [row.to_json() for row in rows],
    }


# The whole system


def profile(clock: Clock, seed: int) -> dict[str, object]:
    """A latency table of the device from the real model's iterations, and its error on whole engine runs."""
    from tilebudget.engine import EngineConfig
    from tilebudget.engine.model.config import ModelConfig
    from tilebudget.engine.profiling.profile import measure_profile
    from tilebudget.engine.torch_executor import TorchExecutor

    model = ModelConfig.preset("llama-3.1-8b")
    executor = TorchExecutor.from_model(model, device="cuda", dtype="bf16", seed=seed)
    config = EngineConfig(token_budget=4096, max_num_seqs=32, max_model_len=4096)
    found = measure_profile(executor, model, config, time_limit_s=max(clock.left_s() - 10, 5))
    summary: dict[str, object] = {
        "num_points": found.num_points,
        "num_samples": found.num_samples,
        "median_error": found.median_error,
    }
    return {"summary": summary, "factors": dict(found.factors), "executor": dict(executor.describe())}


def tune_model(clock: Clock, seed: int) -> dict[str, object]:
    """A short tuning of a real-sized model."""
    from tilebudget.autotune import tune
    from tilebudget.autotune.config import TuneConfig
    from tilebudget.autotune.devices import make_executor

    config = TuneConfig(
        model="llama-3.1-8b", device="cuda", dtype="bf16", num_requests=16, max_num_seqs=16, max_model_len=2048,
        num_trials=4, num_contenders=2, repeats=2, seed=seed,
    )  # fmt: skip
    executor = make_executor(config)
    with TemporaryDirectory() as folder:
        began_s = perf_counter()
        found = tune(config, executor=executor, run_dir=Path(folder) / "run", command="gpu_check tune")
        elapsed_s = perf_counter() - began_s
    document = found.to_json()
    return {
        "summary": {"token_budget": found.token_budget, "status": found.status, "tuning_s": round(elapsed_s, 1)},
        "recommendation": document,
        "executor": dict(executor.describe()),
    }


SECTIONS: dict[str, Callable[[Clock, int], dict[str, object]]] = {
    "kernels": lambda clock, seed: check_kernels(clock.left_s),
    "engine": check_engine,
    "speed": speed,
    "staircase": staircase,
    "configs": configs,
    "profile": profile,
    "tune": tune_model,
}


def main() -> int:
    """Run one section and write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    clock = Clock(args.limit_s)
    with torch.inference_mode():
        document = SECTIONS[args.section](clock, args.seed)
    document |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "seed": args.seed}
    args.out.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
