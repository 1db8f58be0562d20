from __future__ import annotations

import numpy as np
import pytest
from tilebudget.engine.server.metrics import ServerCounters, ServerView, parse_samples, read_counters

VLLM = """# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0",model_name="a b"}} {preemptions}
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv}
vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="m"}} {iterations}
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {iterations}
vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} {tokens}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="1234",num_gpu_blocks_override="None"}} 1.0
"""


def vllm(*, preemptions: float, kv: float, iterations: float, tokens: float, hits: float) -> str:
    return VLLM.format(preemptions=preemptions, kv=kv, iterations=iterations, tokens=tokens, hits=hits)


def test_counters_are_what_grew_over_the_run() -> None:
    texts = [
        vllm(preemptions=2.0, kv=0.1, iterations=100.0, tokens=5e3, hits=64.0),
        vllm(preemptions=3.0, kv=0.75, iterations=150.0, tokens=7e3, hits=64.0),
        vllm(preemptions=7.0, kv=0.0, iterations=200.0, tokens=2.5e4, hits=80.0),
    ]
    assert read_counters(texts) == ServerCounters(
        num_iterations=100,
        mean_tokens_per_iteration=200.0,
        num_preemptions=5,
        kv_peak_fraction=0.75,
        prefix_hit_tokens=16,
        num_kv_blocks=1234,
    )


def test_what_a_server_does_not_tell_is_none_and_not_zero() -> None:
    assert read_counters([]) == ServerCounters()
    assert read_counters(["<html>", "<html>"]) == ServerCounters()
    sglang = 'sglang:token_usage{model_name="m"} 0.28\n'
    assert read_counters([sglang, sglang]) == ServerCounters(kv_peak_fraction=0.28)


def test_engines_of_one_server_are_kept_apart() -> None:
    text = 'a{engine="0"} 0.5\na{engine="1"} 0.25\nb 1e3\n# a 7\n'
    assert parse_samples(text) == {"a": [0.5, 0.25], "b": [1000.0]}


def test_event_gaps_become_percentiles() -> None:
    view = ServerView(
        counters=ServerCounters(),
        busy_s=1.0,
        sent_s=np.zeros(1),
        late_s=0.002,
        event_gaps_s=np.arange(101) / 1e3,
        num_shared_events=0,
    )
    row = view.to_json()
    assert [row[f"event_gap_p{level}_ms"] for level in (50, 90, 99)] == pytest.approx([50.0, 90.0, 99.0])
    assert row["client_late_ms"] == 2.0
