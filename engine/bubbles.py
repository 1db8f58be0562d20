"""Where the stages of a pipeline stood idle in a run, and why."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .pipeline_clock import PipelineClock
from .record import FloatArray, Iterations, busy_span_s

#: Why a stage waits for a micro-batch. The first two are Sarathi-Serve's (OSDI'24, section 3.3): neighbours of
#: different length (prefills of different size, decodes of different context), and a prefill beside a decode.
#: ``stage_imbalance``: one stage has more work than another for the same micro-batch (the LM head, an uneven split).
#: ``transfer``: activations on their way. ``empty_slot``: fewer micro-batches in flight than stages, because there was
#: nothing to schedule, or the pipeline filled or drained; on a real pipeline also the time that the host takes
#: between a micro-batch that is back and the next.
BUBBLE_CAUSES = ("length_difference", "prefill_after_decode", "stage_imbalance", "transfer", "empty_slot")
LENGTH, KIND, IMBALANCE, TRANSFER, EMPTY = range(len(BUBBLE_CAUSES))


@dataclass(frozen=True, kw_only=True)
class Bubbles:
    """Idle time of a pipeline's stages while anything was in flight.

    ``idle_s``: ``[iterations, causes]``, seconds of idle time over all stages that came before each iteration (after
    the last one of a busy stretch, what the stages waited for its end), by BUBBLE_CAUSES. It adds up to
    ``num_stages * span_s`` less the work of the stages. ``span_s`` leaves out the gaps in which nothing was in flight.
    """

    num_stages: int
    span_s: float
    idle_s: FloatArray

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all stages ÷ (stages × span)."""
        return sum(self.fractions().values())

    def fractions(self) -> dict[str, float]:
        """Its parts, by cause."""
        whole_s = self.num_stages * self.span_s
        shares = self.idle_s.sum(axis=0) / whole_s if whole_s > 0.0 else np.zeros(len(BUBBLE_CAUSES))
        return dict(zip(BUBBLE_CAUSES, shares.tolist(), strict=True))


def find_bubbles(iterations: Iterations) -> Bubbles:
    """The bubbles of a run on a pipeline. Raises ValueError for a run without one, or without iterations."""
    if iterations.stage_start_s is None or iterations.stage_end_s is None or not len(iterations):
        raise ValueError("iterations have no stage times: bubbles are those of a pipeline's run")
    return explain_idle_time(iterations.stage_start_s, iterations.stage_end_s, iterations.num_prefill_tokens > 0)


def replay_stages(
    stage_s: npt.ArrayLike, *, transfer_s: float = 0.0, has_prefill: npt.ArrayLike | None = None
) -> Bubbles:
    """The bubbles of micro-batches whose work in each stage is known, replayed back to back.

    stage_s: seconds, ``[micro-batches, stages]``. As many are in flight as there are stages; the next enters once the
    oldest has left, and moves on by the rule of ``PipelineClock``. ``has_prefill`` tells the causes apart (None: all
    alike). Raises ValueError when ``stage_s`` has another shape, or a time that is not positive and finite.
    """
    times = np.asarray(stage_s, dtype=np.float64)
    if times.ndim != 2 or not times.size:
        raise ValueError(f"stage_s has shape {times.shape}: needs micro-batches and stages, at least one of each")
    if not (np.isfinite(times).all() and (times > 0.0).all()):
        raise ValueError("stage_s: every stage must take a positive, finite time")
    num_stages = times.shape[1]
    clock = PipelineClock(num_stages)
    transfers_s = [transfer_s] * (num_stages - 1)
    start_s, end_s = np.empty_like(times), np.empty_like(times)
    for number, work_s in enumerate(times.tolist()):
        ready_s = float(end_s[number - num_stages, -1]) if number >= num_stages else 0.0
        start_s[number], end_s[number] = clock.enter(ready_s, work_s, transfers_s)
    prefill = np.zeros(len(times), dtype=bool) if has_prefill is None else np.asarray(has_prefill, dtype=bool)
    return explain_idle_time(start_s, end_s, prefill)


