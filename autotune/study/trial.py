"""One engine run of a study: run it, score it, and keep it whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import cast

from ...engine import EngineConfig, Monitor, RunRecord, Workload
from ...engine.metrics import SLO, Metrics, compute_metrics
from ...engine.server.engine import AnyEngine, ServerEngine
from ...engine.slo import sound_stop
from ..scoring.capacity import Capacity, find_capacity
from ..scoring.objective import OBJECTIVES, Objective
from ..scoring.prediction import Prediction
from .device_lock import device_lock
from .space import Candidate

MetricRow = dict[str, float | int | None]

#: Metrics without which a run cannot be scored.
REQUIRED_METRICS = ("total_tokens_per_s", "output_tokens_per_s", "busy_s", "iteration_cv")


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One row of ``trials.parquet``. ``state`` is ``complete``, ``pruned`` or ``failed``; the last two have a
    ``reason``. ``feasible`` is None where the SLO has no data. A pruned row's ``tbt_p99_ms`` is that of the run so far.
    ``max_num_seqs`` is None where the study does not search it. ``round``: of the interleaved repeats. ``score``: the
    objective of a complete run. ``tbt_share``: under capacity, P99 TBT as a share of its limit just above the capacity,
    or at the rate that was asked for. ``busy_rps``: what a budget that does not hold that rate served of it while it
    had work, requests/s. ``violations``: how far over its limit each of ``engine.metrics.LIMITED`` is, as a share of
    the limit.
    """

    run: str
    role: str
    state: str
    reason: str | None
    token_budget: int
    kind: str
    edge_tokens: int | None
    policy: str
    feasible: bool | None
    started_at: str
    elapsed_s: float
    max_num_seqs: int | None = None
    round: int | None = None
    score: float = 0.0
    violations: tuple[float, ...] = ()
    tbt_share: float | None = None
    busy_rps: float | None = None
    tbt_quantiles_ms: tuple[float, ...] = ()
    metrics: MetricRow = field(default_factory=dict)
    predicted_tbt_p99_ms: float | None = None
    predicted_total_tokens_per_s: float | None = None

    @property
    def setting(self) -> tuple[int, int | None, str]:
        """What was run: budget, most sequences where they are searched, policy; see ``SearchSpace.find``."""
        return self.token_budget, self.max_num_seqs, self.policy

    def metric(self, name: str) -> float:
        """A metric by name, NaN where the run has no data for it."""
        value = self.metrics.get(name)
        return math.nan if value is None else float(value)

    def to_row(self) -> dict[str, object]:
        """The flat row, metrics as columns; predictions where the model was asked."""
        row = asdict(self)
        for name in ("max_num_seqs", "predicted_tbt_p99_ms", "predicted_total_tokens_per_s"):
            if row[name] is None:
                del row[name]
        row["tbt_quantiles_ms"] = list(self.tbt_quantiles_ms)
        del row["violations"], row["score"], row["tbt_share"], row["busy_rps"]
        del row["metrics"]
        return row | self.metrics

    @classmethod
    def from_json(cls, row: dict[str, object]) -> TrialRow:
        """The inverse of ``dataclasses.asdict`` after a round through JSON."""
        tuples = {name: tuple(cast(list[float], row[name])) for name in ("violations", "tbt_quantiles_ms")}
        return cls(**{**row, **tuples})  # type: ignore[arg-type]


