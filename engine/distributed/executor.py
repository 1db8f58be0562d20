"""Executors whose model is spread over processes: tensor-parallel ranks, and stages of a pipeline."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from ..config import KERNELS, EngineConfig
from ..device import DTYPES, resolve_device
from ..executor import OutOfMemoryError, PipelinedStepResult, StepResult
from ..kv_cache import BlockManager
from ..model.config import ModelConfig
from ..model.hf_config import resolve_model
from ..model.input import lay_out
from ..request import Batch
from ..warm_up import make_warm_up
from .group import StageFailedError, StageGroup
from .launch import Torchrun
from .messages import STAGE_TIMEOUT_S, AskMemory, Begin, Begun, Done, Memory, MicroBatch, Setup
from .partition import Partition


class DistributedExecutor:
    """What the two kinds of distributed executor share: the stage processes, and micro-batches in flight in them.

    The process that holds this object is the driver: it schedules and computes nothing of the model. Stage processes
    that died are started again by the next run, except under ``torchrun``, which starts them itself.
    """

    virtual_time = False
    needs_token_ids = True

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._torchrun = Torchrun.from_env()
        partition = setup.partition
        if self._torchrun is not None and self._torchrun.num_ranks != partition.num_ranks:
            raise ValueError(
                f"pipeline_parallel={partition.num_stages}: times tensor_parallel={partition.tensor_parallel} must be "
                f"the {self._torchrun.num_ranks} processes that torchrun started"
            )
        self.max_position = partition.config.max_position
        self.vocab_size = partition.config.vocab_size
        self._kv: BlockManager | None = None
        self._warm: tuple[EngineConfig, int] | None = None
        self._number = 0
        self._in_flight: deque[int] = deque()
        self._done: dict[int, dict[int, Done]] = {}
        self._group = self._start_group()

    def close(self) -> None:
        """End the stage processes; also done when the object or the program ends."""
        self._finalizer()

    @property
    def stage_pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return self._group.pids

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype, how the model is cut, over how many hosts, and what the first stage says of itself."""
        partition = self._setup.partition
        return {
            "device": self._setup.device,
            "model": partition.config.name,
            "num_parameters": partition.config.num_parameters,
            "dtype": self._setup.dtype,
            "tensor_parallel": partition.tensor_parallel,
            "pipeline_parallel": partition.num_stages,
            "stage_layers": ",".join(map(str, partition.stage_layers)),
            "num_hosts": self._group.num_hosts,
            "backend": "nccl" if self._setup.device == "cuda" else "gloo",
            **self._group.described,
        }

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        """Blocks that every stage's memory holds (stages on one host's CPU share it; else as ``TorchExecutor``), and no
        more than the requests can use. Raises OutOfMemoryError when not one request fits."""
        self._revive()
        pools: dict[str, list[Memory]] = {}
        for memory in self._group.ask(AskMemory(block_size=config.block_size), Memory):
            pools.setdefault(memory.pool, []).append(memory)
        blocks = min(
            max(memory.free_bytes for memory in pool) // sum(memory.block_bytes for memory in pool)
            for pool in pools.values()
        )
        if blocks < config.max_blocks_per_seq:
            raise OutOfMemoryError(
                f"the KV cache of one request of {config.max_model_len} tokens needs {config.max_blocks_per_seq} "
                f"blocks, the stages have memory for {blocks}"
            )
        num_lanes = self._setup.partition.num_stages
        return min(blocks, num_lanes * config.max_num_seqs * config.max_blocks_per_seq)

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Start what has died, let every stage allocate its KV cache, and warm up; what an earlier run left in flight
        is waited for and forgotten."""
        self._revive()
        while self._in_flight:
            self._take_oldest()
        wanted = (config, kv.num_blocks)
        if self._warm != wanted:
            self._warm = None
            warm_up = make_warm_up(config, kv)
            begin = Begin(
                num_blocks=kv.num_blocks,
                block_size=kv.block_size,
                max_tokens=warm_up.max_tokens,
                max_query_len=warm_up.max_query_len,
                max_context_len=warm_up.max_context_len,
            )
            self._group.ask(begin, Begun)
            self._kv = warm_up.kv
            for batch in warm_up.batches:
                self._send(batch)
                self._take_oldest()
            self._warm = wanted
        self._kv = kv

    def _send(self, batch: Batch) -> None:
        if self._kv is None:
            raise RuntimeError("a batch was sent before start")
        self._group.send(MicroBatch(number=self._number, rows=lay_out(batch, self._kv)))
        self._in_flight.append(self._number)
        self._done[self._number] = {}
        self._number += 1

    def _wait_for_oldest(self, until_s: float) -> bool:
        """Whether every stage has finished the oldest micro-batch in flight by ``until_s``."""
        partition = self._setup.partition
        done = self._done[self._in_flight[0]]
        while len(done) < partition.num_stages:
            left_s = until_s - perf_counter()
            if left_s < 0.0:
                return False
            for rank, message in self._group.listen(left_s):
                if isinstance(message, Done):
                    self._done[message.number][rank] = message
        return True

    def _take_oldest(self) -> PipelinedStepResult:
        number = self._in_flight[0]
        if not self._wait_for_oldest(perf_counter() + STAGE_TIMEOUT_S):
            firsts = range(0, self._setup.partition.num_ranks, self._setup.partition.tensor_parallel)
            self._group.give_up(next(rank for rank in firsts if rank not in self._done[number]))
        self._in_flight.popleft()
        done = sorted(self._done.pop(number).items())
        offsets_s = [self._group.clock_offsets_s[rank] for rank, _ in done]
        token_ids = done[-1][1].token_ids
        assert token_ids is not None
        return PipelinedStepResult(
            np.array([stage.start_s for _, stage in done]) - offsets_s,
            np.array([stage.end_s for _, stage in done]) - offsets_s,
            np.frombuffer(token_ids, dtype=np.int64),
        )

    def _start_group(self) -> StageGroup:
        group = StageGroup(self._setup, self._torchrun)
        self._finalizer = weakref.finalize(self, group.close)
        return group

    def _revive(self) -> None:
        if self._group.alive:
            return
        if self._torchrun is not None:
            raise StageFailedError("the stage processes are gone: torchrun starts them, see its --max-restarts")
        self._kv = self._warm = None
        self._in_flight.clear()
        self._done.clear()
        self._group = self._start_group()


class TensorParallelExecutor(DistributedExecutor):
    """An ``Executor`` over tensor-parallel ranks of one stage. ``model_s`` of a step is the first rank's time, the
    all-reduces in it."""

    def execute(self, batch: Batch) -> StepResult:
        """Run one iteration; raises what goes wrong in a rank."""
        self._send(batch)
        result = self._take_oldest()
        return StepResult(float(result.stage_end_s[0] - result.stage_start_s[0]), result.token_ids)


class PipelineExecutor(DistributedExecutor):
    """A ``PipelinedExecutor`` over stage processes, each of one or more tensor-parallel ranks, of which the first one's
    times are the stage's."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.num_stages = setup.partition.num_stages

    def submit(self, batch: Batch, now_s: float) -> None:
        """Send a micro-batch on its way; ``now_s`` says nothing to a real pipeline."""
        self._send(batch)

    def wait_until(self, until_s: float) -> bool:
        """Whether the oldest micro-batch is done by ``until_s`` on ``perf_counter``."""
        return self._wait_for_oldest(until_s)

    def collect(self) -> PipelinedStepResult:
        """The oldest micro-batch in flight, waited for; raises what goes wrong in a stage."""
        return self._take_oldest()


