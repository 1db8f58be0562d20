"""Optuna's storages, opened by path or URL, and what is done when one is damaged, full or out of reach."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import optuna
from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError

from ...kernels.errors import TileBudgetError
from ..environment import mask_passwords
from .pause import Pause

_log = logging.getLogger(__name__)

JOURNAL_NAME = "study.journal"
DEFAULT_GRPC_PORT = 13000

#: How long to try again when a storage is out of reach; a trial that has run is not given up lightly.
RECONNECT_LIMIT_S = 300.0

Result = TypeVar("Result")


class StorageError(TileBudgetError):
    """The storage of a study is full, damaged or out of reach. What was recorded before is still there."""


def open_storage(storage: str | Path) -> BaseStorage:
    """Optuna's storage for a journal file (or the run folder that it is in), a database URL, or ``grpc://HOST:PORT``,
    Optuna's proxy in front of one.

    A journal whose end was cut off or garbled is repaired: the damaged end goes into a file beside it. Raises
    ValueError for a URL that nothing installed can open, StorageError when there is no such database or the journal is
    damaged before its end.
    """
    url = str(storage)
    if "://" not in url:
        return _open_journal(_journal_at(storage))
    parts = urlsplit(url)
    if parts.scheme == "grpc":
        return _open_proxy(url, parts.hostname, parts.port)
    if parts.scheme in ("postgres", "postgresql"):  # SQLAlchemy's default driver is an older one
        url = f"postgresql+psycopg{url[len(parts.scheme) :]}"
    try:
        # Connections that the server has closed meanwhile are replaced.
        return get_storage(RDBStorage(url, engine_kwargs={"pool_pre_ping": True}))
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        extra = "; pip install 'tilebudget[postgres]'" if parts.scheme.startswith("postgres") else ""
        rule = "must be a journal file, a run folder, grpc://HOST:PORT, or a database's URL such as postgresql://..."
        raise ValueError(f"storage={mask_passwords(url)!r}: {rule} ({error}{extra})") from None
    except _LOST as error:
        raise StorageError(f"{mask_passwords(url)}: {_first_line(error)}") from error


def is_there(storage: str | Path) -> bool:
    """Whether ``storage`` can be opened without beginning it: False for a journal file that does not exist yet."""
    return "://" in str(storage) or _journal_at(storage).is_file()


def _journal_at(storage: str | Path) -> Path:
    """The journal file that ``storage`` is, or that is in this run folder."""
    path = Path(storage)
    return path / JOURNAL_NAME if path.is_dir() else path


def patiently(what: str, step: Callable[[], Result], *, limit_s: float = RECONNECT_LIMIT_S) -> Result:
    """The result of ``step``, tried again while the connection to the storage is lost; ``step`` must bear being done
    twice. Raises StorageError, naming ``what``, after ``limit_s``."""
    until_s = time.monotonic() + limit_s
    pause, told = Pause(shortest_s=0.1, longest_s=5.0), False
    while True:
        try:
            result = step()
        except Exception as error:
            if not _is_lost(error):
                raise
            if time.monotonic() > until_s:
                raise StorageError(
                    f"{what}: out of reach for {limit_s:.0f} s ({_first_line(error)}); what was recorded is kept "
                    "there, and the same command goes on from it"
                ) from error
            if not told:
                _log.warning("%s: connection lost (%s); trying again for %.0f s", what, _first_line(error), limit_s)
                told = True
            pause()
            continue
        if told:
            _log.warning("%s: connected again", what)
        return result


class JournalFile(JournalFileBackend):
    """Optuna's journal, made safe against writers that are killed and disks that are full.

    A ``flock`` on the journal itself keeps writers apart, so a killed one blocks nobody. What it wrote of a line is
    removed by the next. A write that fails leaves the journal as it was.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append one line for each of ``logs``, all or none. Raises StorageError when they cannot be written."""
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        try:
            with open(self._path, "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                end = _end_of_last_line(file.fileno())
                os.ftruncate(file.fileno(), end)
                try:
                    _write_all(file.fileno(), text.encode(), end)
                    os.fsync(file.fileno())
                except BaseException:
                    os.ftruncate(file.fileno(), end)
                    raise
        except OSError as error:
            raise StorageError(
                f"{self._path}: cannot be written ({error.strerror}); what was recorded before is kept, and once it "
                "can be written the same command goes on from there"
            ) from error


def _open_journal(path: Path) -> BaseStorage:
    try:
        backend = JournalFile(path)
        _repair(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened ({error.strerror})") from None
    return JournalStorage(backend)


def _repair(path: Path) -> None:
    """Move a damaged end of the journal into ``<journal>.damaged``; nothing else can have used those lines."""
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        good, end, bad_line = 0, 0, 0
        for number, line in enumerate(file, start=1):
            end += len(line)
            if not _is_entry(line):
                bad_line = bad_line or number
            elif bad_line:
                raise StorageError(f"{path}: line {bad_line} is damaged and lines after it are not; use a copy of it")
            else:
                good = end
        if good == end:
            return
        file.seek(good)
        damaged = path.with_name(f"{path.name}.damaged")
        with damaged.open("ab") as rest:
            rest.write(file.read())
        file.truncate(good)
    _log.warning(
        "%s: its end was damaged (a writer was cut off); %d bytes from line %d on moved to %s, the study goes on from "
        "what is before them",
        path,
        end - good,
        bad_line,
        damaged.name,
    )


def _is_entry(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return line.endswith(b"\n") and isinstance(entry, dict) and {"op_code", "worker_id"} <= entry.keys()


def _end_of_last_line(handle: int) -> int:
    """Where the last whole line ends; a killed writer may have left a part of one after it."""
    end = position = os.fstat(handle).st_size
    while position:
        begin = max(0, position - 65536)
        found = os.pread(handle, position - begin, begin).rfind(b"\n")
        if found >= 0:
            end = begin + found + 1
            break
        position = begin
    return end if position else 0


def _write_all(handle: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


def _open_proxy(url: str, host: str | None, port: int | None) -> BaseStorage:
    if find_spec("grpc") is None:
        raise ValueError(f"storage={url!r}: needs grpcio; pip install 'tilebudget[grpc]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GrpcStorageProxy(host=host or "localhost", port=port or DEFAULT_GRPC_PORT)


_LOST = (OperationalError, InterfaceError)


def _is_lost(error: Exception) -> bool:
    """Whether ``error`` says that the storage does not answer: on writing, Optuna wraps SQLAlchemy's in its own."""
    if isinstance(error, optuna.exceptions.StorageInternalError):
        return isinstance(error.__cause__, _LOST)
    return isinstance(error, _LOST) or (
        find_spec("grpc") is not None and isinstance(error, import_module("grpc").RpcError)
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    cause = getattr(cause, "orig", None) or cause  # the driver's error, which SQLAlchemy wraps
    details = getattr(cause, "details", None)  # gRPC's text is longer
    text = details() if callable(details) else str(cause)
    return mask_passwords(str(text).strip().partition("\n")[0])
