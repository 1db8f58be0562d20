"""Latency tables from silicon: a made-up system, and the real tables where the extra is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tilebudget.kernels.latency import silicon
from tilebudget.kernels.latency.silicon import Silicon, SiliconError
from tilebudget.kernels.latency.silicon_table import pair_ms, silicon_table, without_plus_one
from tilebudget.kernels.latency.sweep import Sweep
from tilebudget.kernels.latency.table import IterationShape, LatencyTable
from tilebudget.kernels.model_shape import ModelShape

SPEC = """data_dir: data/toy
gpu:
  mem_bw: 2000000000000
  mem_capacity: 85899345920
  bfloat16_tc_flops: 312000000000000
node:
  num_gpus_per_node: 8
  intra_node_bw: 300000000000
  inter_node_bw: 25000000000
  p2p_latency: 0.00001
"""

TOY = ModelShape(num_layers=2, hidden=256, num_heads=8, num_kv_heads=8, head_dim=64, intermediate=512, vocab_size=1024)
LLAMA_8B = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336, vocab_size=128256
)
LLAMA_7B = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, head_dim=128, intermediate=11008, vocab_size=32000
)
LLAMA_70B = ModelShape(
    num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, head_dim=128, intermediate=28672, vocab_size=32000
)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Silicon:
    """A system whose tables follow formulas: GEMM by multiples of 64, prefill by pairs, decode by KV heads read."""
    pytest.importorskip("yaml")
    (tmp_path / "toy.yaml").write_text("# toy\n" + SPEC)

    def write(kind: str, name: str, rows: list[dict[str, object]]) -> None:
        path = tmp_path / "data" / "toy" / kind / "vllm" / "1.0.0"
        path.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(path / f"{name}.parquet")

    sizes = (128, 256, 512, 1024, 2048)
    ms = (1, 32, 33, 64, 65, 128, 129, 256, 257)
    write(
        "gemm",
        "gemm_perf",
        [
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": n * k * -(-m // 32) * 1e-8}
            for m in ms
            for n in sizes
            for k in sizes
        ],
    )
    shared = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0, "beam_width": 1, "head_dim": 64}
    heads = ((8, 2), (4, 4), (4, 2))
    write(
        "attention",
        "context_attention_perf",
        [
            {
                **shared,
                "batch_size": 1,
                "isl": c,
                "step": 0,
                "num_heads": h,
                "num_key_value_heads": kv,
                "latency": 0.01 + 1e-7 * h * c * c / 2,
            }
            for h, kv in heads
            for c in (1, 64, 128, 256, 512, 1024, 2048)
        ],
    )
    write(
        "attention",
        "generation_attention_perf",
        [
            {
                **shared,
                "batch_size": b,
                "isl": 1,
                "step": kv_len - 1,
                "num_heads": h,
                "num_key_value_heads": kv,
                "latency": 0.01 + 1e-6 * b * kv * kv_len,
            }
            for h, kv in heads
            for b in (1, 2, 4, 8, 16, 32)
            for kv_len in (2, 128, 1024)
            if b * kv_len <= 16 * 1024
        ],
    )
    write(
        "comm",
        "custom_allreduce_perf",
        [
            {"num_gpus": 2, "message_size": size, "backend": backend, "latency": slow * (0.004 + size * 1e-8)}
            for size in (128, 1024, 65536, 1 << 20)
            for backend, slow in (("vllm_graph", 1), ("vllm_eager", 5))
        ],
    )
    monkeypatch.setattr(silicon, "systems_dir", lambda: tmp_path)
    return Silicon.open("toy", "vllm")


def test_gemms_collectives_and_elementwise_parts(toy: Silicon) -> None:
    table = silicon_table(toy, TOY, "bf16", 2)
    parts = table.iteration(IterationShape(chunks=((64, 0),), num_logits=1)).parts_ms
    n, k = TOY.gemms(2)["mlp_up_proj"]
    assert parts["mlp_up_proj"] == pytest.approx(2 * n * k * 2 * 1e-8)
    # Two layers, one all-reduce of 64 tokens of 256 values of 2 bytes each, inside a graph.
    assert parts["attn_all_reduce"] == pytest.approx(2 * (0.004 + 64 * 256 * 2 * 1e-8))
    # Four hidden vectors a token at 80% of 2 TB/s, and 3 us.
    assert parts["input_layernorm"] == pytest.approx(2 * (0.003 + 64 * 4 * 256 * 2 / 1.6e12 * 1e3))
    sources = {row["part"]: row for row in table.provenance()}
    assert sources["mlp_up_proj"]["table"] == 9
    assert "derived" in sources["mlp_act"]
    assert "attn_all_reduce" not in {c.op for c in silicon_table(toy, TOY, "bf16", 1).layer_ops}


def test_prefix_attention_is_its_pairs(toy: Silicon) -> None:
    table = silicon_table(toy, TOY, "bf16", 2)  # 4 heads, 4 KV heads a GPU: in the table
    for chunk, prefix in ((256, 0), (512, 1024), (1024, 8192)):
        expected = 2 * (0.01 + 1e-7 * 4 * (chunk * chunk / 2 + chunk * prefix))
        assert float(table.prefill_ms(chunk, prefix)) == pytest.approx(expected, rel=1e-6)
    assert table.prefill.source_at(256, 0) == "derived"  # of the four points around it
    assert table.prefill.sources[2].tolist()[:2] == [1, 3]


def test_decode_with_more_kv_heads_reads_as_more_requests(toy: Silicon) -> None:
    table = silicon_table(toy, TOY, "bf16", 1)  # 8 heads, 8 KV heads: taken from 2 KV heads
    assert table.decode.note == "8 heads, 8 KV heads taken from 8 heads, 2 KV heads"
    assert table.decode.rows.tolist() == [1, 2, 4, 8]
    for requests, kv in ((1, 128), (4, 1024), (8, 1024)):
        expected = 2 * (0.01 + 1e-6 * requests * 8 * kv)
        assert float(table.decode_ms(requests, requests * kv)) == pytest.approx(expected, rel=1e-6)
    assert table.decode.source_at(1, 128) == "transferred"
    assert table.decode.sources[3].tolist() == [2, 2, 3]  # 32 requests of 1024 tokens are not in the table


def test_plus_one_points_can_be_left_out(toy: Silicon) -> None:
    step = silicon_table(toy, TOY, "bf16", 1)
    padded = silicon_table(toy, TOY, "bf16", 1, plus_one="padded")
    up = {table: next(c for c in table.layer_ops if c.op == "mlp_up_proj") for table in (step, padded)}
    assert up[padded].tokens.tolist() == [1, 32, 64, 128, 256]
    assert up[step].at(129)[0] / up[step].at(128)[0] == pytest.approx(5 / 4)
    assert 1 < up[padded].at(129)[0] / up[padded].at(128)[0] < 1.01
    with pytest.raises(ValueError, match="plus_one is 'both'"):
        silicon_table(toy, TOY, "bf16", plus_one="both")
    small = Sweep(op="x", tokens=np.arange(1, 18), latency_ms=np.ones(17))
    assert without_plus_one(small).tokens.tolist() == list(range(1, 17))


def test_missing_tables_are_said(toy: Silicon) -> None:
    odd = ModelShape(
        num_layers=2, hidden=256, num_heads=3, num_kv_heads=3, head_dim=64, intermediate=510, vocab_size=1024
    )
    with pytest.raises(SiliconError, match="no measured attention has 3 KV heads"):
        silicon_table(toy, odd, "bf16")
    with pytest.raises(SiliconError, match="no fp8 GEMM table"):
        silicon_table(toy, TOY, "fp8")
    with pytest.raises(ValueError, match="tensor_parallel=3: must divide"):
        silicon_table(toy, TOY, "bf16", 3)


def test_heads_of_another_size_are_as_many_elements(toy: Silicon) -> None:
    """8 heads of 32 read and multiply what 4 heads of 64 do, which the table has."""
    small, measured = (replace(TOY, num_heads=heads, num_kv_heads=heads, head_dim=256 // heads) for heads in (8, 4))
    one, other = (silicon_table(toy, shape, "bf16") for shape in (small, measured))
    for surface, expected in ((one.prefill, other.prefill), (one.decode, other.decode)):
        np.testing.assert_array_equal(surface.latency_ms, expected.latency_ms)
        assert "heads of 32 taken for 0.5 times as many of 64" in surface.note
    assert "heads of" not in other.decode.note
    assert one.decode.source_at(2.0, 128.0) == "transferred"
    assert other.decode.source_at(2.0, 128.0) == "table"


def test_price_of_a_pair_is_that_of_long_prompts_and_rises_below_512_rows() -> None:
    chunks = np.array([128, 256, 512, 1024, 2048, 4096])
    planted = 0.01 + 1e-7 * chunks.astype(np.float64) ** 2 / 2
    assert pair_ms(chunks, planted) == pytest.approx([4e-7, 2e-7, 1e-7, 1e-7, 1e-7, 1e-7])
    assert pair_ms(chunks[:4], planted[:4])[-1] == pytest.approx(1e-7)  # a table that ends at 1024


def real(system: str, framework: str, model: ModelShape, dtype: str, tensor_parallel: int = 1) -> LatencyTable:
    pytest.importorskip("aiconfigurator_core", reason="the extra 'silicon' is not installed")
    return silicon_table(Silicon.open(system, framework), model, dtype, tensor_parallel)


def test_measured_prefix_slope_on_a100() -> None:
    """Vidur's A100 sweep (32 query and 4 KV heads a GPU): chunk 1024, .289 ms at prefix 704, .533 at 3072."""
    half = ModelShape(
        num_layers=1, hidden=8192, num_heads=32, num_kv_heads=4, head_dim=128, intermediate=28672, vocab_size=32000
    )
    for framework in ("vllm", "sglang"):
        table = real("a100_sxm", framework, half, "bf16")
        low, high = table.prefill_ms(1024, [704, 3072])
        assert (high - low) / (3072 - 704) == pytest.approx((0.533 - 0.289) / (3072 - 704), rel=0.15)


@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s"])
def test_every_framework_of_the_main_systems_makes_a_table(system: str, framework: str) -> None:
    table = real(system, framework, LLAMA_8B, "bf16")
    shape = IterationShape(chunks=((480, 2048),), num_decodes=32, decode_kv_tokens=32 * 2048, num_logits=33)
    found = table.iteration(shape)
    assert found.extrapolated == ()
    # 16 GB of weights and 8.6 GB of KV at the data sheet's bandwidth, and the FLOPs of 512 tokens, bound it from below.
    assert 5 < found.latency_ms < 150


def test_decode_is_bound_by_memory_and_tensor_parallel_by_collectives() -> None:
    table = real("a100_sxm", "vllm", LLAMA_7B, "bf16")
    decode = float(table.decode_ms(32, 32 * 4096))
    kv_gb = 32 * 4096 * 2 * 32 * 128 * 2 * 32 / 1e9
    assert kv_gb / 2.039 < decode < 1.6 * kv_gb / 2.039
    big = real("h100_sxm", "vllm", LLAMA_70B, "bf16", 2)
    parts = big.iteration(IterationShape(chunks=((512, 0),), num_logits=1)).parts_ms
    assert parts["attn_all_reduce"] == parts["mlp_all_reduce"] > 1
