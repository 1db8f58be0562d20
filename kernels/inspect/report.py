"""What a kernel costs on a GPU that is not here: registers, spills, shared memory, MMA, occupancy, tiles and waves.

``python -P -m tilebudget.kernels.inspect --markdown`` prints the table that is kept in kernels/COMPILED.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..gpus import KIB, REPRESENTATIVE, DeviceLimits, device_limits, occupancy, resident_ctas
from ..ops.gemm_tiles import TileConfig, last_wave_fill, num_tiles, quantization_efficiency, waves
from .compiler import CompiledKernel, compile_variants
from .matrix import KERNELS, variants
from .variants import Variant

#: The table's GEMM: the tokens of a common budget through the widest layer of an 8B model (gate and up, 4096 to 28672).
DEFAULT_M, DEFAULT_N = 512, 28672

_DTYPE_LABELS = {"fp8e4nv": "fp8"}


@dataclass(frozen=True, kw_only=True)
class TileUse:
    """How a GEMM of m x n fills a device, at the occupancy its registers and shared memory allow."""

    m: int
    n: int
    tiles: int
    waves: int
    last_wave_fill: float
    quantization_efficiency: float


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel in one configuration on one device.

    ``registers`` are per thread, ``spill_bytes`` the stack and local memory of a thread, ``resident_ctas`` the CTAs
    that one SM holds and ``occupancy`` the share of its warps. ``default`` says whether the launcher may choose the
    configuration. ``problems`` says why it is left out; empty if it is usable. ``tile`` and ``use`` are the GEMM's.
    """

    kernel: str
    config: str
    dtype: str
    device: str
    arch: str
    default: bool
    registers: int
    spill_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    mma: str
    resident_ctas: int
    occupancy: float
    problems: tuple[str, ...]
    tile: TileConfig | None = None
    use: TileUse | None = None

    @property
    def usable(self) -> bool:
        """Whether it compiles, does not spill and fits the device."""
        return not self.problems


def compile_matrix(
    devices: Sequence[str] = tuple(REPRESENTATIVE),
    *,
    kernels: Sequence[str] = KERNELS,
    dtypes: Sequence[str] | None = None,
    m: int = DEFAULT_M,
    n: int = DEFAULT_N,
    workers: int | None = None,
    use_cache: bool = True,
    on_done: Callable[[int, int], None] | None = None,
) -> list[KernelReport]:
    """A report for every kernel, configuration and device, compiled here without any GPU.

    devices are names (``h200_sxm``) or architectures (``sm_90``), kernels a subset of `KERNELS`, dtypes of bf16,
    fp32 and fp8 (all by default). m and n are the GEMM's output that tiles and waves are counted for. workers,
    use_cache and on_done as in `compile_variants`. Raises ValueError for an unknown name.
    """
    for name in kernels:
        if name not in KERNELS:
            raise ValueError(f"kernels={name!r}: must be one of {', '.join(KERNELS)}")
    jobs: list[tuple[Variant, DeviceLimits]] = []
    for device in devices:
        limits = device_limits(device)
        jobs += [
            (variant, limits)
            for variant in variants(limits)
            if _kernel_family(variant) in kernels and (dtypes is None or _dtype_label(variant) in dtypes)
        ]
    results = compile_variants(
        [(variant, limits.arch) for variant, limits in jobs], workers=workers, use_cache=use_cache, on_done=on_done
    )
    return [_report(variant, limits, facts, m, n) for (variant, limits), facts in zip(jobs, results, strict=True)]


def inspect_kernel(
    kernel: str, device: str, *, dtype: str = "bf16", m: int = DEFAULT_M, n: int = DEFAULT_N, use_cache: bool = True
) -> list[KernelReport]:
    """A report for every configuration of one kernel on one device; see `compile_matrix`.

    Raises ValueError if the kernel is not declared for the dtype on the device.
    """
    reports = compile_matrix([device], kernels=[kernel], dtypes=[dtype], m=m, n=n, use_cache=use_cache)
    if not reports:
        raise ValueError(f"dtype={dtype!r}: {kernel} is not declared for it on {device}")
    return reports


def usable_configs(
    device: str, *, kernel: str = "gemm", dtype: str = "bf16", use_cache: bool = True
) -> tuple[list[KernelReport], list[KernelReport]]:
    """The configurations of a kernel that a device can use, and those left out, whose ``problems`` say why."""
    reports = inspect_kernel(kernel, device, dtype=dtype, use_cache=use_cache)
    return [r for r in reports if r.usable], [r for r in reports if not r.usable]


def _kernel_family(variant: Variant) -> str:
    return "attention" if variant.kernel == "attention_reduce" else variant.kernel


def _dtype_label(variant: Variant) -> str:
    return _DTYPE_LABELS.get(variant.dtype, variant.dtype)


