"""Runs on a real server process: the small streaming server of tests/support."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_command import fake_server_command
from tilebudget.engine import (
    SLO,
    EngineConfig,
    Progress,
    Request,
    RunRecord,
    Workload,
    compute_metrics,
    sound_stop,
    tbt_gaps,
)
from tilebudget.engine.server.command import check_words, template_command
from tilebudget.engine.server.engine import ServerEngine
from tilebudget.engine.server.error import ServerError
from tilebudget.engine.server.process import ServerProcess, free_port

CONFIG = EngineConfig(token_budget=64, max_num_seqs=8, max_model_len=256)
WORKLOAD = Workload(
    name="toy",
    requests=tuple(Request(arrival_s=0.01 * index, prompt_tokens=40 + index, output_tokens=6) for index in range(12)),
)
NUM_WARMUP = 4


def launched(tmp_path: Path, options: str = "", *, stall_timeout_s: float = 20.0, **settings: int) -> ServerEngine:
    return ServerEngine(
        command=template_command(fake_server_command(options), model="m"),
        log_dir=tmp_path / "logs",
        start_timeout_s=20.0,
        stall_timeout_s=stall_timeout_s,
        **settings,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Path]:
    """A run without faults, and the folder of its log."""
    folder = tmp_path_factory.mktemp("plain")
    return launched(folder).run(WORKLOAD, CONFIG), folder


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that somebody else started."""
    port = free_port()
    command = fake_server_command().format(port=port, token_budget=64, max_num_seqs=8)
    with ServerProcess(check_words(command), port=port, log=tmp_path / "running.log") as server:
        server.wait_until_healthy(20.0)
        yield server


def test_a_run_has_a_record_like_any_engine(plain: tuple[RunRecord, Path]) -> None:
    record, _ = plain
    assert set(record.requests.status) == {"finished"}
    assert record.requests.num_generated.tolist() == [6] * 12
    assert len(record.token_s) == 72
    assert (np.diff(record.token_s) >= 0.0).all()
    frame = record.request_frame()
    assert record.server is not None
    for arrival_s, sent_s, token_s in zip(frame["arrival_s"], record.server.sent_s, frame["token_s"], strict=True):
        assert len(token_s) == 6
        assert (np.diff(np.concatenate([[arrival_s, sent_s], token_s])) >= 0.0).all()
    assert record.stopped is None


def test_metrics_of_a_run_have_what_a_client_sees_and_what_the_server_tells(plain: tuple[RunRecord, Path]) -> None:
    record, _ = plain
    slo = SLO(name="loose", tbt_s=10.0)
    metrics = compute_metrics(record, slo)
    row = metrics.to_row()
    assert row["tbt_count"] == 60
    assert row["ttft_count"] == row["tpot_count"] == row["num_finished"] == 12
    assert row["total_tokens_per_s"] == pytest.approx(
        (72 + record.requests.prompt_tokens.sum()) / record.busy_s, rel=1e-9
    )
    assert row["scheduling_delay_count"] == 0
    assert metrics.queueing_p50_s == metrics.ttft.p50
    assert metrics.feasible(slo) is True
    assert row["goodput_requests_per_s"] == row["requests_per_s"]
    assert row["iteration_cv"] is row["bubble_fraction_4"] is row["tile_waste"] is None
    # From the server's own page: 4 warm-ups of 64 tokens come before the first reading.
    assert row["num_preemptions"] == 0
    assert record.num_kv_blocks == 512
    iterations, mean_tokens = row["num_iterations"], row["mean_tokens_per_iteration"]
    assert iterations is not None
    assert mean_tokens is not None
    # Every prompt token once, every output token but the first of each request once.
    assert iterations * mean_tokens == pytest.approx(record.requests.prompt_tokens.sum() + 60)


def test_the_log_is_named_after_its_budget_and_numbered(plain: tuple[RunRecord, Path]) -> None:
    _, folder = plain
    launched(folder).run(WORKLOAD, CONFIG)
    assert sorted(file.name for file in (folder / "logs").iterdir()) == [
        "server-001-budget-64.log",
        "server-002-budget-64.log",
    ]


def test_several_tokens_in_an_event_keep_the_count_and_the_ends(tmp_path: Path) -> None:
    record = launched(tmp_path, "--tokens-per-event 3").run(WORKLOAD, CONFIG)
    assert record.requests.num_generated.tolist() == [6] * 12
    assert record.server is not None
    assert record.server.num_shared_events == 24
    assert len(record.server.event_gaps_s) == 12
    for token_s in record.request_frame()["token_s"]:
        assert token_s[0] == token_s[2]
        np.testing.assert_allclose(np.diff(token_s[2:]), (token_s[5] - token_s[2]) / 3)


def test_servers_without_usage_or_metrics(tmp_path: Path) -> None:
    record = launched(tmp_path, "--no-usage --no-metrics --health-status 404").run(WORKLOAD, CONFIG)
    assert record.requests.num_generated.tolist() == [6] * 12
    assert record.num_kv_blocks is None
    row = compute_metrics(record).to_row()
    assert row["num_preemptions"] is row["num_iterations"] is row["kv_peak_fraction"] is None


