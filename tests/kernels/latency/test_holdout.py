"""The holdout benchmark's contract, on a made-up file and on the real ones."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def holdout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("holdout_benchmark", ROOT / "benchmarks" / "holdout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made_up_file(path: Path) -> Path:
    """Two operations at two degrees: noisy stairs of tiles 128 and 256, on Vidur's counts, rows descending."""
    rng = np.random.default_rng(0)
    grid = np.array([1, 2, 4, *range(8, 1025, 8), *range(1040, 2049, 16), *range(2080, 4097, 32)])
    lines = ["time_stats.up.median,time_stats.down.median,num_tokens,num_tensor_parallel_workers"]
    for degree in (1, 2):
        up = (1 + (grid - 1) // 128 + 0.001 * grid / degree) * np.exp(0.005 * rng.standard_normal(grid.size)) / degree
        down = (1 + 0.7 * ((grid - 1) // 256)) * np.exp(0.005 * rng.standard_normal(grid.size)) / degree
        lines += [f"{u},{d},{t},{degree}" for t, u, d in zip(grid[::-1], up[::-1], down[::-1], strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_contract_on_a_made_up_file(holdout: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made_up_file(tmp_path / "mlp.csv")
    assert holdout.main(["--sweep", str(path), "--points", "64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["points"] == 64
    assert document["median_error_pct"] <= 1.5
    assert document["p95_error_pct"] <= 6
    assert document["jump_kept_pct"] >= 85
    assert [(row["op"], row["tensor_parallel"], row["points"]) for row in document["operations"]] == [
        ("up", 1, 64),
        ("down", 1, 64),
        ("up", 2, 64),
        ("down", 2, 64),
    ]
    assert holdout.main(["--sweep", str(path), "--no-hints"]) == 0
    assert "jumps kept" in capsys.readouterr().out


def test_figures_by_their_definitions(holdout: ModuleType) -> None:
    from tilebudget.kernels.latency.sweep import Sweep

    tokens = np.arange(8, 81, 8)
    measured = np.array([1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    predicted = np.array([1.0, 1.0, 1.0, 1.1, 1.65, 2.0, 2.0, 2.0, 2.0, 2.0])
    figures = holdout.summary(
        [
            holdout.Prediction(
                sweep=Sweep(op="x", tokens=tokens, latency_ms=measured),
                predicted_ms=predicted,
                chosen=frozenset({8, 80}),
            )
        ]
    )
    # Errors at the eight others: 0, 0, 0.1, 0.175, 0, 0, 0, 0; the jump of +100% is predicted as +50%.
    assert figures["median_error_pct"] == 0
    assert figures["p95_error_pct"] == pytest.approx(np.percentile([0, 0, 10, 17.5, 0, 0, 0, 0], 95))
    assert figures["jump_kept_pct"] == pytest.approx(50)
    assert figures["num_jumps"] == 1


def test_usage_error(holdout: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert holdout.main(["--sweep", str(tmp_path / "absent.csv")]) == 2
    assert "absent.csv" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vidur_a100_llama2_7b_mlp.csv", "vidur_h100_llama2_7b_mlp.csv"])
def test_real_sweeps_meet_the_bars(
    holdout: ModuleType, shared: Callable[[str], Path], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert holdout.main(["--sweep", str(shared(f"data/{name}")), "--points", "64", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_counts"] == 259
    assert document["median_error_pct"] <= 1.5
    assert document["p95_error_pct"] <= 6
    assert document["jump_kept_pct"] >= 85
