"""The curves are the latency table's own iterations, and importance is Optuna's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tilebudget.autotune.run_folder.cost_curves import BatchSizes, cost_curves, hybrid_ms
from tilebudget.autotune.run_folder.importance import parameter_importance
from tilebudget.autotune.study.trial import TrialRow
from tilebudget.engine import Request, Workload
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.kernels.latency.silicon import system_spec
from tilebudget.kernels.latency.table import IterationShape, LatencyTable
from tilebudget.reports.data.cost_curves import parse_cost_curves
from tilebudget.reports.data.json_object import JsonObject

pytest.importorskip("aiconfigurator_core")
SIZES = BatchSizes(prompt_tokens=1024, context_tokens=1300, max_num_seqs=128, max_model_len=8192)


@pytest.fixture(scope="module")
def table() -> LatencyTable:
    table = ModelledExecutor.from_silicon("llama-3.1-8b", system="h100_sxm", framework="vllm", dtype="bf16").table
    # Overheads too, so that every term counts.
    return replace(table, overhead_ms=0.5, request_overhead_ms=0.01)


def test_each_point_is_an_iteration_of_the_table(table: LatencyTable) -> None:
    document = cost_curves(table, SIZES, token_budget=768, spec=system_spec("h100_sxm"))
    curves = parse_cost_curves(JsonObject(file="f", values=json.loads(json.dumps(document))))

    def cost(**shape: object) -> float:
        return table.iteration(IterationShape(**shape)).latency_ms  # type: ignore[arg-type]

    for batch in curves.decode:
        size = batch.batch_size
        expected = cost(num_decodes=size, decode_kv_tokens=size * 1300, num_logits=size)
        assert batch.latency_ms == pytest.approx(expected)
    for batch in curves.prefill:
        expected = cost(chunks=((1024, 0),) * batch.batch_size, num_logits=batch.batch_size)
        assert batch.latency_ms == pytest.approx(expected)
    for prompt in curves.prompts:
        assert prompt.whole_ms == pytest.approx(cost(chunks=((prompt.prompt_tokens, 0),), num_logits=1))
        whole = {point.tokens: point.latency_ms for point in prompt.points}
        half = prompt.prompt_tokens // 2
        parts = cost(chunks=((half, 0),)) + cost(chunks=((half, half),), num_logits=1)
        assert whole[half] == pytest.approx(parts)
        assert 768 in whole
    assert hybrid_ms(table, 32, 1300, [96])[0] == pytest.approx(
        cost(chunks=((96, 0),), num_decodes=32, decode_kv_tokens=32 * 1300, num_logits=32)
    )


def test_chunking_costs_what_the_paper_measured(table: LatencyTable) -> None:
    """Sarathi-Serve's artifact: chunks of 512 and more take at most 1.20 times the whole (Yi-34B on two A100)."""
    document = cost_curves(table, SIZES, token_budget=None, spec=None)
    curves = parse_cost_curves(JsonObject(file="f", values=json.loads(json.dumps(document))))
    for prompt in curves.prompts:
        for point in prompt.points:
            if point.tokens >= 512:
                assert 0.95 < point.latency_ms / prompt.whole_ms < 1.30


def test_sizes_are_those_of_the_traffic() -> None:
    requests = tuple(
        Request(arrival_s=0, prompt_tokens=n, output_tokens=o) for n, o in ((900, 11), (1000, 1), (4000, 31))
    )
    sizes = BatchSizes.of(Workload(name="w", requests=requests), max_num_seqs=8, max_model_len=4096)
    assert sizes.prompt_tokens == 1024
    assert sizes.context_tokens == int((10 * (900 + 5.5) + 30 * (4000 + 15.5)) / 40)


def rows_of(values: dict[tuple[int, str], float]) -> list[TrialRow]:
    """Complete trials by (edge, kind) with their throughput."""
    return [
        TrialRow(
            run=f"trial-{number}", role="search", state="complete", reason=None,
            token_budget=edge + (kind != "aligned"), kind=kind, edge_tokens=edge,
            policy="sarathi", feasible=True, started_at="", elapsed_s=1.0,
            metrics={"total_tokens_per_s": value, "tbt_p99_ms": None},
        )
        for number, ((edge, kind), value) in enumerate(values.items())
    ]  # fmt: skip


def test_the_parameter_that_decides_is_the_important_one() -> None:
    metrics = (("total_tokens_per_s", True), ("tbt_p99_ms", False))
    by_edge = rows_of({(edge, kind): 100.0 * edge for edge in range(10) for kind in ("aligned", "plus_one")})
    by_kind = rows_of(
        {(edge, kind): float(kind == "aligned") for edge in range(10) for kind in ("aligned", "plus_one")}
    )
    found = [parameter_importance(rows, metrics) for rows in (by_edge, by_kind)]
    for document, parameter in zip(found, ("edge_index", "kind"), strict=True):
        assert document is not None
        shares = document["metrics"]
        assert isinstance(shares, dict)
        assert list(shares) == ["total_tokens_per_s"]  # no trial has the other
        assert shares["total_tokens_per_s"][parameter] > 0.7
        assert sum(shares["total_tokens_per_s"].values()) == pytest.approx(1.0)


def test_few_or_equal_trials_tell_nothing() -> None:
    metrics = (("total_tokens_per_s", True),)
    assert parameter_importance(rows_of({(edge, "aligned"): float(edge) for edge in range(5)}), metrics) is None
    assert parameter_importance(rows_of({(edge, "aligned"): 1.0 for edge in range(10)}), metrics) is None
