"""What an engine run leaves behind: one row an iteration, one a request, and the time of every token."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import pandas as pd

from .config import EngineConfig
from .server.metrics import ServerView

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_BATCH_COLUMNS = 7


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """Columns, one entry an iteration: ``start_s`` and ``duration_s`` on the run's clock, ``model_s`` of it in the
    model, token counts (``num_tokens = num_decodes + num_prefill_tokens``), requests served, KV blocks in use
    during the iteration, and sequences preempted to make it possible.

    In a pipeline an iteration lasts from its start in the first stage to its end in the last one, iterations overlap,
    and ``model_s`` is the work of all stages; ``stage_start_s`` and ``stage_end_s`` are ``[iterations, stages]``. None
    without a pipeline.
    """

    start_s: FloatArray
    duration_s: FloatArray
    model_s: FloatArray
    num_tokens: IntArray
    num_decodes: IntArray
    num_prefill_tokens: IntArray
    num_requests: IntArray
    kv_blocks_used: IntArray
    num_preemptions: IntArray
    stage_start_s: FloatArray | None = None
    stage_end_s: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.start_s)

    @classmethod
    def empty(cls) -> Iterations:
        """No iteration: those of a server cannot be seen from outside."""
        times, counts = np.empty(0), np.empty(0, dtype=np.int64)
        return cls(
            start_s=times,
            duration_s=times,
            model_s=times,
            num_tokens=counts,
            num_decodes=counts,
            num_prefill_tokens=counts,
            num_requests=counts,
            kv_blocks_used=counts,
            num_preemptions=counts,
        )

    @property
    def end_s(self) -> FloatArray:
        """When each iteration ended, and its tokens came."""
        return self.start_s + self.duration_s if self.stage_end_s is None else self.stage_end_s[:, -1]

    def to_frame(self) -> pd.DataFrame:
        """One row an iteration, columns as named here; lists by stage in a pipeline, no such columns without."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return pd.DataFrame(
            {
                name: values if values.ndim == 1 else list(values)
                for name, values in columns.items()
                if values is not None
            }
        )


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Columns, one entry a request of the workload, in its order.

    ``status``: ``finished``, ``rejected_model_len``, ``rejected_kv``, or ``unfinished`` when the run was
    stopped. ``num_generated`` tokens were produced; ``first_scheduled_s`` is NaN for one never scheduled.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    first_scheduled_s: FloatArray
    num_generated: IntArray
    num_preemptions: IntArray
    status: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of the engine.

    ``token_request`` and ``token_s`` give, for every generated token in order of time, the request's index
    in the workload and the time it came. ``overhead_s`` is the host time outside the model (scheduling,
    building the batch, records). ``stopped`` says why a run ended early, None when it ran to its end.
    ``outputs`` holds the generated ids by request, empty where the device is modelled. ``virtual_time``: the clock is
    a model's, and ``overhead_s`` is not on it. A run on a server has no iterations but a ``server`` view, and no
    ``num_kv_blocks`` where the server does not tell.
    """

    config: EngineConfig
    num_kv_blocks: int | None
    device: Mapping[str, str | int | float]
    workload: str
    saturated: bool
    iterations: Iterations
    requests: Requests
    token_request: IntArray
    token_s: FloatArray
    overhead_s: float
    stopped: str | None = None
    outputs: tuple[tuple[int, ...], ...] = ()
    server: ServerView | None = None
    virtual_time: bool = False

    @property
    def busy_s(self) -> float:
        """Seconds during which the engine had work: idle gaps left out, iterations that overlap counted once."""
        if self.server is not None:
            return self.server.busy_s
        iterations = self.iterations
        if iterations.stage_end_s is None:
            return float(iterations.duration_s.sum())
        return busy_span_s(iterations.start_s, iterations.end_s)

    def count_status(self, status: str) -> int:
        """Requests that ended with ``status``."""
        return self.requests.status.count(status)

    def request_frame(self) -> pd.DataFrame:
        """One row a request; ``token_s`` lists the times of its tokens."""
        frame = pd.DataFrame({column.name: getattr(self.requests, column.name) for column in fields(self.requests)})
        order = np.argsort(self.token_request, kind="stable")
        counts = np.bincount(self.token_request, minlength=len(self.requests))
        times = np.split(self.token_s[order], np.cumsum(counts)[:-1])
        frame["token_s"] = pd.Series(times, index=frame.index, dtype=object)
        return frame


@dataclass(slots=True)
class RecordBuilder:
    """Collects a run's rows cheaply while it goes on (typed arrays: 8 bytes a number).

    ``start_s``, ``duration_s`` and ``model_s`` have one entry an iteration; ``model_s`` none where it is the duration.
    ``batches`` has seven a batch: the iterations that ran it in turn, decodes, prefill tokens, requests, preemptions,
    KV blocks in use during the first of those iterations, and the requests that each of them gave a token to, which
    ``emitted`` lists once. ``blocks_taken`` names, for each block that decodes took during a batch, the iteration of
    the run from which on it was in use. ``stage_start_s`` and ``stage_end_s`` have an entry for every stage of every
    iteration, none without a pipeline.
    """

    start_s: array[float] = field(default_factory=lambda: array("d"))
    duration_s: array[float] = field(default_factory=lambda: array("d"))
    model_s: array[float] = field(default_factory=lambda: array("d"))
    blocks_taken: array[int] = field(default_factory=lambda: array("q"))
    batches: array[int] = field(default_factory=lambda: array("q"))
    emitted: array[int] = field(default_factory=lambda: array("q"))
    stage_start_s: array[float] = field(default_factory=lambda: array("d"))
    stage_end_s: array[float] = field(default_factory=lambda: array("d"))
    num_stages: int = 0

    def add_stages(self, start_s: FloatArray, end_s: FloatArray, model_s: float) -> None:
        """One iteration of a pipeline: when each stage began and ended it."""
        self.num_stages = len(start_s)
        self.stage_start_s.extend(start_s)
        self.stage_end_s.extend(end_s)
        self.start_s.append(start_s[0])
        self.duration_s.append(end_s[-1] - start_s[0])
        self.model_s.append(model_s)

    def iterations(self) -> Iterations:
        """The columns so far."""
        num_iterations, *columns = self._batch_columns()
        decodes, prefill, requests, preemptions, kv_blocks, _ = (
            np.repeat(column, num_iterations) for column in columns
        )
        taken = np.cumsum(np.bincount(np.array(self.blocks_taken, dtype=np.int64), minlength=len(decodes)))
        firsts = np.cumsum(num_iterations) - num_iterations  # of each batch
        return Iterations(
            start_s=np.array(self.start_s),
            duration_s=np.array(self.duration_s),
            model_s=np.array(self.model_s or self.duration_s),
            num_tokens=decodes + prefill,
            num_decodes=decodes,
            num_prefill_tokens=prefill,
            num_requests=requests,
            kv_blocks_used=kv_blocks + taken - np.repeat(taken[firsts], num_iterations),
            num_preemptions=preemptions,
            stage_start_s=self._by_stage(self.stage_start_s),
            stage_end_s=self._by_stage(self.stage_end_s),
        )

    def position(self) -> tuple[int, int, int]:
        """How far the record is: iterations, batches, and requests in ``emitted``."""
        return len(self.start_s), len(self.batches) // _BATCH_COLUMNS, len(self.emitted)

    def tokens(self, since: tuple[int, int, int] = (0, 0, 0)) -> tuple[IntArray, FloatArray]:
        """Request index and time of every token after the position ``since``, in order of time.

        A token comes at the end of its iteration.
        """
        iteration, batch, emitted = since
        stage_end_s = self._by_stage(self.stage_end_s)
        if stage_end_s is None:
            ends_s = np.array(self.start_s[iteration:]) + np.array(self.duration_s[iteration:])
        else:
            ends_s = stage_end_s[iteration:, -1]
        num_iterations, *_, num_emitted = self._batch_columns(batch)
        counts = np.repeat(num_emitted, num_iterations)
        # A token's place in ``emitted``: its place in the iteration, from where the batch's requests begin.
        begins = np.repeat(np.cumsum(num_emitted) - num_emitted, num_iterations)
        shift = begins - (np.cumsum(counts) - counts)
        places = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(shift, counts)
        return np.array(self.emitted[emitted:], dtype=np.int64)[places], np.repeat(ends_s, counts)

    def _by_stage(self, times_s: array[float]) -> FloatArray | None:
        return np.array(times_s).reshape(-1, self.num_stages) if self.num_stages else None

    def _batch_columns(self, since: int = 0) -> list[IntArray]:
        """The columns of ``batches`` from batch ``since`` on."""
        rows = np.array(self.batches[since * _BATCH_COLUMNS :], dtype=np.int64)
        return list(rows.reshape(-1, _BATCH_COLUMNS).T)


class GapReader:
    """The gaps between tokens that ended since it was last asked, from a record that is still being built."""

    def __init__(self, builder: RecordBuilder, num_requests: int) -> None:
        self._builder = builder
        self._position = builder.position()
        self._last_token_s = np.full(num_requests, np.nan)

    def read(self) -> FloatArray:
        """Seconds, ordered by request and then by time; the first token of a request ends no gap."""
        request, token_s = self._builder.tokens(self._position)
        self._position = self._builder.position()
        order = np.argsort(narrow(request, len(self._last_token_s)), kind="stable")
        request, token_s = request[order], token_s[order]
        before_s = np.empty_like(token_s)
        before_s[1:] = token_s[:-1]
        first = np.ones(len(request), dtype=bool)
        first[1:] = request[1:] != request[:-1]
        before_s[first] = self._last_token_s[request[first]]
        self._last_token_s[request] = token_s  # of a request's several tokens the last one stays
        gaps_s: FloatArray = (token_s - before_s)[~np.isnan(before_s)]
        return gaps_s


def busy_span_s(start_s: FloatArray, end_s: FloatArray) -> float:
    """Seconds covered by the intervals from ``start_s`` to ``end_s``, both ascending: overlaps count once."""
    if not len(start_s):
        return 0.0
    begins_s = np.maximum(start_s[1:], end_s[:-1])
    return float(end_s[0] - start_s[0] + (end_s[1:] - begins_s).sum())


def narrow(groups: IntArray, num_groups: int) -> npt.NDArray[np.integer]:
    """The same numbers in 16 bits where they fit: numpy sorts those by radix, several times quicker."""
    return groups.astype(np.uint16) if num_groups <= 1 << 16 else groups
