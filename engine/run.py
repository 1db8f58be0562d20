"""What every run of the engine shares, whatever runs its iterations: sequences, rejections, records, the result."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from .config import EngineConfig
from .executor import Device
from .kv_cache import BlockManager
from .record import FloatArray, IntArray, RecordBuilder, Requests, RunRecord
from .request import Batch, Request, Sequence, Workload


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is, given to the ``monitor`` of ``Engine.run`` after each iteration; on a modelled device that
    advances runs of decodes in one step, after every ``MONITOR_EVERY_BATCHES`` batches and at the end.

    ``gaps_s`` are the times between tokens (seconds) that ended since the last call, ``delays_s`` the scheduling delays
    of the requests that were scheduled for the first time since then, where the loop tells them.
    """

    now_s: float
    num_finished: int
    num_requests: int
    gaps_s: list[float] | FloatArray
    delays_s: SequenceOf[float] = ()


#: Batches (a run of the same decodes is one) between two calls of a monitor on a modelled device.
MONITOR_EVERY_BATCHES = 256

#: Called with each ``Progress``; a string stops the run and becomes ``RunRecord.stopped``.
Monitor = Callable[[Progress], str | None]


class Run:
    """The state of one run: its sequences (``pending`` are those to come, the next one last) and its record."""

    def __init__(self, device: Device, workload: Workload, config: EngineConfig, kv: BlockManager) -> None:
        self.device = device
        self.workload = workload
        self.config = config
        self.kv = kv
        self.sequences = make_sequences(workload, device, config.seed)
        self.rejected = {seq.index: reason for seq in self.sequences if (reason := self._reject(seq.request))}
        self.pending = [seq for seq in reversed(self.sequences) if seq.index not in self.rejected]
        self.builder = RecordBuilder()
        self.overhead_s = 0.0

    def record_batch(
        self,
        batch: Batch,
        emitted: SequenceOf[Sequence],
        kv_blocks_used: int,
        num_iterations: int = 1,
        num_preempted: int | None = None,
    ) -> None:
        """Note what a batch ran, in how many iterations, with how many blocks in use, and whom it gave tokens to."""
        num_decodes = len(batch.decodes)
        # fromlist is several times quicker than extend.
        self.builder.batches.fromlist(
            [
                num_iterations,
                num_decodes,
                sum(batch.chunk_tokens),
                num_decodes + len(batch.chunks),
                batch.num_preempted if num_preempted is None else num_preempted,
                kv_blocks_used,
                len(emitted),
            ]
        )
        self.builder.emitted.fromlist([sequence.index for sequence in emitted])

    def finish(self, stopped: str | None) -> RunRecord:
        """The record of the run, as far as it went."""
        sequences = self.sequences
        token_request, token_s = self.builder.tokens()
        return RunRecord(
            config=self.config,
            num_kv_blocks=self.kv.num_blocks,
            device=self.device.describe(),
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
            virtual_time=self.device.virtual_time,
            outputs=tuple(tuple(seq.output_token_ids) for seq in sequences) if self.device.needs_token_ids else (),
        )

    def _reject(self, request: Request) -> str | None:
        if request.total_tokens > self.config.max_model_len:
            return "rejected_model_len"
        if self.kv.blocks_for(request.total_tokens) > self.kv.num_blocks:
            return "rejected_kv"
        return None

    def _status(self, sequence: Sequence) -> str:
        return self.rejected.get(sequence.index, "finished" if sequence.finished else "unfinished")


def make_sequences(workload: Workload, device: Device, seed: int) -> list[Sequence]:
    """The engine's state for each request, with token ids where the executor needs them.

    A request without ids gets random ones, drawn by ``seed`` and its place in the workload alone, so that
    every trial of a study sees the same prompts. Raises ValueError for an id outside the vocabulary, and for cached
    tokens where the executor has a real cache, into which nothing can come from elsewhere.
    """
    if not device.needs_token_ids:
        return [Sequence(index, request) for index, request in enumerate(workload.requests)]
    for index, request in enumerate(workload.requests):
        if request.cached_tokens:
            raise ValueError(f"cached_tokens={request.cached_tokens}: must be 0 in request {index}, on a real device")
    return [
        Sequence(index, request, _token_ids(index, request, device.vocab_size, seed))
        for index, request in enumerate(workload.requests)
    ]


def _token_ids(index: int, request: Request, vocab_size: int, seed: int) -> IntArray:
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


def close_gaps(emitted: SequenceOf[Sequence], end_s: float) -> list[float]:
    """The gap before the token that each sequence got at ``end_s``; the first token of one ends no gap."""
    gaps_s = [end_s - sequence.last_token_s for sequence in emitted]
    for sequence in emitted:
        sequence.last_token_s = end_s
    return [gap_s for gap_s in gaps_s if gap_s == gap_s]  # last_token_s is NaN before the first token


def store_tokens(emitted: SequenceOf[Sequence], token_ids: IntArray) -> None:
    """Append to each sequence the token that it got, which its counts include already."""
    for sequence, token in zip(emitted, token_ids.tolist(), strict=True):
        ids = sequence.token_ids
        if ids is not None:
            ids[sequence.num_tokens - 1] = token
