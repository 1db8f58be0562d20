"""The figures on batches say what the simulated device's arithmetic gives, and name a broken field."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sample_study import Folder, iteration_ms, make_curves, make_folder
from tilebudget.engine.pipeline import replay
from tilebudget.reports.budgets.importance import importance_finding
from tilebudget.reports.costs.batching import (
    chunking_finding,
    free_prefill_finding,
    roofline_finding,
    throughput_finding,
)
from tilebudget.reports.data.cost_curves import CostCurves, parse_cost_curves
from tilebudget.reports.data.json_object import JsonObject
from tilebudget.reports.data.run_folder import RunFolder, read_run_folder
from tilebudget.reports.pipelines.timeline import draw_pipeline_timeline, replay_stages
from tilebudget.reports.policies.lanes import build_lanes
from tilebudget.reports.policies.tails import exceedance, policy_tail_finding


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return read_run_folder(make_folder().write(tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="module")
def curves() -> CostCurves:
    return parse_cost_curves(JsonObject(file="cost_curves.json", values=make_curves()))


def test_throughput_is_that_of_the_batches(curves: CostCurves) -> None:
    prefill, best = 256e3 / iteration_ms(256), 2048e3 / iteration_ms(2048)
    alone, many = 1e3 / iteration_ms(1), 32e3 / iteration_ms(32)
    assert throughput_finding(curves) == (
        f"One prompt of 256 tokens already prefills at {prefill:,.0f} tokens/s, {prefill / best:.0%} of the best "
        f"batch; decode grows {many / alone:.0f} times from {alone:,.0f} tokens/s alone to {many:,.0f} in a batch "
        "of 32."
    )


def test_free_tokens_are_counted_at_ten_per_cent_and_at_the_slo(curves: CostCurves, study: RunFolder) -> None:
    """1 decode: 3.30 ms, 3.63 allowed: 16 tokens make 3.62. 32 decodes: 3.92, 4.31 allowed: 16 make 4.24. In 14 ms
    256 beside 1 and 8 (13.4 and 13.6 ms), not beside 32 (14.2 ms)."""
    assert free_prefill_finding(curves, study.answer) == (
        "Prefill tokens that make an iteration at most 10% longer: 16 beside 1, 16 beside 8 and 16 beside 32 decodes. "
        "An iteration within the SLO of 14.0 ms holds 256 beside 1, 256 beside 8 and 128 beside 32."
    )


def test_chunking_names_the_budget_where_it_is_a_chunk(curves: CostCurves) -> None:
    """1,024 tokens: 43.0 ms whole, 16 × 4.56 in chunks of 64, 8 × 7.12 of 128, 4 × 12.24 of 256."""
    assert chunking_finding(curves.prompts, 128) == (
        "Of a prompt of 1,024 tokens, alone: in chunks of 64 it takes 70% longer, in chunks of 128 it takes 33% longer "
        "and of 256 14% longer (128 is the budget)."
    )


def test_the_roofs_are_what_was_reached_where_there_is_no_data_sheet(curves: CostCurves) -> None:
    finding = roofline_finding(curves)
    assert finding.startswith("The roofs of the highest rates seen meet between ")
    assert "(100% of the compute roof)" in finding


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": None}, "cost_curves.json: prompt_tokens must be a number, found None"),
        ({"decode": [{"batch_size": "one"}]}, r"decode\[0\].batch_size must be a number or null, found 'one'"),
        ({"roofline": []}, "roofline must be an object"),
    ],
    ids=["absent", "text", "list"],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    folder: Folder = make_folder(policies=False, search=True)
    folder.curves = make_curves() | change
    with pytest.raises(ValueError, match=message):
        read_run_folder(folder.write(tmp_path))


def test_stages_follow_the_schedule_that_bubble_fractions_are_from() -> None:
    durations_s = np.random.default_rng(0).exponential(0.01, 200)
    for num_stages in (1, 2, 4, 8):
        stages = replay_stages(durations_s, num_stages)
        expected = replay(durations_s, num_stages)
        assert float(stages.end_s.max()) == pytest.approx(expected.span_s)
        assert stages.bubble_fraction(0, 200) == pytest.approx(expected.bubble_fraction)
        assert (stages.start_s[:, 1:] >= stages.end_s[:, :-1] - 1e-12).all()


def test_recorded_stages_are_drawn_as_they_were(study: RunFolder) -> None:
    lanes = build_lanes(study)
    for lane in lanes:
        starts_s = [np.array([start, start + 0.001]) for start in lane.iterations["start_s"]]
        for name, times_s in (("stage_start_s", starts_s), ("stage_end_s", [start + 0.001 for start in starts_s])):
            lane.iterations[name] = pd.Series(times_s, dtype=object)
    drawing = draw_pipeline_timeline(study, lanes)
    assert drawing.note.startswith("Stages as the pipeline ran them")
    assert drawing.figure is not None
    assert {round(float(width), 9) for trace in drawing.figure.data if trace.name != "bubble" for width in trace.x} == {
        1.0
    }


def test_the_share_of_longer_gaps_falls_to_the_longest_one(study: RunFolder) -> None:
    for _, row in study.policies.iterrows():
        gaps_ms, shares = exceedance(row)
        assert (np.diff(shares) < 0).all()
        assert (np.diff(gaps_ms) >= 0).all()
        assert gaps_ms[-1] == pytest.approx(row["tbt_max_ms"])
        assert gaps_ms[50] == pytest.approx(row["tbt_p50_ms"])
        assert shares[50] == pytest.approx(0.5)
    runs = study.policies
    calm, rough = runs["tbt_p999_ms"].min(), runs["tbt_p999_ms"].max()
    finding = policy_tail_finding(study)
    assert f"{calm:.2f} ms" in finding
    assert f"{rough:.1f} ms" in finding


def test_importance_names_the_first_parameter_of_each_metric(study: RunFolder) -> None:
    assert importance_finding(study) == (
        "What sets the best trials apart is, for throughput the edge (size of the budget) (80%), P99 TBT the edge "
        "(size of the budget) (95%) and bubble fraction the edge (size of the budget) (60%)."
    )
    assert json.loads((study.path / "importance.json").read_text())["evaluator"] == "PED-ANOVA"