def test_too_long_requests_are_not_sent(tmp_path: Path) -> None:
    long = Request(arrival_s=0.0, prompt_tokens=300, output_tokens=6)
    record = launched(tmp_path).run(Workload(name="w", requests=(long, WORKLOAD.requests[0])), CONFIG)
    assert record.requests.status == ("rejected_model_len", "finished")
    assert record.server is not None
    assert np.isnan(record.server.sent_s).tolist() == [True, False]
    assert compute_metrics(record).num_rejected_model_len == 1


FAULTS = {
    "exit": "exited with code 3 before it was healthy; last line of its log: no such model",
    "die": r"exited with code 9 during the run: request \d+ lost its connection after \d of 6 tokens",
    "error-500": r"request \d+ got HTTP 500: .*out of memory",
    "stall": r"stalled: nothing came on \d+ open streams for",
    "short": r"request \d+ brought 5 tokens, 6 were asked",
    "stream-error": "reports an error in the stream: .*the engine is dead",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_error_with_its_reason_and_the_log(tmp_path: Path, fault: str) -> None:
    engine = launched(tmp_path, f"--fault {fault} --fault-after {NUM_WARMUP + 1}", stall_timeout_s=1.0)
    log = re.escape(str(tmp_path / "logs" / "server-001-budget-64.log"))
    with pytest.raises(ServerError, match=f"{FAULTS[fault]}.*; log: {log}$"):
        engine.run(WORKLOAD, CONFIG)
    assert (tmp_path / "logs" / "server-001-budget-64.log").exists()


def test_waiting_in_the_queue_is_no_stall(tmp_path: Path) -> None:
    """One at a time, so that the last stream hears nothing for longer than the limit."""
    saturated = Workload(
        name="w", requests=tuple(Request(arrival_s=0.0, prompt_tokens=8, output_tokens=4) for _ in range(12))
    )
    engine = launched(tmp_path, "--base-ms 30 --max-num-seqs 1", stall_timeout_s=0.6)
    record = engine.run(saturated, CONFIG)
    assert set(record.requests.status) == {"finished"}
    assert record.token_s.max() > 0.6


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port: int = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} is taken .*; log: .*server-001-budget-64\.log$"):
            launched(tmp_path, port=port).run(WORKLOAD, CONFIG)


def test_a_monitor_sees_every_gap_and_can_end_the_run(tmp_path: Path) -> None:
    seen: list[float] = []

    def watch(progress: Progress) -> str | None:
        seen.extend(progress.gaps_s)
        return None

    engine = launched(tmp_path, "--base-ms 25")
    record = engine.run(WORKLOAD, CONFIG, monitor=watch)
    assert len(seen) > 0
    assert set(seen) <= set(tbt_gaps(record))
    slo = SLO(name="tight", tbt_s=0.02)
    record = engine.run(WORKLOAD, CONFIG, monitor=sound_stop(slo, WORKLOAD, CONFIG))
    assert record.stopped is not None
    assert "P99 TBT is over" in record.stopped
    assert "unfinished" in record.requests.status
    assert compute_metrics(record, slo).feasible(slo) is False


def test_the_reference_is_a_gap_of_a_full_set_of_decodes(tmp_path: Path) -> None:
    reference = launched(tmp_path, "--base-ms 4 --token-ms 0").reference_decode(CONFIG)
    assert reference.num_seqs == 8
    assert reference.duration_s >= 4e-3
    assert reference.context_tokens + 32 <= 256
    assert "8 requests that decode at once on the server" in reference.note


def test_a_reference_that_never_is_a_full_set_of_decodes(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="never decoded 8 requests at once"):
        launched(tmp_path, "--max-num-seqs 4 --base-ms 0.1 --token-ms 0").reference_decode(CONFIG)


def test_a_server_that_runs_already_is_measured_and_left_running(running: ServerProcess) -> None:
    engine = ServerEngine(base_url=running.base_url + "/v1/")
    record = engine.run(WORKLOAD, CONFIG)
    assert set(record.requests.status) == {"finished"}
    assert engine.describe()["base_url"] == running.base_url
    assert running.death() is None


def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    """The server gives no token before it has them all."""
    workload = Workload(
        name="w", requests=tuple(Request(arrival_s=0.0, prompt_tokens=20, output_tokens=3) for _ in range(1000))
    )
    engine = launched(tmp_path, f"--hold-until 1000 --fault-after {NUM_WARMUP} --max-num-seqs 1000 --token-ms 0")
    record = engine.run(workload, EngineConfig(token_budget=20_000, max_num_seqs=8, max_model_len=256))
    assert set(record.requests.status) == {"finished"}
    assert len(record.token_s) == 3000


def test_no_server_there() -> None:
    with pytest.raises(ServerError, match="no healthy server at"):
        ServerEngine(base_url=f"http://127.0.0.1:{free_port()}").run(WORKLOAD, CONFIG)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "base_url and command: exactly one"),
        ({"base_url": "http://x", "port": 0}, "port=0: must be in"),
        ({"base_url": "http://x", "stall_timeout_s": 0.0}, r"stall_timeout_s=0\.0: must be above 0"),
    ],
)
def test_settings_that_disagree(settings: dict[str, str | int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerEngine(**settings)  # type: ignore[arg-type]
