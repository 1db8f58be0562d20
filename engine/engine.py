"""The loop: admit arrivals, ask the policy for a batch, execute it, advance the clock, record."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter

from .config import EngineConfig
from .executor import AnyExecutor, DecodeRunner, Executor, NonFiniteTimeError, PipelinedExecutor, num_stages
from .kv_cache import BlockManager
from .pipelined_run import PipelinedRun
from .policies import make_scheduler
from .record import FloatArray, GapReader, RunRecord
from .request import Batch, Workload
from .run import MONITOR_EVERY_BATCHES, Monitor, Progress, Run, close_gaps, store_tokens
from .scheduler import Scheduler

INFINITY = float("inf")


class Engine:
    """A chunked-prefill serving engine over one executor; reusable for any number of runs."""

    def __init__(self, executor: AnyExecutor) -> None:
        self.executor = executor

    def run(self, workload: Workload, config: EngineConfig, *, monitor: Monitor | None = None) -> RunRecord:
        """Serve ``workload`` under ``config`` and return the record.

        On a real device the clock advances by the measured time of each iteration and jumps over idle gaps;
        on a modelled one by what the table says; there, iterations that repeat a batch of decodes are advanced in one
        step, which gives the same record as one by one. Requests longer than ``max_model_len`` or than the whole KV
        cache are rejected, recorded and do not stop the others.
        Raises OutOfMemoryError when the device cannot hold the run, ValueError on settings that disagree.
        """
        if config.max_model_len > self.executor.max_position:
            raise ValueError(
                f"max_model_len={config.max_model_len}: the model takes at most {self.executor.max_position} tokens"
            )
        executor = self.executor
        num_blocks = config.num_kv_blocks or executor.default_num_kv_blocks(config)
        kv = BlockManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs * num_stages(executor),
            max_blocks_per_seq=config.max_blocks_per_seq,
            with_table=executor.needs_token_ids,
        )
        executor.start(config, kv)
        run = (
            PipelinedRun(executor, workload, config, kv)
            if isinstance(executor, PipelinedExecutor)
            else _SerialRun(executor, workload, config, kv)
        )
        with _frozen_heap():
            return run.serve(monitor)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector off what exists already: walking it would stall an iteration now and then."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _SerialRun(Run):
    """A run whose iterations follow each other: the next batch is made when the last one is done."""

    def __init__(self, executor: Executor, workload: Workload, config: EngineConfig, kv: BlockManager) -> None:
        super().__init__(executor, workload, config, kv)
        self.executor = executor
        self.decode_runner = executor if executor.virtual_time and isinstance(executor, DecodeRunner) else None
        self.scheduler: Scheduler = make_scheduler(config, kv)
        self.delays_s: list[float] = []  # of requests first scheduled since the monitor was last asked
        self.decode_s = 0.0  # duration of the last iteration advanced in a run, to guess how many fit the next

    def serve(self, monitor: Monitor | None) -> RunRecord:
        now_s = 0.0
        stopped = None
        scheduler, pending = self.scheduler, self.pending
        virtual_time = self.executor.virtual_time
        reader = GapReader(self.builder, len(self.sequences)) if self.decode_runner is not None else None
        want_gaps = monitor is not None and reader is None
        num_batches = 0
        has_work = False
        while has_work or pending:
            began = perf_counter()
            if not has_work:
                now_s = max(now_s, pending[-1].arrival_s)
            while pending and pending[-1].arrival_s <= now_s:
                scheduler.add(pending.pop())
            batch = scheduler.schedule()
            if not (batch.decodes or batch.chunks):
                raise AssertionError(f"policy {self.config.policy} scheduled an empty iteration with work waiting")
            num_iterations = 1 if self.decode_runner is None else self._run_length(batch, now_s)
            gaps_s: list[float] | FloatArray = []
            model_s = 0.0
            if num_iterations > 1:
                now_s = self._run_decodes(batch, now_s, num_iterations)
            else:
                now_s, gaps_s, model_s = self._run_once(batch, now_s, began, want_gaps)
            has_work = scheduler.has_work
            self.overhead_s += perf_counter() - began - (0.0 if virtual_time else model_s)
            if monitor is None:
                continue
            num_batches += 1
            if reader is not None:
                if num_batches % MONITOR_EVERY_BATCHES and (pending or has_work):
                    continue
                gaps_s = reader.read()
            stopped = monitor(
                Progress(
                    now_s=now_s,
                    num_finished=scheduler.num_finished,
                    num_requests=len(self.sequences),
                    gaps_s=gaps_s,
                    delays_s=self.delays_s,
                )
            )
            self.delays_s = []
            if stopped is not None:
                break
        return self.finish(stopped)

    def _run_once(
        self, batch: Batch, start_s: float, began: float, want_gaps: bool
    ) -> tuple[float, list[float], float]:
        """One iteration. When it ends, the gaps it ended, and its seconds in the model."""
        blocks_used = self.kv.num_used
        result = self.executor.execute(batch)
        emitted = self.scheduler.commit(batch)
        if result.token_ids is not None:
            store_tokens(emitted, result.token_ids)
        builder = self.builder
        if self.executor.virtual_time:
            duration_s = result.model_s
        else:
            duration_s = perf_counter() - began
            builder.model_s.append(result.model_s)
        if not 0.0 <= duration_s < INFINITY:
            raise NonFiniteTimeError(f"the executor reports {duration_s} s for an iteration: must be finite")
        builder.start_s.append(start_s)
        builder.duration_s.append(duration_s)
        self.record_batch(batch, emitted, blocks_used)
        end_s = start_s + duration_s
        for sequence in batch.chunks:
            if sequence.first_scheduled_s != sequence.first_scheduled_s:
                sequence.first_scheduled_s = start_s
                self.delays_s.append(start_s - sequence.arrival_s)
        return end_s, close_gaps(emitted, end_s) if want_gaps else [], result.model_s

    def _run_length(self, batch: Batch, now_s: float) -> int:
        """Iterations of decodes to advance in one step: how long the batch surely stays the same, cut short where the
        next arrival is expected (the exact cut comes with the durations)."""
        length = self.scheduler.decode_run_length(batch)
        if length > 1 and self.pending and self.decode_s > 0.0:
            until_arrival = (self.pending[-1].arrival_s - now_s) / self.decode_s
            if until_arrival < length:
                return min(length, int(1.05 * until_arrival) + 2)
        return length

    def _run_decodes(self, batch: Batch, now_s: float, num_iterations: int) -> float:
        """Iterations of one unchanged batch of decodes, up to ``num_iterations``: those that start before the next
        arrival. Returns when the last one ends."""
        assert self.decode_runner is not None
        durations_s = self.decode_runner.decode_run_s(batch, num_iterations)
        clock_s = list(accumulate(durations_s, initial=now_s))
        if self.pending and clock_s[-1] > self.pending[-1].arrival_s:
            num_iterations = min(num_iterations, bisect_left(clock_s, self.pending[-1].arrival_s))
            del durations_s[num_iterations:], clock_s[num_iterations + 1 :]
        end_s = clock_s.pop()
        if not (min(durations_s) >= 0.0 and end_s < INFINITY):
            bad_s = next(duration_s for duration_s in durations_s if not 0.0 <= duration_s < INFINITY)
            raise NonFiniteTimeError(f"the executor reports {bad_s} s for an iteration: must be finite")
        builder = self.builder
        num_before, blocks_used = len(builder.start_s), self.kv.num_used
        builder.start_s.fromlist(clock_s)
        builder.duration_s.fromlist(durations_s)
        taken_at = self.scheduler.commit_run(batch, num_iterations)
        builder.blocks_taken.fromlist([num_before + iteration for iteration in taken_at])
        self.record_batch(batch, batch.decodes, blocks_used, num_iterations)
        self.decode_s = durations_s[-1]
        return end_s
