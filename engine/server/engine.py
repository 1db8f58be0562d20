"""The engine that is somebody else's server: the same workload in, the same record out, seen from the client.

A run starts the server with the budget asked for (its budget is fixed when it starts), waits for its health, warms it
up, replays the workload and stops it; each run has a log of its own. With ``base_url`` the server runs already: it is
measured as it is, and neither started nor stopped.

What a client cannot see has no data: single iterations (and so pipeline bubbles and tile waste), and when a request was
first scheduled. ``Requests.first_scheduled_s`` is NaN.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from time import monotonic, sleep

import numpy as np

from ..config import EngineConfig
from ..engine import Engine
from ..executor import AnyExecutor
from ..record import FloatArray, Iterations, Requests, RunRecord, busy_span_s
from ..request import Workload
from ..run import Monitor
from ..slo import REFERENCE_CONTEXT_TOKENS, REFERENCE_NUM_SEQS, ReferenceDecode
from .client import CompletionCall, Replay, replay, served_model_id
from .command import CommandLine, check_words
from .error import ConnectionLostError, ServerError
from .metrics import ServerView, read_counters
from .process import ServerProcess, free_port, is_healthy

#: Prompt ids are drawn below this where the model's vocabulary is not known: every tokenizer has as many.
DEFAULT_VOCAB_SIZE = 1000

#: Requests that a fresh server serves before it is measured, and their tokens; none of their prompts comes again.
NUM_WARMUP = 4
WARMUP_OUTPUT_TOKENS = 8

#: Iterations of full decodes that the reference wants, beside those that the prefills take.
REFERENCE_ITERATIONS = 32

#: How long a lost connection waits for the news that the server died.
_DEATH_NEWS_S = 2.0

_LOG_NAME = re.compile(r"server-(\d+)-")


class ServerEngine:
    """Runs workloads on an OpenAI-compatible server through ``/v1/completions``.

    Exactly one of ``command`` (starts a server for each run; logs go to ``log_dir``) and ``base_url``. ``port`` None
    takes a free one. Prompts without token ids get random ones below ``vocab_size``: the same in every run on a server
    of ours, new ones in every run on one that runs already, whose prefix cache would know them.
    """

    #: Time is measured.
    virtual_time = False

    def __init__(
        self,
        *,
        command: CommandLine | None = None,
        base_url: str | None = None,
        log_dir: Path | None = None,
        facts: Mapping[str, str | int | float] | None = None,
        max_position: int = 1 << 30,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        port: int | None = None,
        start_timeout_s: float = 600.0,
        stall_timeout_s: float = 30.0,
    ) -> None:
        if (command is None) == (base_url is None):
            raise ValueError("base_url and command: exactly one of them must be given")
        if command is not None and log_dir is None:
            raise ValueError("log_dir=None: a server that is started needs a folder for its logs")
        for name, value in (("start_timeout_s", start_timeout_s), ("stall_timeout_s", stall_timeout_s)):
            if not value > 0.0:
                raise ValueError(f"{name}={value}: must be above 0 seconds")
        if port is not None and not 1 <= port <= 65535:
            raise ValueError(f"port={port}: must be in 1..65535")
        self.command = command
        self.base_url = None if base_url is None else base_url.rstrip("/").removesuffix("/v1")
        self.log_dir = log_dir
        self.max_position = max_position
        self.vocab_size = vocab_size
        self.port = port
        self.start_timeout_s = start_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self._facts = dict(facts or {})

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype and the server, for the run folder."""
        where = {"base_url": self.base_url} if self.base_url is not None else {}
        return {"executor": "server", **self._facts, **where}

    def run(self, workload: Workload, config: EngineConfig, *, monitor: Monitor | None = None) -> RunRecord:
        """Serve ``workload`` under ``config`` on a server of that budget and return the record.

        Requests longer than ``max_model_len`` are not sent but recorded as rejected. The record's ``server`` has what
        the server told of itself. Raises ServerError, which names the log, when the server fails in any way.
        """
        sent = [index for index, one in enumerate(workload.requests) if one.total_tokens <= config.max_model_len]
        draw = [config.seed] if self.base_url is None else [config.seed, _fresh()]
        calls = [
            CompletionCall(
                arrival_s=workload.requests[index].arrival_s,
                prompt=workload.requests[index].prompt_token_ids
                or self._draw([*draw, index], workload.requests[index].prompt_tokens),
                output_tokens=workload.requests[index].output_tokens,
            )
            for index in sent
        ]
        with self._open(config) as (base_url, death):
            model = served_model_id(base_url)
            self._warm_up(base_url, model, config, death)
            done = replay(
                base_url, calls, model=model, stall_timeout_s=self.stall_timeout_s, death=death, monitor=monitor
            )
        return self._record(workload, config, sent, done)

    def reference_decode(self, config: EngineConfig) -> ReferenceDecode:
        """The reference decode iteration, seen from the client: the median gap between tokens while 32 requests at 4096
        tokens of context decode at once, or as many and as long as ``config`` allows.

        The requests begin to decode one after the other, so their outputs are long enough for the first still to decode
        when the last has been prefilled; only gaps in which all of them decode count. ``spread_s`` is the distance
        between the 10th and 90th percentile of these gaps.
        Raises ServerError when the server fails, or never decodes all of them at once.
        """
        num_seqs = min(REFERENCE_NUM_SEQS, config.max_num_seqs)
        budget = config.token_budget or REFERENCE_CONTEXT_TOKENS
        context_tokens = min(REFERENCE_CONTEXT_TOKENS, config.max_model_len, self.max_position)
        chunk_tokens = max(1, budget - num_seqs + 1)
        # Of the context c a prompt takes p and the outputs c - p = iterations(p) + what the reference wants.
        prompt_tokens = int((context_tokens - REFERENCE_ITERATIONS - 2) / (1.0 + num_seqs / chunk_tokens))
        if prompt_tokens < 1:
            raise ServerError(
                f"{num_seqs} requests of {context_tokens} tokens never decode at once under a budget of {budget}"
            )
        output_tokens = REFERENCE_ITERATIONS + ceil(prompt_tokens * num_seqs / chunk_tokens) + 1
        calls = [
            CompletionCall(
                arrival_s=0.0, prompt=self._draw([_fresh(), index], prompt_tokens), output_tokens=output_tokens
            )
            for index in range(num_seqs)
        ]
        with self._open(config) as (base_url, death):
            model = served_model_id(base_url)
            self._warm_up(base_url, model, config, death)
            done = replay(base_url, calls, model=model, stall_timeout_s=self.stall_timeout_s, death=death)
        times_s = [stream.token_times() for stream in done.streams]
        begin_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
        gaps_s = np.concatenate([np.diff(times[(times >= begin_s) & (times <= end_s)]) for times in times_s])
        if len(gaps_s) < num_seqs:
            raise ServerError(f"the server never decoded {num_seqs} requests at once; its KV cache may be too small")
        low_s, middle_s, high_s = np.quantile(gaps_s, (0.1, 0.5, 0.9)).tolist()
        return ReferenceDecode(
            duration_s=middle_s,
            spread_s=high_s - low_s,
            num_seqs=num_seqs,
            context_tokens=prompt_tokens,
            note=f"the median of {len(gaps_s)} gaps between tokens of {num_seqs} requests that decode at once on the "
            f"server at {prompt_tokens} to {prompt_tokens + output_tokens} tokens of context, network included",
        )

    @contextmanager
    def _open(self, config: EngineConfig) -> Iterator[tuple[str, Callable[[], str | None]]]:
        """The address of a healthy server, and how to learn of its death. A ServerError from inside names the log, and
        the server's death where that was the cause."""
        if self.command is None or self.log_dir is None:
            assert self.base_url is not None
            if not is_healthy(self.base_url):
                raise ServerError(f"no healthy server at {self.base_url}")
            yield self.base_url, lambda: None
            return
        port = self.port or free_port()
        log = _next_log(self.log_dir, config.token_budget)
        server = ServerProcess(check_words(self.command(config, port)), port=port, log=log)
        try:
            with server:
                try:
                    server.wait_until_healthy(self.start_timeout_s)
                    yield server.base_url, server.death
                except ServerError as error:
                    raise _with_death(error, server.death) from None
        except ServerError as error:
            raise ServerError(f"{error}; log: {log}") from None

    def _warm_up(self, base_url: str, model: str, config: EngineConfig, death: Callable[[], str | None]) -> None:
        """Let the server compile and allocate what it does at its first requests."""
        prompt_tokens = max(1, min(config.token_budget or config.max_model_len, config.max_model_len // 2))
        output_tokens = min(WARMUP_OUTPUT_TOKENS, config.max_model_len - prompt_tokens)
        if output_tokens < 1:
            return
        calls = [
            CompletionCall(
                arrival_s=0.0, prompt=self._draw([_fresh(), index], prompt_tokens), output_tokens=output_tokens
            )
            for index in range(min(NUM_WARMUP, config.max_num_seqs))
        ]
        replay(base_url, calls, model=model, stall_timeout_s=self.stall_timeout_s, death=death)

    def _draw(self, seed: list[int], num_tokens: int) -> list[int]:
        ids: list[int] = np.random.default_rng(seed).integers(0, self.vocab_size, num_tokens).tolist()
        return ids

    def _record(self, workload: Workload, config: EngineConfig, sent: list[int], done: Replay) -> RunRecord:
        requests = workload.requests
        times_s = [stream.token_times() for stream in done.streams]
        token_s = np.concatenate([*times_s, np.empty(0)])
        token_request = np.repeat(np.array(sent, dtype=np.int64), [len(times) for times in times_s])
        order = np.argsort(token_s, kind="stable")
        num_generated = np.zeros(len(requests), dtype=np.int64)
        num_generated[sent] = [len(times) for times in times_s]
        status = ["rejected_model_len"] * len(requests)
        for index in sent:
            finished = num_generated[index] == requests[index].output_tokens
            status[index] = "finished" if finished else "unfinished"
        counters = read_counters(done.metrics)
        arrival_s = np.array([one.arrival_s for one in requests])
        sent_s = np.full(len(requests), np.nan)
        sent_s[sent] = done.sent_s
        return RunRecord(
            config=config,
            num_kv_blocks=counters.num_kv_blocks,
            device=self.describe(),
            workload=workload.name,
            saturated=workload.saturated,
            iterations=Iterations.empty(),
            requests=Requests(
                arrival_s=arrival_s,
                prompt_tokens=np.array([one.prompt_tokens for one in requests], dtype=np.int64),
                output_tokens=np.array([one.output_tokens for one in requests], dtype=np.int64),
                first_scheduled_s=np.full(len(requests), np.nan),
                num_generated=num_generated,
                num_preemptions=np.zeros(len(requests), dtype=np.int64),
                status=tuple(status),
            ),
            token_request=token_request[order],
            token_s=token_s[order],
            overhead_s=0.0,
            stopped=done.stopped,
            server=ServerView(
                counters=counters,
                busy_s=_busy_s(arrival_s[sent], times_s),
                sent_s=sent_s,
                late_s=done.late_s,
                event_gaps_s=np.concatenate([*(stream.event_gaps() for stream in done.streams), np.empty(0)]),
                num_shared_events=sum(count > 1 for stream in done.streams for count in stream.event_tokens),
            ),
        )


def _busy_s(arrival_s: FloatArray, times_s: list[FloatArray]) -> float:
    """Seconds during which a request was in flight: each from its arrival to its last token."""
    begins_s = np.array([begin_s for begin_s, times in zip(arrival_s, times_s, strict=True) if len(times)])
    ends_s = np.array([times[-1] for times in times_s if len(times)])
    return busy_span_s(begins_s, np.maximum.accumulate(ends_s))


def _with_death(error: ServerError, death: Callable[[], str | None]) -> ServerError:
    """``error``, with the end of the server where that broke the connection."""
    if not isinstance(error, ConnectionLostError):
        return error
    deadline_s = monotonic() + _DEATH_NEWS_S
    while (news := death()) is None and monotonic() < deadline_s:
        sleep(0.05)
    return error if news is None else ServerError(f"{news} during the run: {error}")


def _next_log(folder: Path, token_budget: int | None) -> Path:
    """A new file; those of a resumed study's earlier runs stay."""
    taken = [int(match[1]) for file in folder.glob("server-*.log") if (match := _LOG_NAME.match(file.name))]
    return folder / f"server-{max(taken, default=0) + 1:03d}-budget-{token_budget or 'unlimited'}.log"


def _fresh() -> int:
    """A seed that no earlier run had."""
    return int.from_bytes(os.urandom(8), "big")


#: What serves the runs of a study: an executor under our engine, or a server.
Target = AnyExecutor | ServerEngine

#: What runs workloads.
AnyEngine = Engine | ServerEngine


def engine_on(target: Target) -> AnyEngine:
    """The engine that runs workloads on ``target``: ours over an executor; a server is its own."""
    return target if isinstance(target, ServerEngine) else Engine(target)
