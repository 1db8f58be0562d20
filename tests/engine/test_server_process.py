"""Starting, waiting for and stopping a server."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
from server_command import fake_server_command
from tilebudget.engine.server.error import ServerError
from tilebudget.engine.server.process import (
    ServerProcess,
    free_port,
    is_healthy,
    port_is_free,
    split_environment,
)


def words(port: int, options: str = "") -> list[str]:
    command = fake_server_command(options)
    return shlex.split(command.format(port=port, token_budget=64, max_num_seqs=8))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_is_started_and_stopped_and_its_log_stays(tmp_path: Path) -> None:
    port = free_port()
    with ServerProcess(words(port), port=port, log=tmp_path / "logs" / "a.log") as server:
        server.wait_until_healthy(20.0)
        assert server.death() is None
        assert not port_is_free(port)
    assert not is_healthy(server.base_url)
    assert port_is_free(port)
    log = (tmp_path / "logs" / "a.log").read_text()
    assert log.startswith("$ ")
    assert f"listening on {port}" in log


def test_a_server_without_a_health_page_is_asked_for_its_models(tmp_path: Path) -> None:
    port = free_port()
    with ServerProcess(words(port, "--health-status 404"), port=port, log=tmp_path / "a.log") as server:
        server.wait_until_healthy(20.0)


def test_the_whole_group_ends_even_what_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebudget.engine.server.process.TERM_GRACE_S", 0.3)
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "a.log"
    with ServerProcess([sys.executable, "-S", "-c", script], port=free_port(), log=log) as server:
        deadline_s = monotonic() + 20.0
        while not log.read_text().split()[-1].isdigit():
            assert server.death() is None
            assert monotonic() < deadline_s
            sleep(0.02)
        child = int(log.read_text().split()[-1])
        assert alive(child)
    assert not alive(child)


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    port = free_port()
    with (
        ServerProcess(words(port, "--fault exit"), port=port, log=tmp_path / "a.log") as server,
        pytest.raises(ServerError, match="exited with code 3 before it was healthy; last line of its log: no such"),
    ):
        server.wait_until_healthy(20.0)


def test_a_server_that_a_signal_ends(tmp_path: Path) -> None:
    program = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    with (
        ServerProcess(program, port=free_port(), log=tmp_path / "a.log") as server,
        pytest.raises(ServerError, match="was ended by signal 9 before it was healthy"),
    ):
        server.wait_until_healthy(20.0)


def test_a_server_that_never_is_healthy(tmp_path: Path) -> None:
    port = free_port()
    with (
        ServerProcess(words(port, "--fault never-healthy"), port=port, log=tmp_path / "a.log") as server,
        pytest.raises(ServerError, match=r"not healthy within 0\.5 s"),
    ):
        server.wait_until_healthy(0.5)


def test_nothing_is_started_on_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ServerError, match=f"port {port} is taken by another program; nothing was started"),
            ServerProcess(words(port), port=port, log=tmp_path / "a.log"),
        ):
            pass
    assert f"port {port} is taken" in (tmp_path / "a.log").read_text()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="cannot run 'no-such-server': No such file"),
        ServerProcess(["no-such-server"], port=free_port(), log=tmp_path / "a.log"),
    ):
        pass


def test_leading_assignments_are_environment(tmp_path: Path) -> None:
    assert split_environment(["A=1", "B_C=x=y", "run", "D=2"]) == ({"A": "1", "B_C": "x=y"}, ["run", "D=2"])
    with pytest.raises(ValueError, match="names no program"):
        split_environment(["A=1"])
    program = ["WORD=here", sys.executable, "-S", "-c", "import os; print(os.environ['WORD'])"]
    log = tmp_path / "a.log"
    with ServerProcess(program, port=free_port(), log=log) as server, pytest.raises(ServerError, match="log: here"):
        server.wait_until_healthy(20.0)
    assert os.environ.get("WORD") is None
