"""The stage processes of one distributed executor, as the driver sees them: asked, listened to, mourned and ended."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from time import perf_counter
from typing import NoReturn, TypeVar

from ...kernels.errors import TileBudgetError
from .launch import Launch, Torchrun
from .messages import (
    NAMED_ERRORS,
    STAGE_TIMEOUT_S,
    AskClock,
    Clock,
    Failed,
    Hello,
    Ready,
    Setup,
    Stop,
    admit,
    host_id,
)

Reply = TypeVar("Reply")

#: Round trips by which the clock of another host is compared; the quickest counts.
CLOCK_ROUNDS = 20
#: Seconds that a failure may take to show in the stage that caused it, after the first one noticed.
BLAME_S = 1.0
#: Seconds that a stage gets to end by itself.
STOP_S = 5.0


class StageFailedError(TileBudgetError):
    """A stage process died, or failed in a way that has no error of its own."""


class StageGroup:
    """Starts the stage processes of ``setup`` and waits until all have loaded their part.

    ``clock_offsets_s[rank]`` is that rank's ``perf_counter`` less the driver's: 0 on this host, on another one measured
    here by the quickest of some round trips, which is right to half of that. Any failure ends all of the processes and
    raises a ``StageFailedError`` that names the stage, or what the stage itself raised where ``NAMED_ERRORS`` has it.
    """

    def __init__(self, setup: Setup, torchrun: Torchrun | None) -> None:
        self._partition = setup.partition
        self._connections: dict[int, Connection] = {}
        self._hello: dict[int, Hello] = {}
        self.alive = True
        self._launch = Launch(setup.partition.num_ranks, torchrun)
        try:
            self._welcome()
            self.send(setup)
            ready = self._replies(Ready)
            self.described = ready[0].described
            self.clock_offsets_s = [self._clock_offset_s(rank) for rank in range(setup.partition.num_ranks)]
        except BaseException:
            self.close(failed=True)
            raise

    @property
    def num_hosts(self) -> int:
        """Hosts that the processes run on."""
        return len({hello.host for hello in self._hello.values()})

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank, each on its own host."""
        return tuple(self._hello[rank].pid for rank in sorted(self._hello))

    def send(self, message: object) -> None:
        """Tell every process."""
        for rank, connection in self._connections.items():
            try:
                connection.send(message)
            except OSError:
                self._fail(rank, None)

    def ask(self, question: object, kind: type[Reply]) -> list[Reply]:
        """Tell every process, and return their answers by rank."""
        self.send(question)
        return self._replies(kind)

    def listen(self, timeout_s: float) -> Iterator[tuple[int, object]]:
        """What has been said, with the rank that said it, once any process has, or ``timeout_s`` are over."""
        ranks = {id(connection): rank for rank, connection in self._connections.items()}
        for ready in wait(list(self._connections.values()), max(timeout_s, 0.0)):
            rank = ranks[id(ready)]
            try:
                message = self._connections[rank].recv()
            except (EOFError, OSError):
                self._fail(rank, None)
            if isinstance(message, Failed):
                self._fail(rank, message)
            yield rank, message

    def give_up(self, rank: int) -> NoReturn:
        """End everything because ``rank`` has said nothing for too long."""
        self.close(failed=True)
        raise StageFailedError(f"{self._name(rank)} has said nothing for {STAGE_TIMEOUT_S:.0f} s")

    def close(self, *, failed: bool = False) -> None:
        """End all processes: they are asked to, or, once something ``failed``, cut off."""
        if not self.alive:
            return
        self.alive = False
        for connection in self._connections.values():
            if not failed:
                try:
                    connection.send(Stop())
                    continue
                except OSError:
                    pass
            connection.close()
        self._launch.close(patience_s=0.5 if failed else STOP_S)
        for connection in self._connections.values():
            connection.close()

    def _welcome(self) -> None:
        """Wait until every process has introduced itself."""
        deadline_s = perf_counter() + STAGE_TIMEOUT_S
        listener, num_ranks = self._launch.listener, self._partition.num_ranks
        while len(self._connections) < num_ranks:
            missing = [rank for rank in range(num_ranks) if rank not in self._connections]
            if perf_counter() > deadline_s:
                self.give_up(missing[0])
            for rank in missing:
                process = self._launch.processes.get(rank)
                if process is not None and process.poll() is not None:
                    self._fail(rank, None)
            if not select.select([listener], [], [], 0.2)[0]:
                continue
            connection = admit(listener.accept()[0], self._launch.meeting.key)
            if connection is not None:
                hello = connection.recv()
                self._connections[hello.rank] = connection
                self._hello[hello.rank] = hello
        self._connections = dict(sorted(self._connections.items()))

    def _replies(self, kind: type[Reply]) -> list[Reply]:
        found: dict[int, Reply] = {}
        deadline_s = perf_counter() + STAGE_TIMEOUT_S
        while len(found) < len(self._connections):
            if perf_counter() > deadline_s:
                self.give_up(next(rank for rank in self._connections if rank not in found))
            for rank, message in self.listen(deadline_s - perf_counter()):
                if isinstance(message, kind):
                    found[rank] = message
        return [found[rank] for rank in sorted(found)]

    def _clock_offset_s(self, rank: int) -> float:
        if self._hello[rank].host == host_id():
            return 0.0
        best_s, offset_s = float("inf"), 0.0
        for _ in range(CLOCK_ROUNDS):
            asked_s = perf_counter()
            self._connections[rank].send(AskClock())
            clock = next(message for _, message in self.listen(STAGE_TIMEOUT_S) if isinstance(message, Clock))
            answered_s = perf_counter()
            if answered_s - asked_s < best_s:
                best_s, offset_s = answered_s - asked_s, clock.now_s - (asked_s + answered_s) / 2
        return offset_s

    def _fail(self, rank: int, failed: Failed | None) -> NoReturn:
        """End everything and raise the error of the stage that is to blame: one that died, before one that raised an
        error of its own, before one that lost its peer. ``failed`` is None for one that died."""
        seen = {rank: failed}
        deadline_s = perf_counter() + BLAME_S
        # One that died may be noticed by its neighbours first.
        while all(reason is not None and reason.by_peer for reason in seen.values()) and perf_counter() < deadline_s:
            others = [connection for other, connection in self._connections.items() if other not in seen]
            for ready in wait(others, max(deadline_s - perf_counter(), 0.0)):
                other = next(r for r, connection in self._connections.items() if connection is ready)
                try:
                    message = self._connections[other].recv()
                    if isinstance(message, Failed):
                        seen[other] = message
                except (EOFError, OSError):
                    seen[other] = None
        to_blame = min(seen, key=lambda r: (_order_of_blame(seen[r]), r))
        reason = seen[to_blame]
        self.close(failed=True)
        where = self._name(to_blame)
        if reason is None:
            raise StageFailedError(f"{where} {self._end_of(to_blame)}")
        if reason.kind in NAMED_ERRORS:
            raise NAMED_ERRORS[reason.kind](reason.message)
        raise StageFailedError(f"{where}: {reason.kind}: {reason.message}")

    def _name(self, rank: int) -> str:
        partition, hello = self._partition, self._hello.get(rank)
        name = f"stage {partition.stage_of(rank)} of {partition.num_stages} (rank {rank} of {partition.num_ranks}"
        return name + (")" if hello is None else f", process {hello.pid} on {hello.host_name})")

    def _end_of(self, rank: int) -> str:
        """How a process ended, where it was started here."""
        process = self._launch.processes.get(rank)
        code = None if process is None else process.poll()
        if code is None:
            return "ended without a word"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _order_of_blame(reason: Failed | None) -> int:
    return 0 if reason is None else 1 + reason.by_peer
