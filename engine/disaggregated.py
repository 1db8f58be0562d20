"""Prefill and decode on instances apart, against replicas that do both: modelled, for comparison only.

Splitwise (ISCA'24) and DistServe (OSDI'24) serve prompts on some instances and decode on others, with the KV cache sent
between them. Here both arrangements run on the one engine, over the same table, with the same requests dealt the same
way: each to the instance that was dealt the fewest prompt tokens so far. What favours the split ones: the cache of a
prompt is freed when its prefill ends, not when it is sent; receiving it costs the decode instance no time.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from .config import EngineConfig
from .engine import Engine
from .metrics import SLO, Distribution
from .modelled.pipeline import Link
from .policies import POLICIES
from .record import FloatArray, IntArray, RunRecord
from .request import Request, Workload

#: Most prompt tokens that a prefill instance batches: Splitwise's (section 4.2), above which prefill gains no more.
PREFILL_BATCH_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Split:
    """How many instances prefill, and how many decode."""

    num_prefill: int
    num_decode: int

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def name(self) -> str:
        """Such as ``1:3``: prefill to decode."""
        return f"{self.num_prefill}:{self.num_decode}"


@dataclass(frozen=True, kw_only=True)
class KvTransfer:
    """What sends the cache of a prompt: every GPU its ``bytes_per_token`` over a ``link`` of its own. A prefill
    instance sends one prompt after the other, whole, when its prefill has ended."""

    bytes_per_token: int
    link: Link

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1:
            raise ValueError(f"bytes_per_token={self.bytes_per_token}: must be at least 1")

    def arrivals_s(self, ready_s: FloatArray, prompt_tokens: IntArray) -> FloatArray:
        """When the caches of prompts that are ready at ``ready_s``, on one instance, have arrived."""
        arrived_s = np.empty_like(ready_s)
        free_s = 0.0
        sending_s = self.link.latency_s + prompt_tokens * self.bytes_per_token / self.link.bytes_per_s
        for place in np.argsort(ready_s, kind="stable").tolist():
            free_s = max(free_s, float(ready_s[place])) + float(sending_s[place])
            arrived_s[place] = free_s
        return arrived_s


@dataclass(frozen=True, kw_only=True)
class Service:
    """What a group of instances did with a workload, in seconds.

    ``delay`` is the scheduling delay, with what a request waits between its first and its second token where these come
    from two instances. ``busy_fractions`` are the shares of the time from the first arrival to the last token that an
    instance had work, on average: of the replicas (``both``), or of each side. ``transfer`` is what the cache of a
    prompt takes to arrive.
    """

    tbt: Distribution
    tbt_gaps_s: FloatArray
    ttft: Distribution
    e2e: Distribution
    delay: Distribution
    num_finished: int
    requests_per_s: float
    total_tokens_per_s: float
    busy_fractions: dict[str, float]
    transfer: Distribution | None = None

    def meets(self, slo: SLO) -> bool:
        """Whether every limit of ``slo`` is kept; one without data is."""
        tbt_s = float(np.quantile(self.tbt_gaps_s, slo.quantile)) if len(self.tbt_gaps_s) else None
        limits = (
            (tbt_s, slo.tbt_s),
            (self.delay.p50, slo.max_scheduling_delay_s),
            *(
                (each.at(limit.quantile), limit.limit_s)
                for each, limit in ((self.ttft, slo.ttft), (self.e2e, slo.e2e))
                if limit
            ),
        )
        return all(value is None or limit_s is None or value <= limit_s for value, limit_s in limits)


def serve_colocated(engine: Engine, workload: Workload, *, num_replicas: int, config: EngineConfig) -> Service:
    """Replicas of one engine, each of which prefills and decodes the requests that it was dealt.

    Raises ValueError when ``num_replicas`` is below 1 or a request is longer than ``config`` allows.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas}: must be at least 1")
    stage = _run(engine, workload.requests, num_replicas, config)
    return _service(workload, stage.token_request, stage.token_s, stage.delay_s, {"both": stage})


