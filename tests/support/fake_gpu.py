"""Serves requests through the Triton executor on a GPU that is not there: every launch is compiled, none is run.

Prints one JSON object: how many variants of each kernel were compiled before the runs (`prepare`), when the decode
graphs ran (`graphs`), and in the middle of the runs (`run`), and how many requests were served.
"""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver


class FakeDriver:
    """As much of a driver as compiling for an H100 asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    """Compile, serve, count."""
    driver.set_active(FakeDriver())
    from tilebudget.engine import BlockManager, Engine, EngineConfig, Request, Workload, torch_executor
    from tilebudget.engine.model import decode_graphs
    from tilebudget.engine.model.config import ModelConfig
    from tilebudget.engine.model.decode_graphs import DecodeGraphs
    from tilebudget.engine.model.model import Model
    from tilebudget.engine.model.triton_ops import TritonOps, TritonPagedKV
    from tilebudget.engine.model.weights import random_weights
    from tilebudget.kernels.ops import activation, attention, gemm, norm, rotary

    modules: list[Any] = [activation, attention, gemm, norm, rotary]
    for module in modules:
        module.require_runnable = lambda *_: None  # the tensors are on the CPU
    modules = [attention, gemm]
    for module in modules:
        module.must_widen = lambda _: False
    modules = [decode_graphs, torch_executor]
    for module in modules:  # nothing was computed: memory is as it was found
        module.greedy = lambda logits: torch.zeros(len(logits), dtype=torch.int64)

    phase, compiled = "prepare", collections.Counter[str]()
    real_run: Any = JITFunction.run

    def compile_only(self: Any, *args: object, grid: object, warmup: bool, **options: object) -> object:
        def num_variants() -> int:
            return sum(len(cache[0]) for cache in self.device_caches.values())

        before = num_variants()
        kernel = real_run(self, *args, grid=grid, warmup=True, **options)
        compiled[f"{phase}:{self.__name__}"] += num_variants() - before
        return kernel

    JITFunction.run = compile_only

    model_config = ModelConfig(
        name="fake", vocab_size=256, hidden_size=256, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=64,
        intermediate_size=512, max_position=4096,
    )  # fmt: skip
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    weights = random_weights(model_config, dtype=dtype, device=cpu)
    executor = torch_executor.TorchExecutor(Model(model_config, weights, TritonOps(model_config, dtype, cpu)))
    config = EngineConfig(token_budget=1024, max_num_seqs=16, max_model_len=3072)
    width = config.max_blocks_per_seq
    executor.start(config, BlockManager(num_blocks=1500, block_size=16, max_num_seqs=16, max_blocks_per_seq=width))

    phase = "graphs"
    pages = executor._cache
    assert isinstance(pages, TritonPagedKV)
    graphs = DecodeGraphs(executor.model, pages, max_num_seqs=16, max_blocks_per_seq=width, capture=False)
    for size in graphs.sizes:
        graphs._forward(size)

    phase = "run"
    rng = np.random.default_rng(0)
    requests = tuple(
        Request(arrival_s=0.0, prompt_tokens=int(rng.integers(1, 2900)), output_tokens=int(rng.integers(1, 20)))
        for _ in range(30)
    )
    finished = 0
    for budget in (1024, 997, 130, 16):
        run_config = EngineConfig(token_budget=budget, max_num_seqs=16, max_model_len=3072, num_kv_blocks=1500)
        record = Engine(executor).run(Workload(name="fake", requests=requests), run_config)
        finished += record.count_status("finished")
    print(json.dumps({"compiled": {name: count for name, count in compiled.items() if count}, "finished": finished}))


if __name__ == "__main__":
    main()
