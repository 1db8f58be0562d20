"""The SLO: its words, the reference decode iteration that they are multiples of, and when a run has lost it."""

from __future__ import annotations

import re
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import floor
from time import perf_counter

import numpy as np

from .config import EngineConfig
from .executor import AnyExecutor, PipelinedExecutor, num_stages
from .kv_cache import BlockManager
from .metrics import SLO, Limit
from .record import FloatArray
from .request import Batch, Request, Sequence, Workload
from .run import Monitor, Progress

#: The reference decode iteration: this many decodes at this many tokens of context.
REFERENCE_NUM_SEQS = 32
REFERENCE_CONTEXT_TOKENS = 4096

#: Multiples of the reference decode iteration (Sarathi-Serve, OSDI'24, section 5).
SLO_MULTIPLES = {"strict": 5.0, "relaxed": 25.0}

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(us|ms|s)")
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, kw_only=True)
class ReferenceDecode:
    """The reference decode iteration: median of ``duration_s`` over repeats, ``spread_s`` their range (max - min), and
    what ran: ``num_seqs`` decodes at ``context_tokens`` each. ``note`` says where it differs from 32 at 4096, and why.
    """

    duration_s: float
    spread_s: float
    num_seqs: int
    context_tokens: int
    note: str


def reference_decode(
    executor: AnyExecutor, config: EngineConfig, *, num_repeats: int = 9, num_warmup: int = 3
) -> ReferenceDecode:
    """Time one iteration of 32 decodes at 4096 tokens of context on ``executor``, or the nearest that fits.

    The context shrinks to the model's longest, to ``config.max_model_len``, and to what the KV cache holds for 32
    requests (``config.num_kv_blocks``, else what the executor's memory gives); the requests become fewer only when the
    cache has fewer blocks than 32. The KV cache is not filled first: time does not depend on the values, so the
    executor's fresh cache must hold finite ones. Warm-up iterations are not counted.
    In a pipeline it is one micro-batch through all stages, alone.
    Raises ValueError when ``num_repeats`` is below 1; OutOfMemoryError when the device holds no KV block.
    """
    if num_repeats < 1:
        raise ValueError(f"num_repeats={num_repeats}: must be at least 1")
    num_seqs, context_tokens, reasons = _fit_reference(executor, config)
    run_config, kv = _reference_cache(config, num_seqs, context_tokens, num_stages(executor))
    executor.start(run_config, kv)
    batch = Batch([_decode_at(index, context_tokens, executor, kv, config.seed) for index in range(num_seqs)])
    for _ in range(num_warmup):
        _timed(executor, batch)
    durations_s = [_timed(executor, batch) for _ in range(num_repeats)]
    wanted = f"{REFERENCE_NUM_SEQS} decodes at {REFERENCE_CONTEXT_TOKENS} tokens of context"
    ran = f"{num_seqs} decodes at {context_tokens} tokens of context"
    return ReferenceDecode(
        duration_s=float(np.median(durations_s)),
        spread_s=max(durations_s) - min(durations_s),
        num_seqs=num_seqs,
        context_tokens=context_tokens,
        note=wanted if not reasons else f"{ran}, the nearest to {wanted} that fits ({'; '.join(reasons)})",
    )


def resolve_slo(
    text: str,
    reference: ReferenceDecode | None = None,
    *,
    max_scheduling_delay_s: float | None = 2.0,
    ttft: Limit | None = None,
    e2e: Limit | None = None,
) -> SLO:
    """The SLO that ``text`` asks for: ``strict`` (5 × the reference decode iteration), ``relaxed`` (25 ×), or a P99 TBT
    such as ``20ms``, ``0.1s``, ``100us``; with the limits on TTFT and E2E that are given.

    Raises ValueError when the text is neither, or names a multiple and no ``reference`` is given.
    """
    name = text.strip().lower()
    tbt_s = parse_tbt(text)
    if tbt_s is None:
        if reference is None:
            raise ValueError(
                f"tbt_slo={text!r}: is a multiple of the reference decode iteration, which was not measured"
            )
        tbt_s = SLO_MULTIPLES[name] * reference.duration_s
    return SLO(
        name=name.replace(" ", ""), tbt_s=tbt_s, max_scheduling_delay_s=max_scheduling_delay_s, ttft=ttft, e2e=e2e
    )


