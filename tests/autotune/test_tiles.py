"""``tilebudget tiles``: which source answers, and that its budgets and edges come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tilebudget.autotune.tiles import analyse_device, analyse_sweep_file

ARGUMENTS = {"kernels": None, "dtype": "auto", "tensor_parallel": 1, "min_jump_pct": 10.0}


def test_a_plain_sweep_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.csv"
    rows = [f"{tokens},{1.0 + 0.5 * ((tokens - 1) // 128)}" for tokens in range(16, 1025, 16)]
    file.write_text("tokens,latency_ms\n" + "\n".join(rows) + "\n")
    document = json.loads(json.dumps(analyse_sweep_file(file, tensor_parallel=None, min_jump_pct=10.0).to_json()))
    assert [(edge["tokens"], edge["next_tokens"]) for edge in document["edges"]] == [
        (128 * tile, 128 * tile + 16) for tile in range(1, 8)
    ]
    assert document["edges"][0]["jump_pct"] == pytest.approx(50.0)


def test_both_vidur_files_prefer_512_over_520(shared) -> None:  # type: ignore[no-untyped-def]
    for name, at_512, at_520 in (("a100", 537, 487), ("h100", 1559, 1197)):
        file = shared(f"data/vidur_{name}_llama2_7b_mlp.csv")
        budgets = analyse_sweep_file(file, tensor_parallel=None, min_jump_pct=10.0).to_json()["budgets"]
        by_tokens = {row["tokens"]: row["tokens_per_ms"] for row in budgets}  # type: ignore[attr-defined]
        assert by_tokens[512] == pytest.approx(at_512, abs=1)
        assert by_tokens[520] == pytest.approx(at_520, abs=1)


def test_the_cpu_is_measured() -> None:
    analysis = analyse_device("tiny-llama", device="cpu", max_tokens=64, **ARGUMENTS)  # type: ignore[arg-type]
    document = analysis.to_json()
    assert {row["source"] for row in document["operations"]} == {"measured"}  # type: ignore[attr-defined]
    assert document["num_layers"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernels": "vllm"}, "kernels='vllm': must be one of torch, triton on cpu"),
        ({"dtype": "fp8"}, "dtype='fp8': must be one of fp32, bf16, fp16 on cpu"),
        ({"tensor_parallel": 3}, "tensor_parallel=3: must divide the 8 heads"),
    ],
    ids=lambda value: str(value),
)
def test_bad_combinations_are_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        analyse_device("tiny-llama", device="cpu", **{**ARGUMENTS, **change})  # type: ignore[arg-type]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sweep=.*none.csv: there is no such file"):
        analyse_sweep_file(tmp_path / "none.csv", tensor_parallel=None, min_jump_pct=10.0)
