"""Latency tables of GPUs that are not here, put together from the silicon tables.

What the tables do not hold is derived, and marked so:

- attention of a chunk after a prefix (the tables have no prefix): the chunk's own causal attention, and chunk * prefix
  query-key pairs more at the price that a pair has in long prompts (`pair_ms`); never less than one decode over
  the same context. On an A100 (FlashAttention, 32 query heads) a chunk of 1024 was measured to cost 0.103 us for each
  token of prefix, evenly from 704 to 3072 (Vidur's sweep); this rule says 0.103 from the vllm table;
- heads of a size that was not measured: as many elements in heads of the nearest one that was;
- norms, rotary embedding, activation, residual and embedding: their bytes at 80% of the memory bandwidth, and 3 us.
- the time between kernels and iterations is 0 unless the caller knows better.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from ..model_shape import ModelShape
from .silicon import TRANSFER_SPREAD, Silicon, SiliconError, SystemSpec, system_spec
from .step_curve import StepCurve
from .surface import Surface
from .sweep import SOURCES, FloatArray, IntArray, Sweep
from .table import LatencyTable

BANDWIDTH_SHARE = 0.8
LAUNCH_MS = 0.003
ELEMENT_BYTES = 2
PREFIXES = np.array([0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072])
LONG_TOKENS = 2048
FILLING_TOKENS = 512
"""Rows that fill a GPU of about 130 SMs with 32 heads and tiles of 128 rows."""

DERIVED_SPREAD = 0.15
"""Relative spread of derived attention."""

_TOKEN_GRID = np.array([1, 16, 64, 256, 1024, 4096, 16384, 32768])


def silicon_table(
    silicon: Silicon,
    model: ModelShape,
    dtype: str,
    tensor_parallel: int = 1,
    *,
    plus_one: str = "step",
    overhead_ms: float = 0.0,
) -> LatencyTable:
    """The latency table of a model on one of the measured systems.

    ``dtype`` is that of the linear layers (bf16 or fp8; KV cache, attention and logits are bf16). ``plus_one``:
    "step" takes a slow m+1 point of a GEMM table for the beginning of the next step, "padded" for an odd m that an
    engine would pad, and leaves it out. SiliconError when the system lacks a table; ValueError for a degree that
    the model does not allow.
    """
    if plus_one not in ("step", "padded"):
        raise ValueError(f"plus_one is {plus_one!r}: it must be step or padded")
    spec = system_spec(silicon.system)
    gemms = []
    for op, (n, k) in model.gemms(tensor_parallel).items():
        sweep = silicon.gemm(n, k, dtype, op, tensor_parallel)
        gemms.append(StepCurve.of(sweep if plus_one == "step" else without_plus_one(sweep), kind="lines"))
    n, k = model.logits_gemm(tensor_parallel)
    logits = silicon.gemm(n, k, "bf16", "logits", tensor_parallel)
    decode = decode_surface(silicon, model, tensor_parallel)
    return LatencyTable(
        device=silicon.system,
        model=model,
        dtype=dtype,
        tensor_parallel=tensor_parallel,
        layer_ops=(
            *gemms,
            *elementwise_ops(spec, model, tensor_parallel),
            *(all_reduce_ops(silicon, model, tensor_parallel) if tensor_parallel > 1 else ()),
        ),
        once_ops=(_by_bytes(spec, "embedding", 2 * model.hidden), _by_bytes(spec, "last_norm", 2 * model.hidden)),
        logits=StepCurve.of(logits if plus_one == "step" else without_plus_one(logits), kind="lines"),
        prefill=prefill_surface(silicon, model, tensor_parallel, decode),
        decode=decode,
        overhead_ms=overhead_ms,
        origin={
            "tables": "aiconfigurator-core",
            "system": silicon.system,
            "framework": silicon.framework,
            "version": silicon.version,
            "plus_one": plus_one,
        },
        notes=(
            "prefix attention is derived: chunk x prefix pairs at the price of a pair in long prompts",
            "element-wise operations are derived from their bytes",
        ),
    )


def without_plus_one(sweep: Sweep) -> Sweep:
    """A sweep without the m+1 points of a table of multiples (those whose gap to the next count is 8 or more)."""
    gaps = np.diff(sweep.tokens)
    keep = np.ones(sweep.tokens.size, dtype=bool)
    keep[1:-1] = ~((gaps[:-1] == 1) & (gaps[1:] >= 8))
    keep[-1] = sweep.tokens.size < 2 or gaps[-1] != 1
    return Sweep(
        op=sweep.op,
        tensor_parallel=sweep.tensor_parallel,
        tokens=sweep.tokens[keep],
        latency_ms=sweep.latency_ms[keep],
        std_ms=None if sweep.std_ms is None else sweep.std_ms[keep],
        source=sweep.source,
        note=sweep.note,
    )


def elementwise_ops(spec: SystemSpec, model: ModelShape, tensor_parallel: int) -> tuple[StepCurve, ...]:
    """The derived operations of a layer: two norms with their residual, rotary embedding, activation.

    Elements read and written for each token: 4 hidden for a norm fused with its residual; queries and keys, twice, and
    keys and values into the cache; gate and up, and their product.
    """
    heads = model.num_heads // tensor_parallel
    kv_heads = model.kv_heads_per_gpu(tensor_parallel)
    intermediate = model.intermediate // tensor_parallel
    return (
        _by_bytes(spec, "input_layernorm", 4 * model.hidden),
        _by_bytes(spec, "post_attention_layernorm", 4 * model.hidden),
        _by_bytes(spec, "attn_rope", (2 * heads + 4 * kv_heads) * model.head_dim),
        _by_bytes(spec, "mlp_act", (3 if model.gated else 2) * intermediate),
    )


def all_reduce_ops(silicon: Silicon, model: ModelShape, tensor_parallel: int) -> tuple[StepCurve, ...]:
    """The two all-reduces of a layer: hidden values of each token, at 2 bytes, by the framework's own table.

    Times inside CUDA graphs where the table tells them apart. A degree that it lacks takes the next lower one's, as
    "transferred". SiliconError when there is no table.
    """
    frame = silicon.frame("comm", "custom_allreduce_perf")
    backends = frame["backend"] if "backend" in frame.columns else frame["kernel_source"]
    in_graph = backends.astype(str).str.contains("graph", case=False)
    if in_graph.any():
        frame = frame[in_graph]
    degrees = sorted(int(degree) for degree in frame["num_gpus"].unique())
    usable = [degree for degree in degrees if degree <= tensor_parallel]
    if not usable:
        raise SiliconError(f"{silicon.system} has all-reduce tables for {degrees} GPUs, none for {tensor_parallel}")
    part = frame[frame["num_gpus"] == usable[-1]].groupby("message_size")["latency"].min()
    token_bytes = model.hidden * ELEMENT_BYTES
    tokens = np.unique(np.maximum(part.index.to_numpy(dtype=np.int64) // token_bytes, 1))
    sizes = part.index.to_numpy(dtype=np.float64)
    latency_ms = np.interp(tokens * token_bytes, sizes, part.to_numpy(dtype=np.float64))
    exact = usable[-1] == tensor_parallel
    return tuple(
        StepCurve.of(
            Sweep(
                op=op,
                tensor_parallel=tensor_parallel,
                tokens=tokens,
                latency_ms=latency_ms,
                source="table" if exact else "transferred",
                note="" if exact else f"measured on {usable[-1]} GPUs, not {tensor_parallel}",
            ),
            kind="lines",
        )
        for op in ("attn_all_reduce", "mlp_all_reduce")
    )


def decode_surface(silicon: Silicon, model: ModelShape, tensor_parallel: int) -> Surface:
    """Decode attention of one layer by (requests, KV tokens of each).

    Where the table lacks the number of KV heads, requests with more KV heads are taken for proportionally more
    requests with fewer ("transferred": as many heads of keys and values are read). Combinations beyond the table's
    memory go on along the KV length at the slope before ("derived").
    """
    frame, heads, kv_heads, head_note = _attention(silicon, "generation_attention_perf", model, tensor_parallel)
    heads_used, kv_used = _nearest_heads(frame, heads, kv_heads)
    part = frame[(frame["num_heads"] == heads_used) & (frame["num_key_value_heads"] == kv_used)]
    part = part.assign(kv=part["isl"] + part["step"])
    grid = part.pivot_table(index="batch_size", columns="kv", values="latency", aggfunc="min").sort_index()
    grid = grid.loc[:, grid.notna().sum() > 0]
    requests = grid.index.to_numpy(dtype=np.float64) * kv_used / kv_heads
    columns = grid.columns.to_numpy(dtype=np.int64)
    latency_ms = grid.to_numpy(dtype=np.float64, copy=True)
    exact = not head_note and (heads_used, kv_used) == (heads, kv_heads)
    sources = np.full(latency_ms.shape, SOURCES.index("table" if exact else "transferred"), dtype=np.int8)
    for row in range(latency_ms.shape[0]):
        _continue_row(latency_ms[row], columns, sources[row])
    whole = (requests >= 1) & (requests % 1 == 0)
    note = "" if exact else f"{heads} heads, {kv_heads} KV heads taken from {heads_used} heads, {kv_used} KV heads"
    note += head_note
    return Surface(
        rows=requests[whole].astype(np.int64),
        columns=columns,
        latency_ms=latency_ms[whole],
        std_ms=latency_ms[whole] * np.where(sources[whole] == SOURCES.index("table"), 0.02, DERIVED_SPREAD),
        sources=sources[whole],
        note=note,
    )


def prefill_surface(silicon: Silicon, model: ModelShape, tensor_parallel: int, decode: Surface) -> Surface:
    """Prefill attention of one layer by (chunk, prefix), from whole prompts one at a time; see the module's head."""
    frame, heads, kv_heads, head_note = _attention(silicon, "context_attention_perf", model, tensor_parallel)
    frame = frame[(frame["batch_size"] == 1) & (frame["step"] == 0)]
    heads_used, kv_used = _nearest_heads(frame, heads, kv_heads)
    part = frame[(frame["num_heads"] == heads_used) & (frame["num_key_value_heads"] == kv_used)]
    causal = part.groupby("isl")["latency"].min()
    chunks = causal.index.to_numpy(dtype=np.int64)
    causal_ms = causal.to_numpy(dtype=np.float64)
    exact = not head_note and (heads_used, kv_used) == (heads, kv_heads)
    if heads_used != heads:  # work goes with the query heads; the launch does not
        causal_ms = causal_ms[0] + (causal_ms - causal_ms[0]) * heads / heads_used
    prefix_ms = chunks[:, None] * PREFIXES[None, :] * pair_ms(chunks, causal_ms)[:, None]
    latency_ms = causal_ms[:, None] + prefix_ms
    latency_ms = np.maximum(latency_ms, decode.at(np.ones((1, 1)), chunks[:, None] + PREFIXES[None, :]))
    latency_ms[:, 0] = causal_ms
    sources = np.full(latency_ms.shape, SOURCES.index("derived"), dtype=np.int8)
    sources[:, 0] = SOURCES.index("table" if exact else "transferred")
    std_ms = latency_ms * DERIVED_SPREAD
    std_ms[:, 0] = causal_ms * (0.02 if exact else TRANSFER_SPREAD)
    note = "prefixes are derived"
    if not exact:
        note += f"; {heads} heads, {kv_heads} KV heads taken from {heads_used} heads, {kv_used} KV heads{head_note}"
    return Surface(rows=chunks, columns=PREFIXES, latency_ms=latency_ms, std_ms=std_ms, sources=sources, note=note)


