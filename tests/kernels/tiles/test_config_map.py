"""Which configuration wins where: by arithmetic against counts made by hand, and measured in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tilebudget.kernels.gpus import device_limits
from tilebudget.kernels.inspect.report import KernelReport
from tilebudget.kernels.latency.measure import Timing
from tilebudget.kernels.latency.sweep import Sweep
from tilebudget.kernels.model_shape import ModelShape
from tilebudget.kernels.ops.gemm_tiles import TileConfig, gemm_configs, select_config
from tilebudget.kernels.tiles import config_map
from tilebudget.kernels.tiles.config_map import ARITHMETIC, MEASURED, measured_map, predicted_map
from tilebudget.kernels.tiles.tile_report import analyse

#: Llama-3.1-8B.
SHAPE = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, intermediate=14336, vocab_size=128256
)
SMALL = ModelShape(num_layers=1, hidden=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate=32, vocab_size=64)
H200 = device_limits("h200_sxm")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler would say, without compiling: one CTA an SM, the widest tile spills."""

    def usable_configs(device: str, *, dtype: str) -> tuple[list[KernelReport], list[KernelReport]]:
        limits = device_limits(device)
        reports = [
            KernelReport(
                kernel="gemm",
                config=cfg.name,
                dtype=dtype,
                device=limits.name,
                arch=limits.arch,
                default=True,
                registers=128,
                spill_bytes=0,
                static_shared_bytes=0,
                dynamic_shared_bytes=0,
                mma="wgmma",
                resident_ctas=1,
                occupancy=cfg.num_warps / limits.max_warps_per_sm,
                problems=("spills 8 bytes a thread",) if cfg.block_m == 256 else (),
                tile=cfg,
            )
            for cfg in gemm_configs({"fp32": 4, "fp8": 1}.get(dtype, 2))
        ]
        return [r for r in reports if r.usable], [r for r in reports if not r.usable]

    monkeypatch.setattr(config_map, "usable_configs", usable_configs)


def predict(max_tokens: int = 2048, **changes: str | int) -> config_map.ConfigMap:
    settings = {"device": "h200_sxm", "dtype": "bf16", "tensor_parallel": 1, **changes}
    return predicted_map(SHAPE, max_tokens=max_tokens, subject={"device": "h200_sxm"}, **settings)  # type: ignore[arg-type]


def test_ranges_cover_every_token_count_once_and_hold_what_the_launcher_selects() -> None:
    for op, (n, k) in SHAPE.gemms(1).items():
        rows = [row for row in predict(700).configs if row.op == op]
        covered = [tokens for row in rows for tokens in range(row.first_tokens, row.last_tokens + 1)]
        assert covered == list(range(1, 701))
        names = [row.config for row in rows for _ in range(row.first_tokens, row.last_tokens + 1)]
        assert names == [select_config(m, n, k, H200, 2).name for m in range(1, 701)]


def test_tiles_and_waves_are_those_counted_by_hand() -> None:
    """gate and up of 8B, 28672 columns, 2048 tokens: with 128x256 tiles 16 x 112 = 1792 tiles, 13.6 waves of 132."""
    row = next(row for row in predict().configs if row.op == "mlp_up_proj" and row.last_tokens == 2048)
    block_m, block_n = (int(size) for size in row.config.split("x")[:2])
    tiles = 2048 // block_m * (28672 // block_n)
    assert row.tiles == tiles
    assert row.waves == -(-tiles // 132)
    assert row.last_wave_fill == pytest.approx((tiles % 132 or 132) / 132)
    assert row.quantization_efficiency == pytest.approx(tiles / (row.waves * 132))
    assert row.source == ARITHMETIC
    assert row.latency_ms is None


def test_reason_names_the_runner_up_and_both_loads() -> None:
    row = next(row for row in predict().configs if row.op == "mlp_up_proj" and row.last_tokens == 2048)
    busiest = -(-row.tiles // 132)
    assert row.why.startswith(f"busiest SM: {busiest} tile")
    ours, theirs = (float(part.split(", ")[-1].split(" kclk")[0]) for part in row.why.split("; next best "))
    assert ours <= theirs


def test_document_says_that_nothing_was_measured() -> None:
    found = predict()
    document = found.to_json()
    assert document["edges"] == document["budgets"] == []
    assert document["notes"] == [f"configs: {ARITHMETIC}"]
    assert {row["source"] for row in document["configs"]} == {ARITHMETIC}  # type: ignore[attr-defined]
    text = found.to_text()
    assert ARITHMETIC in text
    assert "Left out: 256x128x64-w8-s3: spills 8 bytes a thread" in text


@pytest.mark.parametrize(("dtype", "k_bytes"), [("bf16", 2), ("fp32", 4), ("fp8", 1)])
def test_every_dtype_has_its_own_configurations(dtype: str, k_bytes: int) -> None:
    names = {row.config for row in predict(64, dtype=dtype).configs}
    assert names <= {cfg.name for cfg in gemm_configs(k_bytes)}


def test_bad_device_and_dtype_are_named() -> None:
    with pytest.raises(ValueError, match="device='tpu'"):
        predict(device="tpu")
    with pytest.raises(ValueError, match="dtype='int4': must be one of fp8, bf16, fp16, fp32"):
        predict(dtype="int4")


def test_measured_map_names_the_fastest_and_what_the_launcher_would_have_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times are made up: a tile takes as long as it has rows, so the smallest wins wherever it is usable."""

    def fake_time(x: torch.Tensor, weights: object, cfg: TileConfig, *_: object) -> Timing:
        return Timing(median_ms=cfg.block_m + cfg.block_n / 1000, std_ms=0.0)

    monkeypatch.setattr(config_map, "_time", fake_time)
    done: list[tuple[int, int]] = []
    rows = measured_map(
        SMALL,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        tokens=[1, 200],
        on_done=lambda *point: done.append(point),
    )
    assert len(rows) == 8
    assert done[-1] == (8, 8)
    for row in rows:
        selected = select_config(row.last_tokens, row.n, row.k, H200, 2)
        assert row.config == "16x64x128-w4-s4"
        assert row.latency_ms == pytest.approx(16.064)
        assert row.source == MEASURED
        assert row.selected == selected.name
        assert row.why.startswith("16x128x128-w4-s3 is 0% slower; by arithmetic busiest SM")
        if selected.block_m < 256:
            assert row.selected_ms == pytest.approx(selected.block_m + selected.block_n / 1000)


def test_measured_map_runs_the_kernel() -> None:
    """In the interpreter or on the GPU, whichever is here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    one = replace(SMALL, hidden=16, head_dim=8, intermediate=16)
    rows = measured_map(one, device=device, dtype=torch.float32, tokens=[3], repeats=1)
    assert [row.op for row in rows] == list(one.gemms(1))
    assert all(row.latency_ms is not None and row.latency_ms > 0 for row in rows)


def test_tile_analysis_carries_the_map() -> None:
    counts = np.arange(1, 40)
    sweep = Sweep(op="mlp_up_proj", tensor_parallel=1, tokens=counts, latency_ms=1.0 + counts / 100)
    analysis = analyse([sweep])
    assert analysis.to_json()["configs"] == []
    with_map = replace(analysis, configs=predict(64).configs)
    assert len(with_map.to_json()["configs"]) == len(predict(64).configs)  # type: ignore[arg-type]
    assert "Configurations of our GEMM" in with_map.to_text()
    assert "Configurations of our GEMM" not in analysis.to_text()
