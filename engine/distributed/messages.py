"""What the driver and the stage processes of a distributed executor say to each other, and over what.

Control messages (settings, batches, times, token ids) go over one TCP connection from each stage process to the
driver; hidden states and all-reduces go over ``torch.distributed`` between the stages. As with ``torch.distributed``
itself, the network is trusted: messages are pickles.
"""

from __future__ import annotations

import hmac
import platform
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ..executor import NonFiniteLogitsError, OutOfMemoryError
from ..model.input import BatchRows
from .partition import Partition

#: Seconds after which a stage that says nothing, or a rendezvous that does not come about, is given up.
STAGE_TIMEOUT_S = 300.0

#: Errors that the driver raises as what they are; all others become a ``StageFailedError``.
NAMED_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, OutOfMemoryError, NonFiniteLogitsError)
}


class PeerLostError(Exception):
    """A message to or from another stage process did not get through: what failed is there, not here."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where a stage process finds the store of ``torch.distributed`` and the driver; ``key`` lets it in there."""

    store_host: str
    store_port: int
    prefix: str
    driver_host: str
    driver_port: int
    key: str


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A stage process introduces itself. Those with the same ``host`` share a memory and a monotonic clock."""

    rank: int
    pid: int
    host: str
    host_name: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every stage process loads and computes: ``device`` is ``cpu`` or ``cuda``, ``folder`` has the weights (None
    draws them by ``seed``). ``num_threads`` is that of each process; None leaves torch's."""

    partition: Partition
    folder: str | None
    device: str
    dtype: str
    seed: int
    kernels: str
    num_threads: int | None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The weights are loaded; what the stage says of itself."""

    described: dict[str, str | int | float]


@dataclass(frozen=True, kw_only=True)
class AskClock:
    """What does your ``perf_counter`` say?"""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Seconds on the stage's ``perf_counter``."""

    now_s: float


@dataclass(frozen=True, kw_only=True)
class AskMemory:
    """How many KV blocks of this size could you hold?"""

    block_size: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that the KV cache may take out of ``pool``, a memory that several stages may share, and that a block takes
    in this stage."""

    pool: str
    free_bytes: int
    block_bytes: int


@dataclass(frozen=True, kw_only=True)
class Begin:
    """A run with this KV cache, and iterations within these bounds."""

    num_blocks: int
    block_size: int
    max_tokens: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The KV cache is there."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One iteration; ``number`` counts them."""

    number: int
    rows: BatchRows


@dataclass(frozen=True, kw_only=True)
class Done:
    """A stage has finished a micro-batch: when it began and ended on its ``perf_counter``, and in the last stage the
    token ids. Told by the first tensor-parallel rank of each stage."""

    number: int
    start_s: float
    end_s: float
    token_ids: bytes | None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An error in a stage: its type's name and text. ``by_peer``: it is another stage that failed."""

    kind: str
    message: str
    by_peer: bool


@dataclass(frozen=True, kw_only=True)
class Stop:
    """There is no more to do."""


def connection_of(sock: socket.socket) -> Connection:
    """Messages over ``sock``, sent at once; a host that falls silent is noticed in about ten seconds."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 8000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(sock.detach())


def connect(meeting: Meeting) -> Connection:
    """A stage process's connection to the driver."""
    sock = socket.create_connection((meeting.driver_host, meeting.driver_port), timeout=STAGE_TIMEOUT_S)
    connection = connection_of(sock)
    connection.send_bytes(meeting.key.encode())
    return connection


def admit(sock: socket.socket, key: str) -> Connection | None:
    """The driver's connection to whoever connected; None for one without the key, who is cut off."""
    sock.settimeout(STAGE_TIMEOUT_S)
    connection = connection_of(sock)
    try:
        if connection.poll(5.0) and hmac.compare_digest(connection.recv_bytes(1024), key.encode()):
            return connection
    except (EOFError, OSError):
        pass
    connection.close()
    return None


def host_id() -> str:
    """The same for processes that share a memory and a monotonic clock, and for no others."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text(encoding="ascii").strip() if boot_id.exists() else platform.node()
