"""The modelled pipeline: one stage is the modelled executor, several share its time and memory out."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_table import MODEL, make_table
from tilebudget.engine import (
    PAPER_POLICIES,
    Batch,
    BlockManager,
    Engine,
    EngineConfig,
    OutOfMemoryError,
    Request,
    Sequence,
    Workload,
    compute_metrics,
    reference_decode,
)
from tilebudget.engine.distributed.partition import Partition
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.engine.modelled.pipeline import Link, ModelledPipeline, system_links
from tilebudget.kernels.latency.silicon import SystemSpec
from tilebudget.kernels.latency.table import LatencyTable

NO_COST = Link(bytes_per_s=float("inf"))


def pipeline(
    *stage_layers: int, table: LatencyTable | None = None, link: Link = NO_COST, memory_bytes: int | None = None
) -> ModelledPipeline:
    table = table or make_table()
    partition = Partition(config=MODEL, tensor_parallel=table.tensor_parallel, stage_layers=stage_layers)
    return ModelledPipeline(table, partition, [link] * (len(stage_layers) - 1), memory_bytes=memory_bytes)


def workload(rows: list[tuple[float, int, int]]) -> Workload:
    return Workload(
        name="test",
        requests=tuple(
            Request(arrival_s=at, prompt_tokens=prompt, output_tokens=output) for at, prompt, output in sorted(rows)
        ),
    )


def batch_of(num_decodes: int, context: int, chunk: int) -> Batch:
    sequences = [
        Sequence(i, Request(arrival_s=0.0, prompt_tokens=context, output_tokens=9)) for i in range(num_decodes)
    ]
    for sequence in sequences:
        sequence.num_tokens += 1
        sequence.num_computed = context
    if not chunk:
        return Batch(sequences)
    return Batch(sequences, [Sequence(9, Request(arrival_s=0.0, prompt_tokens=chunk, output_tokens=1))], [chunk])


@settings(max_examples=40, deadline=None)
@given(
    load=st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=10).map(
        workload
    ),
    policy=st.sampled_from(PAPER_POLICIES),
    num_kv_blocks=st.integers(12, 60),
)
def test_one_stage_is_the_modelled_executor(load: Workload, policy: str, num_kv_blocks: int) -> None:
    config = EngineConfig(
        token_budget=64, policy=policy, max_num_seqs=6, max_model_len=130, block_size=16, num_kv_blocks=num_kv_blocks
    )
    one = Engine(ModelledExecutor(make_table(), MODEL)).run(load, config)
    other = Engine(pipeline(3)).run(load, config)
    np.testing.assert_array_equal(other.token_request, one.token_request)
    np.testing.assert_array_equal(other.token_s, one.token_s)
    for column in fields(one.requests):
        np.testing.assert_array_equal(getattr(other.requests, column.name), getattr(one.requests, column.name))
    np.testing.assert_array_equal(other.iterations.start_s, one.iterations.start_s)
    np.testing.assert_array_equal(other.iterations.num_tokens, one.iterations.num_tokens)
    assert compute_metrics(other).bubble_fraction == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("batch", [batch_of(3, 40, 0), batch_of(0, 1, 100), batch_of(5, 77, 33)])
def test_the_stages_share_out_the_whole_iteration(batch: Batch) -> None:
    config = EngineConfig(token_budget=256, max_num_seqs=8)
    kv = BlockManager(num_blocks=8, block_size=16, max_num_seqs=8, max_blocks_per_seq=8)
    whole, parts = ModelledExecutor(make_table(), MODEL), pipeline(1, 1, 1)
    whole.start(config, kv)
    parts.start(config, kv)
    first_s, middle_s, last_s = parts.stage_times_s(batch)
    assert first_s + middle_s + last_s == pytest.approx(whole.execute(batch).model_s)
    logits_rows = len(batch.decodes) + len(batch.chunks)
    assert last_s - middle_s == pytest.approx(make_table().logits_ms(logits_rows)[0] * 1e-3)
    overhead_ms = 0.2 + 0.01 * batch.num_requests
    assert first_s - middle_s == pytest.approx(overhead_ms * 1e-3)


def test_an_uneven_split_moves_the_layers() -> None:
    kv = BlockManager(num_blocks=8, block_size=16, max_num_seqs=8, max_blocks_per_seq=8)
    uneven = pipeline(2, 1)
    uneven.start(EngineConfig(token_budget=256, max_num_seqs=8), kv)
    batch = batch_of(0, 1, 100)
    table = make_table()
    layer_ms = float(table.tokens_ms(100)[0] + table.prefill_ms(100, 0)) / 3
    assert uneven.stage_times_s(batch) == pytest.approx(
        [2e-3 * layer_ms + 0.21e-3, 1e-3 * layer_ms + float(table.logits_ms(1)[0]) * 1e-3]
    )


def test_activations_take_the_link() -> None:
    """100 tokens x 64 hidden x 2 bytes at 12.8 MB/s are 1 ms, and 2 ms latency."""
    slow = pipeline(2, 1, link=Link(bytes_per_s=12.8e6, latency_s=2e-3))
    record = Engine(slow).run(workload([(0.0, 100, 1)]), EngineConfig(token_budget=256, max_num_seqs=8))
    assert record.iterations.stage_start_s is not None
    assert record.iterations.stage_end_s is not None
    wait_s = record.iterations.stage_start_s[0, 1] - record.iterations.stage_end_s[0, 0]
    assert wait_s == pytest.approx(3e-3)


def test_memory_is_that_of_the_tightest_stage() -> None:
    config = EngineConfig(token_budget=256, max_num_seqs=64, max_model_len=64, block_size=16)
    block_bytes = 2 * 2 * 16 * 2 * 16  # of one layer: keys and values, 2 heads of 16, 2 bytes, 16 tokens
    layer = (MODEL.num_parameters - 2 * 1000 * 64) // 3 * 2
    memory_bytes = 2_000_000
    even = pipeline(1, 2, memory_bytes=memory_bytes).default_num_kv_blocks(config)
    free = memory_bytes * 0.9 - 2 * layer - 1000 * 64 * 2
    assert even == pytest.approx(free / (2 * block_bytes), abs=1)
    with pytest.raises(OutOfMemoryError, match="stage 1 of small"):
        pipeline(1, 2, memory_bytes=300_000).default_num_kv_blocks(config)
    assert pipeline(1, 2).default_num_kv_blocks(config) == 2 * 64 * 4


def test_the_reference_decode_iteration_passes_all_stages() -> None:
    config = EngineConfig(token_budget=256, max_num_seqs=8)
    whole = reference_decode(ModelledExecutor(make_table(), MODEL), config).duration_s
    assert reference_decode(pipeline(1, 2), config).duration_s == pytest.approx(whole)


def test_a_longer_pipeline_needs_as_many_lanes() -> None:
    """Saturated with equal decodes, three stages give three times the tokens of one, but for filling and imbalance."""
    load = workload([(0.0, 1, 400)] * 12)
    table = replace(make_table(), overhead_ms=0.0, request_overhead_ms=0.0)
    config = EngineConfig(token_budget=64, max_num_seqs=4, max_model_len=512)
    rates = []
    for stage_layers in ((3,), (1, 1, 1)):
        metrics = compute_metrics(Engine(pipeline(*stage_layers, table=table)).run(load, config))
        assert metrics.output_tokens_per_s is not None
        rates.append(metrics.output_tokens_per_s)
    assert metrics.bubble_fraction is not None
    work_s = 1.0 - metrics.bubble_fraction
    assert rates[1] == pytest.approx(3 * work_s * rates[0], rel=1e-6)
    assert rates[1] > 2.0 * rates[0]


SPEC = SystemSpec(
    system="made_up",
    memory_bytes=1,
    bandwidth_bytes_per_s=1.0,
    link_bytes_per_s=300e9,
    inter_node_bytes_per_s=25e9,
    link_latency_s=1e-5,
    flops={},
    num_gpus_per_node=4,
)


def test_links_are_slower_between_nodes() -> None:
    partition = Partition(config=MODEL, tensor_parallel=2, stage_layers=(1, 1, 1))
    assert [link.bytes_per_s for link in system_links(SPEC, partition)] == [300e9, 25e9]


@pytest.mark.parametrize(
    ("links", "table_degree", "message"),
    [(0, 1, "links has 0: 2 stages have 1 between them"), (1, 2, "table is for tensor_parallel=2")],
)
def test_parts_that_disagree(links: int, table_degree: int, message: str) -> None:
    partition = Partition(config=MODEL, tensor_parallel=1, stage_layers=(1, 2))
    with pytest.raises(ValueError, match=message):
        ModelledPipeline(make_table(table_degree), partition, [NO_COST] * links)


def test_a_link_needs_a_speed() -> None:
    with pytest.raises(ValueError, match="bytes_per_s=0"):
        Link(bytes_per_s=0.0)
    with pytest.raises(ValueError, match="latency_s=-1"):
        Link(bytes_per_s=1.0, latency_s=-1.0)