def serve_disaggregated(
    engine: Engine,
    workload: Workload,
    *,
    split: Split,
    prefill: EngineConfig,
    decode: EngineConfig,
    transfer: KvTransfer,
) -> Service:
    """Prompts on ``split.num_prefill`` instances under ``prefill``, all further tokens on others under ``decode``.

    The first token comes when the prefill ends; the request then arrives at its decode instance with its cache, as
    ``transfer`` sends it. A decode that loses its blocks there is prefilled again there. Raises ValueError when a
    request is longer than the configs allow, or ``decode`` is no policy that takes requests with their cache.
    """
    if not POLICIES[decode.policy].takes_cached:
        names = " or ".join(name for name, policy in POLICIES.items() if policy.takes_cached)
        raise ValueError(f"policy={decode.policy!r}: must be {names} on decode instances")
    requests = workload.requests
    prompts = [replace(request, output_tokens=1, prompt_token_ids=None) for request in requests]
    first = _run(engine, prompts, split.num_prefill, prefill)
    first_s = np.full(len(requests), np.nan)
    first_s[first.token_request] = first.token_s

    prompt_tokens = np.array([request.prompt_tokens for request in requests], dtype=np.int64)
    arrived_s = np.empty_like(first_s)
    for members in first.members:
        arrived_s[members] = transfer.arrivals_s(first_s[members], prompt_tokens[members])
    goes_on = [index for index, request in enumerate(requests) if request.output_tokens > 1]
    order = sorted(goes_on, key=lambda index: float(arrived_s[index]))
    if not order:
        return _service(workload, first.token_request, first.token_s, first.delay_s, {"prefill": first})
    handed_over = [_handed_over(requests[index], float(arrived_s[index])) for index in order]
    later = _run(engine, handed_over, split.num_decode, decode)

    token_request = np.concatenate([first.token_request, np.array(order)[later.token_request]])
    token_s = np.concatenate([first.token_s, later.token_s])
    second_s = np.full(len(order), np.nan)
    second_s[later.token_request[::-1]] = later.token_s[::-1]
    delay_s = first.delay_s.copy()
    delay_s[order] += second_s - first_s[order]
    service = _service(workload, token_request, token_s, delay_s, {"prefill": first, "decode": later})
    return replace(service, transfer=Distribution.of((arrived_s - first_s)[order]))


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """One group of equal instances: tokens by request of the group, delays, each instance's members and busy time."""

    token_request: IntArray
    token_s: FloatArray
    delay_s: FloatArray
    members: list[IntArray]
    busy_s: list[float]


def deal(requests: SequenceOf[Request], num_instances: int) -> list[list[int]]:
    """The requests of each instance: in order of arrival, each to the one dealt the fewest prompt tokens so far."""
    dealt = [0] * num_instances
    members: list[list[int]] = [[] for _ in range(num_instances)]
    for index, request in enumerate(requests):
        instance = dealt.index(min(dealt))
        dealt[instance] += request.prompt_tokens
        members[instance].append(index)
    return members


def _run(engine: Engine, requests: SequenceOf[Request], num_instances: int, config: EngineConfig) -> _Stage:
    """The requests, in order of arrival, dealt to instances that run them one apart from the other."""
    tokens: list[tuple[IntArray, FloatArray]] = []
    delay_s = np.full(len(requests), np.nan)
    members: list[IntArray] = []
    busy_s = []
    for own in deal(requests, num_instances):
        if not own:
            continue
        indices = np.array(own, dtype=np.int64)
        record = engine.run(Workload(name="dealt", requests=tuple(requests[index] for index in own)), config)
        _check_all_finished(record, config)
        tokens.append((indices[record.token_request], record.token_s))
        delay_s[indices] = record.requests.first_scheduled_s - record.requests.arrival_s
        members.append(indices)
        busy_s.append(record.busy_s)
    return _Stage(
        token_request=np.concatenate([request for request, _ in tokens]),
        token_s=np.concatenate([token_s for _, token_s in tokens]),
        delay_s=delay_s,
        members=members,
        busy_s=busy_s + [0.0] * (num_instances - len(busy_s)),
    )


def _check_all_finished(record: RunRecord, config: EngineConfig) -> None:
    left = len(record.requests) - record.count_status("finished")
    if left:
        raise ValueError(
            f"{left} of {len(record.requests)} requests are longer than max_model_len={config.max_model_len} or than "
            "the KV cache: clip or drop them first"
        )


def _handed_over(request: Request, arrival_s: float) -> Request:
    """The rest of a request: its first token is the one to compute next, and all before it is in the cache."""
    return Request(
        arrival_s=arrival_s,
        prompt_tokens=request.prompt_tokens + 1,
        output_tokens=request.output_tokens - 1,
        cached_tokens=request.prompt_tokens,
    )


def _service(
    workload: Workload, token_request: IntArray, token_s: FloatArray, delay_s: FloatArray, stages: dict[str, _Stage]
) -> Service:
    order = np.lexsort((token_s, token_request))
    request, token_s = token_request[order], token_s[order]
    starts = np.flatnonzero(np.diff(request, prepend=-1))
    ends = np.append(starts[1:], len(request)) - 1
    same = request[1:] == request[:-1]
    gaps_s = np.diff(token_s)[same]
    arrival_s = np.array([each.arrival_s for each in workload.requests])[request[starts]]
    span_s = float(token_s.max() - arrival_s.min())
    num_tokens = len(token_s) + workload.num_prompt_tokens
    return Service(
        tbt=Distribution.of(gaps_s),
        tbt_gaps_s=np.sort(gaps_s),
        ttft=Distribution.of(token_s[starts] - arrival_s),
        e2e=Distribution.of(token_s[ends] - arrival_s),
        delay=Distribution.of(delay_s),
        num_finished=len(starts),
        requests_per_s=len(starts) / span_s,
        total_tokens_per_s=num_tokens / span_s,
        busy_fractions={name: float(np.mean(stage.busy_s)) / span_s for name, stage in stages.items()},
    )