class TrialRunner:
    """Runs budgets of one study on one engine and turns each run into a row.

    A run that raises, or whose figures are not finite, is a failed row with its reason; it never ends the study.
    ``predictions`` are the latency model's, by budget, for the policy of ``base``. ``workload`` arrives at ``rate_rps``
    requests per second. Under the objective ``capacity`` a run is a search over request rates, and the row is the run
    at the workload's own rate, with the capacity beside; without an ``own_rate`` it is the run at capacity.
    """

    def __init__(
        self,
        engine: AnyEngine,
        workload: Workload,
        base: EngineConfig,
        slo: SLO,
        predictions: Mapping[int, Prediction] | None = None,
        objective: Objective = OBJECTIVES["throughput"],
        *,
        rate_rps: float = 1.0,
        own_rate: bool = False,
    ) -> None:
        self.engine = engine
        self.objective = objective
        self.predictions = predictions or {}
        self.workload = workload
        self.base = base
        self.slo = slo
        self.rate_rps = rate_rps
        self.own_rate = own_rate

    def run(
        self,
        candidate: Candidate,
        *,
        run: str,
        role: str,
        policy: str | None = None,
        prune: bool = False,
        round_number: int | None = None,
        ask_rps: float | None = None,
        near_rps: float | None = None,
    ) -> tuple[TrialRow, RunRecord | None]:
        """Run one budget; with ``prune`` it stops once its SLO cannot be met any more.

        Under ``capacity``, with ``ask_rps`` it is first asked whether it holds the SLO at that rate; where it does not,
        the row is a pruned one with that bound and nothing else. ``near_rps``: its capacity in an earlier run, near
        which the search begins.
        """
        began = perf_counter()
        row = replace(self.failed_row(candidate, run, role, None, policy=policy), round=round_number)
        prediction = self.predictions.get(candidate.token_budget)
        predicted = (self.base.max_num_seqs, self.base.policy)
        if prediction is not None and (row.max_num_seqs or self.base.max_num_seqs, row.policy) == predicted:
            row = replace(
                row,
                predicted_tbt_p99_ms=prediction.tbt_p99_ms,
                predicted_total_tokens_per_s=prediction.total_tokens_per_s,
            )
        record: RunRecord | None = None
        try:
            config = replace(
                self.base,
                token_budget=candidate.token_budget,
                policy=row.policy,
                max_num_seqs=candidate.max_num_seqs or self.base.max_num_seqs,
            )
            with device_lock(self.engine if isinstance(self.engine, ServerEngine) else self.engine.executor):
                if self.objective.name == "capacity":
                    row, record = self._find_capacity(row, config, ask_rps, near_rps)
                else:
                    record = self.engine.run(self.workload, config, monitor=self._monitor() if prune else None)
                    row = self._score(row, record, compute_metrics(record, self.slo), None)
        except Exception as error:  # a failed trial is a result: kept with its reason
            row = replace(row, reason=f"{type(error).__name__}: {error}")
        return replace(row, elapsed_s=perf_counter() - began), record

    def _find_capacity(
        self, row: TrialRow, config: EngineConfig, ask_rps: float | None, near_rps: float | None
    ) -> tuple[TrialRow, RunRecord | None]:
        """The row of a search over rates, and the record that its metrics are of."""
        found = find_capacity(
            self.engine,
            self.workload,
            config,
            self.slo,
            rate_rps=self.rate_rps,
            ask_rps=ask_rps,
            near_rps=near_rps,
            monitor=self._monitor,
            resolution=self.objective.resolution,
        )
        if found.qps is None:
            return self._bounded(row, found), None
        record, metrics = found.record, found.metrics
        if self.own_rate:
            record = self.engine.run(self.workload, config)
            metrics = compute_metrics(record, self.slo)
        row = self._score(row, record, metrics, found.qps)
        above = None if found.above is None else found.above.tbt_at(self.slo.quantile)
        if row.state != "complete":
            return row, record
        bound: MetricRow = {"capacity_at_most_qps": found.at_most_qps}
        share = None if above is None else above / self.slo.tbt_s
        return replace(row, metrics=row.metrics | bound, tbt_share=share), record

    def _bounded(self, row: TrialRow, found: Capacity) -> TrialRow:
        """The row of a budget that does not hold the rate that was asked for."""
        assert found.at_most_qps is not None
        excesses = found.metrics.excesses(self.slo)
        broken = [name.replace("_", " ") for name, excess in excesses.items() if (excess or 0.0) > 0.0]
        why = found.record.stopped or f"{' and '.join(broken)} over the limit"
        violations = [max(excess or 0.0, 0.0) for excess in excesses.values()]
        if not any(violations):
            violations[0] = 1e-6  # stopped before the figures showed it
        tbt_s = found.metrics.tbt_at(self.slo.quantile)
        return replace(
            row,
            state="pruned",
            reason=f"capacity below {found.at_most_qps:.4g} requests/s: {why}",
            feasible=False if self.own_rate and found.at_most_qps <= self.rate_rps else None,
            violations=tuple(violations),
            tbt_share=None if tbt_s is None else tbt_s / self.slo.tbt_s,
            busy_rps=_busy_rps(found.record, self.workload),
            metrics={"capacity_at_most_qps": found.at_most_qps},
        )

    def failed_row(
        self, candidate: Candidate, run: str, role: str, reason: str | None, *, policy: str | None = None
    ) -> TrialRow:
        """The row of a run that did not come to its end, begun now."""
        return TrialRow(
            run=run,
            role=role,
            state="failed",
            reason=reason,
            token_budget=candidate.token_budget,
            kind=candidate.kind,
            edge_tokens=candidate.edge_tokens,
            policy=policy or candidate.policy or self.base.policy,
            max_num_seqs=candidate.max_num_seqs,
            feasible=None,
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            elapsed_s=0.0,
        )

    def _monitor(self) -> Monitor:
        return sound_stop(self.slo, self.workload, self.base)

    def _score(self, row: TrialRow, record: RunRecord, metrics: Metrics, qps: float | None) -> TrialRow:
        """The row of a run; ``qps`` is the capacity, where that was searched for."""
        values = metrics.to_row()
        violations = {name: excess or 0.0 for name, excess in metrics.excesses(self.slo).items()}
        if record.stopped is not None:
            violations = dict.fromkeys(violations, 0.0) | {"tbt": max(violations["tbt"], 1e-6)}
            return replace(
                row,
                state="pruned",
                reason=record.stopped,
                feasible=False,
                violations=tuple(violations.values()),
                metrics={name: values[name] for name in ("tbt_count", "tbt_p99_ms", "num_iterations")},
            )
        broken = [name for name in REQUIRED_METRICS if not math.isfinite(values[name] or 0.0)]
        if broken:
            return replace(row, reason=f"not finite: {', '.join(f'{name}={values[name]}' for name in broken)}")
        if not values["num_finished"]:
            return replace(row, reason="no request finished: all were rejected")
        if qps is not None:
            values["capacity_qps"] = qps
        return replace(
            row,
            state="complete",
            feasible=metrics.feasible(self.slo),
            score=float(values[self.objective.metric] or 0.0),
            violations=tuple(violations.values()),
            tbt_quantiles_ms=tuple(metrics.tbt_quantiles_ms()),
            metrics=values,
        )


def _busy_rps(record: RunRecord, workload: Workload) -> float | None:
    """Requests of the mean length that ``record`` served per second in which it had work; None without iterations. A
    run that was stopped early counts as far as it came."""
    computed = float(record.iterations.num_tokens.sum())
    tokens = sum(one.prompt_tokens + one.output_tokens for one in workload.requests) / len(workload.requests)
    return computed / tokens / record.busy_s if computed and record.busy_s > 0.0 else None


def next_question(rows: Iterable[TrialRow], resolution: float) -> float | None:
    """The rate that the next budget is asked about: the best capacity of ``rows`` and ``resolution``, a share, more;
    requests/s. None where none has a capacity, or it is not what the study is after."""
    found = [row for row in rows if row.metric("capacity_qps") > 0.0]
    if not found:
        return None
    best = max(found, key=lambda row: row.metric("capacity_qps"))
    # Where no rate broke the SLO, the figure is where the asking ended, and nothing is above it.
    bounded = not math.isnan(best.metric("capacity_at_most_qps"))
    return best.metric("capacity_qps") * (1.0 + resolution if bounded else 1.0)


#: Told of every finished run: the row, and how many of how many are done in this phase.
OnTrial = Callable[[TrialRow, int, int], None]
