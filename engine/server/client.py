"""A client that replays a workload open-loop over streaming completions and writes down when every token came.

Open-loop: a request is sent at its own arrival whatever the others do, so a server that falls behind is measured
falling behind. Every stream is held at once, however many there are; a saturated workload sends all of them at time 0
and leaves the queueing to the server, as ``vllm bench serve --request-rate inf`` does. Latencies count from the planned
arrival: what the client itself is late (``Replay.late_s``) counts against the server and is told.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import aiohttp

from ..run import Monitor, Progress
from .error import ConnectionLostError, ServerError
from .stream import TokenStream

COMPLETIONS = "/v1/completions"

#: Seconds between two looks at the whole: stalls, the server's own health, the monitor.
WATCH_S = 0.1
#: Seconds between two reads of the server's metrics, and the largest share of the time that reading them may take: a
#: page that holds the server's tokens up for long is read seldom.
METRICS_S = 2.0
METRICS_SHARE = 0.001
#: An idle connection is given up before a server would close it (uvicorn: 5 s), which would fail the next request.
KEEP_ALIVE_S = 2.0

_CONNECT_TIMEOUT_S = 30.0

#: Open files of this process that are no stream.
_OTHER_FILES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionCall:
    """One request to send: when (seconds from the start), its prompt as token ids, and the tokens to generate."""

    arrival_s: float
    prompt: Sequence[int]
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay brought, times in seconds from its start.

    ``streams`` and ``sent_s`` (when it was sent, NaN: never) have an entry a call, in their order. ``late_s`` is
    the longest that the client itself was late: a request sent after its arrival, or its loop, which reads the streams,
    awake after its time. ``metrics`` are the texts of ``/metrics`` before, during and after; empty where the server has
    no such page. ``stopped`` is what the monitor said when it ended the run, None when every stream ended by itself.
    """

    streams: Sequence[TokenStream]
    sent_s: Sequence[float]
    late_s: float
    metrics: Sequence[str]
    stopped: str | None


