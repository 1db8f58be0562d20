"""A PostgreSQL server of the tests' own: on loopback, in a temporary folder, never as root."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import psycopg

USER = "tilebudget"


def free_port() -> int:
    """A port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_programs() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``; Debian has it outside the path. None where there is no server."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


class PostgresServer:
    """A server that is started at once and can be stopped and started again."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="tilebudget-postgres-"))
        self._user: str | None = None
        if os.geteuid() == 0:  # which the server refuses to run as
            self._user = next(name for name in ("postgres", "nobody") if _exists(name))
            shutil.chown(self._folder, self._user)
        self.port = free_port()
        self._run("initdb", "--auth=trust", f"--username={USER}", "--no-sync", "--encoding=UTF8", "--locale=C")
        self.start()

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self._run("pg_ctl", "-o", options, "-l", str(self._folder / "log"), "-w", "start")

    def stop(self) -> None:
        """Cut every connection, as a crash does."""
        self._run("pg_ctl", "-m", "immediate", "-w", "stop")

    def close(self) -> None:
        """Stop for good."""
        self._run("pg_ctl", "-m", "immediate", "-w", "stop", check=False)
        shutil.rmtree(self._folder)

    def create_database(self, name: str) -> str:
        """The URL of a new database."""
        with psycopg.connect(self._url("postgresql", "postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self._url("postgresql", name)

    def _url(self, scheme: str, database: str) -> str:
        return f"{scheme}://{USER}:unused@127.0.0.1:{self.port}/{database}"

    def _run(self, program: str, *arguments: str, check: bool = True) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        account = {} if self._user is None else {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid}
        # The server keeps what it is given as its output: a pipe would never end.
        with (self._folder / "programs.log").open("ab") as log:
            subprocess.run(
                command,
                check=check,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=60,
                **account,  # type: ignore[call-overload]
            )


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
