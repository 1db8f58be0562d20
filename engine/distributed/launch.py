"""How stage processes come to be: started here by the driver, or by ``torchrun``, on this host and on others."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .messages import STAGE_TIMEOUT_S, Meeting

LOOPBACK = "127.0.0.1"
#: Under this key the driver tells the ranks of ``torchrun`` where to meet; an empty value sends them home.
MEETING_KEY = "tilebudget/meeting"


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """What ``torchrun`` tells each process that it starts."""

    rank: int
    local_rank: int
    num_ranks: int
    num_local_ranks: int
    store_host: str
    store_port: int
    has_store: bool
    attempt: str

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Torchrun | None:
        """None outside ``torchrun``, and where it runs one process only."""
        if "RANK" not in env or int(env.get("WORLD_SIZE", "1")) < 2:
            return None
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                raise ValueError(f"{name} is not set: RANK and WORLD_SIZE are, so torchrun's others must be too")
        num_ranks = int(env["WORLD_SIZE"])
        return cls(
            rank=int(env["RANK"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            num_ranks=num_ranks,
            num_local_ranks=int(env.get("LOCAL_WORLD_SIZE", num_ranks)),
            store_host=env["MASTER_ADDR"],
            store_port=int(env["MASTER_PORT"]),
            has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    @cache  # noqa: B019 - as long as the process, for rank 0 may be the one that serves the store
    def store(self) -> Store:
        """The store that all ranks see: torchrun's own, or one that rank 0 opens where that has none."""
        opened = TCPStore(
            self.store_host,
            self.store_port,
            is_master=self.rank == 0 and not self.has_store,
            timeout=timedelta(seconds=STAGE_TIMEOUT_S),
            wait_for_workers=False,
        )
        return PrefixStore(f"tilebudget/{self.attempt}", opened)


class Launch:
    """A place to meet, and the stage processes that were started here: all of them, or rank 0's under ``torchrun``."""

    def __init__(self, num_ranks: int, torchrun: Torchrun | None) -> None:
        self._torchrun = torchrun
        self._key = secrets.token_hex(16)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        # Loopback alone where all ranks are here.
        here = torchrun is None or torchrun.num_local_ranks == torchrun.num_ranks
        self.listener = socket.create_server((LOOPBACK if here else "", 0), backlog=num_ranks)
        driver_port = int(self.listener.getsockname()[1])
        if torchrun is None:
            self._store: Store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
            store_host, store_port = LOOPBACK, self._store.port
        else:
            self._store = torchrun.store()
            store_host, store_port = torchrun.store_host, torchrun.store_port
        self.meeting = Meeting(
            store_host=store_host,
            store_port=store_port,
            prefix=f"tilebudget/{self._key}",
            driver_host=LOOPBACK if here else store_host,
            driver_port=driver_port,
            key=self._key,
        )
        if torchrun is None:
            for rank in range(num_ranks):
                self._start(rank)
        else:
            self._store.set(MEETING_KEY, json.dumps(asdict(self.meeting)))
            self._start(0)

    def _start(self, rank: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tilebudget.engine.distributed.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self.processes[rank] = process
        assert process.stdin is not None
        process.stdin.write(json.dumps({"meeting": asdict(self.meeting), "rank": rank, "local_rank": rank}) + "\n")
        process.stdin.close()

    def close(self, *, patience_s: float) -> None:
        """End what was started here: after ``patience_s`` by force. Frees both ports."""
        self.listener.close()
        for process in self.processes.values():
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        del self._store


def serve_torchrun_rank(torchrun: Torchrun) -> None:
    """Be the stage process of a rank above 0 that ``torchrun`` started: wait for the driver, rank 0, and serve it."""
    from .process import serve

    store = torchrun.store()
    store.wait([MEETING_KEY], timedelta(seconds=STAGE_TIMEOUT_S))
    told = json.loads(store.get(MEETING_KEY) or b"null")
    if told is not None:
        serve(Meeting(**told), rank=torchrun.rank, local_rank=torchrun.local_rank)


def dismiss_torchrun_ranks(torchrun: Torchrun) -> None:
    """Send home the ranks that still wait for a driver: rank 0 needs no stages, or failed before it had any."""
    torchrun.store().compare_set(MEETING_KEY, "", "")
