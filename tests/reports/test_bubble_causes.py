"""The report of a pipeline: its own bubbles come first, and why a larger budget loses is said."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import pytest
from sample_study import make_folder, trial
from tilebudget.engine import BUBBLE_CAUSES
from tilebudget.reports.budgets.trials import summarise_budgets
from tilebudget.reports.build import build_report
from tilebudget.reports.data.run_folder import RunFolder, read_run_folder
from tilebudget.reports.pipelines.bubble_causes import CAUSES, draw_bubble_causes
from tilebudget.reports.pipelines.timeline import _stages


def row(budget: int, speed: float, **parts: float) -> dict[str, object]:
    causes = {f"bubble_{cause}": parts.get(cause, 0.0) for cause in BUBBLE_CAUSES}
    metrics = {"tbt_p50_ms": 3.0, "tbt_p99_ms": 10.0, "tbt_max_ms": 12.0, "bubble_fraction_4": 0.2}
    own = {"bubble_fraction": sum(causes.values()), "num_stages": 2}
    return trial(f"t{budget}", budget, {**metrics, **causes, **own, "total_tokens_per_s": speed})


def write(path: Path, rows: list[dict[str, object]], *, chosen: int) -> Path:
    folder = make_folder(policies=False, search=False)
    folder.trials = rows
    folder.recommendation["token_budget"] = chosen
    key, expected = (cast(dict[str, object], folder.recommendation[name]) for name in ("key", "expected"))
    key["pipeline_parallel"] = 2
    expected["bubble_fraction"] = {"value": 0.05, "low": 0.05, "high": 0.05, "repeats": 2}
    return folder.write(path)


def test_the_causes_are_those_of_the_engine() -> None:
    assert {column.removeprefix("bubble_") for column in CAUSES} == set(BUBBLE_CAUSES)


def test_why_a_larger_budget_loses(tmp_path: Path) -> None:
    rows = [
        row(512, 1000.0, empty_slot=0.03, length_difference=0.02),
        row(2048, 930.0, empty_slot=0.04, prefill_after_decode=0.12),
    ]
    folder = read_run_folder(write(tmp_path, rows, chosen=512))
    assert (folder.answer.bubble_metric, folder.answer.bubble_stages) == ("bubble_fraction", 2)
    drawing = draw_bubble_causes(folder, summarise_budgets(folder.search, folder.answer))
    assert drawing is not None
    assert drawing.finding == (
        "The 2 stages of the pipeline idle most at budget 2048: 16% of the time, 12% for a prefill beside a decode. "
        "Budget 2048 idles 16% where the recommended 512 idles 5.0%, most of the difference for a prefill beside a "
        "decode; its throughput differs by −7.0%."
    )
    assert drawing.figure is not None
    drawn = {trace.name: list(trace.y) for trace in drawing.figure.data}
    assert drawn["a prefill beside a decode"] == pytest.approx([0.0, 12.0])
    assert "activations on their way" not in drawn
    page = build_report(folder.path).read_text(encoding="utf-8")
    assert "What empties the pipeline" in page
    assert "Pipeline bubbles, 2 stages" in page


def test_without_a_larger_budget_nothing_is_compared(tmp_path: Path) -> None:
    folder = read_run_folder(write(tmp_path, [row(512, 1000.0, empty_slot=0.03)], chosen=512))
    drawing = draw_bubble_causes(folder, summarise_budgets(folder.search, folder.answer))
    assert drawing is not None
    assert drawing.finding.endswith("3.0% of the time, 3.0% for an empty slot: too few micro-batches.")


def test_no_pipeline_no_section(tmp_path: Path) -> None:
    folder: RunFolder = read_run_folder(make_folder().write(tmp_path))
    assert folder.answer.bubble_metric == "bubble_fraction_4"
    assert draw_bubble_causes(folder, summarise_budgets(folder.search, folder.answer)) is None


def test_a_wait_in_the_timeline_names_its_cause(tmp_path: Path) -> None:
    folder = read_run_folder(make_folder().write(tmp_path))
    iterations = next(iter(folder.iterations.values())).iloc[:3].copy()
    times = np.arange(6.0).reshape(3, 2)
    iterations["stage_start_s"] = pd.Series(list(times))
    iterations["stage_end_s"] = pd.Series(list(times + 0.5))
    for cause in BUBBLE_CAUSES:
        iterations[f"bubble_{cause}_s"] = 0.0
    iterations["bubble_prefill_after_decode_s"] = [0.0, 2.0, 0.0]
    iterations["bubble_transfer_s"] = [0.0, 1.0, 3.0]
    stages = _stages(iterations, 0, 3, 2)
    assert not stages.replayed
    assert stages.causes[1:] == (" for a prefill beside a decode", " for activations on their way")
