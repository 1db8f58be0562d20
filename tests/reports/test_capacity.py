"""A study of capacity: what each budget serves, what decided, the best budget by load; a bound is no failure."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_text import ALL_FIGURES, figures, numbers, words
from sample_study import BOUNDS, CAPACITIES, DECISION, OWN_RATE, make_capacity_folder, make_folder
from tilebudget.reports import build_report
from tilebudget.reports.budgets.capacity import capacities
from tilebudget.reports.data.run_folder import read_run_folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_report(make_capacity_folder().write(tmp_path_factory.mktemp("study"))).read_text(encoding="utf-8")


def test_the_card_names_capacity_ttft_and_what_decided(page: str) -> None:
    seen = words(page)
    assert "Capacity 21.4 requests/s" in seen
    assert "2.3 times your rate of 9.30" in seen
    assert "P99 time to first token" in seen
    assert f"P99 time to first token decided {DECISION} 128 has 412 ms, 160 has 431 ms." in seen
    assert "Counted as equal before that: 128, 160 and 192." in seen
    assert "Requests arrive over time, so the study maximises capacity" in seen


def test_measured_capacities_and_bounds_are_drawn_apart(page: str) -> None:
    figure = figures(page)["budgets"]
    first = [trace for trace in figure["data"] if trace.get("yaxis") == "y"]
    bounds = next(trace for trace in first if trace["name"] == "at most")
    assert dict(zip(bounds["customdata"], numbers(bounds["y"]), strict=True)) == {  # type: ignore[call-overload]
        "unlimited" if budget is None else str(budget): bound for budget, bound in BOUNDS.items()
    }
    measured: dict[str, float] = {}
    for trace in first:
        if trace["name"] in ("aligned", "edge + 1", "mid-tile"):
            measured |= dict(zip(trace["customdata"], numbers(trace["y"]), strict=True))  # type: ignore[call-overload]
    assert measured == {str(budget): rate for budget, rate in CAPACITIES.items()}
    shapes = {shape.get("name"): shape for shape in figure["layout"]["shapes"]}  # type: ignore[call-overload]
    assert shapes["own_rate"]["y0"] == OWN_RATE
    assert shapes["recommended"]["x0"] < 128 < shapes["recommended"]["x1"]


def test_the_finding_says_what_the_recommended_budget_gives_away(page: str) -> None:
    assert (
        "Budget 192 serves most: 21.6 requests/s, 2.3 times your rate of 9.30. The recommended 128 serves 21.4, 0.9% "
        "less. Next to it, 96 serves 18.2 (−15%) and 129 serves 20.9 (−2.3%)." in words(page)
    )


def test_a_bound_is_no_stopped_run(page: str) -> None:
    seen = words(page)
    assert "Bounded : 6 runs asked one question, answered with no: no more than 9.10 to 20.0 requests/s." in seen
    assert "no more than 17.5 requests/s at most 17.5" in seen  # outcome and capacity in the table of every run
    assert "6 ended with a bound on their capacity, 1 stopped early" in seen


def test_alternatives_have_ttft_and_capacity_beside_the_recommended(page: str) -> None:
    seen = words(page).split("Nearest alternatives")[1].split("What changes it")[0]
    assert "Capacity requests/s P50 TTFT ms P99 TTFT ms P99 TBT" in seen
    assert "128 aligned met 21.4" in seen
    assert "at most 12.0" in seen


def test_where_each_budget_wins(page: str, report: Path) -> None:
    seen = words(page)
    assert "Where each budget wins" in seen
    assert "The recommended 128 is the best budget at 1 of 5 loads" in seen
    assert "It misses a limit at 100%." in seen
    assert "100% 21.6 192 600 ms 13.0 ms 820 ms 14.5 ms missed" in seen
    assert set(figures(page)) == ALL_FIGURES | {"by_load"}
    assert "Where each budget wins" not in words(report.read_text(encoding="utf-8"))


def test_without_a_decision_or_own_rate_the_page_still_stands(tmp_path: Path) -> None:
    folder = make_capacity_folder()
    folder.recommendation |= {"decision": None, "own_rate_rps": None, "best_by_load": None, "ttft_p99_s": None}
    seen = words(build_report(folder.write(tmp_path)).read_text(encoding="utf-8"))
    assert "Why this one" not in seen
    assert "your rate" not in seen


def test_repeats_speak_for_a_budget_only_where_they_have_a_capacity(tmp_path: Path) -> None:
    folder = make_capacity_folder()
    for row in folder.trials:
        if row["role"] == "repeat" and row["token_budget"] == 128:
            row["capacity_qps"] = 22.0
    served = capacities(read_run_folder(folder.write(tmp_path))).set_index("label")
    assert served.loc["128", "capacity"] == 22.0
    assert served.loc["160", "capacity"] == CAPACITIES[160]


def test_a_group_that_is_no_list_is_named(tmp_path: Path) -> None:
    folder = make_folder()
    folder.recommendation["decision"] = {"rule": "objective", "group": "128"}
    with pytest.raises(ValueError, match=r"decision\.group must be a list of whole numbers or nulls, found '128'"):
        read_run_folder(folder.write(tmp_path))
