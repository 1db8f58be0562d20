"""Silicon tables: a small package of our own making, and the real one where the extra is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tilebudget.kernels.latency import silicon
from tilebudget.kernels.latency.silicon import Silicon, SiliconError, list_systems, system_spec
from tilebudget.kernels.latency.sweep import layer_sweep
from tilebudget.kernels.model_shape import ModelShape
from tilebudget.kernels.tiles.tile_report import analyse, candidate_edges

LLAMA_8B = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336, vocab_size=128256
)

SPEC = """# comment
data_dir: data/toy
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


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system "toy" (vllm in two versions, bf16) whose latency is n*k*ceil(m/64), and "paper" with no tables."""
    for name in ("toy", "paper"):
        (tmp_path / f"{name}.yaml").write_text(SPEC)
    (tmp_path / "query_versions.yaml").write_text("versions: []\n")
    sizes = (1024, 2048, 8192)
    table = pd.DataFrame(
        [
            {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": n * k * -(-m // 64) * 1e-9 * slow}
            for dtype in ("bfloat16", "nvfp4")
            for m in (1, 64, 65, 128, 129, 256)
            for n in sizes
            for k in sizes
            for slow in (1, 3)
        ]
    )
    for version, scale in (("0.9.0", 2.0), ("0.10.0", 1.0)):
        path = tmp_path / "data" / "toy" / "gemm" / "vllm" / version
        path.mkdir(parents=True)
        table.assign(latency=table["latency"] * scale).to_parquet(path / "gemm_perf.parquet")
    monkeypatch.setattr(silicon, "systems_dir", lambda: tmp_path)
    return tmp_path


def test_list_says_what_is_measured(toy: Path) -> None:
    found = {info.system: info for info in list_systems()}
    assert set(found) == {"toy", "paper"}
    assert found["toy"].frameworks == {"vllm": {"0.9.0": ("bf16",), "0.10.0": ("bf16",)}}
    assert found["toy"].measured
    assert not found["paper"].measured


def test_newest_version_by_number_and_fastest_kernel(toy: Path) -> None:
    tables = Silicon.open("toy", "vllm")
    assert tables.version == "0.10.0"
    sweep = tables.gemm(2048, 1024, "bf16", op="attn_pre_proj")
    assert (sweep.source, sweep.note, sweep.op) == ("table", "", "attn_pre_proj")
    assert sweep.tokens.tolist() == [1, 64, 65, 128, 129, 256]
    assert sweep.at(64) == pytest.approx(2048 * 1024 * 1e-9)
    assert Silicon.open("toy", "vllm", "0.9.0").gemm(2048, 1024, "bf16").at(64) == pytest.approx(2 * sweep.at(64))


@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 4096), (4096, 4096), (16384, 2048), (1536, 16384)])
def test_absent_shapes_are_transferred_and_say_so(toy: Path, n: int, k: int) -> None:
    sweep = Silicon.open("toy", "vllm").gemm(n, k, "bf16")
    assert sweep.source == "transferred"
    assert f"{n}x{k} is not in the table" in sweep.note
    # The planted latency is a power law in n and k, which log-log interpolation reproduces.
    assert sweep.at(65) == pytest.approx(n * k * 2e-9)
    assert sweep.std_ms is not None


def test_what_is_not_there_is_said(toy: Path) -> None:
    with pytest.raises(SiliconError, match="there is no system 'h900': the tables know paper, toy"):
        Silicon.open("h900", "vllm")
    with pytest.raises(SiliconError, match=r"paper has no measured vllm tables .*there is only a data sheet"):
        Silicon.open("paper", "vllm")
    with pytest.raises(SiliconError, match=r"no version '1\.0': measured are 0\.9\.0, 0\.10\.0"):
        Silicon.open("toy", "vllm", "1.0")
    with pytest.raises(ValueError, match="framework is 'tgi'"):
        Silicon.open("toy", "tgi")
    tables = Silicon.open("toy", "vllm")
    with pytest.raises(SiliconError, match="no fp8 GEMM table"):
        tables.gemm(1024, 1024, "fp8")
    with pytest.raises(ValueError, match="dtype is 'int3'"):
        tables.gemm(1024, 1024, "int3")
    with pytest.raises(SiliconError, match="no context_attention_perf table"):
        tables.frame("attention", "context_attention_perf")


def test_spec(toy: Path) -> None:
    pytest.importorskip("yaml")
    spec = system_spec("toy")
    assert spec.memory_bytes == 80 * 2**30
    assert spec.flops == {"bf16": 312e12}
    assert (spec.link_bytes_per_s, spec.inter_node_bytes_per_s, spec.link_latency_s) == (300e9, 25e9, 1e-5)
    with pytest.raises(SiliconError, match="there is no system 'h900'"):
        system_spec("h900")


def test_absent_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SiliconError, match=r"extra 'silicon' \(pip install 'tilebudget\[silicon\]'\)"):
        list_systems()


def test_gemm_shapes_of_a_shard() -> None:
    assert LLAMA_8B.gemms(1) == {
        "attn_pre_proj": (6144, 4096),
        "attn_post_proj": (4096, 4096),
        "mlp_up_proj": (28672, 4096),
        "mlp_down_proj": (4096, 14336),
    }
    assert LLAMA_8B.gemms(4)["attn_pre_proj"] == (1536, 4096)
    assert LLAMA_8B.gemms(16)["attn_pre_proj"] == ((2 + 2) * 128, 4096)  # KV heads are replicated
    assert LLAMA_8B.logits_gemm(8) == (16032, 4096)
    with pytest.raises(ValueError, match="tensor_parallel=3: must divide the 32 heads"):
        LLAMA_8B.gemms(3)
    with pytest.raises(ValueError, match="hidden is 0"):
        ModelShape(num_layers=1, hidden=0, num_heads=1, num_kv_heads=1, head_dim=64, intermediate=64, vocab_size=100)


def real_layer(system: str, framework: str, dtype: str) -> dict[int, float]:
    pytest.importorskip("aiconfigurator_core", reason="the extra 'silicon' is not installed")
    tables = Silicon.open(system, framework)
    layer = layer_sweep([tables.gemm(n, k, dtype, op) for op, (n, k) in LLAMA_8B.gemms(1).items()])
    return dict(zip(layer.tokens.tolist(), layer.latency_ms.tolist(), strict=True))


@pytest.mark.parametrize(
    ("system", "framework", "dtype", "published"),
    [
        ("a100_sxm", "sglang", "bf16", {256: 0.569, 257: 0.723, 512: 1.018, 513: 1.225, 1024: 1.872, 1025: 2.060}),
        ("l40s", "vllm", "bf16", {256: 0.800, 257: 0.850, 512: 0.983, 513: 1.260, 1024: 1.826, 1025: 2.217}),
        ("h100_sxm", "vllm", "bf16", {256: 0.207, 257: 0.220, 512: 0.291, 513: 0.309, 1024: 0.564, 1025: 0.588}),
        ("h200_sxm", "vllm", "bf16", {256: 0.174, 257: 0.190, 512: 0.286, 513: 0.301, 1024: 0.556, 1025: 0.593}),
        ("h200_sxm", "vllm", "fp8", {256: 0.142, 257: 0.310, 512: 0.199, 513: 0.404, 1024: 0.359, 1025: 0.619}),
    ],
)
def test_layer_sums_agree_with_the_record(system: str, framework: str, dtype: str, published: dict[int, float]) -> None:
    """FACTS section 1, whose transfer rule is not stated: two of the four shapes are transferred there too."""
    layer = real_layer(system, framework, dtype)
    for tokens, latency_ms in published.items():
        assert layer[tokens] == pytest.approx(latency_ms, rel=0.035)


def test_h200_fp8_doubles_after_512_and_bf16_does_not() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra 'silicon' is not installed")
    tables = Silicon.open("h200_sxm", "vllm")
    jumps = {}
    for dtype in ("fp8", "bf16"):
        analysis = analyse([tables.gemm(n, k, dtype, op) for op, (n, k) in LLAMA_8B.gemms(1).items()])
        budget = next(b for b in analysis.budgets[1] if b.tokens == 512)
        assert budget.next_tokens == 513
        jumps[dtype] = budget.one_more_pct
        assert 512 in candidate_edges(analysis)
        sources = {s.sweep.op: s.sweep.source for s in analysis.staircases}
        assert sources == {
            "attn_pre_proj": "table",
            "attn_post_proj": "table",
            "mlp_up_proj": "transferred",
            "mlp_down_proj": "transferred",
        }
    assert jumps["fp8"] is not None
    assert jumps["bf16"] is not None
    assert 95 < jumps["fp8"] < 115
    assert 0 < jumps["bf16"] < 10


def test_real_systems() -> None:
    pytest.importorskip("aiconfigurator_core", reason="the extra 'silicon' is not installed")
    found = {info.system: info for info in list_systems()}
    measured = {name for name, info in found.items() if info.measured}
    assert {"a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "b300_sxm", "gb200", "gb300", "l40s", "b60"} <= measured
    assert not {"l4", "a30", "a100_pcie", "h100_pcie"} & measured
    assert system_spec("h200_sxm").flops["fp8"] == pytest.approx(1978e12)
    assert np.isclose(system_spec("a100_sxm").bandwidth_bytes_per_s, 2.039e12)
