"""The sentences say what the numbers say: ties are ties, a miss is a miss, one run has no spread."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_study import Folder, make_folder, trial
from tilebudget.reports.budgets.trials import edge_penalty, noise_fraction, summarise_budgets
from tilebudget.reports.data.answer import Answer
from tilebudget.reports.data.run_folder import RunFolder, read_run_folder
from tilebudget.reports.findings import budget_finding, judge_confidence, pipeline_finding, tail_finding
from tilebudget.reports.policies.lanes import build_lanes, policy_rows
from tilebudget.reports.policies.timeline import timeline_finding
from tilebudget.reports.text import beside_slo, budget_label, change, listing, milliseconds, percent, significant


def row(run: str, budget: int, speed: float, **changes: object) -> dict[str, object]:
    metrics = {"tbt_p50_ms": 3.0, "tbt_p99_ms": 10.0, "tbt_max_ms": 12.0, "bubble_fraction_4": 0.2}
    return trial(run, budget, {**metrics, "total_tokens_per_s": speed}, **changes)


def read(path: Path, rows: list[dict[str, object]]) -> RunFolder:
    folder = make_folder(policies=False, search=False)
    folder.trials = rows
    return read_run_folder(folder.write(path))


def test_a_step_past_the_edge_inside_the_spread_is_a_tie(tmp_path: Path) -> None:
    """Case 15: 512 and 513 tokens with differences inside the noise."""
    speeds = {512: (1000.0, 1040.0, 960.0), 513: (985.0, 1020.0, 950.0)}
    kinds = {512: "aligned", 513: "plus_one"}
    rows = [
        row(f"repeat-{budget}-{number}", budget, speed, role="repeat", kind=kinds[budget])
        for budget, measured in speeds.items()
        for number, speed in enumerate(measured)
    ]
    folder = read(tmp_path, rows)
    budgets = summarise_budgets(folder.search, folder.answer)
    penalty = edge_penalty(budgets, "total_tokens_per_s")
    assert penalty is not None
    assert penalty[0] == pytest.approx(-0.015)
    assert noise_fraction(budgets, "total_tokens_per_s") == pytest.approx(0.04)
    assert "by −1.5% (median of 1 pair), inside the ±4.0% spread of the repeats: a tie." in budget_finding(
        folder, budgets
    )


def test_a_single_run_claims_no_gain(tmp_path: Path) -> None:
    folder = read(tmp_path, [row("a", 128, 1000.0), row("b", 129, 700.0)])
    budgets = summarise_budgets(folder.search, folder.answer)
    assert "by −30% (median of 1 pair), but nothing was repeated, so no gain is claimed." in budget_finding(
        folder, budgets
    )


def test_a_repeated_budget_is_represented_by_its_repeats(tmp_path: Path) -> None:
    repeats = [row(f"r{n}", 128, speed, role="repeat") for n, speed in enumerate((900.0, 910.0, 930.0))]
    folder = read(tmp_path, [row("cold", 128, 100.0), *repeats])
    summary = summarise_budgets(folder.search, folder.answer).iloc[0]
    assert (summary["total_tokens_per_s"], summary["num_runs"]) == (910.0, 3)
    assert (summary["total_tokens_per_s_low"], summary["total_tokens_per_s_high"]) == (900.0, 930.0)


def test_a_budget_is_feasible_only_where_every_repeat_was(tmp_path: Path) -> None:
    rows = [row("a", 128, 1.0, role="repeat"), row("b", 128, 1.0, role="repeat", feasible=False), row("c", 64, 1.0)]
    folder = read(tmp_path, rows)
    assert list(summarise_budgets(folder.search, folder.answer)["feasible"]) == [True, False]


def test_equal_bubbles_are_a_tie(tmp_path: Path) -> None:
    rows = [
        row(f"r{budget}{n}", budget, 1.0, role="repeat", bubble_fraction_4=0.2 + offset)
        for budget, shift in ((128, 0.0), (256, 0.01))
        for n, offset in enumerate((shift, shift + 0.02))
    ]
    folder = read(tmp_path, rows)
    finding = pipeline_finding(folder, summarise_budgets(folder.search, folder.answer))
    assert finding.endswith("a tie.")


def test_tails_without_a_stall_name_their_growth(tmp_path: Path) -> None:
    rows = [row("a", 64, 1.0), row("b", 128, 1.0, tbt_p99_ms=20.0, tbt_max_ms=20.0)]
    folder = read(tmp_path, rows)
    assert tail_finding(folder, summarise_budgets(folder.search, folder.answer)) == (
        "From budget 64 to 128 P99 goes from 10.0 ms to 20.0 ms and the median from 3.00 ms to 3.00 ms; "
        "no gap is longer than 1.2 times its budget's P99."
    )


def confidence(tmp_path: Path, low: float, high: float, repeats: int) -> tuple[str, str]:
    folder = make_folder(policies=False, search=False)
    folder.trials = [row("a", 128, 1.0)]
    speed = {"value": 1000.0, "low": 990.0, "high": 1010.0 if low != high else 990.0, "repeats": repeats}
    tbt = {"value": low, "low": low, "high": high, "repeats": repeats}
    folder.recommendation |= {"expected": {"tbt_p99_ms": tbt, "total_tokens_per_s": speed}, "alternatives": []}
    answer: Answer = read_run_folder(folder.write(tmp_path)).answer
    judged = judge_confidence(answer)
    return judged.level, judged.reasons


@pytest.mark.parametrize(
    ("low", "high", "repeats", "level", "reason"),
    [
        (10.0, 11.2, 3, "high", "The highest P99 TBT, 11.2 ms, is 20% inside the SLO."),
        (10.0, 11.2, 2, "moderate", "Measured 2 times, throughput within ±1.0%."),
        (10.0, 11.2, 1, "low", "Measured once, so there is no spread"),
        (13.0, 15.4, 3, "low", "The highest P99 TBT, 15.4 ms, is 10% over the SLO."),
        (10.0, 10.0, 3, "moderate", "3 identical repeats, as on a modelled clock"),
    ],
)
def test_confidence_follows_repeats_and_margin(
    tmp_path: Path, low: float, high: float, repeats: int, level: str, reason: str
) -> None:
    judged, reasons = confidence(tmp_path, low, high, repeats)
    assert judged == level
    assert reason in reasons


def test_policies_are_ranked_by_their_own_figures(tmp_path: Path) -> None:
    sample: Folder = make_folder(search=False)
    folder = read_run_folder(sample.write(tmp_path))
    p99 = {str(row["policy"]): float(str(row["tbt_p99_ms"])) for row in sample.trials}
    assert p99["vllm_v0"] > p99["orca"] > p99["sarathi"] > p99["faster_transformer"]
    finding = timeline_finding(folder)
    assert finding.startswith(f"P99 TBT from worst to best: vLLM v0 {milliseconds(p99['vllm_v0'])}, Orca ")
    assert "FasterTransformer has the lowest throughput" in finding
    rows = {row.name: row for row in policy_rows(folder, build_lanes(folder))}
    assert list(rows) == ["FasterTransformer", "Orca", "vLLM v0", "Sarathi"]
    assert rows["vLLM v0"].p99 == milliseconds(p99["vllm_v0"])
    assert int(rows["vLLM v0"].stalls) > 0
    assert rows["Sarathi"].stalls == rows["FasterTransformer"].stalls == "0"


def test_numbers_are_printed_with_three_digits_and_a_unit() -> None:
    assert [significant(v) for v in (0.0, 1.33e-16, 0.01234, 1.0, 41.26, 999.6, 12345.0)] == [
        "0", "0", "0.0123", "1.00", "41.3", "1,000", "12,300",
    ]  # fmt: skip
    assert [milliseconds(v) for v in (None, float("nan"), 9.876, 4460.0, 12_345.0)] == [
        "–", "–", "9.88 ms", "4,460 ms", "12.3 s",
    ]  # fmt: skip
    assert [percent(v) for v in (None, 0.012, 0.46)] == ["–", "1.2%", "46%"]
    assert [budget_label(v) for v in (512.0, float("nan"), None)] == ["512", "unlimited", "unlimited"]
    assert [listing(["a", "b", "c"][:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_a_difference_that_rounds_to_zero_is_not_printed() -> None:
    assert [percent(v) for v in (-0.0001, -0.0, 0.0004)] == ["0.0%"] * 3
    assert [change(v) for v in (-0.0004, 0.0, -0.015, 0.2)] == ["", "", "−1.5%", "+20%"]
    assert [beside_slo(v, 14.0) for v in (13.999, 7.0, 15.4)] == ["at the SLO", "50% under the SLO", "10% over the SLO"]
