"""The loop: admit arrivals, ask the policy for a batch, execute it, advance the clock, record."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter

import numpy as np

from .config import EngineConfig
from .executor import DecodeRunner, Executor, NonFiniteTimeError
from .kv_cache import BlockManager
from .policies import make_scheduler
from .record import FloatArray, GapReader, RecordBuilder, Requests, RunRecord
from .request import Batch, Request, Sequence, Workload
from .scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, given to the ``monitor`` of ``Engine.run`` after each iteration; on a modelled device that
    advances runs of decodes in one step, after every ``MONITOR_EVERY_BATCHES`` batches and at the end.

    ``gaps_s`` are the times between tokens (seconds) that ended since the last call.
    """

    now_s: float
    num_finished: int
    num_requests: int
    gaps_s: list[float] | FloatArray


#: Batches (a run of the same decodes is one) between two calls of a monitor on a modelled device.
MONITOR_EVERY_BATCHES = 256

#: Called with each ``Progress``; a string stops the run and becomes ``RunRecord.stopped``.
Monitor = Callable[[Progress], str | None]


class Engine:
    """A chunked-prefill serving engine over one executor; reusable for any number of runs."""

    def __init__(self, executor: Executor) -> None:
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
        num_blocks = config.num_kv_blocks or self.executor.default_num_kv_blocks(config)
        kv = BlockManager(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_blocks_per_seq=config.max_blocks_per_seq,
            with_table=self.executor.needs_token_ids,
        )
        self.executor.start(config, kv)
        return _Run(self.executor, workload, config, kv).serve(monitor)


class _Run:
    """The state of one run."""

    def __init__(self, executor: Executor, workload: Workload, config: EngineConfig, kv: BlockManager) -> None:
        self.executor = executor
        self.decode_runner = executor if executor.virtual_time and isinstance(executor, DecodeRunner) else None
        self.workload = workload
        self.config = config
        self.kv = kv
        self.scheduler: Scheduler = make_scheduler(config, kv)
        self.sequences = make_sequences(workload, executor, config.seed)
        self.rejected = {seq.index: reason for seq in self.sequences if (reason := self._reject(seq.request))}
        self.pending = [seq for seq in reversed(self.sequences) if seq.index not in self.rejected]
        self.builder = RecordBuilder()
        self.overhead_s = 0.0
        self.decode_s = 0.0  # duration of the last iteration advanced in a run, to guess how many fit the next

    def serve(self, monitor: Monitor | None) -> RunRecord:
        now_s = 0.0
        stopped = None
        scheduler, pending = self.scheduler, self.pending
        reader = GapReader(self.builder, len(self.sequences)) if self.decode_runner is not None else None
        want_gaps = monitor is not None and reader is None
        num_batches = 0
        while pending or scheduler.has_work:
            began = perf_counter()
            if not scheduler.has_work:
                now_s = max(now_s, pending[-1].arrival_s)
            while pending and pending[-1].arrival_s <= now_s:
                scheduler.add(pending.pop())
            batch = scheduler.schedule()
            if not batch.num_requests:
                raise AssertionError(f"policy {self.config.policy} scheduled an empty iteration with work waiting")
            num_iterations = self._run_length(batch, now_s)
            gaps_s: list[float] | FloatArray = []
            model_s = 0.0
            if num_iterations > 1:
                now_s = self._run_decodes(batch, now_s, num_iterations)
            else:
                now_s, gaps_s, model_s = self._run_once(batch, now_s, began, want_gaps)
            self.overhead_s += perf_counter() - began - (0.0 if self.executor.virtual_time else model_s)
            if monitor is None:
                continue
            num_batches += 1
            if reader is not None:
                if num_batches % MONITOR_EVERY_BATCHES and (pending or scheduler.has_work):
                    continue
                gaps_s = reader.read()
            stopped = monitor(
                Progress(
                    now_s=now_s,
                    num_finished=scheduler.num_finished,
                    num_requests=len(self.sequences),
                    gaps_s=gaps_s,
                )
            )
            if stopped is not None:
                break
        return self._finish(stopped)

    def _run_once(
        self, batch: Batch, start_s: float, began: float, want_gaps: bool
    ) -> tuple[float, list[float], float]:
        """One iteration. When it ends, the gaps it ended, and its seconds in the model."""
        blocks_used = self.kv.num_used
        result = self.executor.execute(batch)
        emitted = self.scheduler.commit(batch)
        if result.token_ids is not None:
            _store_tokens(emitted, result.token_ids)
        duration_s = result.model_s if self.executor.virtual_time else perf_counter() - began
        if not 0.0 <= duration_s < float("inf"):
            raise NonFiniteTimeError(f"the executor reports {duration_s} s for an iteration: must be finite")
        builder = self.builder
        builder.start_s.append(start_s)
        builder.duration_s.append(duration_s)
        builder.model_s.append(result.model_s)
        builder.kv_blocks_used.append(blocks_used)
        self._record_batch(batch, emitted, 1)
        end_s = start_s + duration_s
        for sequence in batch.chunks:
            if sequence.first_scheduled_s != sequence.first_scheduled_s:
                sequence.first_scheduled_s = start_s
        return end_s, _close_gaps(emitted, end_s) if want_gaps else [], result.model_s

    def _run_length(self, batch: Batch, now_s: float) -> int:
        """Iterations to advance in one step: how long the batch surely stays the same, cut short where the next
        arrival is expected (the exact cut comes with the durations)."""
        if self.decode_runner is None or batch.chunks:
            return 1
        length = self.scheduler.decode_run_length(batch)
        if self.pending and self.decode_s > 0.0:
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
        if self.pending:
            num_iterations = min(num_iterations, bisect_left(clock_s, self.pending[-1].arrival_s))
            del durations_s[num_iterations:], clock_s[num_iterations + 1 :]
        end_s = clock_s.pop()
        if not (min(durations_s) >= 0.0 and end_s < float("inf")):
            bad_s = next(duration_s for duration_s in durations_s if not 0.0 <= duration_s < float("inf"))
            raise NonFiniteTimeError(f"the executor reports {bad_s} s for an iteration: must be finite")
        builder = self.builder
        builder.start_s.extend(clock_s)
        builder.duration_s.extend(durations_s)
        builder.model_s.extend(durations_s)
        builder.kv_blocks_used.extend(self.scheduler.commit_run(batch, num_iterations))
        self._record_batch(batch, batch.decodes, num_iterations)
        self.decode_s = durations_s[-1]
        return end_s

    def _record_batch(self, batch: Batch, emitted: SequenceOf[Sequence], num_iterations: int) -> None:
        num_decodes = len(batch.decodes)
        self.builder.batches.extend(
            (
                num_iterations,
                num_decodes,
                sum(batch.chunk_tokens),
                num_decodes + len(batch.chunks),
                batch.num_preempted,
                len(emitted),
            )
        )
        self.builder.emitted.extend([sequence.index for sequence in emitted])

    def _reject(self, request: Request) -> str | None:
        if request.total_tokens > self.config.max_model_len:
            return "rejected_model_len"
        if self.kv.blocks_for(request.total_tokens) > self.kv.num_blocks:
            return "rejected_kv"
        return None

    def _status(self, sequence: Sequence) -> str:
        return self.rejected.get(sequence.index, "finished" if sequence.finished else "unfinished")

    def _finish(self, stopped: str | None) -> RunRecord:
        sequences = self.sequences
        token_request, token_s = self.builder.tokens()
        return RunRecord(
            config=self.config,
            num_kv_blocks=self.kv.num_blocks,
            device=self.executor.describe(),
            workload=self.workload.name,
            saturated=self.workload.saturated,
            iterations=self.builder.iterations(),
            requests=Requests(
                arrival_s=np.array([seq.arrival_s for seq in sequences]),
                prompt_tokens=np.array([seq.prompt_tokens for seq in sequences], dtype=np.int64),
                output_tokens=np.array([seq.output_tokens for seq in sequences], dtype=np.int64),
                first_scheduled_s=np.array([seq.first_scheduled_s for seq in sequences]),
                num_generated=np.array([seq.num_generated for seq in sequences], dtype=np.int64),
                num_preemptions=np.array([seq.num_preemptions for seq in sequences], dtype=np.int64),
                status=tuple(self._status(seq) for seq in sequences),
            ),
            token_request=token_request,
            token_s=token_s,
            overhead_s=self.overhead_s,
            stopped=stopped,
            outputs=tuple(tuple(seq.output_token_ids) for seq in sequences) if self.executor.needs_token_ids else (),
        )


