"""What goes wrong around a study: nothing recorded is lost, the message says what happened, resuming ends the same."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError
from stair_device import StairDevice
from tilebudget.autotune import Recommendation, TuneConfig, tune, tuning
from tilebudget.autotune.run_folder.run_folder import RunFolder, RunFolderError
from tilebudget.autotune.study import storages
from tilebudget.autotune.study.file_lock import LockedError
from tilebudget.autotune.study.storages import StorageError, patiently
from tilebudget.autotune.study.trial_queue import TrialQueue
from tilebudget.engine import EngineConfig, Workload
from tilebudget.kernels.errors import TileBudgetError
from worker_study import CONFIG, EDGES, WorkerStudy, essence


def tuned(folder: Path, workload: Workload) -> Recommendation:
    return tune(CONFIG, executor=StairDevice(), workload=workload, edges=EDGES, run_dir=folder, command="test")


def answer(recommendation: Recommendation) -> tuple[object, ...]:
    return recommendation.token_budget, recommendation.verdict, recommendation.expected, recommendation.num_trials


@pytest.fixture
def whole(tmp_path: Path, workload: Workload) -> list[tuple[object, ...]]:
    """What a search finds that nothing disturbs."""
    return essence(WorkerStudy(tmp_path / "whole.journal", workload).search())


def die_at(iteration: int) -> Callable[[EngineConfig], None]:
    """A fault that kills this process, -9, before that iteration of the study."""
    num_begun = 0

    def fault(config: EngineConfig) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def in_fork(run: Callable[[], object]) -> int:
    """What ``run`` ended with in a process of its own: 0, 1 after an exception, -9 when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("iteration", [1, 100, 300])
def test_a_killed_study_resumes_to_the_same_end(
    tmp_path: Path, workload: Workload, whole: list[tuple[object, ...]], iteration: int
) -> None:
    journal = tmp_path / "study.journal"
    assert in_fork(lambda: WorkerStudy(journal, workload, StairDevice(fault=die_at(iteration))).search()) == -9
    study = WorkerStudy(journal, workload)
    before = essence([one.row for one in study.queue().proposals() if one.row is not None])
    assert whole[: len(before)] == before
    assert essence(study.search(2)) == whole


