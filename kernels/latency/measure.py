"""Measures the four linear layers of a model on the device here, by token count.

Every measurement is warmed up, rotates through enough buffers that weights come from memory as they do between the
layers of a model, and is reported as median and spread over its repeats.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
import torch.nn.functional as F

from ..model_shape import ModelShape
from ..ops.gemm import gemm
from .sweep import Sweep

#: Rotated buffers together hold at least this much, more than the last-level cache of the GPUs in `gpus`.
ROTATION_BYTES = 256 * 2**20
NUM_WARMUP = 3
#: About 5 ms of a GPU's clock, in which the host gets ahead of it: else an event pair around a short kernel times how
#: long its launch takes the host.
HEAD_START_CYCLES = 10_000_000
#: Counts that are measured whatever the time limit says.
MIN_COUNTS = 4

GemmKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: What can run a linear layer here: torch's own (cuBLAS, MKL) or our Triton kernel.
GEMM_KERNELS: dict[str, GemmKernel] = {"torch": F.linear, "triton": gemm}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and standard deviation of one call, ms."""

    median_ms: float
    std_ms: float


def time_calls(call: Callable[[int], object], device: torch.device, *, repeats: int = 9) -> Timing:
    """Time ``call(i)``; see `sample_calls`."""
    samples_ms = sample_calls(call, device, repeats=repeats)
    return Timing(median_ms=statistics.median(samples_ms), std_ms=statistics.pstdev(samples_ms))


def sample_calls(call: Callable[[int], object], device: torch.device, *, repeats: int = 9) -> list[float]:
    """Milliseconds of each of ``repeats`` calls ``call(i)``, i counting up so that the call can rotate its buffers.

    On CUDA each call is timed by events and the queue is drained once at the end; on the CPU by the clock.
    """
    for index in range(NUM_WARMUP):
        call(index)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            for _ in range(repeats)
        ]
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        for index, (began, ended) in enumerate(marks):
            began.record()
            call(index)
            ended.record()
        torch.cuda.synchronize(device)
        return [began.elapsed_time(ended) for began, ended in marks]
    samples_ms = []
    for index in range(repeats):
        began_s = perf_counter()
        call(index)
        samples_ms.append((perf_counter() - began_s) * 1e3)
    return samples_ms


def token_grid(max_tokens: int) -> list[int]:
    """Token counts worth a measurement: powers of two, then each multiple of 64 (128 from 1024, 256 from 4096 on) and
    the count after it."""
    grid = {1, 2, 4, 8, 16, 17, 32, 33}
    tokens = 64
    while tokens <= max_tokens:
        grid |= {tokens, tokens + 1}
        tokens += 64 if tokens < 1024 else 128 if tokens < 4096 else 256
    return sorted(count for count in grid if count <= max_tokens)


def measure_gemms(
    shape: ModelShape,
    *,
    tokens: Iterable[int],
    device: torch.device,
    dtype: torch.dtype,
    tensor_parallel: int = 1,
    kernel: str = "torch",
    repeats: int = 9,
    time_limit_s: float | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> list[Sweep]:
    """One sweep for each of the four linear layers of ``shape`` on one GPU of ``tensor_parallel``.

    The order of token counts is shuffled, so that drift of the machine does not look like a staircase, and so that the
    counts measured before ``time_limit_s`` (for all layers together) is spent lie all over the range; the layers then
    share the counts that every one of them has. ``on_done`` is told (points done, points in all). Raises ValueError
    for an unknown ``kernel`` or a degree that does not fit.
    """
    if kernel not in GEMM_KERNELS:
        raise ValueError(f"kernel={kernel!r}: must be one of {', '.join(GEMM_KERNELS)}")
    counts = sorted(set(tokens))
    if not counts or counts[0] < 1:
        raise ValueError(f"tokens={counts[:1]}: must be one or more counts of at least 1")
    layers = shape.gemms(tensor_parallel)
    measured = {}
    began_s = perf_counter()
    for place, (op, (n, k)) in enumerate(layers.items()):
        spent_s = perf_counter() - began_s
        left_s = None if time_limit_s is None else (time_limit_s - spent_s) / (len(layers) - place)
        measured[op] = _measure_layer(
            GEMM_KERNELS[kernel],
            n,
            k,
            counts,
            device,
            dtype,
            repeats,
            left_s,
            None if on_done is None else _shifted(on_done, place * len(counts), len(layers) * len(counts)),
        )
    common = [count for count in counts if all(count in timings for timings in measured.values())]
    return [
        Sweep(
            op=op,
            tensor_parallel=tensor_parallel,
            tokens=np.array(common),
            latency_ms=np.array([timings[count].median_ms for count in common]),
            std_ms=np.array([timings[count].std_ms for count in common]),
            source="measured",
            note=f"{kernel}, n={layers[op][0]}, k={layers[op][1]}, median of {repeats}",
        )
        for op, timings in measured.items()
    ]


@torch.inference_mode()
def _measure_layer(
    run: GemmKernel,
    n: int,
    k: int,
    counts: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    time_limit_s: float | None,
    on_done: Callable[[int], None] | None,
) -> dict[int, Timing]:
    copies = max(2, min(repeats, -(-ROTATION_BYTES // (n * k * dtype.itemsize))))
    weights = [torch.randn(n, k, device=device).to(dtype) for _ in range(copies)]
    inputs = torch.randn(counts[-1], k, device=device).to(dtype)
    order = np.random.default_rng(0).permutation(len(counts))
    timings: dict[int, Timing] = {}
    began_s = perf_counter()
    for done, place in enumerate(order.tolist(), start=1):
        # The order is the same for every layer, so what one has measured the others have first.
        if time_limit_s is not None and len(timings) >= MIN_COUNTS and perf_counter() - began_s > time_limit_s:
            break
        x = inputs[: counts[place]]
        timings[counts[place]] = time_calls(
            lambda index, x=x: run(x, weights[index % copies]),  # type: ignore[misc]
            device,
            repeats=repeats,
        )
        if on_done is not None:
            on_done(done)
    return timings


def _shifted(on_done: Callable[[int, int], None], before: int, total: int) -> Callable[[int], None]:
    return lambda done: on_done(before + done, total)
