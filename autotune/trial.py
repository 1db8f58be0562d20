"""One engine run of a study: run it, score it, and keep it whatever happens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import cast

from ..engine import Engine, EngineConfig, Monitor, RunRecord, Workload
from ..engine.metrics import SLO, compute_metrics
from ..engine.slo import sound_stop
from .device_lock import device_lock
from .prediction import Prediction
from .space import Candidate

MetricRow = dict[str, float | int | None]

#: Metrics without which a run cannot be scored.
REQUIRED_METRICS = ("total_tokens_per_s", "output_tokens_per_s", "busy_s", "iteration_cv")


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One row of ``trials.parquet``. ``state`` is ``complete``, ``pruned`` or ``failed``; the last two have a
    ``reason``. ``feasible`` is None where the SLO has no data. A pruned row's ``tbt_p99_ms`` is that of the run so far.
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
    violations: tuple[float, ...] = ()
    tbt_quantiles_ms: tuple[float, ...] = ()
    metrics: MetricRow = field(default_factory=dict)
    predicted_tbt_p99_ms: float | None = None
    predicted_total_tokens_per_s: float | None = None

    def metric(self, name: str) -> float:
        """A metric by name, NaN where the run has no data for it."""
        value = self.metrics.get(name)
        return math.nan if value is None else float(value)

    def to_row(self) -> dict[str, object]:
        """The flat row, metrics as columns; predictions where the model was asked."""
        row = asdict(self)
        for name in ("predicted_tbt_p99_ms", "predicted_total_tokens_per_s"):
            if row[name] is None:
                del row[name]
        row["tbt_quantiles_ms"] = list(self.tbt_quantiles_ms)
        del row["violations"]
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
    ``predictions`` are the latency model's, by budget, for the policy of ``base``.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        base: EngineConfig,
        slo: SLO,
        predictions: Mapping[int, Prediction] | None = None,
    ) -> None:
        self.engine = engine
        self.predictions = predictions or {}
        self.workload = workload
        self.base = base
        self.slo = slo

    def run(
        self, candidate: Candidate, *, run: str, role: str, policy: str | None = None, prune: bool = False
    ) -> tuple[TrialRow, RunRecord | None]:
        """Run one budget; with ``prune`` it stops once its SLO cannot be met any more."""
        began = perf_counter()
        row = self.failed_row(candidate, run, role, None, policy=policy)
        prediction = self.predictions.get(candidate.token_budget)
        if prediction is not None and row.policy == self.base.policy:
            row = replace(
                row,
                predicted_tbt_p99_ms=prediction.tbt_p99_ms,
                predicted_total_tokens_per_s=prediction.total_tokens_per_s,
            )
        record: RunRecord | None = None
        try:
            config = replace(self.base, token_budget=candidate.token_budget, policy=row.policy)
            with device_lock(self.engine.executor):
                record = self.engine.run(self.workload, config, monitor=self._monitor() if prune else None)
            row = self._score(row, record)
        except Exception as error:  # a failed trial is a result: kept with its reason
            row = replace(row, reason=f"{type(error).__name__}: {error}")
        return replace(row, elapsed_s=perf_counter() - began), record

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
            policy=policy or self.base.policy,
            feasible=None,
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            elapsed_s=0.0,
        )

    def _monitor(self) -> Monitor:
        return sound_stop(self.slo, self.workload, self.base)

    def _score(self, row: TrialRow, record: RunRecord) -> TrialRow:
        metrics = compute_metrics(record, self.slo)
        values = metrics.to_row()
        if record.stopped is not None:
            return replace(
                row,
                state="pruned",
                reason=record.stopped,
                feasible=False,
                violations=(max(_excess(values["tbt_p99_ms"], self.slo.tbt_s * 1e3), 1e-6), 0.0),
                metrics={name: values[name] for name in ("tbt_count", "tbt_p99_ms", "num_iterations")},
            )
        broken = [name for name in REQUIRED_METRICS if not math.isfinite(values[name] or 0.0)]
        if broken:
            return replace(row, reason=f"not finite: {', '.join(f'{name}={values[name]}' for name in broken)}")
        if not values["num_finished"]:
            return replace(row, reason="no request finished: all were rejected")
        delay_limit_s = None if record.saturated else self.slo.max_scheduling_delay_s
        return replace(
            row,
            state="complete",
            feasible=metrics.feasible(self.slo),
            violations=(
                _excess(values["tbt_p99_ms"], self.slo.tbt_s * 1e3),
                0.0 if delay_limit_s is None else _excess(values["scheduling_delay_p50_ms"], delay_limit_s * 1e3),
            ),
            tbt_quantiles_ms=tuple(metrics.tbt_quantiles_ms()),
            metrics=values,
        )


def _excess(value: float | int | None, limit: float) -> float:
    """How far over its limit a figure is, as a share of the limit; 0 where there is no data."""
    return 0.0 if value is None else float(value) / limit - 1.0


#: Told of every finished run: the row, and how many of how many are done in this phase.
OnTrial = Callable[[TrialRow, int, int], None]