def parse_tbt(text: str) -> float | None:
    """Seconds of a limit on P99 TBT; None for ``strict`` and ``relaxed``, which are multiples of what the device does.

    Raises ValueError when the text is neither.
    """
    name = text.strip().lower()
    duration_s = _duration_s(name)
    if duration_s is None and name not in SLO_MULTIPLES:
        words = ", ".join(SLO_MULTIPLES)
        raise ValueError(f"tbt_slo={text!r}: must be {words}, or a positive duration such as 20ms, 0.1s or 100us")
    return duration_s


def parse_limit(name: str, text: str) -> Limit:
    """A limit such as ``2s``, at P99, or ``p90:2s`` at another percentile (p50, p90, p99, p99.9).

    Raises ValueError that names the field ``name``.
    """
    percentile, separator, duration = text.strip().lower().rpartition(":")
    duration_s = _duration_s(duration)
    quantile = _QUANTILES.get(percentile if separator else "p99")
    if duration_s is None or quantile is None:
        raise ValueError(
            f"{name}={text!r}: must be a positive duration such as 500ms or 2s, at P99, or with the percentile before "
            f"it ({', '.join(_QUANTILES)}), as in p90:2s"
        )
    return Limit(limit_s=duration_s, quantile=quantile)


def describe_limits(slo: SLO) -> str:
    """The limits on TTFT and E2E in words, ``P99 TTFT 2 s and P90 E2E 30 s``; empty where there are none."""
    parts = [
        f"P{limit.quantile * 100:g} {name} {limit.limit_s:g} s"
        for name, limit in (("TTFT", slo.ttft), ("E2E", slo.e2e))
        if limit is not None
    ]
    return " and ".join(parts)


