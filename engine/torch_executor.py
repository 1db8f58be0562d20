"""Runs iterations for real: the forward pass in torch, on a CPU or a CUDA device, timed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
from .kv_cache import BlockManager
from .model.config import ModelConfig
from .model.decode_graphs import DecodeGraphs, greedy
from .model.hf_config import resolve_model
from .model.input import ModelInput, build_input
from .model.kernel_choice import choose_ops
from .model.model import Model
from .model.torch_ops import PagedKV
from .model.triton_ops import TritonPagedKV
from .model.weights import load_weights, random_weights
from .request import Batch
from .warm_up import make_warm_up

_log = logging.getLogger(__name__)


class TorchExecutor:
    """An ``Executor`` over a ``Model``: greedy sampling, paged KV cache, measured time.

    ``num_threads`` sets torch's threads for the whole process; None leaves them as they are. With ``cuda_graphs``,
    iterations of decodes alone replay captured graphs where our attention kernel runs them; where a capture fails they
    are launched one by one, and ``describe`` says why.
    ``model_s`` of a step is the forward pass and the sampling, until the token ids are on the host; laying out the
    batch is not in it.
    """

    virtual_time = False
    needs_token_ids = True

    def __init__(self, model: Model, *, num_threads: int | None = None, cuda_graphs: bool = True) -> None:
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
        self._wants_graphs = cuda_graphs and self._device.type == "cuda"
        self._graphs: DecodeGraphs | None = None
        self._graphs_for: tuple[int, int] | None = None
        self._graphs_state = "none yet" if self._wants_graphs else "off"
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # Triton launches on the current device

    @classmethod
    def from_model(
        cls,
        model: str | Path | ModelConfig,
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        seed: int = 0,
        num_threads: int | None = None,
        kernels: str = "auto",
        cuda_graphs: bool = True,
    ) -> Self:
        """An executor for a preset's name (random weights drawn by ``seed``), a Hugging Face folder, or a config.

        ``kernels`` is ``torch``, ``triton``, or ``auto`` for the faster of the two by operation; see ``choose_ops``.
        Raises ValueError for an unknown model, device, dtype or kernels, or a damaged folder; OutOfMemoryError when the
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
            ops = choose_ops(kernels, config, weights)
        return cls(Model(config, weights, ops), num_threads=num_threads, cuda_graphs=cuda_graphs)

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype, torch version, which kernels run what, and, on a CPU, its threads."""
        described: dict[str, str | int | float] = {
            "device": self._device.type,
            "device_name": device_name(self._device),
            "model": self.model.config.name,
            "num_parameters": self.model.config.num_parameters,
            "dtype": next(name for name, dtype in DTYPES.items() if dtype == self.model.dtype),
            "torch": torch.__version__,
            **self.model.ops.describe(),
        }
        if self._device.type == "cpu":
            described["num_threads"] = torch.get_num_threads()
        else:
            described["cuda_graphs"] = self._graphs_state
            if torch.version.cuda is not None:
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
            self._cache = cache = self._graphs = self._graphs_for = None  # freed before the new one is asked for
            what = f"a KV cache of {kv.num_blocks} blocks"
            require_memory(kv.num_blocks * self._block_bytes(kv.block_size), self._device, what)
            with memory_errors(what):
                self._cache = self.model.new_pages(kv.num_blocks, kv.block_size)
            self._warm = None
        if self._warm != config:
            self._warm_up(config, kv)
            self._warm = config
        if self._wants_graphs:
            self._capture(config)

    def execute(self, batch: Batch) -> StepResult:
        """Run one iteration; raises OutOfMemoryError and NonFiniteLogitsError."""
        if self._kv is None:
            raise RuntimeError("execute was called before start")
        with memory_errors(f"an iteration of {batch.num_tokens} tokens"):
            if self._graphs is not None and batch.decodes and not batch.chunks:
                return self._decode(self._graphs, batch, self._kv)
            return self._step(build_input(batch, self._kv, self._device))

    @torch.inference_mode()
    def _step(self, step: ModelInput) -> StepResult:
        assert self._cache is not None
        attend = self._cache.plan(step)
        return self._timed(lambda: greedy(self.model.forward(step.token_ids, step.emit_rows, attend)))

    def _decode(self, graphs: DecodeGraphs, batch: Batch, kv: BlockManager) -> StepResult:
        size = graphs.load(batch, kv)
        result = self._timed(lambda: graphs.launch(size))
        assert result.token_ids is not None
        return StepResult(result.model_s, result.token_ids[: len(batch.decodes)])

    def _timed(self, run: Callable[[], Tensor]) -> StepResult:
        """Time ``run`` until the token ids that it makes are on the host."""
        if self._device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            began.record()
            token_ids = self._to_host(run())
            ended.record()
            ended.synchronize()
            return StepResult(began.elapsed_time(ended) / 1000.0, token_ids)
        began_s = perf_counter()
        token_ids = self._to_host(run())
        return StepResult(perf_counter() - began_s, token_ids)

    def _to_host(self, chosen: Tensor) -> npt.NDArray[np.int64]:
        token_ids: npt.NDArray[np.int64] = chosen.cpu().numpy()
        if token_ids.size and token_ids[0] < 0:
            if self._cache is not None:
                self._cache.clear()  # NaN left in the cache would spread to the next run through masked keys
            raise NonFiniteLogitsError(f"{self.model.config.name} produced NaN or infinite logits")
        return token_ids

    def _capture(self, config: EngineConfig) -> None:
        """Capture the decode graphs of ``config``, unless those of the previous run serve it too."""
        if not isinstance(self._cache, TritonPagedKV):
            self._graphs_state = "off (attention runs in torch)"
            return
        wanted = (config.max_num_seqs, config.max_blocks_per_seq)
        if self._graphs_for == wanted:
            return
        self._graphs, self._graphs_for = None, wanted
        try:
            self._graphs = DecodeGraphs(self.model, self._cache, max_num_seqs=wanted[0], max_blocks_per_seq=wanted[1])
        except RuntimeError as error:  # out of memory and whatever CUDA refuses to capture
            self._graphs_state = f"failed, decodes are launched one by one: {error}".split("\n")[0]
            _log.warning("CUDA graphs: %s", self._graphs_state)
            return
        self._graphs_state = f"decodes, {len(self._graphs.sizes)} batch sizes to {config.max_num_seqs}"

    def _block_bytes(self, block_size: int) -> int:
        return self.model.config.kv_elements_per_token * self.model.dtype.itemsize * block_size

    def _warm_up(self, config: EngineConfig, kv: BlockManager) -> None:
        """Pay first-call costs (kernel selection, thread pools, page faults) before anything is timed."""
        warm_up = make_warm_up(config, kv)
        self.model.ops.prepare(self.model.linears(), max_tokens=warm_up.max_tokens)
        if self._cache is not None:
            self._cache.prepare(max_query_len=warm_up.max_query_len, max_context_len=warm_up.max_context_len)
        with memory_errors("the warm-up"):
            for batch in warm_up.batches:
                self._step(build_input(batch, warm_up.kv, self._device))