def make_sequences(workload: Workload, executor: Executor, seed: int) -> list[Sequence]:
    """The engine's state for each request, with token ids where the executor needs them.

    A request without ids gets random ones, drawn by ``seed`` and its place in the workload alone, so that
    every trial of a study sees the same prompts. Raises ValueError for an id outside the vocabulary.
    """
    if not executor.needs_token_ids:
        return [Sequence(index, request) for index, request in enumerate(workload.requests)]
    return [
        Sequence(index, request, _token_ids(index, request, executor.vocab_size, seed))
        for index, request in enumerate(workload.requests)
    ]


def _token_ids(index: int, request: Request, vocab_size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ids = np.zeros(request.total_tokens, dtype=np.int64)
    if request.prompt_token_ids is None:
        ids[: request.prompt_tokens] = np.random.default_rng([seed, index]).integers(
            0, vocab_size, request.prompt_tokens
        )
        return ids
    ids[: request.prompt_tokens] = request.prompt_token_ids
    prompt = ids[: request.prompt_tokens]
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"prompt_token_ids of request {index}: every id must be in 0..{vocab_size - 1}, "
            f"found {int(prompt.min())}..{int(prompt.max())}"
        )
    return ids


def _close_gaps(emitted: SequenceOf[Sequence], end_s: float) -> list[float]:
    """The gap before the token that each sequence got at ``end_s``; the first token of one ends no gap."""
    gaps_s = [end_s - sequence.last_token_s for sequence in emitted]
    for sequence in emitted:
        sequence.last_token_s = end_s
    return [gap_s for gap_s in gaps_s if gap_s == gap_s]  # last_token_s is NaN before the first token


def _store_tokens(emitted: list[Sequence], token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    for sequence, token in zip(emitted, token_ids.tolist(), strict=True):
        ids = sequence.token_ids
        if ids is not None:
            ids[sequence.num_tokens - 1] = token
