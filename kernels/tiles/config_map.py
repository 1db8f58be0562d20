"""Which tile configuration of our GEMM wins where, and why: by arithmetic for any device, measured on the one here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from ..gpus import DeviceLimits, device_limits
from ..inspect.report import KernelReport, usable_configs
from ..inspect.variants import DTYPE_NAMES
from ..latency.measure import Timing, time_calls
from ..model_shape import ModelShape
from ..ops.gemm import gemm
from ..ops.gemm_tiles import (
    TileConfig,
    default_gemm_configs,
    last_wave_fill,
    num_tiles,
    quantization_efficiency,
    select_config,
    tile_clocks,
    waves,
)
from ..ops.launch import limits_of

ARITHMETIC = "predicted by tile arithmetic, nothing was measured"
MEASURED = "measured here"

#: Token counts at which every configuration is measured.
MEASURED_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

#: Weights together are at least this large, so that they come from memory and not from a cache.
ROTATION_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class ConfigUse:
    """The configuration that one linear layer uses for ``first_tokens`` to ``last_tokens`` tokens, and what it costs.

    ``tiles``, ``waves``, ``last_wave_fill`` and ``quantization_efficiency`` are at ``last_tokens``, with the
    ``ctas_per_sm`` that the compiled kernel leaves room for; ``occupancy`` is its share of an SM's warps. ``why`` is in
    words. Measured: the winner at one token count, its time, that of the configuration that the launcher selects, and
    ``selected_ms`` over ``latency_ms``.
    """

    op: str
    tensor_parallel: int
    n: int
    k: int
    first_tokens: int
    last_tokens: int
    config: str
    tiles: int
    waves: int
    last_wave_fill: float
    quantization_efficiency: float
    ctas_per_sm: int
    occupancy: float
    why: str
    source: str = ARITHMETIC
    latency_ms: float | None = None
    std_ms: float | None = None
    selected: str | None = None
    selected_ms: float | None = None

    def to_json(self) -> dict[str, object]:
        """The row as a flat dictionary."""
        return {name: round(v, 6) if isinstance(v, float) else v for name, v in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class ConfigMap:
    """The rows of every linear layer, for a device whose latencies nobody measured with our kernels."""

    subject: dict[str, str | int]
    configs: tuple[ConfigUse, ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """As the tile analysis has it; ``edges`` and ``budgets`` are empty, for they come from latencies alone."""
        return {
            **self.subject,
            "edges": [],
            "budgets": [],
            "configs": [row.to_json() for row in self.configs],
            "left_out": list(self.left_out),
            "notes": [f"configs: {ARITHMETIC}"],
        }

    def to_text(self) -> str:
        """The table for people."""
        subject = ", ".join(f"{key} {value}" for key, value in self.subject.items())
        lines = [f"Tile configurations: {subject}", "", *config_lines(self.configs)]
        return "\n".join([*lines, *(f"Left out: {reason}" for reason in self.left_out)])


def config_lines(rows: Sequence[ConfigUse]) -> list[str]:
    """The rows as a table, each with its reason."""
    if not rows:
        return []
    lines = [f"Configurations of our GEMM ({rows[0].source}):"]
    lines.append(
        f"{'operation':<16}{'tokens':>13}  {'configuration':<20}{'tiles':>7}{'waves':>7}{'last':>6}{'quant.':>8}"
        f"{'occup.':>8}{'ms':>9}  why"
    )
    for row in rows:
        tokens = str(row.last_tokens) if row.source == MEASURED else f"{row.first_tokens}-{row.last_tokens}"
        time_ms = "" if row.latency_ms is None else f"{row.latency_ms:.4f}"
        lines.append(
            f"{row.op:<16}{tokens:>13}  {row.config:<20}{row.tiles:>7}{row.waves:>7}{row.last_wave_fill:>6.0%}"
            f"{row.quantization_efficiency:>8.0%}{row.occupancy:>8.0%}{time_ms:>9}  {row.why}"
        )
    return lines


def predicted_map(
    shape: ModelShape, *, device: str, dtype: str, tensor_parallel: int, max_tokens: int, subject: dict[str, str | int]
) -> ConfigMap:
    """What the launcher selects on ``device`` for every token count up to ``max_tokens``, by arithmetic.

    Registers, shared memory and so occupancy come from compiling the kernels for the device, which need not be here.
    ``dtype`` is bf16, fp16, fp32 or fp8. Raises ValueError for an unknown device, dtype or degree.
    """
    limits = device_limits(device)
    reports, left_out = _compiled(limits, dtype)
    rows = [
        row
        for op, (n, k) in shape.gemms(tensor_parallel).items()
        for row in _selected_ranges(op, n, k, tensor_parallel, limits, _element_bytes(dtype), max_tokens, reports)
    ]
    return ConfigMap(subject=subject, configs=tuple(rows), left_out=left_out)


def _selected_ranges(
    op: str,
    n: int,
    k: int,
    tensor_parallel: int,
    limits: DeviceLimits,
    element_bytes: int,
    max_tokens: int,
    reports: dict[str, KernelReport],
) -> Iterable[ConfigUse]:
    """One row for every run of token counts that select the same configuration."""
    begins: list[tuple[int, TileConfig]] = []
    # The number of tiles, and with it the choice, changes only after a multiple of the smallest BLOCK_M, 16.
    for m in range(1, max_tokens + 1, 16):
        cfg = select_config(m, n, k, limits, element_bytes)
        if not begins or begins[-1][1] != cfg:
            begins.append((m, cfg))
    ends = [begin - 1 for begin, _ in begins[1:]] + [max_tokens]
    for (first, cfg), last in zip(begins, ends, strict=True):
        yield _use(
            op,
            n,
            k,
            tensor_parallel,
            first,
            last,
            cfg,
            limits,
            reports[cfg.name],
            _why(last, n, k, cfg, limits, element_bytes),
        )


def _use(
    op: str,
    n: int,
    k: int,
    tensor_parallel: int,
    first: int,
    last: int,
    cfg: TileConfig,
    limits: DeviceLimits,
    report: KernelReport,
    why: str,
) -> ConfigUse:
    ctas = max(report.resident_ctas, 1)
    return ConfigUse(
        op=op,
        tensor_parallel=tensor_parallel,
        n=n,
        k=k,
        first_tokens=first,
        last_tokens=last,
        config=cfg.name,
        tiles=num_tiles(last, n, cfg),
        waves=waves(last, n, cfg, limits.num_sms, ctas),
        last_wave_fill=last_wave_fill(last, n, cfg, limits.num_sms, ctas),
        quantization_efficiency=quantization_efficiency(last, n, cfg, limits.num_sms, ctas),
        ctas_per_sm=report.resident_ctas,
        occupancy=report.occupancy,
        why=why,
    )


def _why(m: int, n: int, k: int, cfg: TileConfig, limits: DeviceLimits, element_bytes: int) -> str:
    """The busiest SM's load under this configuration, beside the runner-up's: what `select_config` compares."""

    def busiest(other: TileConfig) -> tuple[int, float]:
        tiles = -(-num_tiles(m, n, other) // limits.num_sms)
        return tiles, tiles * tile_clocks(other, k, element_bytes, limits)

    others = [other for other in default_gemm_configs(limits, element_bytes) if other != cfg]
    here_tiles, here_clocks = busiest(cfg)
    text = f"busiest SM: {here_tiles} tile{'s' if here_tiles > 1 else ''}, {here_clocks / 1e3:.1f} kclk"
    if not others:
        return text
    runner_up = min(others, key=lambda other: busiest(other)[1])
    tiles, clocks = busiest(runner_up)
    return f"{text}; next best {runner_up.name}: {tiles}, {clocks / 1e3:.1f} kclk"


@torch.inference_mode()
def measured_map(
    shape: ModelShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    tensor_parallel: int = 1,
    tokens: Sequence[int] = MEASURED_TOKENS,
    repeats: int = 9,
    on_done: Callable[[int, int], None] | None = None,
) -> list[ConfigUse]:
    """The fastest configuration of our GEMM for every linear layer at each token count, all of them timed here.

    Occupancy comes from compiling for this device. ``on_done`` is told (points done, points in all).
    """
    limits = limits_of(device)
    reports, _ = _compiled(limits, _dtype_name(dtype))
    by_name = {cfg.name: cfg for cfg in default_gemm_configs(limits, dtype.itemsize)}
    usable = [cfg for name, cfg in by_name.items() if reports[name].usable]
    layers = shape.gemms(tensor_parallel)
    rows: list[ConfigUse] = []
    for op, (n, k) in layers.items():
        copies = max(2, min(repeats, -(-ROTATION_BYTES // (n * k * dtype.itemsize))))
        weights = [torch.randn(n, k, device=device, dtype=dtype) for _ in range(copies)]
        for m in tokens:
            x = torch.randn(m, k, device=device, dtype=dtype)
            timings = {cfg: _time(x, weights, cfg, device, repeats) for cfg in usable}
            rows.append(_winner(op, n, k, tensor_parallel, m, timings, limits, reports, dtype.itemsize))
            if on_done is not None:
                on_done(len(rows), len(layers) * len(tokens))
    return rows


def _time(
    x: torch.Tensor, weights: Sequence[torch.Tensor], cfg: TileConfig, device: torch.device, repeats: int
) -> Timing:
    return time_calls(lambda index: gemm(x, weights[index % len(weights)], config=cfg), device, repeats=repeats)


def _winner(
    op: str,
    n: int,
    k: int,
    tensor_parallel: int,
    m: int,
    timings: dict[TileConfig, Timing],
    limits: DeviceLimits,
    reports: dict[str, KernelReport],
    element_bytes: int,
) -> ConfigUse:
    ranked = sorted(timings, key=lambda cfg: timings[cfg].median_ms)
    best, selected = ranked[0], select_config(m, n, k, limits, element_bytes)
    best_ms = timings[best].median_ms
    why = _why(m, n, k, best, limits, element_bytes)
    if len(ranked) > 1:
        second = ranked[1]
        share = timings[second].median_ms / best_ms - 1
        tie = timings[second].median_ms - best_ms <= timings[best].std_ms + timings[second].std_ms
        why = f"{second.name} {'ties' if tie else f'is {share:.0%} slower'}; by arithmetic {why}"
    row = _use(op, n, k, tensor_parallel, m, m, best, limits, reports[best.name], why)
    chosen = timings.get(selected)
    return ConfigUse(
        **{
            **asdict(row),
            "source": MEASURED,
            "latency_ms": best_ms,
            "std_ms": timings[best].std_ms,
            "selected": selected.name,
            "selected_ms": None if chosen is None else chosen.median_ms,
        }
    )


def _compiled(limits: DeviceLimits, dtype: str) -> tuple[dict[str, KernelReport], tuple[str, ...]]:
    """Reports by configuration, and why others are left out. fp16 compiles as bf16 but for one letter."""
    usable, left_out = usable_configs(limits.name, dtype="bf16" if dtype == "fp16" else dtype)
    reasons = tuple(f"{report.config}: {'; '.join(report.problems)}" for report in left_out)
    return {report.config: report for report in [*usable, *left_out]}, reasons


def _dtype_name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else DTYPE_NAMES[dtype]


def _element_bytes(dtype: str) -> int:
    sizes = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
    if dtype not in sizes:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(sizes)}")
    return sizes[dtype]
