"""``cost_curves.json``: what batches of prefills, decodes and both cost on the device, from its latency table.

The report draws from it how throughput grows with the batch, where the device stands on its roofline, how many prefill
tokens decodes can carry, and what chunking costs. The table is that of a modelled device, or of the profile that a
study here begins with; without a table there is no such file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ...engine import Workload
from ...engine.modelled.executor import ELEMENT_BYTES, WEIGHT_BYTES
from ...kernels.latency.silicon import SystemSpec
from ...kernels.latency.table import LatencyTable

CURVES_FILE = "cost_curves.json"

#: Prefill batches and whole prompts are priced up to this many tokens in one iteration.
MAX_PREFILL_TOKENS = 32768
NUM_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: Decodes that prefill tokens are added to.
CARRIERS = (1, 8, 32, 128)
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPTS = (512, 1024, 2048, 4096, 8192, 16384)

Json = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The lengths that the curves are drawn for: ``prompt_tokens`` of a prefill, ``context_tokens`` of a decode, and
    the most sequences and tokens of a sequence."""

    prompt_tokens: int
    context_tokens: int
    max_num_seqs: int
    max_model_len: int

    @classmethod
    def of(cls, workload: Workload, *, max_num_seqs: int, max_model_len: int) -> BatchSizes:
        """The median prompt of ``workload`` (a power of two near it), and the mean context of its decodes."""
        prompts = np.array([request.prompt_tokens for request in workload.requests], dtype=np.float64)
        outputs = np.array([request.output_tokens for request in workload.requests], dtype=np.float64)
        # A request of n output tokens decodes n - 1 times, at contexts from its prompt on.
        decodes = np.maximum(outputs - 1, 0)
        weights = decodes if decodes.any() else np.ones_like(decodes)
        context = int(np.average(prompts + outputs / 2, weights=weights))
        prompt = 2 ** round(float(np.log2(np.median(prompts))))
        return cls(
            prompt_tokens=max(16, min(prompt, max_model_len)),
            context_tokens=max(16, min(context, max_model_len)),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )


def cost_curves(
    table: LatencyTable, sizes: BatchSizes, *, token_budget: int | None, spec: SystemSpec | None = None
) -> Json:
    """The object of ``cost_curves.json``; ms, tokens and TFLOP/s of one GPU. ``spec`` is its data sheet, if known."""
    return {
        "device": table.device,
        "model": table.model.name,
        "dtype": table.dtype,
        "tensor_parallel": table.tensor_parallel,
        "prompt_tokens": sizes.prompt_tokens,
        "context_tokens": sizes.context_tokens,
        "prefill": _prefill_batches(table, sizes),
        "decode": _decode_batches(table, sizes),
        "roofline": _roofline(table, spec),
        "free_prefill": [_carried(table, sizes, count) for count in CARRIERS if count <= sizes.max_num_seqs],
        "chunking": _chunking(table, sizes, token_budget),
    }


def hybrid_ms(table: LatencyTable, num_decodes: int, context_tokens: int, chunks: Sequence[int]) -> np.ndarray:
    """Iterations of ``num_decodes`` decodes and one chunk of each of ``chunks`` tokens, without a prefix, ms.

    A chunk of 0 is none. The rules are those of ``LatencyTable.iteration``, for many chunks at once.
    """
    tokens = np.asarray(chunks, dtype=np.float64)
    has_chunk = tokens > 0
    attention_ms = np.where(has_chunk, table.prefill_ms(np.maximum(tokens, 1), np.zeros_like(tokens)), 0.0)
    decode_ms = float(table.decode_ms(num_decodes, num_decodes * context_tokens)) if num_decodes else 0.0
    logits_ms = float(table.logits_ms(num_decodes)[0]) if num_decodes else 0.0
    overhead_ms = table.overhead_ms + table.request_overhead_ms * (num_decodes + has_chunk)
    result: np.ndarray = table.tokens_ms(tokens + num_decodes) + attention_ms + decode_ms + logits_ms + overhead_ms
    return result


def _prefill_batches(table: LatencyTable, sizes: BatchSizes) -> list[Json]:
    prompt, rows = sizes.prompt_tokens, []
    for count in takewhile(lambda count: count * prompt <= max(MAX_PREFILL_TOKENS, prompt), NUM_DECODES):
        one_ms = float(table.prefill_ms(prompt, 0))
        latency_ms = (
            float(table.tokens_ms(count * prompt)[0])
            + float(table.logits_ms(count)[0])
            + count * one_ms
            - (count - 1) * table.shared_launch_ms()
            + table.overhead_ms
            + count * table.request_overhead_ms
        )
        rows.append(_batch(count, count * prompt, latency_ms))
    return rows