def served_model_id(base_url: str) -> str:
    """The first model that ``/v1/models`` lists. Raises ServerError when it lists none."""

    async def fetch() -> str:
        async with _session() as session:
            text = await _get_text(session, f"{base_url}/v1/models")
        try:
            return str(json.loads(text or "")["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise ServerError(f"{base_url}/v1/models lists no model") from None

    return asyncio.run(fetch())


def replay(
    base_url: str,
    calls: Sequence[CompletionCall],
    *,
    model: str,
    stall_timeout_s: float,
    death: Callable[[], str | None] = lambda: None,
    monitor: Monitor | None = None,
) -> Replay:
    """Send ``calls`` (in order of arrival) to ``base_url`` and read every stream to its end.

    ``death`` says how a server of ours ended, None while it runs. ``monitor`` is asked every ``WATCH_S`` seconds.
    Raises ServerError, and drops all other streams, at the first request that fails or brings another number of tokens
    than asked, when no stream has brought anything for ``stall_timeout_s`` while some wait, or when the server died.
    """
    _allow_sockets(len(calls))
    run = _Replay(base_url, calls, model, stall_timeout_s, death, monitor)
    with _no_garbage_collection():
        return asyncio.run(run.run())


class _StopRun(Exception):  # noqa: N818
    """The monitor ends the run."""


class _Replay:
    def __init__(
        self,
        base_url: str,
        calls: Sequence[CompletionCall],
        model: str,
        stall_timeout_s: float,
        death: Callable[[], str | None],
        monitor: Monitor | None,
    ) -> None:
        self.base_url = base_url
        self.calls = calls
        self.bodies = [_body(call, model) for call in calls]  # made before the clock starts
        self.stall_timeout_s = stall_timeout_s
        self.death = death
        self.monitor = monitor
        self.streams = [TokenStream() for _ in calls]
        self.gaps_s: list[float] = []
        self.metrics: list[str] = []
        self.num_open = self.num_finished = 0
        self.sent_s = [float("nan")] * len(calls)
        self.late_s = 0.0
        self.origin_s = self.heard_s = 0.0

    async def run(self) -> Replay:
        stopped: str | None = None
        async with _session() as session:
            await self._read_metrics(session)
            self.origin_s = self.heard_s = perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    streams = group.create_task(self._send_all(session))
                    watchers = [group.create_task(watch) for watch in (self._watch(), self._sample_metrics(session))]
                    await streams
                    for watcher in watchers:
                        watcher.cancel()
            except BaseExceptionGroup as group_of:
                first = _first_of(group_of)
                if not isinstance(first, _StopRun):
                    raise first from None
                stopped = str(first)
            await self._read_metrics(session)
        return Replay(
            streams=self.streams, sent_s=self.sent_s, late_s=self.late_s, metrics=self.metrics, stopped=stopped
        )

    def _now(self) -> float:
        return perf_counter() - self.origin_s

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as group:
            for index, call in enumerate(self.calls):
                wait_s = call.arrival_s - self._now()
                if wait_s > 0.0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._stream(session, index))

    async def _stream(self, session: aiohttp.ClientSession, index: int) -> None:
        call, stream = self.calls[index], self.streams[index]
        if not self.num_open:
            self.heard_s = perf_counter()  # the quiet before this request was nobody's stall
        self.num_open += 1
        self.sent_s[index] = self._now()
        self.late_s = max(self.late_s, self.sent_s[index] - call.arrival_s)
        try:
            async with session.post(self.base_url + COMPLETIONS, data=self.bodies[index]) as response:
                if response.status != 200:
                    text = (await response.text(errors="replace"))[:300]
                    raise ServerError(f"request {index} got HTTP {response.status}: {text}")
                async for data in response.content.iter_any():
                    self.heard_s = perf_counter()
                    self.gaps_s += stream.feed(data, self.heard_s - self.origin_s)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(
                f"request {index} lost its connection after {stream.num_tokens} of {call.output_tokens} tokens "
                f"({type(error).__name__}: {error})"
            ) from None
        if stream.num_tokens != call.output_tokens:
            raise ServerError(
                f"request {index} brought {stream.num_tokens} tokens, {call.output_tokens} were asked "
                f"(finish_reason {stream.finish_reason})"
            )
        self.num_open -= 1
        self.num_finished += 1

    async def _watch(self) -> None:
        while True:
            due_s = perf_counter() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self.late_s = max(self.late_s, perf_counter() - due_s)
            if (death := self.death()) is not None:
                raise ServerError(f"{death} during the run")
            quiet_s = perf_counter() - self.heard_s
            if self.num_open and quiet_s > self.stall_timeout_s:
                raise ServerError(
                    f"the server stalled: nothing came on {self.num_open} open streams for {quiet_s:.1f} s"
                )
            if self.monitor is not None:
                self._ask(self.monitor)

    def _ask(self, monitor: Monitor) -> None:
        gaps_s, self.gaps_s = self.gaps_s, []
        progress = Progress(
            now_s=self._now(), num_finished=self.num_finished, num_requests=len(self.calls), gaps_s=gaps_s
        )
        if (stopped := monitor(progress)) is not None:
            raise _StopRun(stopped)

    async def _sample_metrics(self, session: aiohttp.ClientSession) -> None:
        pause_s = METRICS_S
        while self.metrics:
            await asyncio.sleep(pause_s)
            began_s = perf_counter()
            await self._read_metrics(session)
            pause_s = max(METRICS_S, (perf_counter() - began_s) / METRICS_SHARE)

    async def _read_metrics(self, session: aiohttp.ClientSession) -> None:
        text = await _get_text(session, f"{self.base_url}/metrics")
        if text is not None:
            self.metrics.append(text)


def _body(call: CompletionCall, model: str) -> bytes:
    """The JSON of one request: exactly ``output_tokens`` tokens, greedily, with usage at the end where offered.

    Not with usage in every event: vLLM offers that, but on a CPU it made its tokens 15 to 25% slower.
    """
    return json.dumps(
        {
            "model": model,
            "prompt": list(call.prompt),
            "max_tokens": call.output_tokens,
            "min_tokens": call.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        separators=(",", ":"),
    ).encode()


def _session() -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        headers=headers,
    )


async def _get_text(session: aiohttp.ClientSession, url: str) -> str | None:
    """The text of a page; None where there is none."""
    try:
        async with session.get(url) as response:
            return await response.text(errors="replace") if response.status == 200 else None
    except (aiohttp.ClientError, OSError):
        return None


def _first_of(group: BaseExceptionGroup) -> BaseException:
    """What came first; the groups inside are those of the tasks."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _allow_sockets(num_streams: int) -> None:
    """Raise this process's limit on open files as far as it may go, so that every stream has a socket.

    Raises ServerError when that is not enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_streams + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ServerError(
                f"{num_streams} streams at once need {needed} open files, the limit is {hard} (ulimit -n)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection over everything that torch and pandas have loaded would hold up the clock for tens of ms."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
