"""The compile matrix: a covering subset compiled here, and the committed table compared with the declarations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import triton
from tilebudget.kernels.gpus import REPRESENTATIVE, device_limits
from tilebudget.kernels.inspect import report as inspect
from tilebudget.kernels.inspect.compiler import CompiledKernel, cache_dir, cache_key, compile_variants
from tilebudget.kernels.inspect.matrix import KERNELS, variants
from tilebudget.kernels.inspect.report import KernelReport, compile_matrix, inspect_kernel, markdown, usable_configs
from tilebudget.kernels.inspect.variants import Variant
from tilebudget.kernels.ops.gemm_tiles import default_gemm_configs

TABLE = Path(inspect.__file__).parents[1] / "COMPILED.md"
GEMM_MMA = {"sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}

#: What is compiled on every architecture: a small, a middle and a large GEMM tile, and one of each other kernel.
SUBSET = ("16x64x128", "128x128x64", "128x256x32", "16x64-w4-s3-split8", "split8-w4", "hidden4096-w8", "head128-w2")


def _variant(arch: str, kernel: str, config: str, dtype: str = "bf16") -> Variant:
    found = [v for v in variants(device_limits(arch)) if (v.kernel, v.dtype) == (kernel, dtype)]
    return next(v for v in found if v.config.startswith(config))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, list[tuple[Variant, CompiledKernel]]]:
    """The subset by architecture, with fp8 and the tile that spills, compiled in one go.

    The facts last from run to run inside pytest's own cache, never in the user's.
    """
    jobs = [
        (v, arch)
        for arch in REPRESENTATIVE
        for v in variants(device_limits(arch))
        if v.dtype == "bf16" and v.config.startswith(SUBSET)
    ]
    jobs += [(_variant(arch, "gemm", "128x128", "fp8e4nv"), arch) for arch in ("sm_89", "sm_90", "sm_100")]
    jobs.append((_variant("sm_80", "gemm", "128x256x64"), "sm_80"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEBUDGET_CACHE_DIR", str(request.config.cache.mkdir("tilebudget")))
        results = compile_variants(jobs)
    found: dict[str, list[tuple[Variant, CompiledKernel]]] = {}
    for (variant, arch), facts in zip(jobs, results, strict=True):
        found.setdefault(arch, []).append((variant, facts))
    return found


def _table_rows() -> dict[tuple[str, str, str, str], list[str]]:
    """Cells of COMPILED.md by (architecture, kernel, dtype, configuration as printed)."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    arch = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            arch = line[line.index("(") + 1 : line.index(",")]
        elif line.startswith("| ") and not line.startswith("| kernel"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[arch, cells[0], cells[1], cells[2]] = cells[3:]
    return rows


def test_the_table_lists_exactly_what_is_declared() -> None:
    declared = {
        (arch, v.kernel, v.dtype.replace("e4nv", ""), f"**{v.config}**" if v.default else v.config)
        for arch in REPRESENTATIVE
        for v in variants(device_limits(arch))
    }
    assert set(_table_rows()) == declared, "run python -P -m tilebudget.kernels.inspect --write"


def test_the_table_holds_no_default_that_spills_or_does_not_fit() -> None:
    for (arch, kernel, dtype, config), cells in _table_rows().items():
        mma, spills, left_out = cells[0], int(cells[2]), cells[-1]
        if config.startswith("**"):
            assert (spills, left_out) == (0, ""), (arch, kernel, dtype, config)
            if kernel == "gemm" and dtype != "fp32":
                assert mma == GEMM_MMA[arch], (config, mma)
        assert bool(spills) == ("spills" in left_out)


@pytest.mark.parametrize("arch", REPRESENTATIVE)
def test_compiled_here_as_the_table_says(arch: str, compiled: dict[str, list[tuple[Variant, CompiledKernel]]]) -> None:
    assert {v.kernel for v, _ in compiled[arch]} == {*KERNELS, "attention_reduce"} - {"silu_mul"}
    table = _table_rows()
    same_compiler = f"\nTriton {triton.__version__}.\n" in TABLE.read_text(encoding="utf-8")
    for variant, facts in compiled[arch]:
        assert facts.error is None
        if variant.default:
            assert facts.spill_bytes == 0, variant.config
        if variant.kernel == "gemm":
            assert facts.mma == GEMM_MMA[arch], variant.config
        if same_compiler:
            shown = f"**{variant.config}**" if variant.default else variant.config
            cells = table[arch, variant.kernel, variant.dtype.replace("e4nv", ""), shown]
            assert cells[:3] == [facts.mma or "none", str(facts.registers), str(facts.spill_bytes)], variant.config


def test_fp8_reaches_the_tensor_cores(compiled: dict[str, list[tuple[Variant, CompiledKernel]]]) -> None:
    found = {arch: facts.mma for arch, pairs in compiled.items() for v, facts in pairs if v.dtype == "fp8e4nv"}
    assert found == {"sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}
    with pytest.raises(ValueError, match="dtype='fp8': gemm is not declared for it on a100_sxm"):
        inspect_kernel("gemm", "a100_sxm", dtype="fp8")


def test_a_configuration_that_spills_is_named_and_left_out(
    compiled: dict[str, list[tuple[Variant, CompiledKernel]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The whole list on one device is slow to compile, so all but the spilling tile get the facts of a small kernel.
    spilling, truth = compiled["sm_80"][-1]
    assert truth.spill_bytes > 0

    def answer(jobs: list[tuple[Variant, str]], **_: object) -> list[CompiledKernel]:
        small = CompiledKernel(registers=64, dynamic_shared_bytes=1024, mma="mma.sync")
        return [truth if v.config == spilling.config else small for v, _arch in jobs]

    monkeypatch.setattr(inspect, "compile_variants", answer)
    usable, left_out = usable_configs("a100_sxm")
    assert [report.config for report in left_out] == [spilling.config]
    assert left_out[0].problems == (f"spills {truth.spill_bytes} bytes a thread",)
    assert set(default_gemm_configs(device_limits("a100_sxm"), 2)) <= {report.tile for report in usable}


def _reports(monkeypatch: pytest.MonkeyPatch, facts: CompiledKernel, device: str, m: int) -> list[KernelReport]:
    monkeypatch.setattr(inspect, "compile_variants", lambda jobs, **_: [facts] * len(jobs))
    return compile_matrix([device], kernels=["gemm"], dtypes=["bf16"], m=m, n=4096)


def test_occupancy_tiles_and_waves_follow_from_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = CompiledKernel(registers=128, dynamic_shared_bytes=65536, mma="mma.sync")
    reports = _reports(monkeypatch, facts, "a100_sxm", 513)
    [report] = [r for r in reports if r.config == "128x128x64-w8-s3"]
    # 65,536 registers / (128 x 256 threads) = 2 CTAs, 164 KiB / (64 + 1) KiB = 2; 16 of 64 warps.
    assert (report.resident_ctas, report.occupancy) == (2, 0.25)
    assert report.use is not None
    # 5 x 32 tiles on 108 x 2 slots.
    assert (report.use.tiles, report.use.waves) == (160, 1)
    assert report.use.last_wave_fill == pytest.approx(160 / 216)
    assert report.use.quantization_efficiency == pytest.approx(513 * 4096 / (216 * 128 * 128))
    assert report.usable


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    big = CompiledKernel(registers=64, dynamic_shared_bytes=100 * 1024)
    assert _reports(monkeypatch, big, "l40s", 128)[0].problems == ("needs 100 KiB of shared memory, l40s has 99",)
    broken = CompiledKernel(error="boom")
    [first, *_] = _reports(monkeypatch, broken, "l40s", 128)
    assert first.problems == ("does not compile: boom",)
    assert not first.usable
    assert first.use is None
    tensor = CompiledKernel(registers=64, dynamic_shared_bytes=1024, tensor_columns=256)
    assert _reports(monkeypatch, tensor, "b200_sxm", 128)[0].resident_ctas == 2


def test_markdown_names_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = CompiledKernel(registers=255, spill_bytes=24, dynamic_shared_bytes=1024, mma="mma.sync")
    text = markdown(_reports(monkeypatch, facts, "l40s", 128))
    assert "## l40s (sm_89, 142 SMs)" in text
    assert text.count("spills 24 bytes a thread") == len(_reports(monkeypatch, facts, "l40s", 128))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="kernels='conv'"):
        compile_matrix(["sm_90"], kernels=["conv"])
    with pytest.raises(ValueError, match="device='sm_70'"):
        compile_matrix(["sm_70"])
    with pytest.raises(ValueError, match="arch='h200_sxm'"):
        compile_variants([(_variant("sm_90", "silu_mul", "block"), "h200_sxm")])


def test_the_cache_answers_and_a_broken_entry_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBUDGET_CACHE_DIR", str(tmp_path))
    variant = _variant("sm_80", "silu_mul", "block")
    [first] = compile_variants([(variant, "sm_80")])
    [entry] = (tmp_path / "kernels").iterdir()
    assert entry.stem == cache_key(variant, "sm_80")
    # A planted answer proves that the second call read the cache.
    entry.write_text('{"registers": 7}', encoding="utf-8")
    assert compile_variants([(variant, "sm_80")]) == [CompiledKernel(registers=7)]
    entry.write_text('{"registers": ', encoding="utf-8")
    assert compile_variants([(variant, "sm_80")]) == [first]
    assert cache_key(variant, "sm_80") != cache_key(variant, "sm_90")


def test_a_variant_that_does_not_compile_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEBUDGET_CACHE_DIR", str(tmp_path))
    good = _variant("sm_90", "silu_mul", "block")
    bad = Variant(**{**vars(good), "constants": {"BLOCK": 1000}})
    unknown = Variant(**{**vars(good), "constants": {"BLOCK": 1024, "EXTRA": 1}})
    results = compile_variants([(bad, "sm_90"), (unknown, "sm_90"), (good, "sm_90")], workers=1)
    assert "power of 2" in (results[0].error or "")
    assert "EXTRA" in (results[1].error or "")
    assert results[2].error is None


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEBUDGET_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("TILEBUDGET_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "tilebudget"


def test_command_line_refuses_an_unknown_device() -> None:
    command = [sys.executable, "-P", "-m", "tilebudget.kernels.inspect", "sm_70"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "device='sm_70'" in result.stderr
