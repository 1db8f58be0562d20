"""The yardstick of disaggregated prefill and decode: what it refuses, and what it finds on modelled systems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tilebudget.autotune import TuneConfig, tune
from tilebudget.autotune.devices import make_executor
from tilebudget.autotune.disaggregation import (
    Arrangement,
    Cluster,
    Yardstick,
    compare_disaggregated,
    make_yardstick,
    parse_split,
    system_link,
)
from tilebudget.autotune.problem import Problem, load_workload, read_device, state_problem
from tilebudget.engine.disaggregated import Split
from tilebudget.engine.metrics import Limit
from tilebudget.kernels.latency.silicon import system_spec

CONFIG = TuneConfig(
    model="llama-3.1-8b",
    device="h200_sxm",
    kernels="vllm",
    dtype="fp8",
    workload="fixed:1000:100",
    num_requests=60,
    max_num_seqs=32,
    max_model_len=2048,
    num_trials=4,
    max_budget=1024,
)
SPLIT = Split(num_prefill=1, num_decode=1)


def problem_of(config: TuneConfig) -> Problem:
    executor = make_executor(config)
    workload = load_workload(config, executor.max_position)
    return state_problem(config, executor, workload, read_device(config, executor, workload, None))


def ignore(done: int) -> None:
    return


def test_capacity_keeps_the_limits_and_the_next_rate_breaks_them() -> None:
    problem = problem_of(CONFIG)
    cluster = Cluster(problem, 2, ignore)
    slo = replace(problem.slo, ttft=Limit(limit_s=0.15))
    for arrangement in (
        Arrangement(num_instances=2, token_budget=512),
        Arrangement(num_instances=2, split=SPLIT),
    ):
        qps, service = cluster.capacity(arrangement, slo)
        assert qps > 0.0
        assert service is not None
        assert service.meets(slo)
        just_above = [rate for name, rate in cluster.rates if name == arrangement.name and 1.001 < rate / qps <= 1.03]
        assert just_above
        assert not any(cluster.serve(arrangement, rate).meets(slo) for rate in just_above)


def test_the_table_of_a_comparison() -> None:
    document = cast(dict[str, Any], compare_disaggregated(problem_of(CONFIG), 384, Yardstick(num_gpus=2, split=SPLIT)))
    assert document["num_instances"] == 2
    assert document["link"]["bytes_per_s"] == system_spec("h200_sxm").link_bytes_per_s
    # 32 layers of 8 KV heads of 128, keys and values, 2 bytes.
    assert document["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert [limit["name"] for limit in document["limits"]] == ["tightest", "tight", "strict", "relaxed"]
    for limit in document["limits"]:
        rows = limit["arrangements"]
        assert [row["token_budget"] for row in rows] == [256, 384, 512, 1024, 2048, None]
        assert (rows[-1]["num_prefill"], rows[-1]["num_decode"]) == (1, 1)
        for row in rows:
            if row["capacity_qps"]:
                assert row["tbt_p99_ms"] <= limit["tbt_p99_ms"]
    tightest, tight, _, relaxed = (
        [row["capacity_qps"] for row in limit["arrangements"]] for limit in document["limits"]
    )
    assert all(one <= other for one, other in zip(tight, relaxed, strict=True))
    assert all(one <= other for one, other in zip(tightest, tight, strict=True))
    # A chunk of 2048 tokens takes longer than two reference decode iterations; decodes apart never meet one.
    assert tight[4] < 0.5 * tight[5]


def test_links_within_and_between_nodes() -> None:
    spec = system_spec("a100_sxm")
    assert system_link(spec, 8).bytes_per_s == 300e9
    assert system_link(spec, 9).bytes_per_s == 25e9


def test_the_run_folder_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tune(CONFIG, yardstick=Yardstick(num_gpus=2), run_dir=folder, command="test")
    document = json.loads((folder / "disaggregation.json").read_text())
    assert document["token_budget"] == json.loads((folder / "recommendation.json").read_text())["token_budget"]


@pytest.mark.parametrize(
    ("yardstick", "changes", "match"),
    [
        (
            Yardstick(),
            {"device": "cpu", "kernels": None, "dtype": "fp32"},
            "yardstick='disaggregated': needs a modelled",
        ),
        (Yardstick(num_gpus=3), {"tensor_parallel": 2}, "yardstick_gpus=3: must be a multiple of tensor_parallel=2"),
        (Yardstick(num_gpus=2), {"tensor_parallel": 2}, "yardstick_gpus=2: must be a multiple of tensor_parallel=2"),
        (Yardstick(), {"pipeline_parallel": 2}, "pipeline_parallel=2: must be 1 for yardstick='disaggregated'"),
        (Yardstick(num_gpus=4, split=SPLIT), {}, "yardstick_split='1:1': must add up to 4 instances"),
    ],
)
def test_what_cannot_be_compared_is_refused(yardstick: Yardstick, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tune(replace(CONFIG, **changes), yardstick=yardstick)


def test_bad_arguments() -> None:
    assert parse_split("1:3") == Split(num_prefill=1, num_decode=3)
    with pytest.raises(ValueError, match="yardstick_split='13': must be prefill and decode instances"):
        parse_split("13")
    with pytest.raises(ValueError, match="num_decode=0: must be at least 1"):
        parse_split("1:0")
    with pytest.raises(ValueError, match="yardstick='vllm': must be disaggregated"):
        make_yardstick("vllm", 4, None)
    with pytest.raises(ValueError, match="yardstick_gpus=1: must be at least 2"):
        Yardstick(num_gpus=1)