def _decode_batches(table: LatencyTable, sizes: BatchSizes) -> list[Json]:
    counts = [count for count in NUM_DECODES if count <= max(sizes.max_num_seqs, CARRIERS[0])]
    return [_batch(count, count, float(hybrid_ms(table, count, sizes.context_tokens, [0])[0])) for count in counts]


def _batch(batch_size: int, num_tokens: int, latency_ms: float) -> Json:
    return {
        "batch_size": batch_size,
        "num_tokens": num_tokens,
        "latency_ms": latency_ms,
        "tokens_per_s": 1e3 * num_tokens / latency_ms,
    }


def _roofline(table: LatencyTable, spec: SystemSpec | None) -> Json:
    """The token-wise operations by tokens of the batch: FLOPs of the four linear layers, bytes of their weights,
    inputs and outputs."""
    weight_bytes = WEIGHT_BYTES.get(table.dtype, ELEMENT_BYTES)
    gemms = list(table.model.gemms(table.tensor_parallel).values())
    weights = sum(n * k for n, k in gemms)
    edges = sum(n + k for n, k in gemms)
    activation_bytes = 4 if table.dtype == "fp32" else ELEMENT_BYTES
    largest = max(float(curve.tokens[-1]) for curve in table.layer_ops)
    counts = [2**power for power in range(14) if 2**power <= largest]
    points = []
    for count, latency_ms in zip(counts, table.tokens_ms(counts).tolist(), strict=True):
        flops = 2.0 * weights * count * table.model.num_layers
        num_bytes = (weights * weight_bytes + edges * activation_bytes * count) * table.model.num_layers
        points.append(
            {
                "num_tokens": count,
                "flops_per_byte": flops / num_bytes,
                "tflops_per_s": flops / latency_ms / 1e9,
                "gbytes_per_s": num_bytes / latency_ms / 1e6,
            }
        )
    peak = None if spec is None else spec.flops.get(table.dtype)
    return {
        "points": points,
        "peak_tflops_per_s": None if peak is None else peak / 1e12,
        "peak_gbytes_per_s": None if spec is None else spec.bandwidth_bytes_per_s / 1e9,
    }


def _carried(table: LatencyTable, sizes: BatchSizes, num_decodes: int) -> Json:
    """Iterations of ``num_decodes`` decodes with more and more prefill tokens: whole batches on multiples of 16, which
    is where kernels are fastest, and powers of two below."""
    totals = [2**power for power in range(4)]
    totals += list(range(16, 512, 16)) + list(range(512, 2049, 64)) + list(range(2304, 8193, 256))
    chunks = [0, *(total - num_decodes for total in totals if total > num_decodes)]
    latencies_ms = hybrid_ms(table, num_decodes, sizes.context_tokens, chunks).tolist()
    return {
        "num_decodes": num_decodes,
        "points": [
            {"prefill_tokens": chunk, "latency_ms": latency_ms}
            for chunk, latency_ms in zip(chunks, latencies_ms, strict=True)
        ],
    }


def _chunking(table: LatencyTable, sizes: BatchSizes, token_budget: int | None) -> list[Json]:
    """Prompts alone on the device, whole and in chunks: the sum of the iterations that each takes."""
    fitting = [prompt for prompt in PROMPTS if prompt <= min(sizes.max_model_len, MAX_PREFILL_TOKENS)]
    chunks = sorted({*CHUNKS, *([token_budget] if token_budget else [])})
    return [
        {
            "prompt_tokens": prompt,
            "whole_ms": _prompt_ms(table, prompt, prompt),
            "points": [
                {"chunk_tokens": chunk, "latency_ms": _prompt_ms(table, prompt, chunk)}
                for chunk in chunks
                if chunk < prompt
            ],
        }
        for prompt in fitting[-3:]
    ]


def _prompt_ms(table: LatencyTable, prompt: int, chunk: int) -> float:
    prefixes = np.arange(0, prompt, chunk)
    lengths = np.minimum(chunk, prompt - prefixes)
    each_ms = table.tokens_ms(lengths) + table.prefill_ms(lengths, prefixes)
    overhead_ms = table.overhead_ms + table.request_overhead_ms
    return float(each_ms.sum()) + len(lengths) * overhead_ms + float(table.logits_ms(1)[0])
