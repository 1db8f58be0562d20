"""Processes on this machine beside the one that proposes: workers of a study, and runs that nothing disturbs."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Event
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

MAX_WORKERS = 8
"""Each holds the tokens of a whole trace, some hundred MB."""

STOP_LIMIT_S = 5.0

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_cores() -> int:
    """Workers worth having on a modelled device: one for each core of this process; 1 where processes cannot fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return min(MAX_WORKERS, len(os.sched_getaffinity(0)))


class LocalWorkers:
    """Processes that each call ``work`` with their number, from ``begin`` on; a context manager, which waits for them
    to return, or interrupts them when it is left with an exception.

    Forked, they share workload and tables with this process; that must happen before it opens a storage, whose
    connections no two processes can share. Where this process may have begun to use a GPU they are ``spawned`` anew
    instead; ``work`` is then a function of a module.
    """

    def __init__(self, count: int, work: Callable[[int], object], *, spawned: bool = False) -> None:
        context: BaseContext = multiprocessing.get_context("spawn" if spawned else "fork")
        self._go = context.Event()
        arguments = (work, self._go, os.getpid())
        self._processes = [
            context.Process(target=_work, args=(number, *arguments), daemon=True)  # type: ignore[attr-defined]
            for number in range(count)
        ]
        for process in self._processes:
            process.start()

    def begin(self) -> None:
        """Let them work."""
        self._go.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self._processes:
            if (kind is not None or not self._go.is_set()) and process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        try:
            for process in self._processes:
                process.join(STOP_LIMIT_S if kind is not None else None)
        finally:  # a second Ctrl-C comes here at once
            for process in self._processes:
                process.kill()


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """``function`` of every item, in their order, one process a core: for runs on modelled devices, whose time no
    neighbour disturbs. Forked, the processes share workload and tables with this one."""
    num_processes = min(num_cores(), len(items))
    if num_processes < 2:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_adopt, initargs=(function,)) as pool:
        yield from pool.map(_call_adopted, items)


def is_orphan(parent: int) -> bool:
    """Whether the process that started this one has ended."""
    return os.getppid() != parent


def _work(number: int, work: Callable[[int], object], go: Event, parent: int) -> None:
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        while not go.wait(1.0):
            if is_orphan(parent):
                return
        work(number)
    except KeyboardInterrupt:
        return


def _interrupt_once(signum: int, frame: FrameType | None) -> None:
    """The terminal sends Ctrl-C to every process, and the parent does so again: giving a trial back is not
    interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


_adopted: Callable[[Any], Any] | None = None


def _adopt(function: Callable[[Any], Any]) -> None:
    global _adopted
    _adopted = function


def _call_adopted(item: Any) -> Any:
    if _adopted is None:
        raise RuntimeError("a process runs before it was given its function")
    return _adopted(item)