def explain_idle_time(start_s: FloatArray, end_s: FloatArray, has_prefill: npt.NDArray[np.bool_]) -> Bubbles:
    """The bubbles of micro-batches that the stages began at ``start_s`` and ended at ``end_s``, both
    ``[micro-batches, stages]``.

    A gap that came down from the stage before keeps its cause. What a stage adds to it, and what the first stage waits
    for the last one, is first transfer (the least that was seen between two stages), then imbalance of the stages for
    the micro-batch before, and the rest the difference between neighbours.
    """
    num_iterations, num_stages = start_s.shape
    # A micro-batch that enters an empty pipeline fills it, and the one before has drained it.
    fresh = np.ones(num_iterations, dtype=bool)
    fresh[1:] = start_s[1:, 0] >= end_s[:-1, -1]
    idle_s = np.zeros((num_iterations, len(BUBBLE_CAUSES)))
    idle_s[:, EMPTY] += np.where(fresh, (start_s - start_s[:, :1]).sum(axis=1), 0.0)
    last = np.roll(fresh, -1)  # the first one is fresh, so the last one is last
    idle_s[:, EMPTY] += np.where(last, (end_s[:, -1:] - end_s).sum(axis=1), 0.0)

    gaps_s = np.zeros_like(start_s)
    gaps_s[1:] = np.where(fresh[1:, None], 0.0, np.maximum(start_s[1:] - end_s[:-1], 0.0))
    work_s = np.zeros_like(start_s)  # of the micro-batch before
    work_s[1:] = end_s[:-1] - start_s[:-1]
    least_transfer_s = np.zeros(num_stages)
    least_transfer_s[1:] = np.maximum((start_s[:, 1:] - end_s[:, :-1]).min(axis=0), 0.0)

    held_s = np.zeros(num_iterations)  # what the first stage waited for its slot in the pipeline
    if num_iterations > num_stages:
        back_s = np.minimum(end_s[:-num_stages, -1], start_s[num_stages:, 0])
        held_s[num_stages:] = np.clip(back_s - end_s[num_stages - 1 : -1, 0], 0.0, gaps_s[num_stages:, 0])
    mixed = _are_mixed(has_prefill, num_stages)
    by_cause = _split(held_s, float(least_transfer_s.sum()), work_s.max(axis=1, initial=0.0) - work_s[:, 0], mixed)
    by_cause[:, EMPTY] = gaps_s[:, 0] - held_s
    idle_s += by_cause
    beside = np.zeros(num_iterations, dtype=bool)
    beside[1:] = has_prefill[1:] != has_prefill[:-1]
    for stage in range(1, num_stages):
        before_s, now_s = gaps_s[:, stage - 1], gaps_s[:, stage]
        kept = np.minimum(1.0, np.divide(now_s, before_s, out=np.zeros(num_iterations), where=before_s > 0.0))
        added_s = np.maximum(now_s - before_s, 0.0)
        by_cause = by_cause * kept[:, None] + _split(added_s, 0.0, work_s[:, stage - 1] - work_s[:, stage], beside)
        idle_s += by_cause
    return Bubbles(num_stages=num_stages, span_s=busy_span_s(start_s[:, 0], end_s[:, -1]), idle_s=idle_s)


def _split(wait_s: FloatArray, transfer_s: float, imbalance_s: FloatArray, mixed: npt.NDArray[np.bool_]) -> FloatArray:
    """Waits by cause: ``[iterations, causes]``."""
    parts = np.zeros((len(wait_s), len(BUBBLE_CAUSES)))
    parts[:, TRANSFER] = np.minimum(wait_s, transfer_s)
    left_s = wait_s - parts[:, TRANSFER]
    parts[:, IMBALANCE] = np.clip(imbalance_s, 0.0, left_s)
    left_s = left_s - parts[:, IMBALANCE]
    parts[:, KIND] = np.where(mixed, left_s, 0.0)
    parts[:, LENGTH] = np.where(mixed, 0.0, left_s)
    return parts


def _are_mixed(has_prefill: npt.NDArray[np.bool_], num_stages: int) -> npt.NDArray[np.bool_]:
    """Whether some of the ``num_stages`` micro-batches before each one have a prefill and others none."""
    counts = np.concatenate([[0], np.cumsum(has_prefill)])
    until = np.arange(len(has_prefill))
    since = np.maximum(until - num_stages, 0)
    with_prefill = counts[until] - counts[since]
    return np.asarray((with_prefill > 0) & (with_prefill < until - since))
