"""The staircase section says and draws what tiles.json holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sample_study import Folder, make_folder, make_tiles, trial
from tilebudget.reports.costs.findings import token_cost_finding
from tilebudget.reports.costs.tables import cost_tables
from tilebudget.reports.costs.token_cost import draw_token_cost
from tilebudget.reports.data.run_folder import RunFolder, read_run_folder


def read(path: Path, folder: Folder) -> RunFolder:
    return read_run_folder(folder.write(path))


@pytest.fixture
def study() -> Folder:
    folder = make_folder(policies=False, search=False)
    folder.trials = [trial("trial-0", 128, {})]
    return folder


def test_the_finding_is_the_arithmetic_of_the_simulated_layer(tmp_path: Path, study: Folder) -> None:
    """A layer of the simulator takes (2 + 0.02 n + 1.28 ⌈n/64⌉)/4 ms: 1.78 at 128 tokens, 2.105 at 129."""
    assert token_cost_finding(read(tmp_path, study)) == (
        "At the recommended budget 128 a layer takes 1.78 ms; one more token makes it 2.10 ms, +18% ± 1.5% "
        "(1.30 ms in 4 layers). Its 71.9 tokens/ms are more than any smaller count has. "
        "Of 15 steps in the range drawn, the largest is 64 → 65: +29% ± 1.5%."
    )


@pytest.mark.parametrize(
    ("budget", "status", "sentence"),
    [
        (96, "feasible", "budget 96 a layer takes 1.62 ms; at 112, measured next, it is 1.70 ms, +4.9%"),
        (96, "feasible", ", which is no step."),
        (129, "infeasible", "At the closest budget 129 a layer takes"),
        (129, "infeasible", "It has 61.3 tokens/ms; 128 already has 71.9."),
        (100, "feasible", "The recommended budget 100 was not measured: it lies between the measured 96 and 112."),
        (4096, "feasible", "The recommended budget 4096 was not measured: it is outside the sweep."),
        (1024, "feasible", "nothing was measured close above it."),
        (None, "no_data", "Of 15 steps in the range drawn"),
    ],
)  # fmt: skip
def test_every_place_of_the_budget_has_its_sentence(
    tmp_path: Path, study: Folder, budget: int | None, status: str, sentence: str
) -> None:
    study.recommendation |= {"token_budget": budget, "status": status}
    assert sentence in token_cost_finding(read(tmp_path, study))


def test_the_figure_draws_the_points_the_edges_and_the_budgets(tmp_path: Path, study: Folder) -> None:
    figure = draw_token_cost(read(tmp_path, study)).figure
    assert figure is not None
    tiles = json.loads((tmp_path / "tiles.json").read_text())
    points = [(row["tokens"], row["layer_ms"]) for row in tiles["layer_staircase"] if row["tokens"] >= 32]
    by_name = {(trace.name, trace.yaxis): trace for trace in figure.data}
    line = next(trace for trace in figure.data if trace.name is None and trace.yaxis == "y2")
    for axis, values in (("y", [ms for _, ms in points]), ("y2", [tokens / ms for tokens, ms in points])):
        np.testing.assert_array_equal(by_name["layer", axis].x, [tokens for tokens, _ in points])
        np.testing.assert_allclose(by_name["layer", axis].y, values)
    steps = by_name["step", "y"]
    assert [at for at in steps.x if at is not None] == [n for edge in range(64, 961, 64) for n in (edge, edge + 1)]
    assert {*by_name["budget tried: aligned", "y"].x} == {64, 128, 192, 256, 512}
    middle = by_name["budget tried: mid-tile", "y"]
    np.testing.assert_allclose(middle.y, [(2 + 0.02 * n + 1.28 * -(-n // 64)) / 4 for n in (96, 160)])
    assert {shape.x0 for shape in figure.layout.shapes} == {128}
    # The line of the lower panel passes through the budget that lies between two counts.
    rate = by_name["budget tried: mid-tile", "y2"].y[0]
    np.testing.assert_allclose(np.interp(96, line.x, line.y), rate)
    labels = [note.text for note in figure.layout.annotations if note.name == "step"]
    assert labels[0] == "+18%"  # the step at the recommended budget comes first
    assert "+29%" in labels


def test_a_budget_between_two_counts_says_so_on_hover(tmp_path: Path, study: Folder) -> None:
    study.profile["candidates"] = [{"token_budget": 100, "kind": "mid_tile"}]
    figure = draw_token_cost(read(tmp_path, study)).figure
    assert figure is not None
    marks = next(trace for trace in figure.data if trace.name == "budget tried: mid-tile")
    assert list(marks.text) == ["on the line from 96 to 112"]


def test_the_tables_hold_the_edges_the_budgets_and_every_source(tmp_path: Path, study: Folder) -> None:
    edges, budgets, sources = cost_tables(read(tmp_path, study))
    # mlp_up_proj holds the tiles alone: its step after 64 tokens doubles it.
    assert edges.rows[0][:5] == ("mlp_up_proj", "64", "65", "0.320 → 0.640", "+100% ± 1.5%")
    assert edges.rows[0][5] == "64 is a multiple of 64; a tile of 64x64: 1 → 2 waves"
    assert edges.note == "18 smaller steps of the range drawn not listed."
    assert budgets.marked is not None
    assert budgets.rows[budgets.marked] == ("128", "71.9", "1.78", "7.12", "+18%", "129", "on an edge, worth trying")
    assert " ".join(row[0] for row in budgets.rows) == "64 65 96 128 129 160 192 193 256 257 512 1024"
    assert [row[:3] for row in sources.rows] == [
        ("mlp_up_proj", "yes", "measured"),
        ("mlp_down_proj", "yes", "transferred"),
        ("emb", "no", "table"),
    ]
    assert sources.rows[1][-1] == "256x688 is not in the table: interpolated"
    assert sources.note.startswith("Counts were measured about 16 apart")


def test_the_page_shows_them_and_a_study_without_the_file_says_so(tmp_path: Path, report: Path, study: Folder) -> None:
    page = report.read_text(encoding="utf-8")
    for text in ("Largest steps", "64 is a multiple of 64", "What one more token costs at a budget", "transferred"):
        assert text in page
    study.tiles = None
    absent = read(tmp_path, study)
    drawing = draw_token_cost(absent)
    assert drawing.figure is None
    assert "no tile analysis (tiles.json)" in drawing.finding
    assert cost_tables(absent) == []


def test_another_degree_does_not_leak_in(tmp_path: Path, study: Folder) -> None:
    tiles = make_tiles()
    for key in ("edges", "layer_edges", "operations"):
        rows = tiles[key]
        assert isinstance(rows, list)
        tiles[key] = rows + [{**row, "tensor_parallel": 2} for row in rows]
    study.tiles = tiles
    doubled = read(tmp_path / "both", study)
    study.tiles = make_tiles()
    assert cost_tables(doubled) == cost_tables(read(tmp_path / "one", study))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "layer_staircase",
            [{"tokens": 64}],
            r"layer_staircase\[0\].layer_ms must be a number, found None",
        ),
        ("layer_ops", "mlp", "tiles.json: layer_ops must be a list of strings, found 'mlp'"),
        ("edges", [1], r"tiles.json: edges must be a list of objects, found \[1\]"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, study: Folder, key: str, value: object, message: str) -> None:
    study.tiles = make_tiles() | {key: value}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, study)


def test_an_empty_staircase_is_a_sentence(tmp_path: Path, study: Folder) -> None:
    study.tiles = {}
    drawing = draw_token_cost(read(tmp_path, study))
    assert drawing.figure is None
    assert drawing.finding == "The tile analysis holds no point of a layer: nothing to draw."
