"""The capacity of a setting: the highest request rate that meets the SLO, bracketed and then bisected.

Every rate serves the same requests in the same pattern of arrivals, drawn once by seed and scaled in time, so two
rates, and two budgets at one rate, differ in nothing else (the headline metric of Sarathi-Serve, OSDI'24, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ...engine import EngineConfig, Monitor, RunRecord, Workload
from ...engine.metrics import SLO, Metrics, compute_metrics
from ...engine.server.engine import AnyEngine
from ...engine.workloads.workload import assign_arrivals, scale_load
from .objective import CAPACITY_RESOLUTION

#: How often the first rate is raised, or lowered, before the search for a bracket ends.
MAX_STEPS = 11

#: The first step, and the largest one: each is the square of the one before.
FIRST_STEP, LARGEST_STEP = 1.1, 2.0

#: No rate is tried above this many times what is served when all requests are there at once: beyond, the limits hold
#: only because the workload is so short that it ends before its queue has grown.
MOST_OVER_FLOOD = 4.0


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """``qps`` requests per second: 0.0 when the lowest rate tried breaks the SLO, None when the rate that was asked for
    does, so that all that is known is that it is below ``at_most_qps``. ``at_most_qps`` is the lowest rate tried that
    breaks the SLO, None when none did. ``record`` and ``metrics`` are of the run at ``qps`` (without one, of the lowest
    rate tried), ``above`` the metrics at ``at_most_qps``; ``num_runs`` is how many runs it took."""

    qps: float | None
    at_most_qps: float | None
    record: RunRecord
    metrics: Metrics
    above: Metrics | None
    num_runs: int


def find_capacity(
    engine: AnyEngine,
    workload: Workload,
    config: EngineConfig,
    slo: SLO,
    *,
    rate_rps: float = 1.0,
    ask_rps: float | None = None,
    near_rps: float | None = None,
    monitor: Callable[[], Monitor] | None = None,
    resolution: float = CAPACITY_RESOLUTION,
) -> Capacity:
    """The capacity of ``engine`` under ``config``, to within ``resolution``.

    ``workload`` arrives at ``rate_rps`` requests per second. With ``ask_rps`` the first question is whether that rate
    holds the SLO: a no is all the answer there is, a yes is where the search begins. Without it the first rate is what
    the engine does with all requests there at once, or ``near_rps``, a capacity found before, with small steps. From
    there it goes up or down until the SLO turns, then it is bisected; where the SLO turns more than once over the
    rates, one of these turns is found. ``monitor`` makes the monitor that may stop a run of one rate; a stopped run
    breaks the SLO.
    """
    runs: dict[float, tuple[RunRecord, Metrics]] = {}

    def meets(qps: float) -> bool:
        if qps not in runs:
            scaled = scale_load(workload, qps / rate_rps)
            record = engine.run(scaled, config, monitor=None if monitor is None else monitor())
            runs[qps] = record, compute_metrics(record, slo)
        record, metrics = runs[qps]
        return record.stopped is None and not any((excess or 0.0) > 0.0 for excess in metrics.excesses(slo).values())

    @cache
    def flood_rps() -> float:
        """What the engine does with all requests there at once."""
        flood = compute_metrics(engine.run(assign_arrivals(workload, "saturated"), config)).requests_per_s
        if flood is None or not flood > 0.0:
            raise ValueError(f"workload {workload.name!r}: no request finished, so there is no rate to start from")
        return flood

    best_qps: float | None = None
    if ask_rps is None or meets(ask_rps):
        best_qps, _ = bisect_rate(
            meets,
            ask_rps or near_rps or flood_rps(),
            resolution,
            first_step=FIRST_STEP if near_rps is None else 1.0 + 2.0 * resolution,
            limit_qps=lambda: MOST_OVER_FLOOD * flood_rps(),
        )
    broken = min((qps for qps in runs if not meets(qps)), default=None)
    if best_qps and broken is None:
        most = max(ask_rps or 0.0, MOST_OVER_FLOOD * flood_rps())
        best_qps = max(qps for qps in runs if qps <= most)
    record, metrics = runs[best_qps or min(runs)]
    return Capacity(
        qps=best_qps,
        at_most_qps=broken,
        record=record,
        metrics=metrics,
        above=None if broken is None else runs[broken][1],
        num_runs=len(runs) + flood_rps.cache_info().currsize,
    )


def bisect_rate(
    meets: Callable[[float], bool],
    start_qps: float,
    resolution: float,
    *,
    first_step: float = FIRST_STEP,
    limit_qps: Callable[[], float] = lambda: math.inf,
) -> tuple[float, float]:
    """The highest rate found that ``meets``, at most ``resolution`` below one that does not, and the lowest one tried.

    The first step goes to ``first_step`` times ``start_qps``, or down to 1 / ``first_step`` of it, and each is the
    square of the one before. 0.0 when none of ``MAX_STEPS`` steps down from ``start_qps`` meets; the top rate when
    every step up does, the first one that reaches ``limit_qps``, which is asked once ``start_qps`` was doubled.
    """
    good, bad = 0.0, math.inf
    qps = lowest = start_qps
    step = first_step
    for _ in range(MAX_STEPS + 1):
        lowest = min(lowest, qps)
        if meets(qps):
            good = qps
            if qps > 2.0 * start_qps and qps >= limit_qps():
                break
            qps *= step
        else:
            bad = qps
            qps /= step
        step = min(step * step, LARGEST_STEP)
        if good and bad < math.inf:
            break
    while good and bad < math.inf and bad / good > 1.0 + resolution:
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if meets(middle) else (good, middle)
    return good, lowest
