from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from stair_device import StairDevice
from tilebudget.autotune.study import file_lock
from tilebudget.autotune.study.device_lock import device_lock
from tilebudget.autotune.study.file_lock import FileLock, LockedError
from tilebudget.autotune.study.holder import Holder


class RealDevice(StairDevice):
    """A device whose time another run would disturb."""

    virtual_time = False


def holding(lock: FileLock, then: Callable[[], object] = lambda: time.sleep(60.0)) -> int:
    """A process that holds ``lock`` and does ``then``."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with lock:
                os.write(writer, b"x")
                then()
        finally:
            os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    child = holding(FileLock(path, "the thing"))
    with pytest.raises(LockedError, match=rf"^the thing is in use by pid {child} on .+ \(tilebudget.*\); ask it$"):
        FileLock(path, "the thing", advice="; ask it").__enter__()
    end(child)
    with FileLock(path, "the thing"), pytest.raises(LockedError, match=rf"pid {os.getpid()} on"):
        FileLock(path, "the thing").__enter__()
    assert not path.exists()


def test_a_fork_of_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", "the thing")
    with lock:
        child = os.fork()
        if child == 0:
            time.sleep(60.0)
            os._exit(0)
    with FileLock(tmp_path / "lock", "the thing"):
        pass
    end(child)


def test_who_waits_is_told_for_whom_and_gets_it_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "QUIET_S", 0.0)
    child = holding(FileLock(tmp_path / "lock", "device gpu"))
    told: list[str] = []
    waiter = threading.Timer(0.3, end, (child,))
    waiter.start()
    with FileLock(tmp_path / "lock", "device gpu", on_wait=told.append):
        assert len(told) == 1
        assert told[0].startswith(f"device gpu is in use by pid {child} on ")
    waiter.join()


def test_many_take_turns(tmp_path: Path) -> None:
    """Holders remove the file while others open it: still no two are inside together."""
    count = tmp_path / "count"
    count.write_text("0")

    def add() -> None:
        for _ in range(50):
            with FileLock(tmp_path / "lock", "count", on_wait=lambda message: None):
                count.write_text(str(int(count.read_text()) + 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.read_text() == "200"


def test_one_run_at_a_time_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with device_lock(RealDevice()):
        assert [path.name for path in tmp_path.iterdir()] == ["tilebudget-stair.lock"]
        lock = device_lock(RealDevice())
        assert isinstance(lock, FileLock)
        lock._on_wait = None
        with pytest.raises(LockedError, match=rf"device stair is in use by pid {os.getpid()}"):
            lock.__enter__()
        with device_lock(StairDevice()):  # modelled: time of its own
            pass


def test_a_holder_is_gone_when_its_process_is() -> None:
    here = Holder.here()
    assert not here.gone
    assert Holder.from_json(here.to_json()) == here
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert replace(here, pid=child).gone  # a zombie
    os.waitpid(child, 0)
    assert replace(here, pid=child).gone
    assert replace(here, started="1").gone  # its number was given to this process
    assert not replace(here, pid=child, machine="another").gone