def distributed_executor(
    model: str | Path | ModelConfig,
    *,
    device: str = "cpu",
    dtype: str = "fp32",
    seed: int = 0,
    num_threads: int | None = None,
    kernels: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    stage_layers: Sequence[int] | None = None,
) -> TensorParallelExecutor | PipelineExecutor:
    """An executor of ``tensor_parallel * pipeline_parallel`` processes: started here on this host, or, under
    ``torchrun``, those that it started. Each loads its part of the model alone.

    ``device`` is ``cpu`` or ``cuda`` (a GPU a process, NCCL; CUDA graphs are not used). ``num_threads`` is that of each
    process on a CPU; None shares this host's cores among those on it, unless ``OMP_NUM_THREADS`` is set. The rest as in
    ``TorchExecutor.from_model``; ``stage_layers`` names the layers of each stage where they are not to be even.
    Raises ValueError for settings that disagree, StageFailedError when a process dies.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be cpu or cuda where several processes run the model")
    resolve_device(device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}: must be one of {', '.join(KERNELS)}")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads={num_threads}: must be at least 1")
    config, folder = (model, None) if isinstance(model, ModelConfig) else resolve_model(model)
    partition = Partition.of(
        config, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, stage_layers=stage_layers
    )
    if partition.num_ranks < 2:
        raise ValueError("tensor_parallel=1: times pipeline_parallel must be at least 2 processes")
    if num_threads is None and device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torchrun = Torchrun.from_env()
        num_local = partition.num_ranks if torchrun is None else torchrun.num_local_ranks
        num_threads = max(1, _num_cores() // num_local)
    setup = Setup(
        partition=partition,
        folder=None if folder is None else str(Path(folder).resolve()),
        device=device,
        dtype=dtype,
        seed=seed,
        kernels=kernels,
        num_threads=num_threads,
    )
    return TensorParallelExecutor(setup) if partition.num_stages == 1 else PipelineExecutor(setup)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
