"""A study whose engine is a server: the small streaming one of tests/support, started for every run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from server_command import fake_server_command
from tilebudget.autotune import TuneConfig, tune
from tilebudget.autotune.cli import app
from tilebudget.autotune.problem import DeviceFacts, state_problem
from tilebudget.autotune.server import check_server_study, make_server_engine, read_server
from tilebudget.engine import EngineConfig, Request, Workload
from tilebudget.engine.server.command import check_words
from tilebudget.engine.server.process import ServerProcess, free_port
from typer.testing import CliRunner

WORKLOAD = Workload(
    name="toy", requests=tuple(Request(arrival_s=0.0, prompt_tokens=100, output_tokens=8) for _ in range(8))
)
EDGES = (64, 128, 256, 512)


def config(options: str = "", **settings: Any) -> TuneConfig:
    values: dict[str, Any] = {
        "engine": "server",
        "model": "toy-model",
        "server_command": fake_server_command(options),
        "max_num_seqs": 8,
        "max_model_len": 512,
        "max_budget": 512,
        "tbt_slo": "100ms",
        "num_trials": 5,
        "num_contenders": 1,
        "repeats": 2,
        "start_timeout": 20.0,
        "stall_timeout": 20.0,
    }
    return TuneConfig(**(values | settings))


def test_a_study_goes_on_past_a_fault_to_a_recommendation_and_a_report(tmp_path: Path) -> None:
    """An iteration of b tokens takes 1 + 0.5 b ms. With 512 tokens, five requests decode while the other three are
    prefilled, which breaks 100 ms; the server of 256 tokens dies."""
    run_dir = tmp_path / "run"
    options = "--token-ms 0.5 --fault die --fault-after 5 --fault-budget 256"
    recommendation = tune(config(options), workload=WORKLOAD, edges=EDGES, run_dir=run_dir)
    assert recommendation.token_budget is not None
    assert recommendation.token_budget < 200
    assert recommendation.key.model == "toy-model"
    assert recommendation.slo.reference_decode_ms is None
    assert recommendation.engine.num_kv_blocks is None
    assert "bubble_fraction_4" not in recommendation.expected
    assert recommendation.expected["total_tokens_per_s"].repeats >= 2

    trials = pd.read_parquet(run_dir / "trials.parquet")
    assert not trials[trials["token_budget"] == 512]["feasible"].any()
    assert set(trials["role"]) >= {"search", "repeat"}
    assert "policy" not in set(trials["role"])
    failed = trials[trials["state"] == "failed"]
    assert set(failed["token_budget"]) == {256}
    reason = failed["reason"].iloc[0]
    assert "ServerError: the server exited with code 9 during the run" in reason
    log = Path(reason.rpartition("log: ")[2])
    assert "out of memory, aborting" in log.read_text()
    assert len(list((run_dir / "logs").iterdir())) == len(trials)

    page = (run_dir / "report.html").read_text()
    assert "toy-model" in page
    assert "exited with code 9" in page


def test_slo_words_are_measured_through_the_server(tmp_path: Path) -> None:
    settings = config("--base-ms 4", tbt_slo="relaxed")
    engine = make_server_engine(settings, tmp_path)
    facts = read_server(settings, engine, WORKLOAD, None)
    assert facts.reference is not None
    assert facts.reference.duration_s >= 4e-3
    problem = state_problem(settings, engine, WORKLOAD, DeviceFacts.from_json(facts.to_json()))
    assert problem.slo.tbt_s == pytest.approx(25.0 * facts.reference.duration_s)
    assert "decode at once on the server" in facts.reference.note
    assert {128, 256, 512} <= {candidate.token_budget for candidate in problem.space.candidates}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that somebody else started."""
    port = free_port()
    command = fake_server_command().format(port=port, token_budget=128, max_num_seqs=8)
    with ServerProcess(check_words(command), port=port, log=tmp_path / "running.log") as server:
        server.wait_until_healthy(20.0)
        yield server


def test_run_measures_a_server_that_runs_already(running: ServerProcess) -> None:
    result = CliRunner().invoke(
        app,
        ["run", "--base-url", running.base_url, "--workload", "fixed:40:5", "--num-requests", "6", "--json"],
        catch_exceptions=False,
    )
    document = json.loads(result.stdout)
    assert document["metrics"]["tbt_count"] == 24
    assert document["engine"]["token_budget"] is None
    assert document["device"]["base_url"] == running.base_url
    assert document["server"]["event_gap_p50_ms"] == pytest.approx(document["metrics"]["tbt_p50_ms"])
    assert document["server"]["num_kv_blocks"] == 512
    assert running.death() is None


def test_a_running_server_is_tuned_at_its_one_budget(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"server_command": None, "base_url": "http://127.0.0.1:8000"}
    with pytest.raises(ValueError, match="a running server has one budget"):
        check_server_study(config(**settings))
    one = config(**settings, min_budget=128, max_budget=128)
    check_server_study(one)
    engine = make_server_engine(one, tmp_path)
    problem = state_problem(one, engine, WORKLOAD, read_server(one, engine, WORKLOAD, None))
    assert [candidate.token_budget for candidate in problem.space.candidates] == [128]


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("vllm", "vllm serve some/model --max-num-batched-tokens 512 --max-num-seqs 8 --max-model-len 512"),
        ("sglang", "python -m sglang.launch_server --model-path some/model --chunked-prefill-size 504"),
        ("trtllm", "trtllm-serve some/model --max_num_tokens 512 --max_batch_size 8 --max_seq_len 512"),
    ],
)
def test_known_servers_get_the_arguments_that_a_recommendation_exports(server: str, words: str, tmp_path: Path) -> None:
    settings = config(server_command=None, server=server, model="some/model", server_args="--more 1")
    engine = make_server_engine(settings, tmp_path)
    assert engine.command is not None
    line = engine.command(EngineConfig(token_budget=512, max_num_seqs=8, max_model_len=512), 8123)
    assert line.startswith(words)
    assert "--port 8123" in line
    assert line.endswith("--more 1")
    assert ("--enable-metrics" in line) == (server == "sglang")


def test_the_model_is_that_of_the_command() -> None:
    command = "vllm serve org/name --max-num-batched-tokens {token_budget} --port {port}"
    found = TuneConfig(server_command=command)
    assert (found.engine, found.model, found.max_num_seqs) == ("server", "org/name", 128)


def test_prompts_take_the_vocabulary_of_a_model_that_is_known(tmp_path: Path) -> None:
    assert make_server_engine(config(model="llama-3.1-8b"), tmp_path).vocab_size == 128256
    assert make_server_engine(config(), tmp_path).vocab_size == 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "server"}, "engine='server': needs exactly one of server=NAME, command=TEMPLATE and base_url=URL"),
        ({"engine": "client"}, "engine='client': must be one of builtin, server"),
        ({"engine": "builtin", "server": "vllm"}, "server='vllm': is for engine='server' alone"),
        ({"server": "vllm", "base_url": "http://x"}, "needs exactly one of"),
        ({"server": "llama.cpp", "model": "m"}, r"server='llama\.cpp': must be one of vllm, sglang, trtllm"),
        ({"server": "vllm"}, "model='tiny-llama': name the model that the server serves"),
        ({"base_url": "http://x", "server_args": "--a"}, "server_args='--a': needs server"),
        ({"base_url": "http://x", "kernels": "torch"}, "kernels='torch': a server has its own"),
    ],
)
def test_settings_that_disagree(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuneConfig(**settings)  # type: ignore[arg-type]