def _report(variant: Variant, limits: DeviceLimits, facts: CompiledKernel, m: int, n: int) -> KernelReport:
    shared = facts.static_shared_bytes + facts.dynamic_shared_bytes
    ctas = 0
    if facts.error is None:
        ctas = resident_ctas(
            limits,
            registers_per_thread=facts.registers,
            shared_bytes=shared,
            num_warps=variant.num_warps,
            tensor_columns=facts.tensor_columns,
        )
    tile, use = variant.tile, None
    if tile is not None and ctas:
        use = TileUse(
            m=m,
            n=n,
            tiles=num_tiles(m, n, tile),
            waves=waves(m, n, tile, limits.num_sms, ctas),
            last_wave_fill=last_wave_fill(m, n, tile, limits.num_sms, ctas),
            quantization_efficiency=quantization_efficiency(m, n, tile, limits.num_sms, ctas),
        )
    return KernelReport(
        kernel=variant.kernel,
        config=variant.config,
        dtype=_dtype_label(variant),
        device=limits.name,
        arch=limits.arch,
        default=variant.default,
        registers=facts.registers,
        spill_bytes=facts.spill_bytes,
        static_shared_bytes=facts.static_shared_bytes,
        dynamic_shared_bytes=facts.dynamic_shared_bytes,
        mma=facts.mma,
        resident_ctas=ctas,
        occupancy=occupancy(limits, ctas, variant.num_warps),
        problems=tuple(_problems(facts, limits, shared, ctas)),
        tile=tile,
        use=use,
    )


def _problems(facts: CompiledKernel, limits: DeviceLimits, shared: int, ctas: int) -> Iterable[str]:
    if facts.error is not None:
        yield f"does not compile: {facts.error}"
        return
    if facts.spill_bytes:
        yield f"spills {facts.spill_bytes} bytes a thread"
    if shared > limits.max_shared_per_cta_bytes:
        has = f"{limits.name} has {limits.max_shared_per_cta_bytes // KIB}"
        yield f"needs {shared / KIB:.0f} KiB of shared memory, {has}"
    elif not ctas:
        yield f"does not fit an SM of {limits.name} ({facts.registers} registers a thread)"


def markdown(reports: Sequence[KernelReport]) -> str:
    """The reports as one Markdown table for each device, defaults in bold, with what is left out and why."""
    lines: list[str] = []
    for device in dict.fromkeys(report.device for report in reports):
        rows = [report for report in reports if report.device == device]
        limits = device_limits(device)
        use = next((row.use for row in rows if row.use), None)
        usable, default = sum(row.usable for row in rows), sum(row.default for row in rows)
        shape = f" GEMM columns at M={use.m}, N={use.n}." if use else ""
        lines += [
            f"## {device} ({limits.arch}, {limits.num_sms} SMs)",
            "",
            f"{usable} of {len(rows)} usable, {default} default.{shape}",
            "",
            "| kernel | dtype | configuration | MMA | registers | spill B | shared KiB | CTAs/SM | occupancy "
            "| tiles | waves | last wave | quantization | left out |",
            "|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
            *(_row(row) for row in rows),
            "",
        ]
    return "\n".join(lines)


def _row(row: KernelReport) -> str:
    shared = (row.static_shared_bytes + row.dynamic_shared_bytes) / KIB
    cells = [
        row.kernel,
        row.dtype,
        f"**{row.config}**" if row.default else row.config,
        row.mma or "none",
        str(row.registers),
        str(row.spill_bytes),
        f"{shared:.1f}",
        str(row.resident_ctas),
        f"{row.occupancy:.0%}",
    ]
    if row.use is None:
        cells += [""] * 4
    else:
        cells += [str(row.use.tiles), str(row.use.waves)]
        cells += [f"{row.use.last_wave_fill:.0%}", f"{row.use.quantization_efficiency:.0%}"]
    return f"| {' | '.join(cells)} | {'; '.join(row.problems)} |"


_PREAMBLE = """# The compile matrix

Every Triton kernel of this folder in every declared configuration, compiled without a GPU. **Bold** configurations are
those the launchers choose from. Written by `python -P -m tilebudget.kernels.inspect --write`, which compiles only
what its cache does not hold. Spills, registers and shared memory are the compiler's; occupancy, tiles and waves
follow from them and the limits in `gpus.py` by the formulas of `tiles.py`. Nothing here was run.

"""


def document(reports: Sequence[KernelReport], triton_version: str) -> str:
    """COMPILED.md: what the table is, the compiler it holds for, and the table."""
    return f"{_PREAMBLE}Triton {triton_version}.\n\n{markdown(reports)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tilebudget.kernels.inspect", description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="*", default=list(REPRESENTATIVE), help="device names or architectures")
    parser.add_argument("--m", type=int, default=DEFAULT_M, help="rows of the GEMM that waves are counted for")
    parser.add_argument("--n", type=int, default=DEFAULT_N, help="columns of that GEMM")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    parser.add_argument("--markdown", action="store_true", help="print the whole table (the default prints a summary)")
    parser.add_argument("--write", action="store_true", help="write the table of all devices to COMPILED.md")
    options = parser.parse_args(arguments)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total:
            end = "\n" if done == total else "\r"
            print(f"compiled {done} of {total}", end=end, file=sys.stderr, flush=True)

    try:
        reports = compile_matrix(
            options.devices, m=options.m, n=options.n, use_cache=not options.no_cache, on_done=progress
        )
    except ValueError as error:
        parser.error(str(error))
    if options.write:
        import triton

        (Path(__file__).parents[1] / "COMPILED.md").write_text(document(reports, triton.__version__), encoding="utf-8")
    if options.markdown:
        print(markdown(reports))
    else:
        for report in reports:
            if report.default or not report.usable:
                state = "; ".join(report.problems) or "usable"
                name = f"{report.arch} {report.kernel} {report.dtype} {report.config}"
                print(f"{name}: {report.mma or 'no MMA'}, {state}")
    return 1 if any(report.default and not report.usable for report in reports) else 0
