"""What a run was worth: time between tokens, latencies, throughput, pipeline bubbles, and whether an SLO is met.

Definitions (fixed; see docs of each field): TBT is the gap between consecutive tokens of one request, pooled over all
tokens of all requests. TPOT is (E2E - TTFT) / (tokens - 1) of a request. TTFT, scheduling delay and E2E count from
the request's arrival. Percentiles interpolate linearly (numpy's default). Throughput is over the busy span, idle gaps
between arrivals left out.

What a run did not finish: a rejected request has no latencies and no tokens; one that a stopped run left behind counts
with the gaps, the first token and the first scheduling that it had, and has no E2E and no TPOT.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from ..kernels.ops.gemm_tiles import tile_waste
from .bubbles import BUBBLE_CAUSES, find_bubbles
from .pipeline import PIPELINE_STAGES, replay
from .record import FloatArray, IntArray, RunRecord, narrow
from .server.metrics import ServerCounters

BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]

#: Rows of the GEMM tile whose padding ``Metrics.tile_waste`` counts.
TILE_WASTE_BLOCK_M = 128

#: Levels of ``tbt_quantiles_ms``: 0, 0.01 ... 1.00.
TBT_QUANTILE_LEVELS: FloatArray = np.arange(101) / 100.0


#: The quantiles that a ``Distribution`` has, and its fields for them.
QUANTILE_FIELDS = {0.5: "p50", 0.9: "p90", 0.99: "p99", 0.999: "p999"}

#: What an SLO may limit, in the order of ``Metrics.excesses``.
LIMITED = ("tbt", "scheduling_delay", "ttft", "e2e")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Summary of samples in seconds. ``count`` 0 means no data: every other field is None then, not 0."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, samples_s: FloatArray) -> Distribution:
        """The distribution of ``samples_s``, 1-D, possibly empty. Raises ValueError when one is not finite."""
        return cls.of_sorted(np.sort(samples_s))

    @classmethod
    def of_sorted(cls, samples_s: FloatArray) -> Distribution:
        """The same of samples that rise."""
        if not len(samples_s):
            return cls(count=0)
        if not np.isfinite(samples_s[[0, -1]]).all():  # NaN is sorted last
            raise ValueError("samples_s: every sample must be a finite number of seconds")
        quantiles = sorted_quantiles(samples_s, np.array(list(QUANTILE_FIELDS))).tolist()
        return cls(
            count=len(samples_s),
            mean=float(samples_s.mean()),
            max=float(samples_s[-1]),
            **dict(zip(QUANTILE_FIELDS.values(), quantiles, strict=True)),
        )

    def at(self, quantile: float) -> float | None:
        """The value at one of ``QUANTILE_FIELDS``; None without data."""
        value: float | None = getattr(self, QUANTILE_FIELDS[quantile])
        return value

    def to_row(self, prefix: str) -> dict[str, float | int | None]:
        """Flat columns ``{prefix}_count`` and ``{prefix}_{statistic}_ms``."""
        row: dict[str, float | int | None] = {f"{prefix}_count": self.count}
        for column in fields(self):
            if column.name != "count":
                seconds: float | None = getattr(self, column.name)
                row[f"{prefix}_{column.name}_ms"] = None if seconds is None else seconds * 1e3
        return row


@dataclass(frozen=True, kw_only=True)
class Limit:
    """At most ``limit_s`` seconds at a quantile of the requests, one of those that a ``Distribution`` has."""

    limit_s: float
    quantile: float = 0.99

    def __post_init__(self) -> None:
        if not 0.0 < self.limit_s < float("inf"):
            raise ValueError(f"limit_s={self.limit_s}: must be a positive number of seconds")
        if self.quantile not in QUANTILE_FIELDS:
            names = ", ".join(map(str, QUANTILE_FIELDS))
            raise ValueError(f"quantile={self.quantile}: must be one of {names}")


@dataclass(frozen=True, kw_only=True)
class SLO:
    """A limit on TBT, and on the queue: the ``quantile`` of TBT at most ``tbt_s``, and the median scheduling delay at
    most ``max_scheduling_delay_s`` (None: no such limit). The 2 s are Sarathi-Serve's (OSDI'24, section 5). ``ttft``
    and ``e2e`` are further limits, None where there is none.

    A saturated workload, where all requests are there at time 0, is not held to the delay: it would measure the
    length of the queue, not the system. TTFT and E2E are held to their limits all the same, for somebody set them.
    """

    name: str
    tbt_s: float
    quantile: float = 0.99
    max_scheduling_delay_s: float | None = 2.0
    ttft: Limit | None = None
    e2e: Limit | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.tbt_s < float("inf"):
            raise ValueError(f"tbt_s={self.tbt_s}: must be a positive number of seconds")
        if not 0.0 < self.quantile <= 1.0:
            raise ValueError(f"quantile={self.quantile}: must be above 0 and at most 1")
        if self.max_scheduling_delay_s is not None and not self.max_scheduling_delay_s > 0.0:
            raise ValueError(f"max_scheduling_delay_s={self.max_scheduling_delay_s}: must be above 0, or None")


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The figures of one run. None wherever there is no data.

    tbt, tpot, ttft, e2e, scheduling_delay: distributions, seconds. tbt_gaps_s: every gap, sorted.
    output_tokens_per_s: generated tokens ÷ busy_s. total_tokens_per_s: the same with the prompts whose prefill ended
        (each once: recomputation after a preemption is work, not throughput). requests_per_s: finished ÷ busy_s.
    goodput_requests_per_s: finished requests that met every SLO ÷ busy_s: the SLO's quantile of the request's own gaps
        is within ``tbt_s`` (a request with one token has no gap to miss it with), and its own scheduling delay, TTFT
        and E2E within their limits, where these apply. None without an SLO.
    iteration_cv: standard deviation ÷ mean of iteration time, in a pipeline of the work of all its stages.
    bubble_fractions: what these iterations would do to a pipeline, by number of stages (``replay``).
    num_stages, bubble_fraction, bubble_causes: of the pipeline that ran (``find_bubbles``), the fraction's parts by
        cause; None without one.
    full_budget_share: share of iterations with exactly as many tokens as the budget; None when it is unlimited.
    tile_waste: mean share of padding in the last tile row (128 rows a tile) of the other iterations.
    kv_peak_fraction: most KV blocks in use ÷ blocks there are.
    num_iterations, mean_tokens_per_iteration, num_preemptions, kv_peak_fraction of a run on a server are the server's
        own word where it gives one; every other figure over iterations has no data there.
    overhead_us_per_iteration, overhead_fraction: host time outside the model, and its share of the wall time; None on a
        modelled device, whose clock has no host in it.
    saturated, stopped: from the record.
    """

    tbt: Distribution
    tpot: Distribution
    ttft: Distribution
    e2e: Distribution
    scheduling_delay: Distribution
    tbt_gaps_s: FloatArray
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    requests_per_s: float | None
    goodput_requests_per_s: float | None
    busy_s: float
    num_iterations: int | None
    iteration_cv: float | None
    bubble_fractions: dict[int, float | None]
    num_stages: int
    bubble_fraction: float | None
    bubble_causes: dict[str, float | None]
    mean_tokens_per_iteration: float | None
    full_budget_share: float | None
    tile_waste: float | None
    num_preemptions: int | None
    num_finished: int
    num_rejected_model_len: int
    num_rejected_kv: int
    kv_peak_fraction: float | None
    overhead_us_per_iteration: float | None
    overhead_fraction: float | None
    saturated: bool
    stopped: str | None

    def to_row(self) -> dict[str, float | int | None]:
        """One flat row, latencies in ms: the metric columns of ``trials.parquet``."""
        row: dict[str, float | int | None] = {}
        for name in ("tbt", "tpot", "ttft", "e2e", "scheduling_delay"):
            row |= getattr(self, name).to_row(name)
        for column in fields(self):
            if column.name == "bubble_fractions":
                row |= {f"bubble_fraction_{stages}": share for stages, share in self.bubble_fractions.items()}
            elif column.name == "bubble_causes":
                row |= {f"bubble_{cause}": share for cause, share in self.bubble_causes.items()}
            elif column.name not in row and column.name not in _NOT_IN_ROW:
                row[column.name] = getattr(self, column.name)
        return row

    def tbt_at(self, quantile: float) -> float | None:
        """The ``quantile`` (0..1) of TBT in seconds; None when there is no gap."""
        return float(sorted_quantiles(self.tbt_gaps_s, np.array([quantile]))[0]) if len(self.tbt_gaps_s) else None

    def tbt_quantiles_ms(self) -> list[float]:
        """TBT in ms at the levels 0, 0.01 ... 1.00; empty when there is no gap."""
        return _quantiles_ms(self.tbt_gaps_s)

    @property
    def queueing_p50_s(self) -> float | None:
        """What the SLO's limit on queueing is held against: the median scheduling delay. A server does not tell it from
        outside; there the median TTFT stands in, which is the delay and the prefill together."""
        return self.ttft.p50 if self.scheduling_delay.p50 is None else self.scheduling_delay.p50

    def excesses(self, slo: SLO) -> dict[str, float | None]:
        """How far over its limit each of ``LIMITED`` is, as a share of the limit; below 0 where it is within.

        None where there is no limit, where it does not apply, or where the run has no data for it.
        """
        delay_s = None if self.saturated else slo.max_scheduling_delay_s
        return {
            "tbt": _excess(self.tbt_at(slo.quantile), slo.tbt_s),
            "scheduling_delay": _excess(self.queueing_p50_s, delay_s),
            "ttft": None if slo.ttft is None else _excess(self.ttft.at(slo.ttft.quantile), slo.ttft.limit_s),
            "e2e": None if slo.e2e is None else _excess(self.e2e.at(slo.e2e.quantile), slo.e2e.limit_s),
        }

    def feasible(self, slo: SLO) -> bool | None:
        """Whether the run met ``slo``; None when it has no data to tell.

        No data: nothing that the SLO is about was seen (no gap, and no first token or end where these are limited), or
        no request was ever scheduled. A run that was stopped early is never feasible: False when what it had was over
        a limit already, else None.
        """
        excesses = self.excesses(slo)
        if self.queueing_p50_s is None or all(excesses[name] is None for name in ("tbt", "ttft", "e2e")):
            return None
        if any(excess is not None and excess > 0.0 for excess in excesses.values()):
            return False
        return True if self.stopped is None else None


