"""Putting a workload together: which rows can be served, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from ..record import FloatArray
from ..request import Request, Workload

ARRIVAL_KINDS = ("trace", "poisson", "fixed", "saturated")
OVERLONG_RULES = ("clip", "drop")


@dataclass(frozen=True, kw_only=True)
class RawRequests:
    """Rows as a file or a preset has them, nothing left out. Columns of equal length.

    ``arrival_s`` counts from any origin, in any order; None where the source has no clock. Lengths are 0 or more.
    """

    prompt_tokens: SequenceOf[int]
    output_tokens: SequenceOf[int]
    arrival_s: FloatArray | None = None
    prompt_token_ids: SequenceOf[tuple[int, ...]] | None = None
    notes: tuple[str, ...] = ()


def assemble_workload(
    raw: RawRequests,
    *,
    name: str,
    source: str,
    num_requests: int | None = None,
    max_model_len: int | None = None,
    overlong: str = "clip",
) -> Workload:
    """The first ``num_requests`` rows of ``raw`` that can be served, by arrival, from the first arrival on.

    Rows without prompt or output tokens are dropped (such a request failed where it was recorded). Rows longer than
    ``max_model_len`` are dropped too under ``overlong="drop"``, and shortened under ``"clip"``: the output is kept when
    it is shorter than ``max_model_len``, else cut to one less, and the prompt gets what is left. Both are counted,
    among the rows up to the last one taken. Rows of equal arrival keep their order.
    Raises ValueError when a setting is out of range or no row is left.
    """
    _check(num_requests=num_requests, max_model_len=max_model_len, overlong=overlong)
    num_rows = len(raw.prompt_tokens)
    arrivals = np.zeros(num_rows) if raw.arrival_s is None else raw.arrival_s
    limit = num_rows if num_requests is None else num_requests
    taken: list[tuple[float, int, int, int]] = []
    num_empty = num_long = num_clipped = 0
    for row in np.argsort(arrivals, kind="stable").tolist():
        if len(taken) == limit:
            break
        prompt, output = raw.prompt_tokens[row], raw.output_tokens[row]
        if prompt < 1 or output < 1:
            num_empty += 1
            continue
        if max_model_len is not None and prompt + output > max_model_len:
            if overlong == "drop":
                num_long += 1
                continue
            num_clipped += 1
            prompt, output = clip_lengths(prompt, output, max_model_len)
        taken.append((float(arrivals[row]), prompt, output, row))
    if not taken:
        raise ValueError(
            f"{source}: no request left of {num_rows} rows: {num_empty} have no prompt or no output tokens, "
            f"{num_long} are longer than max_model_len={max_model_len}"
        )
    num_seen = len(taken) + num_empty + num_long
    all_notes = {
        f"the first {len(taken)} requests of {num_rows} rows": num_rows - num_seen,
        f"{num_empty} rows dropped: no prompt or no output tokens": num_empty,
        f"{num_long} rows dropped: longer than max_model_len={max_model_len}": num_long,
        f"{num_clipped} rows clipped to max_model_len={max_model_len}, prompt first": num_clipped,
    }
    return Workload(
        name=name,
        requests=_requests(raw, taken),
        source=source,
        num_dropped=num_empty + num_long,
        num_clipped=num_clipped,
        notes=(*raw.notes, *(note for note, count in all_notes.items() if count)),
        has_arrivals=raw.arrival_s is not None,
    )


def _requests(raw: RawRequests, taken: list[tuple[float, int, int, int]]) -> tuple[Request, ...]:
    """Requests of the rows taken (arrival, prompt, output, row), counted from the first arrival on."""
    origin_s = taken[0][0]
    ids = raw.prompt_token_ids
    return tuple(
        Request(
            arrival_s=arrival_s - origin_s,
            prompt_tokens=prompt,
            output_tokens=output,
            prompt_token_ids=None if ids is None else ids[row][:prompt],
        )
        for arrival_s, prompt, output, row in taken
    )


def clip_lengths(prompt_tokens: int, output_tokens: int, max_model_len: int) -> tuple[int, int]:
    """Prompt and output tokens that together are at most ``max_model_len`` (2 or more), the prompt cut first."""
    output_tokens = min(output_tokens, max_model_len - 1)
    return min(prompt_tokens, max_model_len - output_tokens), output_tokens


def assign_arrivals(workload: Workload, kind: str = "trace", *, qps: float | None = None, seed: int = 0) -> Workload:
    """The same requests in the same order with arrivals of ``kind``; the first arrives at 0.

    ``trace``: as recorded; with ``qps`` the clock is stretched so that the mean rate is that, bursts kept.
    ``poisson``: exponential gaps of mean 1 / ``qps`` drawn by ``seed``. ``fixed``: gaps of 1 / ``qps``.
    ``saturated``: everything at time 0. ``qps`` is requests per second, any positive number.
    Raises ValueError when ``qps`` is missing, not wanted or not positive, or ``trace`` is asked of requests that have
    no recorded arrivals.
    """
    if kind not in ARRIVAL_KINDS:
        raise ValueError(f"arrivals={kind!r}: must be one of {', '.join(ARRIVAL_KINDS)}")
    if qps is not None and not (isfinite(qps) and qps > 0.0):
        raise ValueError(f"qps={qps}: must be a positive number of requests per second")
    num_requests = len(workload.requests)
    if kind == "saturated":
        if qps is not None:
            raise ValueError(f"qps={qps}: saturated arrivals have no rate, every request is there at time 0")
        return _with_arrivals(workload, np.zeros(num_requests), "saturated: every request at time 0")
    if kind == "trace":
        return _trace_arrivals(workload, qps)
    if qps is None:
        raise ValueError(f"qps=None: {kind} arrivals need a rate in requests per second")
    if kind == "fixed":
        return _with_arrivals(workload, np.arange(num_requests) / qps, f"fixed arrivals, {qps:g} requests/s")
    gaps_s = np.random.default_rng(seed).exponential(1.0 / qps, num_requests)
    arrivals_s = np.concatenate(([0.0], np.cumsum(gaps_s)[:-1]))
    return _with_arrivals(workload, arrivals_s, f"Poisson arrivals, {qps:g} requests/s, seed {seed}")


def mean_rate(workload: Workload) -> float:
    """Requests per second of a workload that arrives over time: the gaps between arrivals over their span.

    Raises ValueError when every request arrives at once.
    """
    if workload.saturated:
        raise ValueError(f"workload {workload.name!r}: every request arrives at once, so it has no rate")
    return (len(workload.requests) - 1) / workload.requests[-1].arrival_s


def scale_load(workload: Workload, factor: float) -> Workload:
    """The same requests with the same pattern of arrivals, ``factor`` times as fast.

    Raises ValueError when ``factor`` is not positive, or nothing arrives over time.
    """
    if not (isfinite(factor) and factor > 0.0):
        raise ValueError(f"factor={factor}: must be a positive number")
    if workload.saturated:
        raise ValueError(
            f"factor={factor}: every request of {workload.name} arrives at once, there is no load to scale"
        )
    arrivals_s = np.array([request.arrival_s for request in workload.requests]) / factor
    return _with_arrivals(workload, arrivals_s, f"arrivals {factor:g} times as fast")


def _trace_arrivals(workload: Workload, qps: float | None) -> Workload:
    if not workload.has_arrivals:
        raise ValueError(
            f"arrivals='trace': {workload.name} has no recorded arrivals, choose poisson, fixed or saturated"
        )
    if qps is None:
        return workload
    arrivals_s = np.array([request.arrival_s for request in workload.requests])
    if arrivals_s[-1] == 0.0:
        raise ValueError(f"qps={qps}: every request of {workload.name} arrives at once, its clock cannot be stretched")
    arrivals_s *= (len(arrivals_s) - 1) / qps / arrivals_s[-1]
    return _with_arrivals(workload, arrivals_s, f"recorded arrivals stretched to {qps:g} requests/s on average")


def _with_arrivals(workload: Workload, arrivals_s: FloatArray, note: str) -> Workload:
    requests = tuple(
        replace(request, arrival_s=arrival_s)
        for request, arrival_s in zip(workload.requests, arrivals_s.tolist(), strict=True)
    )
    return replace(workload, requests=requests, notes=(*workload.notes, note), has_arrivals=True)


def _check(*, num_requests: int | None, max_model_len: int | None, overlong: str) -> None:
    if num_requests is not None and num_requests < 1:
        raise ValueError(f"num_requests={num_requests}: must be at least 1")
    if max_model_len is not None and max_model_len < 2:
        raise ValueError(f"max_model_len={max_model_len}: must be at least 2, one prompt and one output token")
    if overlong not in OVERLONG_RULES:
        raise ValueError(f"overlong={overlong!r}: must be one of {', '.join(OVERLONG_RULES)}")
