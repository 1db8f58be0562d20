"""Latency tables: surfaces, lookups in parts, files, and the compiled form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tilebudget.kernels.latency.compiled import CompiledLatency
from tilebudget.kernels.latency.file import SCHEMA, LatencyFileError, load_table, save_table
from tilebudget.kernels.latency.step_curve import StepCurve
from tilebudget.kernels.latency.surface import Surface
from tilebudget.kernels.latency.sweep import Sweep
from tilebudget.kernels.latency.table import IterationShape, LatencyTable
from tilebudget.kernels.model_shape import ModelShape

MODEL = ModelShape(
    num_layers=3, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128, vocab_size=100, name="toy"
)


def curve(op: str, base: float, slope: float, source: str = "measured") -> StepCurve:
    tokens = np.array([1, 128, 129, 256, 512])
    latency = base + slope * np.array([1, 1, 2, 2, 4])
    return StepCurve.of(
        Sweep(op=op, tokens=tokens, latency_ms=latency, std_ms=latency * 0.01, source=source), kind="lines"
    )


def surface(rows: list[int], columns: list[int], base: float, per_row: float, per_cell: float) -> Surface:
    r, c = np.array(rows), np.array(columns)
    latency = base + per_row * r[:, None] + per_cell * r[:, None] * c[None, :]
    return Surface(
        rows=r,
        columns=c,
        latency_ms=latency,
        std_ms=latency * 0.02,
        sources=np.full(latency.shape, 1, dtype=np.int8),
    )


def table() -> LatencyTable:
    return LatencyTable(
        device="toy",
        model=MODEL,
        dtype="bf16",
        tensor_parallel=1,
        layer_ops=(curve("up", 0.5, 0.1), curve("down", 0.4, 0.2, "transferred")),
        once_ops=(curve("embedding", 0.1, 0.0),),
        logits=curve("logits", 0.2, 0.05),
        prefill=surface([1, 64, 512], [0, 1024], 0.01, 0.001, 1e-6),
        decode=surface([1, 2, 8, 64], [1, 512, 4096], 0.02, 0.002, 1e-6),
        overhead_ms=0.3,
        overhead_std_ms=0.05,
        request_overhead_ms=0.01,
        origin={"framework": "none"},
        notes=("made up",),
    )


def test_iteration_adds_its_parts_up() -> None:
    shape = IterationShape(chunks=((60, 100), (58, 0)), num_decodes=2, decode_kv_tokens=1000, num_logits=3)
    assert shape.num_tokens == 120
    found = table().iteration(shape)
    tokens = 3 * (0.5 + 0.1) + 3 * (0.4 + 0.2) + 0.1
    # Bilinear cost is exact on these planted surfaces. Two chunks share one launch (least cost: one row, prefix 0).
    prefill = 3 * (0.01 + 0.001 * 60 + 1e-6 * 6000 + 0.01 + 0.001 * 58 - 0.011)
    decode = 3 * (0.02 + 0.002 * 2 + 1e-6 * 1000)
    assert found.parts_ms["up"] == pytest.approx(1.8)
    assert found.parts_ms["prefill_attention"] == pytest.approx(prefill)
    assert found.parts_ms["decode_attention"] == pytest.approx(decode)
    assert found.parts_ms["overhead"] == pytest.approx(0.3 + 4 * 0.01)
    assert found.latency_ms == pytest.approx(tokens + prefill + decode + 0.34 + 0.25)
    assert found.source == "derived"  # the overhead's
    assert found.extrapolated == ()
    assert found.std_ms > 0.05


def test_a_step_is_a_step_in_the_iteration() -> None:
    full, over = (table().iteration(IterationShape(chunks=((n, 0),))).parts_ms for n in (128, 129))
    assert over["down"] - full["down"] == pytest.approx(3 * 0.2)


def test_outside_the_table_it_extrapolates_and_says_which_part() -> None:
    found = table().iteration(IterationShape(chunks=((700, 5000),), num_decodes=100, decode_kv_tokens=900_000))
    assert set(found.extrapolated) == {"up", "down", "embedding", "prefill_attention", "decode_attention"}
    inside = table().iteration(IterationShape(chunks=((500, 1000),), num_decodes=64, decode_kv_tokens=64 * 4096))
    assert found.latency_ms > inside.latency_ms
    assert np.isfinite(found.latency_ms)


def test_surface_rules() -> None:
    plane = surface([1, 64, 512], [0, 1024], 0.01, 0.001, 1e-6)
    assert float(plane.at(32, 512)) == pytest.approx(0.01 + 0.032 + 1e-6 * 32 * 512)
    assert float(plane.at(0, 512)) == 0
    assert float(plane.at(1024, 0)) == pytest.approx(0.01 + 1.024)
    assert plane.extrapolated([0, 1, 513], [0, 1024, 0]).tolist() == [False, False, True]
    assert plane.extrapolated(1, 1025)
    falling = replace(plane, latency_ms=plane.latency_ms[::-1].copy())
    assert float(falling.at(100_000, 0)) == falling.latency_ms[-1, 0]  # a falling slope does not run into nothing
    with pytest.raises(ValueError, match="a count is below 0"):
        plane.at(-1, 0)
    with pytest.raises(ValueError, match="rows must be two or more counts"):
        surface([1], [0, 1], 1, 0, 0)
    with pytest.raises(ValueError, match=r"std_ms has shape \(1, 2\): it must be \(3, 2\)"):
        replace(plane, std_ms=plane.std_ms[:1])


@pytest.mark.parametrize("seed", range(20))
def test_compiled_agrees_with_the_table_and_runs_equal_single_iterations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = table()
    fast = CompiledLatency(made, max_tokens=512, max_requests=64)
    chunks = tuple((int(c), int(p)) for c, p in zip(rng.integers(1, 200, 3), rng.integers(0, 3000, 3), strict=True))
    chunks = chunks[: int(rng.integers(0, 4))]
    decodes = int(rng.integers(1, 90))  # more than 64 of them go to the table itself
    kv = int(decodes * rng.integers(1, 6000) + rng.integers(0, decodes))
    shape = IterationShape(chunks=chunks, num_decodes=decodes, decode_kv_tokens=kv, num_logits=decodes)
    assert fast.iteration_s(chunks, decodes, kv, decodes) * 1e3 == pytest.approx(
        made.iteration(shape).latency_ms, rel=1e-12
    )
    run = fast.decode_run_s(decodes, kv, 200)
    single = [fast.iteration_s((), decodes, kv + i * decodes, decodes) for i in range(200)]
    assert run == single  # to the last bit


def test_file_round_trip_and_versions(tmp_path: Path) -> None:
    made = table()
    path = tmp_path / "table.json"
    save_table(made, path)
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]
    again = load_table(path)
    shape = IterationShape(chunks=((33, 77),), num_decodes=5, decode_kv_tokens=321, num_logits=6)
    assert again.iteration(shape) == made.iteration(shape)
    assert again.model == MODEL
    assert again.notes == ("made up",)
    assert again.provenance() == made.provenance()
    document = json.loads(path.read_text())
    assert document["schema"] == SCHEMA
    for change, message in (
        ({"schema": "tilebudget.latency_table/9"}, "has schema 'tilebudget.latency_table/9': this version reads"),
        ({"logits": {"op": "x"}}, "is damaged"),
        ({"tensor_parallel": 0}, "is damaged: .*tensor_parallel is 0"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(LatencyFileError, match=message):
            load_table(path)
    path.write_text("[]")
    with pytest.raises(LatencyFileError, match="has schema 'list'"):
        load_table(path)
    path.write_text("{")
    with pytest.raises(LatencyFileError, match="cannot be read"):
        load_table(path)
    with pytest.raises(LatencyFileError, match="cannot be read"):
        load_table(tmp_path / "absent.json")


def test_provenance_counts_points_by_source() -> None:
    rows = {row["part"]: row for row in table().provenance()}
    assert rows["up"]["measured"] == 5
    assert rows["down"]["transferred"] == 5
    assert rows["prefill_attention"]["table"] == 6


def test_sweeps_replace_token_wise_operations() -> None:
    tokens = np.array([8, 16])
    sweeps = [
        Sweep(op=op, tensor_parallel=degree, tokens=tokens, latency_ms=np.array([1.0, 1.0]) / degree)
        for op in ("mlp_up_proj", "emb")
        for degree in (1, 2)
    ]
    made = replace(table(), layer_ops=(*table().layer_ops, curve("mlp_all_reduce", 0.1, 0.0)))
    changed = made.with_sweeps(sweeps)
    assert [c.op for c in changed.layer_ops] == ["mlp_up_proj", "mlp_all_reduce"]
    assert [c.op for c in changed.once_ops] == ["emb"]
    assert changed.tokens_ms(8)[0] == pytest.approx(3 * 1.1 + 1)
    with pytest.raises(ValueError, match="no sweep has tensor_parallel=4"):
        replace(made, tensor_parallel=4).with_sweeps(sweeps)


def test_bad_tables_and_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="no name may occur twice"):
        replace(table(), once_ops=(curve("up", 1, 0),))
    with pytest.raises(ValueError, match="layer_ops is empty"):
        replace(table(), layer_ops=())
    with pytest.raises(ValueError, match="overhead_source is 'guess'"):
        replace(table(), overhead_source="guess")
    with pytest.raises(ValueError, match="decode_kv_tokens is 1: 2 decodes"):
        IterationShape(num_decodes=2, decode_kv_tokens=1)
    with pytest.raises(ValueError, match="each needs 1 token or more"):
        IterationShape(chunks=((0, 5),))
    with pytest.raises(ValueError, match="both must be 1 or more"):
        CompiledLatency(table(), max_tokens=0, max_requests=1)
