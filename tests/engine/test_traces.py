"""Finding the format, and what every format has in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_executor import FakeExecutor
from tilebudget.engine import Engine, EngineConfig, compute_metrics, load_trace
from tilebudget.engine.workloads.traces import TRACE_FORMATS


def _conversation(question: int, answer: int) -> dict[str, list[dict[str, str]]]:
    turns = [{"from": "human", "value": "x" * question}, {"from": "gpt", "value": "y" * answer}]
    return {"conversations": turns}


FILES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,10,2\n2023-11-16 18:15:47.68,30,4\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,10,2,12,l\n6,m,30,4,34,l\n",
    "lengths": "num_prefill_tokens,num_decode_tokens,arrived_at\n10,2,7.0\n30,4,8.0\n",
    "mooncake": '{"timestamp": 27482, "input_length": 10, "output_length": 2, "hash_ids": []}\n'
    '{"timestamp": 28482, "input_length": 30, "output_length": 4, "hash_ids": [1]}\n',
    "sharegpt": json.dumps([_conversation(40, 8), _conversation(120, 16)]),
    "prompts": '{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "output_tokens": 2}\n'
    '{"prompt_token_ids": [' + ", ".join(["9"] * 30) + '], "output_tokens": 4}\n',
}


@pytest.mark.parametrize("format", TRACE_FORMATS)
@pytest.mark.parametrize("asked", ["auto", "by name"])
def test_every_format_is_found_and_rebased(tmp_path: Path, format: str, asked: str) -> None:
    path = tmp_path / "some.trace"
    path.write_text(FILES[format], encoding="utf-8")
    workload = load_trace(path, format="auto" if asked == "auto" else format)
    assert [(request.prompt_tokens, request.output_tokens) for request in workload.requests] == [(10, 2), (30, 4)]
    assert workload.source == f"some.trace ({format})"
    assert workload.name == "some"
    assert workload.has_arrivals == (format not in ("sharegpt", "prompts"))
    expected = [0.0, 1.0] if workload.has_arrivals else [0.0, 0.0]
    assert [request.arrival_s for request in workload.requests] == pytest.approx(expected)


def test_unknown_format_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format='parquet': must be auto or one of azure, burstgpt"):
        load_trace(tmp_path / "x", format="parquet")
    with pytest.raises(ValueError, match=r"x\.csv: no such file"):
        load_trace(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "name", ["azure_llm_2023_conv.csv", "azure_llm_2023_code.csv", "mooncake_conversation_1000.jsonl"]
)
def test_a_real_trace_runs_on_the_engine(shared: Callable[[str], Path], name: str) -> None:
    workload = load_trace(shared(f"data/{name}"), num_requests=48, max_model_len=2048)
    assert max(request.total_tokens for request in workload.requests) <= 2048
    record = Engine(FakeExecutor()).run(workload, EngineConfig(max_model_len=2048, token_budget=256))
    metrics = compute_metrics(record)
    assert metrics.num_finished == 48
    assert metrics.tbt.count == workload.num_output_tokens - 48
