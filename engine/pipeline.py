"""What a run's iterations would do to a pipeline: bubbles under a schedule with p micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

#: Pipeline depths that every run is scored for.
PIPELINE_STAGES = (2, 4, 8)

#: Runs of this many iterations and more are replayed in lanes: the same recurrence, some fifty times quicker.
LANES_FROM_ITERATIONS = 20_000
NUM_LANES = 512


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
    stage_times = durations / num_stages
    if len(durations) < LANES_FROM_ITERATIONS:
        span_s = float(_span(stage_times.tolist(), num_stages, np.zeros((2, num_stages)))[0, -1])
    else:
        span_s = _span_in_lanes(stage_times, num_stages)
    work_s = float(durations.sum()) / num_stages
    # Rounding can put the span a hair below the work of a stage that never idles.
    idle_s = max(0.0, span_s - work_s)
    return PipelineResult(
        num_stages=num_stages, span_s=span_s, stage_idle_s=idle_s, bubble_fraction=idle_s / span_s if idle_s else 0.0
    )


def _span(stage_times: list[float], num_stages: int, state: FloatArray) -> FloatArray:
    """The state after more micro-batches: [2, stages], when each stage is free, and when the last micro-batches left
    (oldest first). The newest of those, which is also when the last stage is free, is the span so far.

    Plain floats: the recurrence has no vector form along time.
    """
    free, left = state.tolist()
    stages = range(num_stages)
    place = 0
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
    return np.array([free, left[place:] + left[:place]])


def _span_in_lanes(stage_times: FloatArray, num_stages: int) -> float:
    """``_span`` of a long run, cut into NUM_LANES stretches that are replayed side by side.

    A stretch needs the state that the one before leaves. It is guessed, and replaced by what came out until all
    stretches fit together, which takes few rounds: a pipeline forgets where it was as soon as it has filled once.
    Only differences within a state matter to what follows, so states are kept relative to their span.
    """
    length = len(stage_times) // NUM_LANES
    head = len(stage_times) - NUM_LANES * length
    before = _span(stage_times[:head].tolist(), num_stages, np.zeros((2, num_stages)))
    head_s = float(before[0, -1])
    columns = np.ascontiguousarray(stage_times[head:].reshape(NUM_LANES, length).T)
    states = np.repeat((before - head_s)[:, :, None], NUM_LANES, axis=2)
    tolerance_s = 1e-9 * float(stage_times.mean())
    while True:
        after = _advance_lanes(columns, states)
        spans_s = after[0, -1]
        entering = np.roll(after - spans_s, 1, axis=2)
        entering[:, :, 0] = states[:, :, 0]
        settled = np.abs(entering - states).max() <= tolerance_s
        states = entering
        if settled:
            return head_s + float(spans_s.sum())


def _advance_lanes(columns: FloatArray, states: FloatArray) -> FloatArray:
    """The recurrence of ``_span`` over all lanes at once: columns [length, lanes], states [2, stages, lanes]."""
    free, left = [list(half.copy()) for half in states]
    num_stages = len(free)
    place = 0
    for stage_time in columns:
        now = left[place]
        for stage in range(num_stages):
            target = free[stage]
            np.maximum(target, now, out=target)
            np.add(target, stage_time, out=target)
            now = target
        left[place] = now.copy()
        place = (place + 1) % num_stages
    return np.array([free, left[place:] + left[:place]])
