"""The analysis behind `tilebudget tiles`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tilebudget.kernels.latency.sweep import FOUR_GEMMS, Sweep, read_sweeps
from tilebudget.kernels.tiles.staircase import find_edges
from tilebudget.kernels.tiles.tile_report import WaveContext, analyse, candidate_edges

GRID = np.arange(8, 1025, 8)
Row = dict[str, Any]


def stairs(op: str, tile: int, degree: int = 1, source: str = "measured") -> Sweep:
    """A step of 20% of the first level at each multiple of the tile."""
    return Sweep(
        op=op,
        tensor_parallel=degree,
        tokens=GRID,
        latency_ms=(1 + 0.2 * ((GRID - 1) // tile)) / degree,
        source=source,
        note="moved" if source == "transferred" else "",
    )


def rows(document: dict[str, object], key: str) -> list[Row]:
    return cast("list[Row]", document[key])


def test_layer_budgets_and_edges_of_planted_stairs() -> None:
    sweeps = [stairs(op, 256) for op in FOUR_GEMMS] + [stairs(op, 256, degree=2) for op in FOUR_GEMMS]
    analysis = analyse([*sweeps, stairs("emb", 96)], num_layers=10, subject={"device": "planted"})
    assert candidate_edges(analysis) == [256, 512, 768]
    document = json.loads(json.dumps(analysis.to_json()))
    budgets = {row["tokens"]: row for row in rows(document, "budgets")}
    # Four operations of 1.2 ms each at 512, of 1.4 ms at 520.
    assert budgets[512]["layer_ms"] == pytest.approx(4.8)
    assert budgets[512]["tokens_per_ms"] == pytest.approx(512 / 4.8)
    assert budgets[512]["one_more_pct"] == pytest.approx((1.4 / 1.2 - 1) * 100)
    assert budgets[512]["place"] == "edge"
    assert budgets[512]["worth_trying"]
    assert budgets[512]["edge_of"] == list(FOUR_GEMMS)
    assert budgets[520]["place"] == "past_edge"
    assert not budgets[520]["worth_trying"]
    assert all(row["tensor_parallel"] == 1 for row in budgets.values())
    assert {row["tensor_parallel"] for row in document["budgets_by_tensor_parallel"]["2"]} == {2}
    assert document["device"] == "planted"
    assert document["layer_staircase"][0] == {"tokens": 8, "layer_ms": 4.0, "iteration_ms": 40.0}
    text = analysis.to_text()
    assert "512" in text
    assert "48.000" in text  # ten layers of 4.8 ms


def test_edges_hold_the_asked_steps_only_and_the_rest_lies_apart() -> None:
    latency = np.select([GRID <= 128, GRID <= 256, GRID <= 512, GRID <= 1008], [1.0, 1.05, 1.5, 1.1], 1.6)
    document = analyse([Sweep(op="x", tokens=GRID, latency_ms=latency)]).to_json()
    found = {
        key: [row["tokens"] for row in rows(document, key)]
        for key in ("edges", "minor_edges", "drops", "unconfirmed_edges")
    }
    assert found == {"edges": [256], "minor_edges": [128], "drops": [512], "unconfirmed_edges": [1008]}
    assert {"op", "tensor_parallel", "tokens", "next_tokens", "jump_pct", "jump_ms"} <= rows(document, "edges")[
        0
    ].keys()


def test_transferred_layers_are_marked() -> None:
    sweeps = [stairs(op, 256, source="transferred" if op == "mlp_up_proj" else "table") for op in FOUR_GEMMS]
    analysis = analyse(sweeps)
    document = analysis.to_json()
    assert [row["source"] for row in rows(document, "operations")] == ["table", "table", "transferred", "table"]
    assert "mlp_up_proj (tensor_parallel=1) is transferred: moved" in analysis.to_text()
    assert analysis.layer().sweep.source == "transferred"


def test_plus_one_points_keep_both_readings() -> None:
    tokens = np.array([256, 257, 512, 513, 768, 769, 1024, 1025])
    latency = np.array([0.142, 0.310, 0.199, 0.404, 0.280, 0.520, 0.359, 0.619])
    analysis = analyse([Sweep(op="gemm", tokens=tokens, latency_ms=latency, source="table")])
    budgets = {budget.tokens: budget for budget in analysis.budgets[1]}
    assert budgets[512].one_more_pct == pytest.approx(103, abs=1)
    assert budgets[513].tokens_per_ms == pytest.approx(513 / 0.404)
    assert budgets[513].tokens_per_ms_if_padded == pytest.approx(513 / (0.199 + 0.081 / 256))
    assert budgets[513].one_more_pct is None  # 768 is no single token away
    assert candidate_edges(analysis) == [256, 512, 768, 1024]
    assert "tokens/ms if padded" in analysis.to_text()


def test_wave_labels_come_from_tile_arithmetic() -> None:
    edge = next(e for e in find_edges(stairs("mlp_up_proj", 256)).edges if e.tokens == 512)
    # 4096 columns: 128x128 tiles make 128 tiles at 512 rows, which is one wave on 132 SMs, and 160 at 520.
    crossings = WaveContext(num_sms=132, columns={"mlp_up_proj": 4096}).crossings(edge)
    assert "128x128: 1 -> 2 waves" in crossings
    assert WaveContext(num_sms=132, columns={}).crossings(edge) == []


def test_plain_sweep_is_its_own_layer_and_bad_choices_are_named() -> None:
    sweep = stairs("latency", 256)
    assert analyse([sweep]).layer_ops == ("latency",)
    with pytest.raises(ValueError, match=r"tensor_parallel is 4: the sweeps have \[1\]"):
        analyse([sweep], tensor_parallel=4)
    with pytest.raises(ValueError, match="sweeps is empty"):
        analyse([])
    with pytest.raises(ValueError, match="not all measured"):
        analyse([sweep], ops=["latency", "other"])


@pytest.mark.parametrize(
    ("name", "at_512", "at_520"),
    [("vidur_a100_llama2_7b_mlp.csv", 537, 487), ("vidur_h100_llama2_7b_mlp.csv", 1559, 1197)],
)
def test_real_sweeps_rank_512_over_520(shared: Callable[[str], Path], name: str, at_512: float, at_520: float) -> None:
    """FACTS section 1, and issue 3's second condition."""
    analysis = analyse(read_sweeps(shared(f"data/{name}")).sweeps, subject={"sweep": name})
    document = analysis.to_json()
    budgets = {row["tokens"]: row["tokens_per_ms"] for row in rows(document, "budgets")}
    assert budgets[512] == pytest.approx(at_512, abs=1)
    assert budgets[520] == pytest.approx(at_520, abs=1)
    text = analysis.to_text()
    assert f"{budgets[512]:.1f}" in text
    assert f"{budgets[520]:.1f}" in text
    assert 512 in candidate_edges(analysis)
    assert {row["tensor_parallel"] for row in rows(document, "edges")} == {1, 2, 4, 8}
    assert min(row["jump_pct"] for row in rows(document, "edges")) >= 10
