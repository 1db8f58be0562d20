"""Who holds something that only one may have: a process by its machine, number and command."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..environment import command_line

MAX_COMMAND = 120


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process. ``machine`` tells boots and containers apart, ``host`` is a name for people; ``started`` tells it from
    a later process with its number."""

    pid: int
    started: str
    machine: str
    host: str
    command: str

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        command = command_line()
        return cls(
            pid=os.getpid(),
            started=_started(os.getpid()) or "",
            machine=_machine(),
            host=platform.node(),
            command=command if len(command) <= MAX_COMMAND else f"{command[:MAX_COMMAND]}...",
        )

    @property
    def gone(self) -> bool:
        """Whether it ran on this machine and has ended. False also for one elsewhere, of which nobody here can tell."""
        return self.machine == _machine() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} ({self.command})"

    def to_json(self) -> dict[str, str | int]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Holder:
        """The inverse of ``to_json``. Raises KeyError when a field is missing."""
        values = {field.name: data[field.name] for field in fields(cls)}
        return cls(**values)  # type: ignore[arg-type]


def _machine() -> str:
    """This boot of this machine, and the container in it that numbers the processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()}:{uuid.getnode()}"


def _started(pid: int) -> str | None:
    """When a process here began, in the kernel's ticks; None where it has ended, a zombie included."""
    try:
        # The name of the program, in brackets, may hold anything; the fields after it are plain.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""