def pair_ms(chunks: IntArray, causal_ms: FloatArray) -> FloatArray:
    """The price of a query-key pair for each chunk length.

    That of long prompts: what the pairs between LONG_TOKENS and twice as many tokens cost (the widest such step that
    the table has, where it is shorter). Chunks under FILLING_TOKENS leave part of the GPU idle: each of their pairs
    costs as much more as they are shorter.
    """
    longest = float(chunks[-1])
    start = min(float(LONG_TOKENS), longest / 2)
    low, high = np.interp([start, 2 * start], chunks, causal_ms)
    price = max(float(high - low), 0.0) / (1.5 * start**2)
    return np.asarray(price * np.maximum(1.0, FILLING_TOKENS / chunks), dtype=np.float64)


def _by_bytes(spec: SystemSpec, op: str, elements_per_token: int) -> StepCurve:
    moved = _TOKEN_GRID * elements_per_token * ELEMENT_BYTES
    latency_ms = LAUNCH_MS + moved / (BANDWIDTH_SHARE * spec.bandwidth_bytes_per_s) * 1e3
    sweep = Sweep(
        op=op,
        tokens=_TOKEN_GRID,
        latency_ms=latency_ms,
        std_ms=latency_ms * 0.3,
        source="derived",
        note=f"{elements_per_token} elements a token at {BANDWIDTH_SHARE:.0%} of the bandwidth, and 3 us",
    )
    return StepCurve.of(sweep, kind="lines")


