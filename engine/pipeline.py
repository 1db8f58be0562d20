"""What a run's iterations would do to a pipeline: bubbles under a schedule with p micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Pipeline depths that every run is scored for.
PIPELINE_STAGES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """A replay: ``span_s`` from the first start to the last end, ``stage_idle_s`` the idle time of one stage
    (equal for all: each works for the sum of the durations ÷ ``num_stages``), ``bubble_fraction`` the idle time
    of all stages ÷ (``num_stages`` × ``span_s``)."""

    num_stages: int
    span_s: float
    stage_idle_s: float
    bubble_fraction: float


def replay(durations_s: npt.ArrayLike, num_stages: int) -> PipelineResult:
    """Replay iterations as micro-batches of a pipeline with ``num_stages`` stages, back to back.

    durations_s: seconds of each iteration, in order; 1-D. Micro-batch i takes ``durations_s[i] / num_stages`` in
    every stage (its share of the layers), starts in a stage once it has left the one before and the stage is free,
    and enters the first one only after micro-batch i - num_stages has left the last: at most ``num_stages`` are in
    flight, because the next tokens of a request wait for its last ones (Sarathi-Serve, OSDI'24, section 3.3).

    Equal durations leave only the filling and draining: (p - 1) / (n + p - 1). Arrival gaps are left out.
    Raises ValueError on no durations, one that is not positive and finite, or ``num_stages`` below 1.
    """
    durations = np.asarray(durations_s, dtype=np.float64)
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: must be at least 1")
    if durations.ndim != 1 or not len(durations):
        raise ValueError(f"durations_s has shape {durations.shape}: needs one dimension and at least one iteration")
    if not (np.isfinite(durations).all() and (durations > 0.0).all()):
        raise ValueError("durations_s: every iteration must take a positive, finite time")
    span_s = _span((durations / num_stages).tolist(), num_stages)
    work_s = float(durations.sum()) / num_stages
    # Rounding can put the span a hair below the work of a stage that never idles.
    idle_s = max(0.0, span_s - work_s)
    return PipelineResult(
        num_stages=num_stages, span_s=span_s, stage_idle_s=idle_s, bubble_fraction=idle_s / span_s if idle_s else 0.0
    )


def _span(stage_times: list[float], num_stages: int) -> float:
    """When the last micro-batch leaves. Plain floats: the recurrence has no vector form, and this is fast enough."""
    free = [0.0] * num_stages  # when each stage is next free
    left = [0.0] * num_stages  # when micro-batch i - num_stages left, by i modulo num_stages
    stages = range(num_stages)
    place = 0
    now = 0.0
    for stage_time in stage_times:
        now = left[place]
        for stage in stages:
            stage_free = free[stage]
            if stage_free > now:
                now = stage_free
            now += stage_time
            free[stage] = now
        left[place] = now
        place += 1
        if place == num_stages:
            place = 0
    return now