def _excess(value: float | None, limit: float | None) -> float | None:
    return None if value is None or limit is None else value / limit - 1.0


_NOT_IN_ROW = {"tbt", "tpot", "ttft", "e2e", "scheduling_delay", "tbt_gaps_s", "saturated", "stopped"}


def compute_metrics(record: RunRecord, slo: SLO | None = None) -> Metrics:
    """The metrics of one run; with ``slo``, its goodput too."""
    requests, iterations = record.requests, record.iterations
    gap_request, gaps_s = _gaps_by_request(record)
    first_token_s, last_token_s = _token_ends(record)
    finished = np.array([status == "finished" for status in requests.status], dtype=bool)
    delay_s = requests.first_scheduled_s - requests.arrival_s
    ttft_s = first_token_s - requests.arrival_s
    e2e_s = last_token_s - requests.arrival_s
    with_gaps = finished & (requests.num_generated > 1)
    tpot_s = (e2e_s - ttft_s)[with_gaps] / (requests.num_generated[with_gaps] - 1)
    busy_s, num_iterations = record.busy_s, len(iterations)
    num_finished = int(finished.sum())
    num_output = len(record.token_s)
    num_prompt = int(requests.prompt_tokens[requests.num_generated > 0].sum())
    good = None
    if slo is not None:
        queueing_s = np.where(np.isnan(delay_s), ttft_s, delay_s)
        good = _num_good(record, slo, finished & _in_time(slo, ttft_s, e2e_s), queueing_s, gap_request, gaps_s)
    in_pipeline = iterations.stage_end_s is not None
    bubbles = find_bubbles(iterations) if in_pipeline and num_iterations else None
    iteration_s = iterations.model_s if in_pipeline else iterations.duration_s
    wall_s = busy_s if in_pipeline else float(iterations.model_s.sum()) + record.overhead_s
    told = ServerCounters() if record.server is None else record.server.counters
    measured = num_iterations > 0 and not record.virtual_time
    sorted_gaps_s = np.sort(gaps_s)
    return Metrics(
        tbt=Distribution.of_sorted(sorted_gaps_s),
        tpot=Distribution.of(tpot_s),
        ttft=Distribution.of(ttft_s[~np.isnan(ttft_s)]),
        e2e=Distribution.of(e2e_s[finished]),
        scheduling_delay=Distribution.of(delay_s[~np.isnan(delay_s)]),
        tbt_gaps_s=sorted_gaps_s,
        output_tokens_per_s=_ratio(num_output, busy_s),
        total_tokens_per_s=_ratio(num_output + num_prompt, busy_s),
        requests_per_s=_ratio(num_finished, busy_s),
        goodput_requests_per_s=None if good is None else _ratio(good, busy_s),
        busy_s=busy_s,
        num_iterations=num_iterations if record.server is None else told.num_iterations,
        iteration_cv=_ratio(float(iteration_s.std()), float(iteration_s.mean())) if num_iterations else None,
        bubble_fractions={
            stages: replay(iteration_s, stages).bubble_fraction if num_iterations else None
            for stages in PIPELINE_STAGES
        },
        num_stages=1 if iterations.stage_end_s is None else iterations.stage_end_s.shape[1],
        bubble_fraction=None if bubbles is None else bubbles.bubble_fraction,
        bubble_causes={**dict.fromkeys(BUBBLE_CAUSES), **(bubbles.fractions() if bubbles is not None else {})},
        mean_tokens_per_iteration=(
            float(iterations.num_tokens.mean()) if num_iterations else told.mean_tokens_per_iteration
        ),
        full_budget_share=_full_budget_share(iterations.num_tokens, record.config.token_budget),
        tile_waste=_mean_tile_waste(iterations.num_tokens, record.config.token_budget),
        num_preemptions=int(iterations.num_preemptions.sum()) if record.server is None else told.num_preemptions,
        num_finished=num_finished,
        num_rejected_model_len=record.count_status("rejected_model_len"),
        num_rejected_kv=record.count_status("rejected_kv"),
        kv_peak_fraction=(
            int(iterations.kv_blocks_used.max()) / record.num_kv_blocks
            if num_iterations and record.num_kv_blocks
            else told.kv_peak_fraction
        ),
        overhead_us_per_iteration=record.overhead_s / num_iterations * 1e6 if measured else None,
        overhead_fraction=_ratio(record.overhead_s, wall_s) if measured else None,
        saturated=record.saturated,
        stopped=record.stopped,
    )


