"""The capacity of a setting: the highest request rate that meets the SLO, bracketed and then bisected.

Every rate serves the same requests in the same pattern of arrivals, drawn once by seed and scaled in time, so two
rates, and two budgets at one rate, differ in nothing else (the headline metric of Sarathi-Serve, OSDI'24, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...engine import EngineConfig, Monitor, RunRecord, Workload
from ...engine.metrics import SLO, Metrics, compute_metrics
from ...engine.server.engine import AnyEngine
from ...engine.workloads.workload import assign_arrivals, scale_load
from .objective import CAPACITY_RESOLUTION

#: How often the first rate is doubled, or halved, before the search for a bracket ends.
MAX_DOUBLINGS = 8


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """``qps`` requests per second, 0.0 when the lowest rate tried breaks the SLO; the run at that rate (of the lowest
    rate then) with its metrics; and how many runs it took."""

    qps: float
    record: RunRecord
    metrics: Metrics
    num_runs: int


def find_capacity(
    engine: AnyEngine,
    workload: Workload,
    config: EngineConfig,
    slo: SLO,
    *,
    monitor: Callable[[], Monitor] | None = None,
    resolution: float = CAPACITY_RESOLUTION,
) -> Capacity:
    """The capacity of ``engine`` under ``config``, to within ``resolution``.

    ``workload`` arrives at 1 request per second on average. The first rate is what the engine does with all requests
    there at once; it is doubled or halved until the SLO turns, then bisected; where the SLO turns more than once over
    the rates, one of these turns is found. ``monitor`` makes the monitor that may
    stop a run of one rate; a stopped run breaks the SLO.
    """
    runs: dict[float, tuple[RunRecord, Metrics]] = {}

    def meets(qps: float) -> bool:
        record = engine.run(scale_load(workload, qps), config, monitor=None if monitor is None else monitor())
        metrics = compute_metrics(record, slo)
        runs[qps] = record, metrics
        return record.stopped is None and not any((excess or 0.0) > 0.0 for excess in metrics.excesses(slo).values())

    flood = compute_metrics(engine.run(assign_arrivals(workload, "saturated"), config))
    start_qps = flood.requests_per_s
    if start_qps is None or not start_qps > 0.0:
        raise ValueError(f"workload {workload.name!r}: no request finished, so there is no rate to start from")
    best_qps, lowest_qps = bisect_rate(meets, start_qps, resolution)
    record, metrics = runs[best_qps or lowest_qps]
    return Capacity(qps=best_qps, record=record, metrics=metrics, num_runs=len(runs) + 1)


def bisect_rate(meets: Callable[[float], bool], start_qps: float, resolution: float) -> tuple[float, float]:
    """The highest rate found that ``meets``, at most ``resolution`` below one that does not, and the lowest one tried.

    0.0 when none of ``MAX_DOUBLINGS`` halvings of ``start_qps`` meets; the top rate when every doubling does.
    """
    good, bad = 0.0, math.inf
    qps = lowest = start_qps
    for _ in range(MAX_DOUBLINGS + 1):
        lowest = min(lowest, qps)
        if meets(qps):
            good = qps
            qps *= 2.0
        else:
            bad = qps
            qps /= 2.0
        if good and bad < math.inf:
            break
    while good and bad < math.inf and bad / good > 1.0 + resolution:
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if meets(middle) else (good, middle)
    return good, lowest
