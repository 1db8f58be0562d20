"""Predictions are compared with the runs they were made for, and with nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sample_study import make_folder, trial
from tilebudget.reports.budgets.predictions import METRICS, draw_predictions, prediction_errors, prediction_finding
from tilebudget.reports.data.run_folder import RunFolder, read_run_folder
from tilebudget.reports.tables import trial_columns, trial_rows

Row = dict[str, object]


def row(
    run: str, budget: int | None, measured_ms: float, predicted_ms: float | None, speed: float = 1.0, **changes: object
) -> Row:
    metrics = {"tbt_p99_ms": measured_ms, "total_tokens_per_s": 1000.0, "predicted_tbt_p99_ms": predicted_ms}
    prediction = None if predicted_ms is None else 1000.0 * speed
    return trial(run, budget, {**metrics, "predicted_total_tokens_per_s": prediction}, **changes)


def read(path: Path, rows: list[Row]) -> RunFolder:
    folder = make_folder(policies=False, search=False)
    folder.trials = rows
    return read_run_folder(folder.write(path))


def test_the_finding_holds_median_worst_and_the_side_of_the_slo(tmp_path: Path) -> None:
    rows = [
        row("a", 64, 10.0, 9.0, 1.02),
        row("b", 128, 10.0, 10.2, 0.99),
        row("c", 256, 13.9, 14.178, 1.01),  # over the SLO of 14 ms, the run is not
        row("d", 512, 20.0, None),
        row("e", 1024, 5.0, 50.0, state="pruned"),  # a stopped run's P99 is of a part of the requests
        row("f", 128, 10.0, 90.0, role="policy"),
    ]
    folder = read(tmp_path, rows)
    assert prediction_finding(folder) == (
        "Over 3 runs of 3 budgets the prediction of P99 TBT is 2.0% off (median), at worst −10% (budget 64); "
        "the prediction of throughput is 1.0% off (median), at worst +2.0% (budget 64). "
        "It puts 1 of 3 budgets on the wrong side of the SLO."
    )
    assert list(prediction_errors(folder, METRICS[0])["error"]) == pytest.approx([-0.1, 0.02, 0.02])


def test_a_modelled_clock_proves_nothing(tmp_path: Path) -> None:
    rows = [row("a", 64, 10.0, 10.0), row("b", 128, 12.0, 12.0)]
    assert prediction_finding(read(tmp_path, rows)) == (
        "Predicted and measured are equal in all 2 runs of 2 budgets, as on a modelled clock: "
        "this says nothing on accuracy."
    )


def test_the_figure_pairs_the_medians_of_each_budget(tmp_path: Path) -> None:
    rows = [row(f"r{n}", 128, ms, 9.0, role="repeat") for n, ms in enumerate((10.0, 12.0, 9.0))]
    figure = draw_predictions(read(tmp_path, [*rows, row("u", None, 30.0, 33.0)])).figure
    assert figure is not None
    by_name = {(trace.name, trace.yaxis): trace for trace in figure.data}
    assert list(by_name["measured", "y"].x) == ["128", "unlimited"]
    np.testing.assert_allclose(by_name["measured", "y"].y, [10.0, 30.0])
    np.testing.assert_allclose(by_name["predicted", "y"].y, [9.0, 33.0])
    errors = by_name["error of the prediction", "y2"]
    np.testing.assert_allclose(errors.y, [-10.0, 10.0])
    np.testing.assert_allclose(errors.error_y.array, [10.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(errors.error_y.arrayminus, [15.0, 0.0])
    identity = [shape for shape in figure.layout.shapes if shape.name == "identity"]
    assert [(shape.y0, shape.y1) for shape in identity] == [(0, 0), (0, 0)]


def test_one_predicted_metric_is_drawn_alone(tmp_path: Path) -> None:
    rows = [row("a", 64, 10.0, 9.0) | {"predicted_total_tokens_per_s": None}]
    folder = read(tmp_path, rows)
    figure = draw_predictions(folder).figure
    assert figure is not None
    assert {trace.yaxis for trace in figure.data} == {"y", "y2"}
    assert "throughput" not in prediction_finding(folder)


def test_the_trial_table_shows_predictions_only_where_there_are_some(tmp_path: Path) -> None:
    with_some = read(tmp_path / "some", [row("a", 64, 10.0, 9.0, 1.02), row("b", 128, 10.0, None)])
    titles = [column.title for column in trial_columns(with_some)]
    assert titles.index("Predicted P99") == titles.index("P99 TBT") + 1
    assert titles.index("Predicted") == titles.index("Throughput") + 1
    first, second = (
        {title: cell.text for title, cell in zip(titles, line.cells, strict=True)} for line in trial_rows(with_some)
    )
    assert (first["P99 TBT"], first["Predicted P99"]) == ("10.0", "9.00")
    assert (first["Throughput"], first["Predicted"]) == ("1,000", "1,020")
    assert (second["Predicted P99"], second["Predicted"]) == ("–", "–")
    without = read(tmp_path / "none", [trial("a", 64, {"tbt_p99_ms": 10.0})])
    assert {column.title for column in trial_columns(without)}.isdisjoint({"Predicted P99", "Predicted"})
    assert len(trial_rows(without)[0].cells) == len(trial_columns(without))
    drawing = draw_predictions(without)
    assert drawing.figure is None
    assert drawing.finding.startswith("No run carries a prediction")
