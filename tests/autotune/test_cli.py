"""The command line as a user meets it: exit codes, what goes to which stream, and messages that name the flag."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from tilebudget.autotune import cli
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.help import COMMANDS
from tilebudget.autotune.options import GROUPS

Run = Callable[..., tuple[int, str, str]]

SMALL = ["--max-num-seqs", "4", "--max-model-len", "256", "--num-threads", "1"]


@pytest.fixture
def tilebudget(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs the console script in a folder of its own; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tilebudget", *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt_token_ids": list(range(5, 5 + 20 * (i + 1))), "output_tokens": 3 + i} for i in range(4)]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def test_devices(tilebudget: Run) -> None:
    code, out, _ = tilebudget("devices", "--json")
    assert code == 0
    by_name = {device["name"]: device for device in json.loads(out)["devices"]}
    assert by_name["cpu"]["available"] is True


def test_version_and_help(tilebudget: Run) -> None:
    assert tilebudget("--version")[1].strip()[0].isdigit()
    code, out, _ = tilebudget("tune", "--help")
    assert code == 0
    assert "--tbt-slo" in out
    assert "--run-dir" in out


def test_run_prints_metrics_and_greedy_outputs(tilebudget: Run, prompts: Path) -> None:
    outputs = []
    for policy, budget in (("sarathi", "8"), ("sarathi", "unlimited"), ("vllm_v0", "64"), ("orca", "64")):
        code, out, err = tilebudget(
            "run", "--prompts", str(prompts), "--token-budget", budget, "--policy", policy, "--json", *SMALL
        )
        assert (code, err) == (0, "")
        document = json.loads(out)
        assert [len(tokens) for tokens in document["outputs"]] == [3, 4, 5, 6]
        assert document["metrics"]["num_finished"] == 4
        assert document["metrics"]["tbt_count"] == 2 + 3 + 4 + 5
        outputs.append(document["outputs"])
    assert all(output == outputs[0] for output in outputs)


def test_a_profile_is_measured_listed_and_run(tilebudget: Run) -> None:
    code, out, _ = tilebudget("profile", "--time-limit", "0.5", "--max-tokens", "32", "--json", *SMALL)
    assert code == 0
    file = json.loads(out)["file"]
    _, out, _ = tilebudget("devices", "--json")
    assert file in {device["name"] for device in json.loads(out)["devices"]}
    code, out, _ = tilebudget("run", "--device", file, "--workload", "fixed:30:4", "--token-budget", "16", *SMALL[:-2])
    assert code == 0
    assert any(line.startswith("tbt_p99_ms ") for line in out.splitlines())


def test_run_reads_the_edges_for_the_policy_that_trims_to_them(tilebudget: Run) -> None:
    requests = ["--workload", "fixed:300:8", "--num-requests", "6", "--max-num-seqs", "4", "--max-model-len", "512"]
    device = ["--device", "h200_sxm", "--kernels", "vllm", "--dtype", "fp8", "--model", "llama-3.1-8b"]
    code, out, _ = tilebudget("run", "--policy", "tile_aligned", "--json", *device, *requests)
    assert code == 0
    document = json.loads(out)
    assert document["statuses"] == ["finished"] * 6
    assert {256, 512} <= set(document["engine"]["token_costs"]["edges"])


def test_run_without_json_prints_one_figure_a_line(tilebudget: Run, prompts: Path) -> None:
    code, out, _ = tilebudget("run", "--prompts", str(prompts), "--token-budget", "16", *SMALL)
    assert code == 0
    assert any(line.startswith("tbt_p99_ms ") for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--tbt-slo", "fast"], "--tbt-slo 'fast': must be strict, relaxed, or a positive duration"),
        (["tune", "--policy", "fifo"], "--policy 'fifo': must be one of faster_transformer, orca"),
        (["tune", "--search", "policy"], "--search 'policy': must name 'token_budget' and, on request, 'max_num_seqs'"),
        (["tune", "--num-requests", "0"], "--num-requests 0: must be at least 1"),
        (["tune", "--min-budget", "4"], "--min-budget 4: must be at least --max-num-seqs 8"),
        (["tune", "--device", "tpu"], "--device 'tpu': must be one of auto, cpu, cuda"),
        (["tune", "--model", "gpt-9"], "gpt-9"),
        (["tune", "--workload", "nope"], "nope"),
        (["run", "--token-budget", "many"], "--token-budget 'many': must be a whole number of tokens, or unlimited"),
        (
            ["run", "--token-budget", "64", "--max-num-seqs", "128"],
            "--token-budget 64: must be at least --max-num-seqs 128, or an iteration cannot hold every decode",
        ),
        (["report", "nowhere"], "nowhere"),
        (["show", "nothing.json"], "nothing.json: no recommendation there"),
        (["show"], "RECOMMENDATION: name a run folder"),
        (["profile", "--device", "h200_sxm"], "--device 'h200_sxm': must be one of auto, cpu, cuda"),
        (["profile", "--time-limit", "0"], "--time-limit 0.0: must be above 0"),
        (["profile", "--out", "p.csv"], "--out 'p.csv': must end in .json"),
        (["profile", "--max-tokens", "4"], "--max-tokens 4: must be at least --max-num-seqs 8"),
        (["tune", "--device", "none.json"], "--device 'none.json': there is no such profile"),
        (["tune", "--num-trials", "three"], "--num-trials"),
        (["tune", "--no-such-flag"], "--no-such-flag"),
        (["worker", "--storage", "x", "--wait-limit", "-1"], "--wait-limit -1.0: must be above 0 seconds"),
        (["tune", "--trace", "."], "trace .: is not a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_exits_2_and_names_flag_value_and_rule(tilebudget: Run, arguments: list[str], message: str) -> None:
    code, out, err = tilebudget(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tune --device h20_sxm", "rtx_pro_6000_server; did you mean h200_sxm?"),
        ("tune --device cuda:1", "--device 'cuda:1': must be cuda"),
        ("tune --model llama-3.1-8", "; did you mean llama-3.1-8b?"),
        ("tune --model meta-llama/Llama-3.1-8B-Instrct", "; did you mean meta-llama/Llama-3.1-8B-Instruct?"),
        ("tune --policy sarathy", "; did you mean sarathi?"),
        ("tune --workload azure-con", "; did you mean azure-conv?"),
        ("tune --objective capasity", "; did you mean capacity?"),
        ("tune --dtype bfloat61", "--dtype 'bfloat61': must be one of auto, fp32"),
        ("tune --kernels vlm --device H100", "on --device 'h100_sxm'; did you mean vllm?"),
        ("tune --server vlm --model x", "; did you mean vllm?"),
        ("tune --tbt-slow 3", "--tbt-slow: there is no such option; did you mean --tbt-slo?"),
        ("tiles --device h20_sxm", "; did you mean h200_sxm?"),
        ("tiles --device h20_sxm --kernels triton", "; did you mean h200_sxm?"),
        ("tiles --device H100 --kernels vlm", "; did you mean vllm?"),
        (
            "tune --device H100 --model llama-3.1-8b --tensor-parallel 3",
            "--tensor-parallel 3: must divide the 32 heads",
        ),
        ("tune --tensor-parallel 3", "--tensor-parallel 3: must divide the 8 heads"),
        (
            "tune --device H100 --pipeline-parallel 2 --pipeline-split 1,2,3",
            "the layers of --pipeline-parallel 2 stages",
        ),
        (
            "tune --device H100 --pipeline-parallel 2 --pipeline-split 1,2",
            "--pipeline-split (1, 2): must be at least one",
        ),
        ("tune --device H100 --dtype fp32", "--dtype 'fp32': must be one of bf16, fp8"),
        ("tune --max-budget 4", "--max-budget 4: must be at least --min-budget 8"),
        (
            "tune --objective capacity --arrivals saturated",
            "--arrivals 'saturated': --objective capacity needs poisson",
        ),
        ("tune --indifference 2", "--indifference '2': must be a share of at least 0 and below 1"),
        ("tune --engine server", "exactly one of --server NAME, --command TEMPLATE and --base-url URL"),
        ("tune --server-args x --command 'x {token_budget} {port}'", "--server-args 'x': needs --server NAME"),
        ("tune --base-url http://127.0.0.1:1 --model x", "give it as both --min-budget and --max-budget"),
        ("tune --server vllm --model x --start-timeout 0", "--start-timeout 0.0: must be above 0 seconds"),
        ("tune --yardstick disaggregated --device cpu", "has --device 'cpu'"),
        ("tiles --min-jump-pct 0", "--min-jump-pct 0.0: must be above 0"),
        ("tiles --max-tokens 0", "--max-tokens 0: must be at least 1"),
        ("tune --device A100 --dtype fp8", "--dtype 'fp8': must be one of bf16, as measured on a100_sxm"),
        ("show nowhere --format vlm", "--format 'vlm': must be one of"),
        ("compare one", "RUN_FOLDERS has 1"),
        ("compare", "RUN_FOLDERS"),
        ("worker", "Missing option '--storage'"),
    ],
)
def test_errors_are_one_line_in_the_words_of_the_command_line(tilebudget: Run, line: str, message: str) -> None:
    code, _, err = tilebudget(*shlex.split(line))
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1
    assert re.search(r"[a-z]+_[a-z_]+=", err) is None


def test_help_is_in_groups_that_hold_every_option_and_fits_80_columns(
    tilebudget: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = tilebudget("tune", "--help")[1]
    headings = [line.removesuffix(":") for line in out.splitlines() if re.fullmatch(r"[A-Z][a-z]+:", line)]
    assert headings == list(GROUPS)
    assert len(GROUPS["Common"]) == 11  # the ten of tune, and run's budget
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(set(grouped)) == len(grouped)
    assert {field.name for field in fields(TuneConfig)} <= set(grouped)
    assert max(map(len, out.splitlines())) <= 80
    commands = tilebudget("--help")[1]
    assert all(f"\n{group}:" in commands for group in COMMANDS)
    assert {name for names in COMMANDS.values() for name in names} == set(re.findall(r"^  (\w+) ", commands, re.M)) - {
        "Find"
    }


def test_what_the_user_wrote_is_not_translated() -> None:
    assert cli.translate("command='x max_num_seqs=3 {port}': must {max_num_seqs}", "tune") == (
        "--command 'x max_num_seqs=3 {port}': must {max_num_seqs}"
    )
    assert cli.translate("file max_num_seqs.csv: the model's max_num_seqs=8 is below 9", "tune") == (
        "file max_num_seqs.csv: the model's --max-num-seqs 8 is below 9"
    )


def test_a_setting_that_is_refused_leaves_no_study_behind(tilebudget: Run, tmp_path: Path) -> None:
    code, _, err = tilebudget("tune", "--tbt-slo", "20", "--run-dir", str(tmp_path / "run"))
    assert (code, (tmp_path / "run").exists()) == (2, False), err


def test_a_worker_says_what_it_waits_for_and_begins_no_study(tilebudget: Run, tmp_path: Path) -> None:
    code, _, err = tilebudget("worker", "--storage", str(tmp_path / "absent"), "--wait-limit", "0.2")
    assert code == 1
    assert f"waiting up to 0 s for study 'tilebudget' in {tmp_path / 'absent'}" in err
    assert "no study 'tilebudget' was begun there" in err
    assert not (tmp_path / "absent").exists()


def test_a_missing_recommendation_exits_1(tilebudget: Run) -> None:
    code, _, err = tilebudget("show", "llama-3.1-8b")
    assert code == 1
    assert "no recommendation for model=llama-3.1-8b" in err


def test_tune_on_the_real_engine(tilebudget: Run, tmp_path: Path) -> None:
    """The main job, small: a real study on the CPU, its run folder, and what show and report make of it."""
    arguments = ["--num-requests", "6", "--num-trials", "3", "--repeats", "2", "--num-contenders", "1", *SMALL]
    code, out, err = tilebudget("tune", *arguments, "--run-dir", "runs/a", "--json")
    assert code in (0, 3)
    recommendation = json.loads(out)
    assert recommendation["status"] == ("feasible" if code == 0 else "infeasible")
    assert recommendation["token_budget"] >= 4
    assert recommendation["num_trials"]["failed"] == 0
    assert "search 3/3" in err
    code, out, _ = tilebudget("show", "runs/latest", "--format", "vllm")
    assert code == 0
    assert out.startswith(f"--max-num-batched-tokens {recommendation['token_budget']} --max-num-seqs 4 ")
    code, out, _ = tilebudget("show", "tiny-llama", "--format", "kubernetes", "--container", "llm")
    assert code == 0
    assert '- name: "llm"' in out
    code, out, err = tilebudget("show", "tiny-llama", "--device", "h100_sxm", "--allow-nearest")
    assert code == 0
    assert out.startswith("--max-num-batched-tokens ")
    assert "the nearest was tuned for model=tiny-llama, device=cpu" in err
    assert json.loads(tilebudget("show", "--schema")[1])["title"] == "tilebudget recommendation"
    code, out, _ = tilebudget("show", "tiny-llama", "--format", "json")
    assert json.loads(out) == recommendation
    (tmp_path / "runs/a/report.html").unlink()
    code, out, _ = tilebudget("report", "runs/a")
    assert code == 0
    assert str(recommendation["token_budget"]) in Path(out.strip()).read_text()


def test_an_infeasible_slo_exits_3(tilebudget: Run) -> None:
    arguments = ["--num-requests", "4", "--num-trials", "2", "--repeats", "2", "--num-contenders", "1", *SMALL]
    code, out, _ = tilebudget("tune", *arguments, "--tbt-slo", "1us", "--json")
    assert code == 3
    recommendation = json.loads(out)
    assert recommendation["status"] == "infeasible"
    assert "No budget meets the SLO" in recommendation["verdict"]
