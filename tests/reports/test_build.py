"""The page as a whole: its figures are those of the files, it loads nothing, and no study breaks it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from page_text import ALL_FIGURES, Figure, figures, numbers, words
from sample_study import Folder, make_folder, tbt_columns, trial
from tilebudget.reports import build_report

#: Drawn from the device's cost curves and from the search alone, whatever its runs came to.
OF_DEVICE = {"throughput", "roofline", "free_prefill", "chunking", "staircase", "importance"}


def has_data(figure: Figure) -> bool:
    values = [trace.get("x") if trace.get("type") == "bar" else trace.get("y") for trace in figure["data"]]
    return any(np.isfinite(numbers(value)).any() for value in values if not isinstance(value, list) or value)


def build(folder: Folder, path: Path) -> str:
    return build_report(folder.write(path)).read_text(encoding="utf-8")


def test_the_card_prints_the_figures_of_recommendation_json(report: Path) -> None:
    seen = words(report.read_text(encoding="utf-8"))
    saved = json.loads((report.parent / "recommendation.json").read_text())
    expected = saved["expected"]
    p99 = expected["tbt_p99_ms"]
    assert f"{p99['value']:.2f} ms {p99['low']:.2f} to {p99['high']:.2f} over 3 runs" in seen
    assert f"{expected['total_tokens_per_s']['value']:,.0f} tokens/s" in seen
    assert f"{100 * expected['bubble_fraction_4']['value']:.1f} %" in seen
    assert "Recommended token budget 128 tokens an iteration meets the SLO" in seen
    assert "P99 TBT ≤ 14.0 ms, 5 times the reference decode iteration of 2.80 ms" in seen
    for alternative in saved["alternatives"]:
        assert alternative["reason"] in seen
        assert f"{alternative['total_tokens_per_s']:,.0f}" in seen


def test_every_launch_command_stands_whole_in_the_page(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    shown = [unescape(re.sub(r"<[^>]+>", "", text)) for text in re.findall(r"<code>(.*?)</code>", page, re.DOTALL)]
    assert shown == list(json.loads((report.parent / "recommendation.json").read_text())["launch"].values())
    for server in ("vLLM", "SGLang", "TensorRT-LLM", "Sarathi-Serve"):
        assert f'aria-label="Copy the {server} command"' in page


def test_the_page_is_one_file_that_may_load_nothing(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    markup = re.sub(r"<script\b[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href|action|data)="(?!data:|#)[^"]*"', markup) == []
    assert "@import" not in markup
    assert "url(" not in markup
    assert re.findall(r'<a [^>]*download="[^"]*"[^>]*href="(?!data:application/zip;base64,)', markup) == []
    assert "<script src" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    for script in re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert len(page.encode()) < 6_000_000
    assert [file.name for file in report.parent.iterdir() if file.name.startswith(".")] == []


def test_every_figure_has_data_and_a_finding(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    drawn = figures(page)
    assert set(drawn) == ALL_FIGURES
    assert all(has_data(figure) for figure in drawn.values())
    assert page.count('<p class="finding">') == len(ALL_FIGURES) + 1  # and the note to readers without JavaScript


def test_the_drawn_points_are_the_trials(report: Path) -> None:
    figure = figures(report.read_text(encoding="utf-8"))["budgets"]
    trials = pd.read_parquet(report.parent / "trials.parquet")
    whole = trials[(trials["kind"] == "whole_prompt") & (trials["role"] == "search")].iloc[0]
    by_kind = {str(trace["name"]): trace for trace in figure["data"] if trace.get("yaxis") == "y"}
    assert by_kind["whole prompt"]["x"] == ["unlimited"]
    assert numbers(by_kind["whole prompt"]["y"]) == pytest.approx([whole["tbt_p99_ms"]])
    assert {trace["marker"]["symbol"] for trace in by_kind.values()} == {  # type: ignore[index]
        "circle",
        "triangle-up",
        "square",
        "diamond",
        "x-thin-open",
    }
    repeats = trials[(trials["role"] == "repeat") & (trials["token_budget"] == 128)]["tbt_p99_ms"]
    aligned = by_kind["aligned"]
    place = list(aligned["x"]).index("128")  # type: ignore[call-overload]
    assert numbers(aligned["y"])[place] == pytest.approx(repeats.median())
    bars = aligned["error_y"]
    assert isinstance(bars, dict)
    assert numbers(bars["array"])[place] == pytest.approx(repeats.max() - repeats.median())
    assert numbers(bars["arrayminus"])[place] == pytest.approx(repeats.median() - repeats.min())


def test_the_slo_and_the_recommended_budget_are_drawn(report: Path) -> None:
    for name in ("budgets", "tails"):
        layout = figures(report.read_text(encoding="utf-8"))[name]["layout"]
        shapes = {shape["name"]: shape for shape in layout["shapes"]}  # type: ignore[call-overload]
        assert shapes["slo"]["y0"] == shapes["slo"]["y1"] == 14.0
        labels = layout["xaxis"]["categoryarray"]  # type: ignore[call-overload]
        assert labels[round((shapes["recommended"]["x0"] + shapes["recommended"]["x1"]) / 2)] == "128"


def test_failed_and_stopped_trials_keep_their_reasons(report: Path) -> None:
    seen = words(report.read_text(encoding="utf-8"))
    assert "Failed : RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB trial-12 (1024)" in seen
    assert "Stopped early : 41 of 300 gaps over the SLO, 10 allowed trial-13 (768)" in seen
    assert "14 trials: 12 ran to the end, 1 stopped early and 1 failed, then 9 repeats of the contenders." in seen


def test_dropped_and_clipped_requests_and_versions_are_named(report: Path) -> None:
    seen = words(report.read_text(encoding="utf-8"))
    assert "24 requests, 7,810 prompt tokens, 702 output tokens; 3 dropped and 5 clipped." in seen
    for text in ("5 prompts cut to max_model_len 2048", "torch 2.13.0", "seed 0", "tilebudget tune --model tiny-llama"):
        assert text in seen


def test_one_long_gap_that_the_p99_hides_is_told(tmp_path: Path) -> None:
    """Case 13: one 900 ms gap among 1,000 gaps of 20 ms."""
    gaps_ms = np.append(np.full(1000, 20.0), 900.0)
    stalled = tbt_columns(gaps_ms)
    assert stalled["tbt_p99_ms"] == 20.0
    folder = make_folder(policies=False, search=False)
    even = tbt_columns(np.full(1001, 20.0))
    rest = {"total_tokens_per_s": 900.0, "bubble_fraction_4": 0.2, "iteration_cv": 0.4}
    folder.trials = [trial("trial-0", 128, {**stalled, **rest}), trial("trial-1", 256, {**even, **rest})]
    page = build(folder, tmp_path)
    assert (
        "At budget 128 the longest gap is 900 ms, 45 times the P99 of 20.0 ms: a stall that the P99 does not show. "
        "1 of 2 budgets have such a gap." in words(page)
    )
    largest = next(trace for trace in figures(page)["tails"]["data"] if trace["name"] == "largest gap")
    assert numbers(largest["y"]) == [900.0, 20.0]


def infeasible(folder: Folder) -> None:
    folder.recommendation |= {"status": "infeasible", "token_budget": 64, "verdict": "No budget meets the SLO."}
    folder.recommendation["slo"] = {"name": "2ms", "tbt_p99_ms": 2.0, "note": ""}
    for row in folder.trials:
        row["feasible"] = None if row["state"] == "failed" else False


def no_data(folder: Folder) -> None:
    folder.recommendation |= {"status": "no_data", "token_budget": None, "launch": {}, "alternatives": []}
    folder.recommendation["expected"] = {"total_tokens_per_s": {"value": 9.0, "low": 9.0, "high": 9.0, "repeats": 2}}
    for row in folder.trials:
        row |= tbt_columns(np.empty(0)) | {"feasible": None}
        row |= {name: None for name in row if name.startswith("tbt_") and name != "tbt_count"}


def all_failed(folder: Folder) -> None:
    folder.recommendation |= {"status": "no_data", "token_budget": None, "expected": {}, "launch": {}}
    folder.trials = [trial(f"trial-{n}", 64 * n, {}, state="failed", reason="boom", feasible=None) for n in (1, 2)]
    folder.iterations, folder.requests = [], []


def one_trial(folder: Folder) -> None:
    folder.trials = folder.trials[:1]
    folder.iterations, folder.requests = [], []


def no_slo(folder: Folder) -> None:
    folder.recommendation["slo"] = {}


def nothing(folder: Folder) -> None:
    folder.recommendation |= {"expected": {}, "alternatives": [], "launch": {}, "slo": {}, "engine": {}, "key": {}}
    folder.environment, folder.profile, folder.tiles = {}, {}, None
    folder.curves = folder.importance = None
    folder.trials = [trial("trial-0", 64, {})]
    folder.iterations, folder.requests = [], []


@pytest.mark.parametrize(
    ("change", "sentence", "drawn"),
    [
        (infeasible, "No budget meets the SLO of 2.00 ms: the closest, 64, has a P99 TBT of", ALL_FIGURES),
        (no_data, "so the SLO has no data", ALL_FIGURES - {"tails", "policy_tails"}),
        (all_failed, "No trial ran to its end", {"history", *OF_DEVICE}),
        (one_trial, "1 trial: 1 ran to the end.", ALL_FIGURES - {"timeline", "policy_tails", "stages"}),
        (no_slo, "no SLO was set", ALL_FIGURES),
        (nothing, "This study ran no policy comparison, so there is no timeline.", {"history"}),
    ],
)
def test_a_study_with_gaps_gives_sentences_and_no_empty_figure(
    tmp_path: Path, change: Callable[[Folder], None], sentence: str, drawn: set[str]
) -> None:
    folder = make_folder()
    change(folder)
    page = build(folder, tmp_path)
    assert sentence in words(page)
    assert set(figures(page)) == drawn
    assert "nan" not in re.findall(r"\bnan\b", words(page).lower())


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    folder = make_folder()
    folder.recommendation["key"] = {"model": attack, "device": attack}
    folder.recommendation["launch"] = {"vllm": f"vllm serve '{attack}'"}
    folder.recommendation["verdict"] = attack
    folder.environment["model"] = {"name": attack}
    folder.trials[4]["reason"] = attack
    folder.trials[5]["run"] = attack
    page = build(folder, tmp_path)
    assert "<script>alert" not in page
    assert "<img" not in re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    # plotly reads markup in hover texts: there the name is escaped once more.
    hover = json.dumps(figures(page)["history"]["data"])
    assert "&lt;img src=x" in hover
    assert "<img" not in hover
    assert attack in words(page)


def test_the_same_folder_gives_the_same_page(report: Path) -> None:
    first = report.read_bytes()
    assert build_report(report.parent).read_bytes() == first


def test_a_long_run_is_drawn_in_part_and_says_so(tmp_path: Path) -> None:
    folder = make_folder()
    folder.iterations = [
        pd.concat([frame.assign(start_s=frame["start_s"] + 2.0 * lap) for lap in range(40)], ignore_index=True)
        for frame in folder.iterations
    ]
    page = build(folder, tmp_path)
    total = sum(len(frame) for frame in folder.iterations)
    match = re.search(r"around the longest stall; ([\d,]+) of ([\d,]+) iterations", words(page))
    assert match is not None
    assert int(match[2].replace(",", "")) == total
    bars = [trace for trace in figures(page)["timeline"]["data"] if trace["type"] == "bar" and trace["name"] != "stall"]
    assert sum(len(numbers(trace["x"])) for trace in bars) == int(match[1].replace(",", "")) <= 4 * 300


def test_the_raw_data_are_in_the_page(report: Path) -> None:
    page = report.read_text(encoding="utf-8")
    found = re.search(r'download="([^"]+)" href="data:application/zip;base64,([^"]+)"', page)
    assert found is not None
    assert found[1].startswith("tilebudget-")
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(found[2]))) as archive:
        assert archive.testzip() is None
        saved = json.loads(archive.read("recommendation.json"))
        trials = pd.read_csv(io.BytesIO(archive.read("trials.csv")))
        quantiles = pd.read_csv(io.BytesIO(archive.read("tbt_quantiles_ms.csv")), index_col="run")
        iterations = pd.read_parquet(io.BytesIO(archive.read("iterations.parquet")))
    assert saved == json.loads((report.parent / "recommendation.json").read_text())
    stored = pd.read_parquet(report.parent / "trials.parquet").set_index("run")
    assert list(trials["run"]) == list(stored.index)
    for run, row in quantiles.iterrows():
        np.testing.assert_allclose(row, stored["tbt_quantiles_ms"][str(run)])
    assert len(iterations) == len(pd.read_parquet(report.parent / "iterations.parquet"))


def test_what_the_page_has_no_room_for_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilebudget.reports.download.MAX_BYTES", 40_000)
    seen = words(build(make_folder(), tmp_path))
    assert re.search(r"Too large for this page, in the run folder: .*requests\.parquet", seen)


def test_confidence_and_what_changes_it_are_the_studys_own_where_it_states_them(tmp_path: Path) -> None:
    folder = make_folder(policies=False)
    assert "What changes it" not in words(build(folder, tmp_path / "without"))
    folder.recommendation |= {
        "confidence": {"level": "medium", "statement": "Drift 1.2% over 3 rounds.", "drift_pct": 1.2, "num_rounds": 3},
        "sensitivity": [{"change": "SLO 10% tighter", "token_budget": 64, "statement": "128 would miss it."}],
    }
    seen = words(build(folder, tmp_path / "with"))
    assert "confidence: medium" in seen
    assert "Drift 1.2% over 3 rounds." in seen
    assert "SLO 10% tighter 64 128 would miss it." in seen


def test_changes_that_fill_a_grid_are_one_and_those_that_move_the_budget_are_told(tmp_path: Path) -> None:
    folder = make_folder(policies=False)
    budget = folder.recommendation["token_budget"]
    folder.recommendation |= {
        "sensitivity": [
            {"change": f"{what} {word}", "token_budget": 64 if moved else budget, "statement": f"{what} {word}: said."}
            for what, word, moved in (
                ("SLO", "halved", True),
                ("SLO", "doubled", False),
                ("load", "halved", False),
                ("load", "doubled", False),
            )
        ],
    }
    seen = words(build(folder, tmp_path))
    assert f"Budget if halved doubled SLO 64 {budget} load {budget} {budget} SLO halved: said." in seen
    assert "SLO doubled: said." not in seen


def test_stopped_runs_that_differ_in_figures_alone_are_told_once(tmp_path: Path) -> None:
    folder = make_folder(policies=False)
    for number, row in enumerate(folder.trials[:3]):
        row |= {"state": "pruned", "feasible": False, "reason": f"{40 + number} of 300 gaps over the SLO, 10 allowed"}
    seen = words(build(folder, tmp_path))
    assert "40 of 300 gaps over the SLO, 10 allowed (and 3 alike) trial-0 (64), trial-1 (65)" in seen
