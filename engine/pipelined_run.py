"""The loop of a pipeline: several micro-batches in flight, each with requests of its own.

The rule by which requests are split among micro-batches: there are as many lanes as stages. A request joins the lane
that admits it and stays there; every lane runs its own policy over its own running requests, up to ``max_num_seqs`` of
them, and all lanes admit from one queue and one KV cache. A lane is scheduled when its last micro-batch is back, the
lane with the fewest running requests first. So no request is in flight twice, and nothing is preempted that is.

That is Orca's rule (OSDI'22, algorithm 1: at most as many batches in flight as workers, of requests that are not
running, ``max_bs`` each) with the grouping made explicit as in vLLM v0, which gave every pipeline slot a scheduler of
its own and new requests to the least loaded. Sarathi-Serve and vLLM V1 take all requests that are not in flight from
one pool; those that came back together are then scheduled together again, which makes the same groups. Both bound the
running requests of all micro-batches by ``max_num_seqs``, where we bound those of each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from .config import EngineConfig
from .executor import NonFiniteTimeError, PipelinedExecutor, PipelinedStepResult
from .kv_cache import BlockManager
from .policies import make_scheduler
from .record import RunRecord
from .request import Batch, Sequence, Workload
from .run import Monitor, Progress, Run, close_gaps, store_tokens
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _InFlight:
    lane: Scheduler
    batch: Batch
    blocks_used: int
    num_preempted: int


class PipelinedRun(Run):
    """A run with up to ``num_stages`` micro-batches in flight.

    On a real pipeline the run's clock is ``perf_counter`` less ``shift_s``, which grows shorter by every idle gap that
    is skipped; nothing is in flight then. In virtual time it jumps from event to event.
    """

    def __init__(self, executor: PipelinedExecutor, workload: Workload, config: EngineConfig, kv: BlockManager) -> None:
        super().__init__(executor, workload, config, kv)
        self.executor = executor
        waiting: deque[Sequence] = deque()
        self.lanes = [make_scheduler(config, kv, waiting) for _ in range(executor.num_stages)]
        self.in_flight: deque[_InFlight] = deque()
        self.num_preempted = 0  # by lanes that then had nothing to run; the next micro-batch carries them
        self.virtual_s = 0.0
        self.shift_s = 0.0 if executor.virtual_time else perf_counter()
        self.blocked_s = 0.0  # seconds spent waiting for the stages

    def serve(self, monitor: Monitor | None) -> RunRecord:
        """Serve the workload and return the record."""
        began_s = perf_counter()
        stopped = None
        while self.pending or self.in_flight or any(lane.has_work for lane in self.lanes):
            self._fill(self._arrive())
            if not self.in_flight:
                self._skip_idle_gap()
            elif self._oldest_is_done_before_an_arrival():
                stopped = self._collect(monitor)
                if stopped is not None:
                    break
        for _ in self.in_flight:  # of a run that was stopped
            self._blocking_collect()
        self.overhead_s = perf_counter() - began_s - (0.0 if self.executor.virtual_time else self.blocked_s)
        return self.finish(stopped)

    def _now(self) -> float:
        return self.virtual_s if self.executor.virtual_time else perf_counter() - self.shift_s

    def _arrive(self) -> float:
        """Queue what has arrived; returns the time."""
        now_s = self._now()
        while self.pending and self.pending[-1].arrival_s <= now_s:
            self.lanes[0].add(self.pending.pop())  # all lanes have one queue
        return now_s

    def _fill(self, now_s: float) -> None:
        """Submit micro-batches while fewer than ``num_stages`` are in flight and a lane has something to run."""
        busy = {id(flight.lane) for flight in self.in_flight}
        free = [lane for lane in self.lanes if id(lane) not in busy]
        free.sort(key=lambda lane: lane.num_running)
        for lane in free:
            if not lane.has_work:
                continue
            batch = lane.schedule()
            self.num_preempted += batch.num_preempted
            if not batch.num_requests:  # no blocks for any of its requests: those in flight hold them
                continue
            self.in_flight.append(_InFlight(lane, batch, self.kv.num_used, self.num_preempted))
            self.num_preempted = 0
            self.executor.submit(batch, now_s)

    def _skip_idle_gap(self) -> None:
        """Jump to the next arrival, with nothing in flight."""
        if any(lane.has_work for lane in self.lanes):
            raise AssertionError(f"policy {self.config.policy} scheduled an empty iteration with work waiting")
        arrival_s = self.pending[-1].arrival_s
        if self.executor.virtual_time:
            self.virtual_s = max(self.virtual_s, arrival_s)
        else:
            self.shift_s -= max(0.0, arrival_s - self._now())

    def _oldest_is_done_before_an_arrival(self) -> bool:
        """False when a request arrives first that a free lane might take; the clock is there then."""
        if not self.pending or len(self.in_flight) == len(self.lanes):
            return True
        arrival_s = self.pending[-1].arrival_s
        began_s = perf_counter()
        done = self.executor.wait_until(arrival_s + self.shift_s)
        self.blocked_s += perf_counter() - began_s
        if not done:
            self.virtual_s = max(self.virtual_s, arrival_s)
        return done

    def _collect(self, monitor: Monitor | None) -> str | None:
        """Take the oldest micro-batch back, and record it; what the monitor says."""
        flight = self.in_flight[0]
        result = self._blocking_collect()
        self.in_flight.popleft()
        emitted = flight.lane.commit(flight.batch)
        if result.token_ids is not None:
            store_tokens(emitted, result.token_ids)
        start_s, end_s = result.stage_start_s - self.shift_s, result.stage_end_s - self.shift_s
        model_s = float((end_s - start_s).sum())
        if not (np.isfinite(end_s).all() and np.isfinite(start_s).all() and (end_s >= start_s).all()):
            raise NonFiniteTimeError(f"a micro-batch ran from {start_s.tolist()} to {end_s.tolist()} s by stage")
        self.builder.add_stages(start_s, end_s, model_s)
        self.record_batch(flight.batch, emitted, flight.blocks_used, num_preempted=flight.num_preempted)
        begins_s, ends_s = float(start_s[0]), float(end_s[-1])
        for sequence in flight.batch.chunks:
            if sequence.first_scheduled_s != sequence.first_scheduled_s:
                sequence.first_scheduled_s = begins_s
        self.virtual_s = max(self.virtual_s, ends_s)
        gaps_s = close_gaps(emitted, ends_s) if monitor is not None else []
        if monitor is None:
            return None
        return monitor(
            Progress(
                now_s=self._now(),
                num_finished=sum(lane.num_finished for lane in self.lanes),
                num_requests=len(self.sequences),
                gaps_s=gaps_s,
            )
        )

    def _blocking_collect(self) -> PipelinedStepResult:
        began_s = perf_counter()
        result = self.executor.collect()
        self.blocked_s += perf_counter() - began_s
        return result
