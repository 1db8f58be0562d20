"""A lock between processes of one machine that names its holder, and that the kernel releases when the holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ...kernels.errors import TileBudgetError
from .holder import Holder
from .pause import Pause

#: A wait that is no longer than this is not worth a word.
QUIET_S = 2.0


class LockedError(TileBudgetError):
    """Another process holds what was asked for."""


class FileLock:
    """An exclusive ``flock`` on the file at ``path``, which says who holds it while it is held and is removed after.

    A context manager. Where another process holds the lock, it raises LockedError with that process's name and
    ``advice``; with ``on_wait``, it waits instead, and tells that once when it takes longer than ``QUIET_S``. Threads
    of one process exclude each other too.
    """

    def __init__(
        self, path: Path, what: str, *, advice: str = "", on_wait: Callable[[str], None] | None = None
    ) -> None:
        self._path = path
        self._what = what
        self._advice = advice
        self._on_wait = on_wait
        self._handle: int | None = None

    def __enter__(self) -> Self:
        told, quiet_until_s, pause = False, time.monotonic() + QUIET_S, Pause()
        while self._handle is None:
            handle = _open(self._path)
            try:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    message = f"{self._what} is in use by {_read_holder(handle)}{self._advice}"
                    if self._on_wait is None:
                        raise LockedError(message) from None
                    if not told and time.monotonic() < quiet_until_s:
                        pause()
                        continue
                    if not told:
                        self._on_wait(message)
                        told = True
                    fcntl.flock(handle, fcntl.LOCK_EX)
                # A holder removes the file when it is done: what was waited for may be no file any more.
                if _is_file(handle, self._path):
                    _write_holder(handle)
                    self._handle, handle = handle, -1
                    _held.add(self)
            finally:
                if handle >= 0:
                    os.close(handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._handle is None:  # a fork of the holder
            return
        handle, self._handle = self._handle, None
        _held.discard(self)
        try:
            self._path.unlink(missing_ok=True)
        except PermissionError:  # made by another user, whose process was killed
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)

    def _forget(self) -> None:
        """In a fork of the holder: let go of its handle, or the lock would outlive the holder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_held() -> None:
    for lock in list(_held):
        lock._forget()
    _held.clear()


os.register_at_fork(after_in_child=_forget_held)


def _open(path: Path) -> int:
    try:  # not to be created where it is there: the kernel refuses that for another user's file in /tmp
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if os.fstat(handle).st_uid == os.geteuid():
            os.fchmod(handle, 0o666)
        return handle


def _is_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    os.ftruncate(handle, 0)
    with suppress(OSError):  # on a full disk the lock holds all the same, without a name
        os.pwrite(handle, json.dumps(Holder.here().to_json()).encode(), 0)


def _read_holder(handle: int) -> str:
    try:
        return str(Holder.from_json(json.loads(os.pread(handle, 65536, 0))))
    except (ValueError, KeyError, TypeError):  # it is just being written
        return "another process"