def _duration_s(text: str) -> float | None:
    """Seconds of a positive duration; None where it is none."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _UNIT_S[match[2]] if match is not None and float(match[1]) > 0.0 else None


def sound_stop(slo: SLO, workload: Workload, config: EngineConfig) -> Monitor:
    """A monitor that stops a run once it can no longer meet ``slo``, whatever the rest of the run does.

    With N samples in the whole run, the linearly interpolated quantile q lies at position (N - 1)q of the sorted ones,
    so it is over the limit for certain once N - floor((N - 1)q) of them are. The samples are the gaps between tokens,
    and the scheduling delays, which are held to the limit on the queue and, for a first token comes later still, to
    those on TTFT and E2E. N is counted over the requests that fit ``max_model_len``; one that the KV cache rejects
    makes N too large, which only delays the stop. So does a modelled device, which asks its monitor now and then
    (``MONITOR_EVERY_BATCHES``).
    """
    served = [request for request in workload.requests if request.total_tokens <= config.max_model_len]
    gaps = _Count("gaps", "TBT", slo.tbt_s, slo.quantile, sum(request.output_tokens - 1 for request in served))
    delays = [
        _Count("scheduling delays", name, limit_s, quantile, len(served))
        for name, limit_s, quantile in (
            ("scheduling delay", None if workload.saturated else slo.max_scheduling_delay_s, 0.5),
            *(
                (name, None if limit is None else limit.limit_s, 0.0 if limit is None else limit.quantile)
                for name, limit in (("TTFT", slo.ttft), ("E2E", slo.e2e))
            ),
        )
        if limit_s is not None
    ]

    def stop_when_lost(progress: Progress) -> str | None:
        gaps.add(progress.gaps_s)
        for count in delays:
            count.add(progress.delays_s)
        lost = next((count for count in (gaps, *delays) if count.is_lost), None)
        return None if lost is None else str(lost)

    return stop_when_lost


class _Count:
    """How many samples of a run are over a limit on one of its quantiles, and whether that has lost it."""

    def __init__(self, noun: str, name: str, limit_s: float, quantile: float, num_samples: int) -> None:
        self._noun, self._name, self._limit_s, self._quantile = noun, name, limit_s, quantile
        self._num_samples, self._num_over = num_samples, 0
        self._enough = num_samples - floor((num_samples - 1) * quantile)

    def add(self, samples_s: SequenceOf[float] | FloatArray) -> None:
        """Count further samples, seconds."""
        if isinstance(samples_s, np.ndarray):
            self._num_over += int(np.count_nonzero(samples_s > self._limit_s))
        else:
            self._num_over += sum([sample_s > self._limit_s for sample_s in samples_s])

    @property
    def is_lost(self) -> bool:
        """Whether the quantile is over the limit, whatever comes."""
        return self._num_samples > 0 and self._num_over >= self._enough

    def __str__(self) -> str:
        return (
            f"P{self._quantile * 100:g} {self._name} is over {self._limit_s * 1e3:.6g} ms: "
            f"{self._num_over:,} of {self._num_samples:,} {self._noun} are"
        )


def _fit_reference(executor: AnyExecutor, config: EngineConfig) -> tuple[int, int, list[str]]:
    """Decodes, tokens of context, and why they are not the wanted ones."""
    reasons = []
    context_tokens = REFERENCE_CONTEXT_TOKENS
    for limit, reason in (
        (executor.max_position, "the model takes at most"),
        (config.max_model_len, "max_model_len is"),
    ):
        if limit < context_tokens:
            context_tokens = limit
            reasons.append(f"{reason} {limit}")
    # A context has its prompt and the token being decoded.
    context_tokens = max(2, context_tokens)
    wanted, _ = _reference_cache(config, REFERENCE_NUM_SEQS, context_tokens)
    num_blocks = config.num_kv_blocks or executor.default_num_kv_blocks(replace(wanted, num_kv_blocks=None))
    blocks_each = -(-context_tokens // config.block_size)
    if num_blocks >= REFERENCE_NUM_SEQS * blocks_each:
        return REFERENCE_NUM_SEQS, context_tokens, reasons
    reasons.append(f"the KV cache has {num_blocks} blocks of {config.block_size}")
    # Blocks of one token cannot hold a prompt and a decode, so a request takes two of those.
    least = -(-2 // config.block_size)
    num_seqs = max(1, min(REFERENCE_NUM_SEQS, num_blocks // least))
    context_tokens = min(context_tokens, num_blocks // num_seqs * config.block_size)
    if context_tokens < 2:
        raise ValueError(f"num_kv_blocks={num_blocks}: cannot hold one decode, which has 2 tokens at least")
    return num_seqs, context_tokens, reasons


def _reference_cache(
    config: EngineConfig, num_seqs: int, context_tokens: int, num_lanes: int = 1
) -> tuple[EngineConfig, BlockManager]:
    """Settings and block manager that hold the reference batch and no more."""
    blocks_each = -(-context_tokens // config.block_size)
    run_config = replace(
        config,
        token_budget=num_seqs,
        policy="sarathi",
        max_num_seqs=num_seqs,
        max_model_len=context_tokens,
        num_kv_blocks=num_seqs * blocks_each,
    )
    kv = BlockManager(
        num_blocks=num_seqs * blocks_each,
        block_size=config.block_size,
        max_num_seqs=num_seqs * num_lanes,
        max_blocks_per_seq=blocks_each,
    )
    return run_config, kv


def _decode_at(index: int, context_tokens: int, executor: AnyExecutor, kv: BlockManager, seed: int) -> Sequence:
    """A sequence about to decode: ``context_tokens`` tokens with its newest one, all but that in the cache."""
    request = Request(arrival_s=0.0, prompt_tokens=context_tokens - 1, output_tokens=1)
    token_ids = None
    if executor.needs_token_ids:
        token_ids = np.random.default_rng([seed, index]).integers(0, executor.vocab_size, context_tokens)
    sequence = Sequence(index, request, token_ids)
    sequence.num_tokens = context_tokens
    sequence.num_computed = context_tokens - 1
    kv.hold(sequence, context_tokens)
    return sequence


def _timed(executor: AnyExecutor, batch: Batch) -> float:
    """Seconds of one iteration; through all stages of a pipeline that holds nothing else."""
    began = perf_counter()
    if isinstance(executor, PipelinedExecutor):
        executor.submit(batch, 0.0)
        stages = executor.collect()
        return float(stages.stage_end_s[-1] - stages.stage_start_s[0])
    result = executor.execute(batch)
    return result.model_s if executor.virtual_time else perf_counter() - began
