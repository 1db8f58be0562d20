"""A server of our own: started in a process group of its own with its own log, waited for, and stopped for certain."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import BinaryIO, Self

from .error import ServerError

_log = logging.getLogger(__name__)

HOST = "127.0.0.1"

#: Seconds that a server gets to end after SIGTERM, and its group to be gone after SIGKILL.
TERM_GRACE_S = 20.0
KILL_GRACE_S = 10.0

_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 4096

#: The server is meant itself, whatever proxy the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerProcess:
    """Starts ``words`` (leading ``NAME=value`` words are environment) and stops it with its whole process group.

    A context manager: leaving it ends the group with SIGTERM, then SIGKILL, and waits until it is gone. Standard output
    and error go to ``log``, after a line with the command. A process that leaves the group by a session of its own is
    out of reach.
    Raises ServerError when ``port`` is taken (nothing is started then) or the command cannot be run.
    """

    def __init__(self, words: Sequence[str], *, port: int, log: Path) -> None:
        self.base_url = f"http://{HOST}:{port}"
        self.log = log
        self._words = tuple(words)
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment, arguments = split_environment(self._words)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            log.write(f"$ {' '.join(self._words)}\n".encode())
            log.flush()
            if not port_is_free(self._port):
                raise self._refusal(log, f"port {self._port} is taken by another program; nothing was started")
            try:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise self._refusal(log, f"cannot run {arguments[0]!r}: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def death(self) -> str | None:
        """How the server ended, None while it runs."""
        # WNOWAIT leaves it a zombie: its process id, and so the group's, cannot pass to another program before stop().
        ended = os.waitid(os.P_PID, self._running.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        how = "exited with code" if ended.si_code == os.CLD_EXITED else "was ended by signal"
        return f"the server {how} {ended.si_status}"

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Return once ``/health`` (``/v1/models`` where there is none) answers 200.

        Raises ServerError when the server ends first or ``timeout_s`` is over.
        """
        deadline_s = monotonic() + timeout_s
        while True:
            if (death := self.death()) is not None:
                raise ServerError(f"{death} before it was healthy; {self.last_words()}")
            if is_healthy(self.base_url):
                return
            if monotonic() >= deadline_s:
                raise ServerError(f"the server was not healthy within {timeout_s:g} s; {self.last_words()}")
            sleep(_POLL_S)

    def last_words(self) -> str:
        """The last line of the log that is not empty, and where the log is."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"last line of its log: {last[:300]}"

    def stop(self) -> None:
        """End the group; does nothing when it is stopped already."""
        if self._process is None:
            return
        group = self._process.pid
        self._signal(signal.SIGTERM)
        _wait_for(lambda: self.death() is not None, TERM_GRACE_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
        if not _wait_for(lambda: not _group_exists(group), KILL_GRACE_S):
            _log.warning("process group %d is still there %g s after SIGKILL", group, KILL_GRACE_S)

    def _refusal(self, log: BinaryIO, reason: str) -> ServerError:
        """The error of a server that was not started; the log says so too."""
        log.write(f"{reason}\n".encode())
        return ServerError(reason)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running: use it as a context manager")
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._running.pid, number)  # its leader is not reaped yet, so the group is there and ours


def split_environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Leading ``NAME=value`` words as environment, and the rest.

    Raises ValueError when no command is left.
    """
    environment: dict[str, str] = {}
    for index, word in enumerate(words):
        name, separator, value = word.partition("=")
        if not separator or not name.isidentifier():
            return environment, list(words[index:])
        environment[name] = value
    raise ValueError(f"command={' '.join(words)!r}: names no program to run")


def port_is_free(port: int) -> bool:
    """Whether a server can listen on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are no listener
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that nothing listens on, as the system gives it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_healthy(base_url: str) -> bool:
    """Whether ``/health`` answers 200, or, where the server has no such page, ``/v1/models`` does."""
    status = _status(f"{base_url}/health")
    return (_status(f"{base_url}/v1/models") if status in (404, 405) else status) == 200


def _status(url: str) -> int | None:
    """HTTP status of a GET; None when nothing answers."""
    try:
        with _OPENER.open(url, timeout=_PROBE_TIMEOUT_S):
            return 200
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, HTTPException):  # refused, reset, timed out, or no HTTP yet
        return None


def _wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether ``condition`` became true within ``timeout_s``."""
    deadline_s = monotonic() + timeout_s
    while not condition():
        if monotonic() >= deadline_s:
            return False
        sleep(_POLL_S)
    return True


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number has passed to a group of somebody else
        return False
    return True