def tbt_gaps(record: RunRecord) -> FloatArray:
    """Every gap between two tokens of a request, seconds, ordered by request and then by time."""
    return _gaps_by_request(record)[1]


def tbt_quantiles_ms(record: RunRecord) -> list[float]:
    """TBT in ms at the levels 0, 0.01 ... 1.00; empty when no request has two tokens."""
    return _quantiles_ms(np.sort(tbt_gaps(record)))


def sorted_quantiles(samples: FloatArray, levels: FloatArray) -> FloatArray:
    """What ``np.quantile`` gives for ``samples``, 1-D and not empty, that rise; which it would sort again."""
    place = levels * (len(samples) - 1)
    below = np.floor(place).astype(np.int64)
    low, high = samples[below], samples[np.minimum(below + 1, len(samples) - 1)]
    part = place - below
    # From the nearer side, as numpy does.
    values: FloatArray = np.where(part < 0.5, low + (high - low) * part, high - (high - low) * (1.0 - part))
    return values


def _quantiles_ms(gaps_s: FloatArray) -> list[float]:
    """Of gaps that rise."""
    if not len(gaps_s):
        return []
    quantiles: list[float] = (sorted_quantiles(gaps_s, TBT_QUANTILE_LEVELS) * 1e3).tolist()
    return quantiles


