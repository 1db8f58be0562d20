"""One process's part of a distributed model: its weights, its KV pages, and its share of an iteration, timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ..device import (
    KV_MEMORY_FRACTION,
    device_name,
    free_memory_bytes,
    memory_errors,
    require_memory,
    resolve_dtype,
)
from ..executor import NonFiniteLogitsError
from ..model.decode_graphs import greedy
from ..model.input import ModelInput
from ..model.kernel_choice import choose_ops
from ..model.model import Model
from ..model.torch_ops import PagedKV
from ..model.weights import load_weights, random_weights
from .messages import Begin, Memory, Setup
from .partition import Part
from .tensor_parallel import TensorGroup


@dataclass(frozen=True, slots=True)
class StageResult:
    """``output`` is hidden states ``[rows, hidden_size]`` for the next stage, in the last one int64 token ids on the
    host. The stage worked from ``start_s`` to ``end_s`` on this process's ``perf_counter``."""

    output: Tensor
    start_s: float
    end_s: float


class Stage:
    """The layers of ``part``, computed together with the other ranks of ``group``."""

    def __init__(self, setup: Setup, part: Part, device: torch.device, group: TensorGroup | None) -> None:
        if setup.num_threads is not None:
            torch.set_num_threads(setup.num_threads)
        config, dtype = setup.partition.config, resolve_dtype(setup.dtype)
        self.part = part
        self.device = device
        local = part.local(config)
        what = f"the weights of {part.num_layers} layers of {config.name}"
        require_memory(local.num_parameters * dtype.itemsize, device, what)
        with memory_errors(what):
            if setup.folder is None:
                weights = random_weights(config, dtype=dtype, device=device, seed=setup.seed, part=part)
            else:
                weights = load_weights(setup.folder, config, dtype=dtype, device=device, part=part)
            ops = choose_ops(setup.kernels, local, weights)
        self.model = Model(local, weights, ops, group)
        self._group = group
        self._cache: PagedKV | None = None

    def describe(self) -> dict[str, str | int | float]:
        """The processor, torch, and which kernels run what."""
        described: dict[str, str | int | float] = {
            "device_name": device_name(self.device),
            "torch": torch.__version__,
            **self.model.ops.describe(),
        }
        if self.device.type == "cpu":
            described["num_threads"] = torch.get_num_threads()
        elif torch.version.cuda is not None:
            described["cuda"] = torch.version.cuda
        return described

    def memory(self, host: str, block_size: int) -> Memory:
        """What the KV cache may take; that of the previous run counts as free."""
        free = free_memory_bytes(self.device) + (self._cache.num_bytes if self._cache else 0)
        return Memory(
            pool=f"{host} {self.device}",
            free_bytes=int(free * KV_MEMORY_FRACTION[self.device.type]),
            block_bytes=self._block_bytes(block_size),
        )

    def begin(self, run: Begin) -> None:
        """Allocate the KV cache (that of the previous run is used again where it fits), and compile what is needed."""
        cache = self._cache
        if cache is None or (cache.num_blocks, cache.block_size) != (run.num_blocks, run.block_size):
            self._cache = cache = None  # freed before the new one is asked for
            what = f"a KV cache of {run.num_blocks} blocks"
            require_memory(run.num_blocks * self._block_bytes(run.block_size), self.device, what)
            with memory_errors(what):
                self._cache = cache = self.model.new_pages(run.num_blocks, run.block_size)
        self.model.ops.prepare(self.model.linears(), max_tokens=run.max_tokens)
        cache.prepare(max_query_len=run.max_query_len, max_context_len=run.max_context_len)

    @torch.inference_mode()
    def run(self, step: ModelInput, hidden: Tensor | None) -> StageResult:
        """Compute one micro-batch; ``hidden`` is what the stage before made of it, None in the first."""
        if self._cache is None:
            raise RuntimeError("a micro-batch came before the run began")
        with memory_errors(f"an iteration of {len(step.token_ids)} tokens"):
            attend = self._cache.plan(step)
            rows = step.token_ids if hidden is None else hidden
            return self._timed(lambda: self._forward(rows, step, attend))

    def _forward(self, rows: Tensor, step: ModelInput, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        made = self.model.forward(rows, step.emit_rows, attend)
        if not self.part.is_last:
            return made
        return (greedy(made) if self._group is None else self._group.greedy(made)).cpu()

    def _timed(self, compute: Callable[[], Tensor]) -> StageResult:
        """Time ``compute``; on CUDA by events, from when the stream gets there."""
        if self.device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began.record()
            output = compute()
            ended.record()
            ended.synchronize()
            end_s = perf_counter()
            start_s = end_s - began.elapsed_time(ended) / 1000.0
        else:
            start_s = perf_counter()
            output = compute()
            end_s = perf_counter()
        if self.part.is_last and len(output) and output[0] < 0:
            raise NonFiniteLogitsError(f"{self.model.config.name} produced NaN or infinite logits")
        return StageResult(output, start_s, end_s)

    def _block_bytes(self, block_size: int) -> int:
        return self.model.config.kv_elements_per_token * self.model.dtype.itemsize * block_size
