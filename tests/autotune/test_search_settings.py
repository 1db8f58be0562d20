"""``max_num_seqs`` and the policy, searched beside the budget: against every combination run."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from cost_device import CostDevice
from stair_device import StairDevice
from tilebudget.autotune import load_recommendation, tune
from tilebudget.autotune.config import TuneConfig
from tilebudget.autotune.problem import Problem, read_device, state_problem
from tilebudget.autotune.recommendation.recommendation import Recommendation
from tilebudget.autotune.study.sampler import Params, Tried, propose, start_params
from tilebudget.engine import Request, Workload

EDGES = (64, 128, 256, 512)
SEARCH = "token_budget,max_num_seqs,policy"
SETTINGS = {"max_num_seqs": 16, "max_model_len": 1024, "max_budget": 512, "num_trials": 32, "max_concurrent": 4}


def config(**settings: object) -> TuneConfig:
    return TuneConfig(**{**SETTINGS, "tbt_slo": "12ms", **settings})  # type: ignore[arg-type]


@pytest.fixture
def load() -> Workload:
    """24 requests, all at once: prompts of 100 to 192 tokens, 40 output tokens each."""
    requests = (Request(arrival_s=0.0, prompt_tokens=100 + 4 * index, output_tokens=40) for index in range(24))
    return Workload(name="load", requests=tuple(requests))


def device() -> CostDevice:
    """Decodes hold each other up: 16 of them take 16 ms or more, whatever the budget."""
    return CostDevice(fixed=4.0, token=0.01, decode_kv=4e-3)


def state(settings: TuneConfig, load: Workload) -> Problem:
    return state_problem(settings, device(), load, read_device(settings, device(), load, EDGES))


def exhaustive(problem: Problem) -> dict[tuple[int, int | None, str], float]:
    """Throughput of every combination that holds the SLO."""
    runner = problem.make_runner()
    rows = [
        runner.run(candidate, run="all", role="search")[0]
        for variant in problem.space.variants
        for candidate in variant.candidates
    ]
    return {row.setting: row.score for row in rows if row.feasible}


def run(folder: Path, load: Workload, settings: TuneConfig) -> Recommendation:
    return tune(settings, executor=device(), workload=load, edges=EDGES, run_dir=folder, num_workers=1)


@pytest.mark.parametrize("tbt_slo", ["8ms", "12ms", "18ms", "1s"])
def test_a_third_of_the_combinations_find_what_all_of_them_find(load: Workload, tbt_slo: str) -> None:
    problem = state(config(search=SEARCH, tbt_slo=tbt_slo), load)
    scores, runner = exhaustive(problem), problem.make_runner()

    def outcome(params: Params) -> Tried:
        candidate = problem.space.variant(params).at(int(params["edge_index"]), str(params["kind"]))
        assert candidate is not None
        return Tried(params=params, row=runner.run(candidate, run="one", role="search", prune=True)[0])

    tried = [outcome(params) for params in start_params(problem.space, ())]
    while len(tried) < problem.config.num_trials:
        params = propose(problem.space, tried, seed=0, variance_metric=problem.variance_metric)
        assert params is not None
        tried.append(outcome(params))
    found = max(one.row.score for one in tried if one.row is not None and one.row.feasible)
    assert found >= 0.99 * max(scores.values())
    assert len(tried) < 0.4 * sum(len(variant.candidates) for variant in problem.space.variants)


def test_a_better_combination_than_any_budget_alone_is_recommended(tmp_path: Path, load: Workload) -> None:
    assert not exhaustive(state(config(), load))  # at 16 sequences no budget holds the SLO
    scores = exhaustive(state(config(search=SEARCH), load))

    found = run(tmp_path / "run", load, config(search=SEARCH))
    assert found.status == "feasible"
    setting = (found.token_budget or 0, found.engine.max_num_seqs, found.engine.policy)
    assert setting[1] < 16
    assert scores[setting] >= 0.99 * max(scores.values())
    assert found.expected["total_tokens_per_s"].value == pytest.approx(scores[setting])
    assert f"with max_num_seqs {found.engine.max_num_seqs} and policy {found.engine.policy}" in found.verdict
    assert found.vllm_args()["max_num_seqs"] == found.engine.max_num_seqs
    assert f"--max-num-seqs {found.engine.max_num_seqs}" in found.export("vllm")

    trials = pd.read_parquet(tmp_path / "run" / "trials.parquet")
    tried = trials[trials["role"] == "search"]
    assert not tried.duplicated(["token_budget", "max_num_seqs", "policy"]).any()
    assert set(tried["max_num_seqs"]) == {16, 8, 4, 2}
    assert set(tried["policy"]) == {"sarathi", "vllm_v0"}
    assert (tried["token_budget"] >= tried["max_num_seqs"]).all()
    others = {(one.token_budget, one.max_num_seqs, one.policy) for one in found.alternatives}
    assert len(others) == len(found.alternatives)
    assert setting not in others
    assert load_recommendation(tmp_path / "run") == found
    assert "Max seqs" in (tmp_path / "run" / "report.html").read_text()


def test_resuming_and_more_workers_give_the_same(tmp_path: Path, load: Workload) -> None:
    settings = config(search="token_budget,max_num_seqs", num_trials=12)
    whole = run(tmp_path / "whole", load, settings)
    run(tmp_path / "parts", load, config(search="token_budget,max_num_seqs", num_trials=7))
    rest = run(tmp_path / "parts", load, settings)
    workers = tune(settings, executor=device(), workload=load, edges=EDGES, run_dir=tmp_path / "workers", num_workers=2)
    for other in (rest, workers):
        assert (other.token_budget, other.engine) == (whole.token_budget, whole.engine)
        assert other.alternatives == whole.alternatives
    with pytest.raises(ValueError, match="search="):
        run(tmp_path / "parts", load, config(num_trials=12))


def test_the_budget_alone_is_searched_unless_more_is_asked_for(tmp_path: Path, workload: Workload) -> None:
    found = tune(
        TuneConfig(max_num_seqs=8, tbt_slo="30ms", max_budget=1024, num_trials=6),
        executor=StairDevice(),
        workload=workload,
        edges=range(128, 1025, 128),
        run_dir=tmp_path / "run",
    )
    assert found.engine.max_num_seqs == 8
    assert "max_num_seqs" not in pd.read_parquet(tmp_path / "run" / "trials.parquet").columns
    written = json.loads((tmp_path / "run" / "recommendation.json").read_text())
    assert not {"max_num_seqs", "policy"} & set(written["alternatives"][0])
    assert "Max seqs" not in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("max_num_seqs", "tried"), [(128, (128, 64, 32, 16)), (100, (100, 64, 32, 16)), (3, (3, 2, 1)), (1, (1,))]
)
def test_powers_of_two_below_the_setting_are_tried(max_num_seqs: int, tried: tuple[int, ...]) -> None:
    settings = TuneConfig(search="token_budget,max_num_seqs", max_num_seqs=max_num_seqs)
    assert settings.variants == tuple((size, None) for size in tried)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"search": "max_num_seqs"},
            r"search='max_num_seqs': must name 'token_budget' and, on request, 'max_num_seqs'",
        ),
        ({"search": "token_budget,block_size"}, r"search='token_budget,block_size': must name 'token_budget'"),
        ({"search": "token_budget,policy,policy"}, r"search='token_budget,policy,policy': .* each once"),
        ({"search": SEARCH, "policy": "orca"}, r"search=.*: policy='orca' heeds no token budget"),
        ({"search": SEARCH, "model": "m", "server": "vllm"}, r"search=.*: a server has its own policy"),
        (
            {
                "search": "token_budget,max_num_seqs",
                "server_command": "serve --model m --budget {token_budget} --port {port}",
            },
            r"search=.*: needs a server that is started with \{max_num_seqs\}",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuneConfig(**{"model": "m", **settings})  # type: ignore[arg-type]


def test_prefill_first_is_exported_where_a_server_has_it(tmp_path: Path, workload: Workload) -> None:
    found = tune(
        TuneConfig(policy="vllm_v0", max_num_seqs=8, tbt_slo="1s", max_budget=256, num_trials=2),
        executor=StairDevice(),
        workload=workload,
        edges=(128, 256),
        run_dir=tmp_path / "run",
    )
    assert set(found.launch_commands()) == {"sglang", "sarathi"}
    budget = found.token_budget
    assert f"--chunked-prefill-size -1 --max-prefill-tokens {budget} " in found.export("sglang")
    assert f"--scheduler_config_type vllm --vllm_scheduler_config_max_batched_tokens {budget} " in found.export(
        "sarathi"
    )
    with pytest.raises(ValueError, match=r"policy='vllm_v0': vllm always batches decodes with prefills"):
        found.vllm_args()