def _attention(
    silicon: Silicon, name: str, model: ModelShape, tensor_parallel: int
) -> tuple[pd.DataFrame, int, int, str]:
    """Rows of an attention table in bf16, without a window, of one head size; the query and KV heads of one GPU in
    heads of that size; and a note where it is not the model's.

    Heads of a size that was not measured are taken for fewer (or more) of the nearest size that was, with as many
    elements of queries, keys and values in all: the same bytes and multiplications, another number of softmax rows.
    """
    frame = silicon.frame("attention", name)
    wanted: Mapping[str, object] = {
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
        "beam_width": 1,
    }
    for column, value in wanted.items():
        if column in frame.columns:
            frame = frame[frame[column] == value]
    frame = frame[frame["latency"] > 0]
    heads, kv_heads = model.num_heads // tensor_parallel, model.kv_heads_per_gpu(tensor_parallel)
    if "head_dim" not in frame.columns and not frame.empty:
        return frame, heads, kv_heads, ""
    sizes = [] if frame.empty else [int(size) for size in frame["head_dim"].unique()]
    if not sizes:
        raise SiliconError(f"{silicon.system} {silicon.framework} has no bf16 {name} for head_dim={model.head_dim}")
    size = min(sizes, key=lambda measured: (abs(float(np.log(measured / model.head_dim))), measured))
    frame = frame[frame["head_dim"] == size]
    if size == model.head_dim:
        return frame, heads, kv_heads, ""
    share = model.head_dim / size
    note = f"; heads of {model.head_dim} taken for {share:g} times as many of {size}"
    return frame, max(1, round(heads * share)), max(1, round(kv_heads * share)), note


