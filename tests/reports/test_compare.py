"""Several studies on one page: what tells them apart names them, and every figure is of their own data."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from page_text import figures, numbers, words
from sample_study import make_folder, simulate
from tilebudget.reports import build_comparison, build_report

NAMES = {"answers", "throughputs", "latencies", "first_tokens", "answer_tails"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The sample study, and one of a device that is twice as fast with half the SLO and another budget."""
    root = tmp_path_factory.mktemp("runs")
    first, second = make_folder(policies=False), make_folder(policies=False)
    second.recommendation["key"] = {**second.recommendation["key"], "device": "fast"}  # type: ignore[dict-item]
    second.recommendation["token_budget"] = 256
    second.recommendation["slo"] = {**second.recommendation["slo"], "tbt_p99_ms": 7.0}  # type: ignore[dict-item]
    for row in second.trials:
        for name in list(row):
            if name.startswith("tbt_") and name.endswith("_ms") and row[name] is not None:
                row[name] = (np.asarray(row[name]) / 2).tolist()
            if name.endswith("tokens_per_s") and row[name] is not None:
                row[name] = 2 * float(str(row[name]))
    return [first.write(root / "slow"), second.write(root / "fast")]


def test_the_page_holds_both_studies(runs: list[Path], tmp_path: Path) -> None:
    page = build_comparison(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    seen = words(page)
    assert "Token budgets of 2 studies" in seen
    assert "The budgets to set: 128 for cpu and 256 for fast." in seen
    assert "All studies serve azure_llm_2023_conv." in seen
    drawn = figures(page)
    assert set(drawn) == NAMES
    trials = pd.read_parquet(runs[1] / "trials.parquet")
    whole = {trace["name"]: trace for trace in drawn["throughputs"]["data"]}
    ys = numbers(whole["fast"]["y"])
    budgets = numbers(whole["fast"]["x"])
    own = trials[(trials["token_budget"] == 512) & (trials["state"] == "complete")]["total_tokens_per_s"]
    assert ys[budgets.index(512)] == pytest.approx(own.iloc[0])
    sizes = whole["fast"]["marker"]["size"]  # type: ignore[index]
    assert budgets[list(sizes).index(14)] == 256
    assert len(page.encode()) < 6_000_000
    assert (
        re.findall(r'(?:src|href|action)="(?!data:|#)[^"]*"', re.sub(r"<script.*?</script>", "", page, flags=re.S))
        == []
    )


def test_p99_is_over_each_studys_own_slo(runs: list[Path], tmp_path: Path) -> None:
    page = build_comparison(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    lines = {str(trace["name"]): numbers(trace["y"]) for trace in figures(page)["latencies"]["data"]}
    slow, fast = lines["cpu"], lines["fast"]
    np.testing.assert_allclose(slow, fast)
    assert simulate("sarathi", 512).metrics["tbt_p99_ms"] == pytest.approx(14.0 * slow[-1], rel=0.05)


def test_studies_alike_are_named_by_their_folders(runs: list[Path], tmp_path: Path) -> None:
    again = make_folder(policies=False).write(tmp_path / "again")
    seen = words(build_comparison([runs[0], again], tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "128 for slow and 128 for again" in seen
    assert "Their throughputs are within 1% of each other." in seen


def test_studies_without_answers_are_sentences(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        folder = make_folder(policies=False, search=False)
        folder.recommendation |= {"status": "no_data", "token_budget": None, "expected": {}, "launch": {}, "slo": {}}
        folder.trials = make_folder(policies=False).trials[4:5]  # the one that failed
        folders.append(folder.write(tmp_path / name))
    page = build_comparison(folders, tmp_path / "page.html").read_text(encoding="utf-8")
    assert figures(page) == {}
    assert "No study has a budget to recommend." in words(page)


def test_one_run_is_no_comparison(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_folders has 1: a comparison needs at least 2"):
        build_comparison(runs[:1], tmp_path / "page.html")
    with pytest.raises(ValueError, match="absent: no such directory"):
        build_comparison([runs[0], tmp_path / "absent"], tmp_path / "page.html")


def test_a_page_that_cannot_be_written_is_one_error(runs: list[Path], tmp_path: Path) -> None:
    for output in (tmp_path, tmp_path / "absent" / "page.html"):
        with pytest.raises(ValueError, match=r"output='.*': must be a file, in a folder that is there"):
            build_comparison(runs, output)
    make_folder().write(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"report\.html: cannot be written"):
        build_report(tmp_path)
