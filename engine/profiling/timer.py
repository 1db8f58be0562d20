"""Times single iterations on an executor, and what the engine's own loop adds to each."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from ...kernels.latency.table import IterationShape
from ..config import EngineConfig
from ..engine import Engine
from ..executor import Executor, StepResult
from ..kv_cache import BlockManager
from ..request import Batch, Request, Sequence, Workload


class IterationTimer:
    """Runs iterations of given shapes on one executor under one config, whose cache and limits they must fit."""

    def __init__(self, executor: Executor, config: EngineConfig, num_kv_blocks: int) -> None:
        self.executor = executor
        self.config = config
        self._kv = BlockManager(
            num_blocks=num_kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
            with_table=executor.needs_token_ids,
        )
        self._random = np.random.default_rng(config.seed)
        executor.start(config, self._kv)

    def time_ms(self, shape: IterationShape, num_samples: int) -> list[float]:
        """Milliseconds of each of ``num_samples`` iterations of this shape.

        All decodes share the context ``decode_kv_tokens / num_decodes``; the first chunks are those that end their
        prompts where ``num_logits`` says that some do.
        """
        batch = self._batch(shape)
        try:
            return [self._time_ms(batch) for _ in range(num_samples)]
        finally:
            for sequence in (*batch.decodes, *batch.chunks):
                self._kv.release(sequence)

    def _time_ms(self, batch: Batch) -> float:
        began = perf_counter()
        result = self.executor.execute(batch)
        return (result.model_s if self.executor.virtual_time else perf_counter() - began) * 1e3

    def _batch(self, shape: IterationShape) -> Batch:
        context = shape.decode_kv_tokens // max(1, shape.num_decodes)
        decodes = [self._sequence(index, context, 1, ends=True) for index in range(shape.num_decodes)]
        num_ending = shape.num_logits - shape.num_decodes
        chunks = [
            self._sequence(shape.num_decodes + place, prefix + tokens, tokens, ends=place < num_ending)
            for place, (tokens, prefix) in enumerate(shape.chunks)
        ]
        return Batch(decodes, chunks, [tokens for tokens, _ in shape.chunks])

    def _sequence(self, index: int, end: int, tokens: int, *, ends: bool) -> Sequence:
        """A sequence whose iteration computes its last ``tokens`` tokens before ``end``; known ones remain unless it
        ``ends`` there."""
        known = end if ends else end + 1
        request = Request(arrival_s=0.0, prompt_tokens=known, output_tokens=1)
        ids = self._random.integers(0, self.executor.vocab_size, known) if self.executor.needs_token_ids else None
        sequence = Sequence(index, request, ids)
        sequence.num_computed = end - tokens
        self._kv.hold(sequence, end)
        return sequence


class _IdleExecutor:
    """An executor that computes nothing, so that the engine's clock sees its own loop alone."""

    virtual_time = False
    needs_token_ids = True
    vocab_size = 2

    def __init__(self, max_position: int) -> None:
        self.max_position = max_position

    def describe(self) -> Mapping[str, str | int | float]:
        return {"device": "idle"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return config.max_num_seqs * config.max_blocks_per_seq

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Nothing to make ready."""

    def execute(self, batch: Batch) -> StepResult:
        ending = [
            sequence.num_computed + tokens >= sequence.num_tokens
            for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True)
        ]
        return StepResult(0.0, np.zeros(len(batch.decodes) + sum(ending), dtype=np.int64))


def loop_overhead_ms(config: EngineConfig, *, num_requests: int = 24) -> tuple[float, float]:
    """Milliseconds that scheduling, bookkeeping and recording take of an iteration, and more for each request in it.

    From an engine run over an executor that computes nothing: a line through the median durations by batch size.
    """
    prompt = max(1, min(config.max_model_len // 2, 4 * config.block_size))
    output = max(1, min(config.max_model_len - prompt, 32))
    requests = (Request(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output),) * num_requests
    engine = Engine(_IdleExecutor(config.max_model_len))
    record = engine.run(Workload(name="overhead", requests=requests), config)
    iterations = record.iterations
    sizes = np.unique(iterations.num_requests)
    medians_ms = np.array([np.median(iterations.duration_s[iterations.num_requests == size]) for size in sizes]) * 1e3
    if sizes.size < 2:
        return float(medians_ms[0]), 0.0
    slope, level = np.polyfit(sizes, medians_ms, 1)
    slope_ms = max(0.0, float(slope))
    return max(0.0, float(level) if slope_ms else float(medians_ms.mean())), slope_ms