def _nearest_heads(frame: pd.DataFrame, heads: int, kv_heads: int) -> tuple[int, int]:
    """The measured (query heads, KV heads) to use: these, or those with the nearest group size and then heads."""
    pairs = frame[["num_heads", "num_key_value_heads"]].drop_duplicates().to_numpy(dtype=np.int64)
    found = [(int(h), int(kv) or int(h)) for h, kv in pairs]
    usable = [pair for pair in found if pair[1] <= kv_heads and kv_heads % pair[1] == 0]
    if not usable:
        raise SiliconError(f"no measured attention has {kv_heads} KV heads or a divisor of them")

    def distance(pair: tuple[int, int]) -> tuple[float, float, float]:
        return (
            abs(float(np.log(pair[0] / heads))),
            abs(float(np.log(pair[1] / kv_heads))),
            abs(float(np.log((pair[0] / pair[1]) / (heads / kv_heads)))),
        )

    return min(usable, key=distance)


def _continue_row(
    latency_ms: FloatArray, columns: IntArray, sources: np.ndarray[tuple[int], np.dtype[np.int8]]
) -> None:
    """Fill the end of a row, in place: the slope between its last two known points goes on."""
    known = np.flatnonzero(np.isfinite(latency_ms))
    last, before = known[-1], known[-2] if known.size > 1 else known[-1]
    width = float(columns[last] - columns[before])
    slope = max(0.0, float(latency_ms[last] - latency_ms[before]) / width) if width else 0.0
    gaps = np.flatnonzero(~np.isfinite(latency_ms))
    inner, outer = gaps[gaps < last], gaps[gaps > last]
    latency_ms[inner] = np.interp(columns[inner], columns[known], latency_ms[known])
    latency_ms[outer] = latency_ms[last] + slope * (columns[outer] - columns[last])
    sources[gaps] = SOURCES.index("derived")
