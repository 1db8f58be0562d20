"""The loop: admit arrivals, ask the policy for a batch, execute it, advance the clock, record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from .config import EngineConfig
from .executor import Executor, NonFiniteTimeError
from .kv_cache import BlockManager
from .policies import make_scheduler
from .record import RecordBuilder, Requests, RunRecord
from .request import Batch, Request, Sequence, Workload
from .scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, given to the ``monitor`` of ``Engine.run`` after each iteration.

    ``gaps_s`` are the times between tokens (seconds) that this iteration ended.
    """

    now_s: float
    num_finished: int
    num_requests: int
    gaps_s: list[float]


#: Called after each iteration; a string stops the run and becomes ``RunRecord.stopped``.
Monitor = Callable[[Progress], str | None]


class Engine:
    """A chunked-prefill serving engine over one executor; reusable for any number of runs."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def run(self, workload: Workload, config: EngineConfig, *, monitor: Monitor | None = None) -> RunRecord:
        """Serve ``workload`` under ``config`` and return the record.

        On a real device the clock advances by the measured time of each iteration and jumps over idle gaps;
        on a modelled one by what the table says. Requests longer than ``max_model_len`` or than the whole KV
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
        )
        self.executor.start(config, kv)
        return _Run(self.executor, workload, config, kv).serve(monitor)


class _Run:
    """The state of one run."""

    def __init__(self, executor: Executor, workload: Workload, config: EngineConfig, kv: BlockManager) -> None:
        self.executor = executor
        self.workload = workload
        self.config = config
        self.kv = kv
        self.scheduler: Scheduler = make_scheduler(config, kv)
        self.sequences = make_sequences(workload, executor, config.seed)
        self.rejected = {seq.index: reason for seq in self.sequences if (reason := self._reject(seq.request))}
        self.pending = [seq for seq in reversed(self.sequences) if seq.index not in self.rejected]
        self.builder = RecordBuilder()
        self.num_finished = 0
        self.overhead_s = 0.0

    def serve(self, monitor: Monitor | None) -> RunRecord:
        now_s = 0.0
        stopped = None
        while self.pending or self.scheduler.has_work:
            began = perf_counter()
            if not self.scheduler.has_work:
                now_s = max(now_s, self.pending[-1].arrival_s)
            while self.pending and self.pending[-1].arrival_s <= now_s:
                self.scheduler.add(self.pending.pop())
            batch = self.scheduler.schedule()
            if not batch.num_requests:
                raise AssertionError(f"policy {self.config.policy} scheduled an empty iteration with work waiting")
            blocks_used = self.kv.num_used
            result = self.executor.execute(batch)
            emitted = self.scheduler.commit(batch)
            if result.token_ids is not None:
                _store_tokens(emitted, result.token_ids)
            duration_s = result.model_s if self.executor.virtual_time else perf_counter() - began
            if not 0.0 <= duration_s < float("inf"):
                raise NonFiniteTimeError(f"the executor reports {duration_s} s for an iteration: must be finite")
            self._record(batch, now_s, duration_s, result.model_s, blocks_used, emitted)
            gaps_s = self._stamp(batch, emitted, now_s, now_s + duration_s, monitor is not None)
            now_s += duration_s
            self.overhead_s += perf_counter() - began - (0.0 if self.executor.virtual_time else result.model_s)
            if monitor is not None:
                progress = Progress(
                    now_s=now_s,
                    num_finished=self.num_finished,
                    num_requests=len(self.sequences),
                    gaps_s=gaps_s,
                )
                stopped = monitor(progress)
                if stopped is not None:
                    break
        return self._finish(stopped)

    def _record(
        self,
        batch: Batch,
        start_s: float,
        duration_s: float,
        model_s: float,
        used: int,
        emitted: list[Sequence],
    ) -> None:
        builder = self.builder
        builder.start_s.append(start_s)
        builder.duration_s.append(duration_s)
        builder.model_s.append(model_s)
        builder.num_decodes.append(len(batch.decodes))
        builder.num_prefill_tokens.append(batch.num_prefill_tokens)
        builder.num_requests.append(batch.num_requests)
        builder.kv_blocks_used.append(used)
        builder.num_preemptions.append(batch.num_preempted)
        builder.num_emitted.append(len(emitted))
        builder.token_request.extend([sequence.index for sequence in emitted])

    def _stamp(
        self, batch: Batch, emitted: list[Sequence], start_s: float, end_s: float, want_gaps: bool
    ) -> list[float]:
        """Note first scheduling and finishing; the gaps between tokens, where a monitor wants them."""
        for sequence in batch.chunks:
            if sequence.first_scheduled_s != sequence.first_scheduled_s:
                sequence.first_scheduled_s = start_s
        self.num_finished += sum(1 for sequence in emitted if sequence.num_generated >= sequence.output_tokens)
        if not want_gaps:
            return []
        gaps_s = [end_s - sequence.last_token_s for sequence in emitted if sequence.num_generated > 1]
        for sequence in emitted:
            sequence.last_token_s = end_s
        return gaps_s

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


def _store_tokens(emitted: list[Sequence], token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    for sequence, token in zip(emitted, token_ids.tolist(), strict=True):
        ids = sequence.token_ids
        if ids is not None:
            ids[sequence.num_tokens - 1] = token