def _gaps_by_request(record: RunRecord) -> tuple[IntArray, FloatArray]:
    """The request of every gap, and the gap."""
    order = np.argsort(narrow(record.token_request, len(record.requests)), kind="stable")
    request, token_s = record.token_request[order], record.token_s[order]
    same = request[1:] == request[:-1]
    return request[1:][same], np.diff(token_s)[same]


def _token_ends(record: RunRecord) -> tuple[FloatArray, FloatArray]:
    """Times of the first and the last token of each request; NaN where it has none."""
    first_s = np.full(len(record.requests), np.nan)
    last_s = first_s.copy()
    last_s[record.token_request] = record.token_s
    first_s[record.token_request[::-1]] = record.token_s[::-1]
    return first_s, last_s


def _in_time(slo: SLO, ttft_s: FloatArray, e2e_s: FloatArray) -> BoolArray:
    """The requests within the limits on TTFT and E2E."""
    in_time = np.ones(len(ttft_s), dtype=bool)
    for limit, values_s in ((slo.ttft, ttft_s), (slo.e2e, e2e_s)):
        if limit is not None:
            in_time &= values_s <= limit.limit_s
    return in_time


def _num_good(
    record: RunRecord,
    slo: SLO,
    finished: BoolArray,
    queueing_s: FloatArray,
    gap_request: IntArray,
    gaps_s: FloatArray,
) -> int:
    good = finished.copy()
    if not record.saturated and slo.max_scheduling_delay_s is not None:
        good &= queueing_s <= slo.max_scheduling_delay_s
    # Without a gap over the limit no quantile is: only the others need sorting.
    over = np.zeros(len(good), dtype=bool)
    over[gap_request[gaps_s > slo.tbt_s]] = True
    suspects = over[gap_request]
    owners, quantiles_s = _quantile_by_group(gap_request[suspects], gaps_s[suspects], slo.quantile)
    good[owners[quantiles_s > slo.tbt_s]] = False
    return int(good.sum())


def _quantile_by_group(groups: IntArray, values: FloatArray, quantile: float) -> tuple[IntArray, FloatArray]:
    """Each group that has values, ascending, and the linearly interpolated ``quantile`` of its values."""
    ordered = values[np.lexsort((values, groups))]
    owners, starts, counts = np.unique(np.sort(groups), return_index=True, return_counts=True)
    position = (counts - 1) * quantile
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, counts - 1)
    low, high = ordered[starts + below], ordered[starts + above]
    return owners, low + (position - below) * (high - low)


def _full_budget_share(num_tokens: IntArray, token_budget: int | None) -> float | None:
    if token_budget is None or not len(num_tokens):
        return None
    return float((num_tokens == token_budget).mean())


def _mean_tile_waste(num_tokens: IntArray, token_budget: int | None) -> float | None:
    """Mean over the iterations that are not at the budget; None when there is none."""
    rest = num_tokens if token_budget is None else num_tokens[num_tokens != token_budget]
    if not len(rest):
        return None
    sizes, counts = np.unique(rest, return_counts=True)
    waste = [tile_waste(size, TILE_WASTE_BLOCK_M) for size in sizes.tolist()]
    return float(np.average(waste, weights=counts))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0.0 else None
