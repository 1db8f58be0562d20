"""Several processes on one study: who runs a trial, and who dies running it, changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from optuna.storages._grpc.server import make_server
from optuna.trial import TrialState
from postgres_server import PostgresServer, free_port, server_programs
from stair_device import StairDevice
from tilebudget.autotune import TuneConfig, tune, tuning
from tilebudget.autotune.study import storages
from tilebudget.autotune.study.holder import Holder
from tilebudget.autotune.study.stored_study import STUDY_NAME, StoredStudy
from tilebudget.autotune.study.trial_queue import Claim, TrialQueue
from tilebudget.engine import EngineConfig, Workload
from worker_study import CONFIG, EDGES, GRACE_S, WorkerStudy, essence


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    programs = server_programs()
    if programs is None:
        pytest.skip("PostgreSQL's server is not installed")
    server = PostgresServer(programs)
    try:
        yield server
    finally:
        server.close()


def killer(folder: Path, *, times: int = 1) -> Callable[[], None]:
    """A function that kills the process that calls it, -9, unless that is this one or ``times`` have been killed."""
    parent = os.getpid()

    def kill() -> None:
        if os.getpid() == parent:
            return
        for number in range(times):
            try:
                (folder / f"killed-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def num_killed(folder: Path) -> int:
    return len(list(folder.glob("killed-*")))


def check_each_counts_once(study: WorkerStudy, *, num_lost: int) -> None:
    """Every proposal has one trial with an outcome; besides there are ``num_lost`` failed ones and no other."""
    trials = study.queue().study.get_trials(deepcopy=False)
    assert all(trial.state.is_finished() for trial in trials)
    done = [trial.user_attrs["proposal"] for trial in trials if "row" in trial.user_attrs]
    assert sorted(done) == list(range(CONFIG.num_trials))
    lost = [trial for trial in trials if "row" not in trial.user_attrs]
    assert len(lost) == num_lost
    assert all(trial.state == TrialState.FAIL and "lost" in trial.user_attrs for trial in lost)


@pytest.fixture
def alone(tmp_path: Path, workload: Workload) -> list[tuple[object, ...]]:
    """What one process finds."""
    return essence(WorkerStudy(tmp_path / "alone.journal", workload).search())


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_the_number_of_workers_changes_nothing(
    tmp_path: Path, workload: Workload, alone: list[tuple[object, ...]], num_workers: int
) -> None:
    study = WorkerStudy(tmp_path / "study.journal", workload)
    assert essence(study.search(num_workers)) == alone
    check_each_counts_once(study, num_lost=0)
    ran = {trial.user_attrs["worker"] for trial in study.queue().study.get_trials(deepcopy=False)}
    assert str(os.getpid()) not in str(ran)


def test_the_order_of_trials_changes_nothing(
    tmp_path: Path, workload: Workload, alone: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = TrialQueue._claim

    def claim_the_last(queue: TrialQueue) -> Claim | None:
        trials = queue._trials()[::-1]
        monkeypatch.setattr(queue, "_trials", lambda: trials)
        try:
            return claim(queue)
        finally:
            monkeypatch.delattr(queue, "_trials")

    monkeypatch.setattr(TrialQueue, "_claim", claim_the_last)
    study = WorkerStudy(tmp_path / "study.journal", workload)
    assert essence(study.search()) == alone
    trials = study.queue().study.get_trials(deepcopy=False)
    began = [trial.datetime_start for trial in trials[:6] if trial.datetime_start is not None]
    assert began == sorted(began, reverse=True)


def test_workers_that_tune_starts_do_not_change_the_recommendation(
    tmp_path: Path, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "build_report", lambda folder: None)
    found = []
    for num_workers in (1, 2, 4):
        recommendation = tune(
            CONFIG,
            executor=StairDevice(),
            workload=workload,
            edges=EDGES,
            run_dir=tmp_path / str(num_workers),
            num_workers=num_workers,
            command="test",
        )
        found.append((recommendation.token_budget, recommendation.verdict, recommendation.expected))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("point", ["claimed", "running", "half a line", "before the outcome"])
def test_a_worker_killed_anywhere_loses_and_doubles_nothing(
    tmp_path: Path,
    workload: Workload,
    alone: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    kill = killer(tmp_path)
    device = StairDevice()
    if point == "claimed":  # the trial runs, and nobody has signed for it
        here = Holder.here

        def die_or_sign() -> Holder:
            kill()
            return here()

        monkeypatch.setattr(Holder, "here", die_or_sign)
    elif point == "running":

        def fault(config: EngineConfig) -> None:
            if config.token_budget == 768:
                kill()

        device.fault = fault
    elif point == "half a line":
        write_all = storages._write_all

        def write_half(handle: int, data: bytes, offset: int) -> None:
            if b'"row"' in data:
                write_all(handle, data[: len(data) // 2], offset)
                kill()
            write_all(handle, data, offset)

        monkeypatch.setattr(storages, "_write_all", write_half)
    else:
        set_outcome = TrialQueue._set_outcome

        def die_or_set(queue: TrialQueue, *arguments: object) -> None:
            kill()
            set_outcome(queue, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(TrialQueue, "_set_outcome", die_or_set)
    # Nobody knows whose a trial is that nobody has signed for: it is only found silent.
    grace_s = 3.0 if point == "claimed" else GRACE_S
    study = WorkerStudy(tmp_path / "study.journal", workload, device, grace_s=grace_s)
    assert essence(study.search(3)) == alone
    assert num_killed(tmp_path) == 1
    monkeypatch.undo()
    # What was recorded before the worker died counts, without another run.
    check_each_counts_once(study, num_lost=0 if point == "before the outcome" else 1)


def test_a_budget_that_kills_its_workers_is_a_failed_one(
    tmp_path: Path, workload: Workload, caplog: pytest.LogCaptureFixture
) -> None:
    kill = killer(tmp_path, times=9)
    device = StairDevice()

    def fault(config: EngineConfig) -> None:
        if config.token_budget == 1024:
            kill()

    device.fault = fault
    study = WorkerStudy(tmp_path / "study.journal", workload, device)
    rows = study.search(4)
    assert num_killed(tmp_path) == 2
    assert len({row.token_budget for row in rows}) == len(rows) == CONFIG.num_trials
    (failed,) = (row for row in rows if row.state == "failed")
    assert failed.token_budget == 1024
    assert str(failed.reason).startswith("lost 2 times, the last time as pid ")
    assert str(failed.reason).endswith(" has ended")
    assert "is lost: pid " in caplog.text
    assert study.search() == rows


def test_four_workers_on_postgresql_two_of_them_killed(
    server: PostgresServer, tmp_path: Path, workload: Workload, alone: list[tuple[object, ...]]
) -> None:
    kill = killer(tmp_path, times=2)
    device = StairDevice()
    midway: list[EngineConfig] = []

    def fault(config: EngineConfig) -> None:
        midway.append(config)
        if len(midway) % 20 == 0:  # some iterations into a run
            kill()

    device.fault = fault
    study = WorkerStudy(server.create_database("four"), workload, device)
    assert essence(study.search(4)) == alone
    assert num_killed(tmp_path) == 2
    check_each_counts_once(study, num_lost=2)


def test_a_server_that_restarts_is_waited_for(
    server: PostgresServer,
    tmp_path: Path,
    workload: Workload,
    alone: list[tuple[object, ...]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = StairDevice()
    restarted: list[bool] = []

    def fault(config: EngineConfig) -> None:
        if config.token_budget == 768 and not restarted:
            restarted.append(True)
            server.stop()
            pool.submit(server.start)

    device.fault = fault
    study = WorkerStudy(server.create_database("restarts"), workload, device)
    with ThreadPoolExecutor(1) as pool:
        assert essence(study.search()) == alone
    assert restarted
    check_each_counts_once(study, num_lost=0)
    assert ":***@127.0.0.1" in caplog.text
    assert "connection lost (" in caplog.text
    assert "unused" not in caplog.text
    assert "connected again" in caplog.text


def test_a_proxy_in_front_of_the_database(
    server: PostgresServer, tmp_path: Path, workload: Workload, alone: list[tuple[object, ...]]
) -> None:
    backend = storages.open_storage(server.create_database("proxied"))
    # In a process of its own, as gRPC and forks do not mix.
    port = free_port()
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proxy = make_server(backend, "127.0.0.1", port)
            proxy.start()
            proxy.wait_for_termination()
            os._exit(0)
    try:
        study = WorkerStudy(f"grpc://127.0.0.1:{port}", workload)
        assert essence(study.search(2)) == alone
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_worker_joins_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "build_report", lambda folder: None)
    trace = tmp_path / "here.csv"
    lines = [f"2023-11-16 18:15:{second:02d}.0000000,{300 + 30 * second},12" for second in range(24)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    moved = tmp_path / "elsewhere" / "there.csv"
    moved.parent.mkdir()
    moved.write_bytes(trace.read_bytes())
    config = TuneConfig(device="h200_sxm", model="llama-3.1-8b", trace=trace, num_trials=4, num_contenders=1)
    program = "from tilebudget.autotune.cli import main; main()"
    arguments = ["worker", "--storage", str(tmp_path / "run"), "--trace", str(moved), "--wait-limit", "300"]
    worker = subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    recommendation = tune(config, run_dir=tmp_path / "run", num_workers=0)
    out, err = worker.communicate(timeout=300)
    assert (worker.returncode, out) == (0, f"ran 4 trials of study {STUDY_NAME}\n"), err
    assert recommendation.status == "feasible"
    assert recommendation.num_trials["failed"] == 0


def test_a_worker_without_the_study_s_requests_or_device_is_refused(tmp_path: Path, workload: Workload) -> None:
    stored = WorkerStudy(tmp_path / "study.journal", workload).open()
    other = Workload(name="other", requests=workload.requests[1:], source="other.csv")
    with pytest.raises(ValueError, match=r"trace='other\.csv': holds other requests than the study's"):
        stored.check_same(other, StairDevice())

    class Other(StairDevice):
        def describe(self):  # type: ignore[no-untyped-def]
            return {**super().describe(), "dtype": "bf16"}

    with pytest.raises(ValueError, match=r"device='stair': .*: dtype is 'bf16', the study's 'fp32'"):
        stored.check_same(workload, Other())
    with pytest.raises(ValueError, match="was begun by a program with an executor or a workload of its own"):
        stored.read_config()


def test_a_study_that_never_begins_is_not_waited_for_forever(tmp_path: Path) -> None:
    with pytest.raises(storages.StorageError, match=r"no study 'tilebudget' was begun there within 0 s"):
        StoredStudy.join(tmp_path / "study.journal", STUDY_NAME, wait_limit_s=0.1)
