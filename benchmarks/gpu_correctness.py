"""Every Triton kernel against its reference on the GPU here: a section of `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from tilebudget.kernels.ops.activation import silu_mul, silu_mul_ref
from tilebudget.kernels.ops.attention import attention, attention_ref
from tilebudget.kernels.ops.gemm import FP8, FP8_ARCHS, gemm, gemm_ref
from tilebudget.kernels.ops.gemm_tiles import default_gemm_configs
from tilebudget.kernels.ops.launch import limits_of
from tilebudget.kernels.ops.norm import rms_norm, rms_norm_ref
from tilebudget.kernels.ops.rotary import rotary_write, rotary_write_ref
from tilebudget.kernels.ops.tolerances import deviation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Rows = list[dict[str, object]]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal random numbers on the device."""
    return torch.randn(shape, device=DEVICE).to(dtype)


def check(rows: Rows, kernel: str, case: str, run: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Run a kernel and its reference and keep how far they are apart; a kernel that fails is a row too."""
    try:
        found = deviation(*run())
        row: dict[str, object] = {"within": found.within, **asdict(found)}
    except Exception as error:  # whatever the compiler or the driver raises is this case's result
        row = {"within": False, "error": f"{type(error).__name__}: {error}"[:500]}
    rows.append({"kernel": kernel, "case": case, **row})


def check_kernels(left_s: Callable[[], float]) -> dict[str, object]:
    """The result of the section: every kernel against its reference, and the GEMM configurations while time is left."""
    rows: Rows = []
    for name, dtype in DTYPES.items():
        small_kernels(rows, name, dtype)
        for batch in ("chunks", "decodes", "hybrid"):
            for heads, kv_heads, head_dim, splits in ((32, 8, 128, None), (8, 8, 64, 1), (16, 2, 128, 4)):
                case = f"{name} {batch} {heads}/{kv_heads} heads of {head_dim}, splits {splits or 'chosen'}"
                check(rows, "attention", case, attention_case(batch, heads, kv_heads, head_dim, splits, dtype))
        for m in (1, 15, 16, 17, 127, 128, 129, 257, 1000, 2048):
            for n, k in ((4096, 4096), (1000, 520)):
                check(rows, "gemm", f"{name} {m}x{n}x{k}", gemm_case(m, n, k, dtype))
    if limits_of(DEVICE).arch in FP8_ARCHS:
        for m in (1, 16, 129, 512):
            check(rows, "gemm", f"fp8 {m}x4096x4096", fp8_case(m, 4096, 4096))
    skipped = 0
    for name, dtype in DTYPES.items():
        for cfg in default_gemm_configs(limits_of(DEVICE), dtype.itemsize):
            if left_s() < 5:
                skipped += 1
                continue
            check(rows, "gemm", f"{name} 300x1536x1024 {cfg.name}", gemm_case(300, 1536, 1024, dtype, config=cfg))
    bad = [row for row in rows if not row["within"]]
    return {
        "summary": {
            "passed": not bad,
            "num_cases": len(rows),
            "num_out_of_tolerance": len(bad),
            "num_skipped_configs": skipped,
            "first_bad": bad[:3],
        },
        "cases": rows,
    }


def gemm_case(
    m: int, n: int, k: int, dtype: torch.dtype, **options: object
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """GEMM with a bias into a result that starts as NaN."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        x, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
        out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
        return gemm(x, w, bias, out=out, **options), gemm_ref(x, w, bias)  # type: ignore[arg-type]

    return run


def fp8_case(m: int, n: int, k: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """fp8 GEMM with scales."""

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        x, w = random(m, k, dtype=torch.float32).to(FP8), random(n, k, dtype=torch.float32).to(FP8)
        x_scale, w_scale = torch.tensor([0.5], device=DEVICE), torch.tensor([0.25], device=DEVICE)
        got = gemm(x, w, x_scale=x_scale, w_scale=w_scale)
        return got, gemm_ref(x, w, x_scale=x_scale, w_scale=w_scale)

    return run


def small_kernels(rows: Rows, name: str, dtype: torch.dtype, *, num_rows: int = 257) -> None:
    """Norm, rotation with the write into pages, and activation."""

    def norm() -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = (
            random(num_rows, 4096, dtype=dtype),
            random(num_rows, 4096, dtype=dtype),
            random(4096, dtype=dtype),
        )
        return rms_norm(x, weight, eps=1e-5, residual=residual)[0], rms_norm_ref(
            x, weight, eps=1e-5, residual=residual
        )[0]

    def silu() -> tuple[torch.Tensor, torch.Tensor]:
        x = random(num_rows, 2 * 14336, dtype=dtype)
        return silu_mul(x), silu_mul_ref(x)

    def rotary() -> tuple[torch.Tensor, torch.Tensor]:
        heads = random(num_rows, 48, 128, dtype=dtype)
        q, k, v = torch.split(heads, [32, 8, 8], dim=1)
        angles = torch.rand(4096, 64, device=DEVICE) * 6.28
        positions = torch.randint(0, 4096, (num_rows,), device=DEVICE)
        slots = torch.randperm(40 * 16, device=DEVICE)[:num_rows]
        slots[::7] = -1
        results = []
        for run in (rotary_write, rotary_write_ref):
            keys, values = (torch.zeros(40, 16, 8, 128, dtype=dtype, device=DEVICE) for _ in range(2))
            turned = run(q, k, v, angles.cos(), angles.sin(), positions, slots, keys, values)
            results.append(torch.cat([turned.flatten(), keys.flatten(), values.flatten()]))
        return results[0], results[1]

    check(rows, "rms_norm", f"{name} {num_rows}x4096", norm)
    check(rows, "silu_mul", f"{name} {num_rows}x14336", silu)
    check(rows, "rotary_write", f"{name} {num_rows} rows, 32/8 heads of 128", rotary)


def attention_case(
    batch: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    splits: int | None,
    dtype: torch.dtype,
    *,
    chunks: Sequence[tuple[int, int]] = ((129, 0), (64, 1), (17, 333), (1, 16)),
    decodes: Sequence[int] = (1, 15, 16, 17, 0, 2049),
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A batch over shuffled pages whose unused slots hold NaN: ``chunks`` (queries, prefix), ``decodes`` at a context,
    where 0 is a row of padding, or both."""
    decodes, chunks = (decodes if batch != "chunks" else ()), (chunks if batch != "decodes" else ())
    query_lens = [1] * len(decodes) + [rows for rows, _ in chunks]
    contexts = [*decodes, *(rows + prefix for rows, prefix in chunks)]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks = [-(-context // 16) for context in contexts]
        order = torch.randperm(sum(num_blocks)).tolist()
        table = torch.zeros(len(contexts), max(num_blocks), dtype=torch.int32)
        keys, values = (random(len(order), 16, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        for row, (count, context) in enumerate(zip(num_blocks, contexts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            if context % 16:
                keys[blocks[-1], context % 16 :] = values[blocks[-1], context % 16 :] = float("nan")
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        q = random(int(starts[-1]), heads, head_dim, dtype=dtype)
        tables = [
            table.to(DEVICE),
            torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        ]
        got = attention(
            q, keys, values, *tables,
            max_query_len=max((rows for rows, _ in chunks), default=0), max_context_len=max(contexts),
            num_decodes=len(decodes), num_splits=splits, out=torch.full_like(q, float("nan")),
        )  # fmt: skip
        return got, attention_ref(q, keys, values, *tables)

    return run
