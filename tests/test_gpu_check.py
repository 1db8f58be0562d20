"""benchmarks/gpu_check.py on a machine without a GPU, and its parts in the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tilebudget.kernels.inspect import report as inspect
from tilebudget.kernels.latency.measure import sample_calls
from tilebudget.kernels.model_shape import ModelShape

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="`make gpu-check` itself does it here")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The three scripts as modules."""
    import importlib

    sys.path.insert(0, str(BENCHMARKS))
    try:
        names = ("gpu_check", "gpu_correctness", "gpu_sections")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))


def _report(*, default: bool, problems: tuple[str, ...]) -> inspect.KernelReport:
    return inspect.KernelReport(
        kernel="gemm", config="16x64x128-w4-s4", dtype="bf16", device="h200_sxm", arch="sm_90", default=default,
        registers=1, spill_bytes=0, static_shared_bytes=0, dynamic_shared_bytes=0, mma="wgmma", resident_ctas=1,
        occupancy=0.1, problems=problems,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("default", "problems", "code"), [(True, (), 0), (False, ("spills 8 bytes",), 0), (True, ("spills 8 bytes",), 1)]
)
def test_without_a_gpu_it_compiles_and_says_so(
    default: bool,
    problems: tuple[str, ...],
    code: int,
    scripts: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = [_report(default=default, problems=problems)]
    monkeypatch.setattr(inspect, "compile_matrix", lambda **_: reports)
    assert scripts["gpu_check"].main([]) == code
    printed = capsys.readouterr().out
    assert "no CUDA device is visible to torch: compiling the kernels" in printed
    assert ("default and not usable: sm_90 gemm 16x64x128-w4-s4: spills 8 bytes" in printed) == (code == 1)


def test_section_that_dies_is_reported_and_nothing_is_raised(tmp_path: Path, scripts: dict[str, ModuleType]) -> None:
    """Here every section that needs CUDA does: the engine section asks for it at once."""
    state = scripts["gpu_check"].run_section("engine", tmp_path, 60.0, 0)
    assert "torch finds no CUDA device" in state["error"]
    assert "passed" not in state


def test_runs_from_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    """With -S no site-packages, and so no tilebudget, is there; the links in .typing stand in for it."""
    script = (
        "import sys, os; sys.path.insert(0, sys.argv[1]); import gpu_check; gpu_check.make_importable();"
        "import importlib.util as u; print(u.find_spec('tilebudget.kernels').origin, os.environ['PYTHONPATH'])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", script, str(BENCHMARKS)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    origin, path = done.stdout.split()
    assert origin.endswith("kernels/__init__.py")
    assert path.split(":")[0].endswith(".typing")


@pytest.mark.parametrize("batch", ["chunks", "decodes", "hybrid"])
def test_attention_cases_are_within_tolerance(batch: str, scripts: dict[str, ModuleType]) -> None:
    rows: list[dict[str, object]] = []
    correctness = scripts["gpu_correctness"]
    small = {"chunks": [(5, 0), (3, 1), (2, 17), (1, 16)], "decodes": [1, 16, 17, 0, 40]}
    case = correctness.attention_case(batch, 4, 2, 16, 2, torch.float32, **small)
    correctness.check(rows, "attention", batch, case)
    assert rows[0]["within"], rows


def test_gemm_and_small_kernels_are_within_tolerance_and_failures_are_rows(scripts: dict[str, ModuleType]) -> None:
    rows: list[dict[str, object]] = []
    correctness = scripts["gpu_correctness"]
    correctness.check(rows, "gemm", "17x40x52", correctness.gemm_case(17, 40, 52, torch.float32))
    correctness.small_kernels(rows, "fp32", torch.float32, num_rows=3)
    assert [row["within"] for row in rows] == [True] * 4, rows
    correctness.check(rows, "gemm", "fp8 4x16x16 without a scale", lambda: (torch.zeros(1), torch.zeros(2)))
    assert rows[-1]["within"] is False
    assert "ValueError" in str(rows[-1]["error"])


def test_staircase_and_speed_documents(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up times with a step after 128 on one side: the edge is found there, and only there."""
    sections = scripts["gpu_sections"]
    shape = ModelShape(num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate=16, vocab_size=32)
    monkeypatch.setattr(sections, "SHAPE", shape)
    monkeypatch.setattr(sections, "ROTATION_BYTES", 1)
    monkeypatch.setattr(sections, "STAIRCASE_CENTRES", (128,))

    def made_up(call: object, device: torch.device, *, repeats: int) -> list[float]:
        tokens, ours = call.__defaults__[0].shape[0], "gemm" in call.__code__.co_names  # type: ignore[attr-defined]
        return [1.0 + tokens / 1e4 + (0.5 if ours and tokens > 128 else 0.0)] * repeats

    monkeypatch.setattr(sections, "sample_calls", made_up)
    document = sections.staircase(sections.Clock(60), 0)
    assert document["summary"] == {"num_points": 4 * 17, "num_edges": 4}
    assert {(edge["side"], edge["tokens"]) for edge in document["edges"]} == {("ours", 128)}
    assert document["points"][0]["ours"]["repeats"] == 16
    assert json.loads(json.dumps(document)) == document

    monkeypatch.setattr(sections, "GEMM_TOKENS", (3,))
    monkeypatch.setattr(sections, "sample_calls", sample_calls)
    rows = [sections.compare(op, {"tokens": m}, ours, theirs) for op, m, ours, theirs in sections.gemm_sides((3,))]
    assert all(row["ours"]["p20_ms"] <= row["ours"]["p50_ms"] <= row["ours"]["p80_ms"] for row in rows)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_attention_sides_have_the_same_work(
    kind: str, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = scripts["gpu_sections"]
    shape = ModelShape(
        num_layers=1, hidden=32, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=16, vocab_size=32
    )
    monkeypatch.setattr(sections, "SHAPE", shape)
    _, sizes, ours, theirs = sections.attention_prefill(5) if kind == "prefill" else sections.attention_decode(3, 20)
    assert ours(0).numel() == theirs(0).numel() == sizes["num_seqs"] * sizes["tokens"] * 64
    assert torch.isfinite(ours(0)).all()