def test_a_study_killed_between_two_proposals_resumes_to_the_same_end(
    tmp_path: Path, workload: Workload, whole: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "study.journal"
    add = TrialQueue.add

    def add_or_die(queue: TrialQueue, proposal: object, distributions: object) -> None:
        if len(queue.proposals()) == 8:  # of the four that follow the first six
            os.kill(os.getpid(), signal.SIGKILL)
        add(queue, proposal, distributions)  # type: ignore[arg-type]

    monkeypatch.setattr(TrialQueue, "add", add_or_die)
    assert in_fork(WorkerStudy(journal, workload).search) == -9
    monkeypatch.undo()
    study = WorkerStudy(journal, workload)
    assert len(study.queue().proposals()) == 8
    assert essence(study.search()) == whole


def test_ctrl_c_twice_gives_up_nothing(
    tmp_path: Path,
    workload: Workload,
    whole: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    journal = tmp_path / "study.journal"
    num_begun = 0

    def interrupt(config: EngineConfig) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 200:
            raise KeyboardInterrupt

    def interrupted_release(queue: TrialQueue, claim: object) -> None:
        raise KeyboardInterrupt

    for release in (TrialQueue.release, interrupted_release):
        monkeypatch.setattr(TrialQueue, "release", release)
        assert in_fork(WorkerStudy(journal, workload, StairDevice(fault=interrupt)).search) == 1
        assert "KeyboardInterrupt" in capfd.readouterr().err
    monkeypatch.undo()
    study = WorkerStudy(journal, workload)
    assert essence(study.search()) == whole
    attributes = [trial.user_attrs for trial in study.queue().study.get_trials(deepcopy=False)]
    assert sum("released" in attrs for attrs in attributes) == 1
    assert sum("lost" in attrs for attrs in attributes) == 1


def test_ctrl_c_twice_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--device", "h200_sxm", "--model", "llama-3.1-8b", "--num-trials", "8", "--num-contenders", "1"]
    settings += ["--workload", "fixed:512:64", "--num-requests", "200", "--workers", "2"]
    program = "from tilebudget.autotune.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program, "tune", *settings, "--run-dir", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        # Tests that were started in the background ignore Ctrl-C, and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr is not None
    head = ""
    while "search 2/" not in head:
        line = process.stderr.readline()
        assert line, head
        head += line
    for _ in range(2):  # as a terminal does: to the whole group
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in head + err, head + err
    assert "interrupted" in err
    config = TuneConfig(
        device="h200_sxm",
        model="llama-3.1-8b",
        num_trials=8,
        num_contenders=1,
        workload="fixed:512:64",
        num_requests=200,
    )
    monkeypatch.setattr(tuning, "build_report", lambda folder: None)
    resumed = tune(config, run_dir=tmp_path / "run", num_workers=1)
    straight = tune(config, run_dir=tmp_path / "straight", num_workers=1)
    assert answer(resumed) == answer(straight)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB, where this user may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(
    small_disk: Path, tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "build_report", lambda folder: None)
    with pytest.raises(TileBudgetError, match=r"cannot be written \(.*No space left on device\)") as caught:
        tuned(small_disk / "run", workload)
    assert isinstance(caught.value, StorageError | RunFolderError)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert answer(tuned(small_disk / "run", workload)) == answer(tuned(tmp_path / "whole", workload))
    assert not list((small_disk / "run").glob("*.damaged"))


def test_a_write_that_fails_leaves_the_journal_as_it_was(
    tmp_path: Path, workload: Workload, whole: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "study.journal"
    write_all = storages._write_all
    sizes: list[int] = []

    def write_some(handle: int, data: bytes, offset: int) -> None:
        if offset > 20_000:
            sizes.append(offset)
            write_all(handle, data[:-5], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(handle, data, offset)

    def search() -> None:
        with pytest.raises(StorageError, match=r"study\.journal: cannot be written \(No space left on device\); what"):
            WorkerStudy(journal, workload).search()
        assert journal.stat().st_size == sizes[0]

    monkeypatch.setattr(storages, "_write_all", write_some)
    assert in_fork(search) == 0
    monkeypatch.undo()
    assert essence(WorkerStudy(journal, workload).search()) == whole


def test_two_studies_in_one_run_folder(tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "build_report", lambda folder: None)
    with (
        RunFolder(tmp_path / "run").locked(),
        pytest.raises(
            LockedError, match=rf"run folder .*run is in use by pid {os.getpid()} on .+; wait for it, or give"
        ),
    ):
        tuned(tmp_path / "run", workload)
    assert not (tmp_path / "run" / "study.journal").exists()
    tuned(tmp_path / "run", workload)


def test_two_processes_that_propose_for_one_study(tmp_path: Path, workload: Workload) -> None:
    stored = WorkerStudy(tmp_path / "study.journal", workload).open()

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with stored.leading():
                os.write(writer, b"led")
                time.sleep(60.0)
        finally:
            os._exit(1)
    try:
        os.read(reader, 3)
        with pytest.raises(LockedError, match=rf"is led by pid {child} on .*; wait for it, or give another --study"):
            WorkerStudy(tmp_path / "study.journal", workload).search()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert WorkerStudy(tmp_path / "study.journal", workload).search()


@pytest.mark.parametrize("tail", [b'{"op_code":8,"worker_', b"\x00" * 512, b"\xff\xfe\n{}\n42\n"])
def test_a_damaged_end_of_the_journal(
    tmp_path: Path,
    workload: Workload,
    whole: list[tuple[object, ...]],
    caplog: pytest.LogCaptureFixture,
    tail: bytes,
) -> None:
    journal = tmp_path / "study.journal"
    first = essence(WorkerStudy(journal, workload).search(num_trials=7))
    size = journal.stat().st_size
    with journal.open("ab") as file:
        file.write(tail)
    again = WorkerStudy(journal, workload)
    again.open()
    assert f"{len(tail)} bytes" in caplog.text
    assert "its end was damaged" in caplog.text
    assert journal.with_name("study.journal.damaged").read_bytes() == tail
    assert journal.stat().st_size >= size
    assert essence(again.search())[:7] == first
    assert len(again.search()) == CONFIG.num_trials


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_journal_that_lost_its_last_lines(
    tmp_path: Path, workload: Workload, whole: list[tuple[object, ...]], kept: float
) -> None:
    journal = tmp_path / "study.journal"
    assert in_fork(WorkerStudy(journal, workload).search) == 0
    data = journal.read_bytes()
    journal.write_bytes(data[: int(kept * len(data))])
    # The cut may be between a claim and its signature.
    assert essence(WorkerStudy(journal, workload, grace_s=3.0).search()) == whole


def test_damage_before_the_end_is_not_repaired(tmp_path: Path, workload: Workload) -> None:
    journal = tmp_path / "study.journal"
    WorkerStudy(journal, workload).open()
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"garbage\n", *lines[1:]]))
    with pytest.raises(StorageError, match=r"study\.journal: line 2 is damaged and lines after it are not"):
        WorkerStudy(journal, workload).open()


def test_a_storage_out_of_reach_is_tried_again_and_then_named(caplog: pytest.LogCaptureFixture) -> None:
    errors = [OperationalError("SELECT 1", {}, ConnectionError("refused")) for _ in range(2)]

    def step() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert patiently("the study", step, limit_s=30.0) == "done"
    assert "the study: connection lost (refused); trying again for 30 s" in caplog.text

    def never() -> str:
        raise OperationalError("SELECT 1", {}, ConnectionError("refused"))

    with pytest.raises(
        StorageError, match=r"the study: out of reach for 0 s \(.*refused.*\); what was recorded is kept"
    ):
        patiently("the study", never, limit_s=0.2)


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("nosuch://host/db", r"storage='nosuch://host/db': "),
        ("postgresql+nodriver://me:secret@host/db", r"storage='postgresql\+nodriver://me:\*\*\*@host/db': "),
    ],
)
def test_a_storage_that_nothing_can_open(storage: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        storages.open_storage(storage)
