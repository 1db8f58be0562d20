"""Runs iterations for real: the forward pass in torch, on a CPU or a CUDA device, timed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .config import EngineConfig
from .device import (
    DTYPES,
    KV_MEMORY_FRACTION,
    device_name,
    free_memory_bytes,
    memory_errors,
    require_memory,
    resolve_device,
    resolve_dtype,
)
from .executor import NonFiniteLogitsError, OutOfMemoryError, StepResult
from .hf_config import resolve_model
from .kv_cache import BlockManager
from .model import Model
from .model_config import ModelConfig
from .model_input import ModelInput, build_input
from .request import Batch, Request, Sequence
from .torch_ops import PagedKV
from .weights import load_weights, random_weights


class TorchExecutor:
    """An ``Executor`` over a ``Model``: greedy sampling, paged KV cache, measured time.

    ``num_threads`` sets torch's threads for the whole process; None leaves them as they are.
    ``model_s`` of a step is the forward pass and the sampling, until the token ids are on the host; laying out the
    batch is not in it.
    """

    virtual_time = False
    needs_token_ids = True

    def __init__(self, model: Model, *, num_threads: int | None = None) -> None:
        if num_threads is not None:
            if num_threads < 1:
                raise ValueError(f"num_threads={num_threads}: must be at least 1")
            torch.set_num_threads(num_threads)
        self.model = model
        self.max_position = model.config.max_position
        self.vocab_size = model.config.vocab_size
        self._device = model.device
        self._cache: PagedKV | None = None
        self._kv: BlockManager | None = None
        self._warm: EngineConfig | None = None

    @classmethod
    def from_model(
        cls,
        model: str | Path | ModelConfig,
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        seed: int = 0,
        num_threads: int | None = None,
    ) -> Self:
        """An executor for a preset's name (random weights drawn by ``seed``), a Hugging Face folder, or a config.

        Raises ValueError for an unknown model, device or dtype, or a damaged folder; OutOfMemoryError when the
        weights do not fit.
        """
        torch_device, torch_dtype = resolve_device(device), resolve_dtype(dtype)
        config, folder = (model, None) if isinstance(model, ModelConfig) else resolve_model(model)
        what = f"the weights of {config.name}"
        require_memory(config.num_parameters * torch_dtype.itemsize, torch_device, what)
        with memory_errors(what):
            if folder is None:
                weights = random_weights(config, dtype=torch_dtype, device=torch_device, seed=seed)
            else:
                weights = load_weights(folder, config, dtype=torch_dtype, device=torch_device)
        return cls(Model(config, weights), num_threads=num_threads)

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype, torch version and, on a CPU, its threads."""
        described: dict[str, str | int | float] = {
            "device": self._device.type,
            "device_name": device_name(self._device),
            "model": self.model.config.name,
            "num_parameters": self.model.config.num_parameters,
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == self.model.dtype),
            "torch": torch.__version__,
        }
        if self._device.type == "cpu":
            described["num_threads"] = torch.get_num_threads()
        elif torch.version.cuda is not None:
            described["cuda"] = torch.version.cuda
        return described

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        """Blocks in ``KV_MEMORY_FRACTION`` of the free memory (0.9 on CUDA, 0.5 on a CPU), and no more than
        ``max_num_seqs`` requests of ``max_model_len`` can use.

        The cache of the previous run counts as free. Raises OutOfMemoryError when not one request fits.
        """
        free = free_memory_bytes(self._device) + (self._cache.num_bytes if self._cache else 0)
        blocks = int(free * KV_MEMORY_FRACTION[self._device.type]) // self._block_bytes(config.block_size)
        if blocks < config.max_blocks_per_seq:
            raise OutOfMemoryError(
                f"the KV cache of one request of {config.max_model_len} tokens needs {config.max_blocks_per_seq} "
                f"blocks, {self._device} has memory for {blocks}"
            )
        return min(blocks, config.max_num_seqs * config.max_blocks_per_seq)

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Allocate the KV cache (that of the previous run is used again where it fits) and warm up."""
        self._kv = kv
        cache = self._cache
        if cache is None or (cache.num_blocks, cache.block_size) != (kv.num_blocks, kv.block_size):
            self._cache = cache = None  # freed before the new one is asked for
            what = f"a KV cache of {kv.num_blocks} blocks"
            require_memory(kv.num_blocks * self._block_bytes(kv.block_size), self._device, what)
            with memory_errors(what):
                self._cache = self.model.new_pages(kv.num_blocks, kv.block_size)
            self._warm = None
        if self._warm != config:
            self._warm_up(config, kv)
            self._warm = config

    def execute(self, batch: Batch) -> StepResult:
        """Run one iteration; raises OutOfMemoryError and NonFiniteLogitsError."""
        if self._kv is None:
            raise RuntimeError("execute was called before start")
        with memory_errors(f"an iteration of {batch.num_tokens} tokens"):
            return self._step(build_input(batch, self._kv, self._device))

    @torch.inference_mode()
    def _step(self, step: ModelInput) -> StepResult:
        assert self._cache is not None
        attend = self._cache.plan(step)
        if self._device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began.record()
            token_ids = self._sample(self.model.forward(step.token_ids, step.emit_rows, attend))
            ended.record()
            ended.synchronize()
            return StepResult(began.elapsed_time(ended) / 1000.0, token_ids)
        began_s = perf_counter()
        token_ids = self._sample(self.model.forward(step.token_ids, step.emit_rows, attend))
        return StepResult(perf_counter() - began_s, token_ids)

    def _sample(self, logits: Tensor) -> npt.NDArray[np.int64]:
        """The most probable token of every row, on the host."""
        # One pass each: the sum is finite only if every logit is.
        finite = torch.isfinite(logits.sum(dtype=torch.float32))
        token_ids: npt.NDArray[np.int64] = logits.argmax(dim=-1).cpu().numpy()
        if not finite:
            if self._cache is not None:
                self._cache.clear()  # NaN left in the cache would spread to the next run through masked keys
            raise NonFiniteLogitsError(f"{self.model.config.name} produced NaN or infinite logits")
        return token_ids

    def _block_bytes(self, block_size: int) -> int:
        return self.model.config.kv_elements_per_token * self.model.dtype.itemsize * block_size

    def _warm_up(self, config: EngineConfig, kv: BlockManager) -> None:
        """Pay first-call costs (kernel selection, thread pools, page faults) before anything is timed.

        Runs the largest prompt chunk and the fullest decode batch of ``config`` on a table of its own; what they
        leave in the cache is never read.
        """
        scratch = BlockManager(
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
        )
        longest = min(config.max_model_len, kv.num_blocks * kv.block_size)
        chunk = min(config.token_budget or longest, longest)
        sequence = _warm_sequence(chunk)
        sequence.slot = scratch.allocate(chunk)
        batches = [Batch([], [sequence], [chunk])] * 2
        decodes = [_warm_sequence(1) for _ in range(min(config.max_num_seqs, kv.num_blocks))]
        scratch.free(sequence.slot)
        for decode in decodes:
            decode.slot = scratch.allocate(1)
        batches += [Batch(decodes), Batch(decodes[:1])]
        with memory_errors("the warm-up"):
            for batch in batches:
                self._step(build_input(batch, scratch, self._device))


def _warm_sequence(num_tokens: int) -> Sequence:
    request = Request(arrival_s=0.0, prompt_tokens=num_tokens, output_tokens=1)
    return Sequence(0, request, np.zeros(num_tokens, dtype=np.int64))
