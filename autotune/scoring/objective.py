"""What a study maximises, among the budgets that meet the SLO."""

from __future__ import annotations

from dataclasses import dataclass

THROUGHPUT = "total_tokens_per_s"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """``metric`` is its column in ``trials.parquet``. Figures of one run that differ by no more than ``resolution``, a
    share, are the same: what the measurement itself cannot tell apart."""

    name: str
    metric: str
    noun: str
    unit: str
    resolution: float = 0.0

    def format(self, value: float) -> str:
        """The value with its unit."""
        return f"{value:,.0f} {self.unit}" if self.metric == THROUGHPUT else f"{value:.3g} {self.unit}"


#: Share by which the two rates differ between which a capacity lies.
CAPACITY_RESOLUTION = 0.02

OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective(name="throughput", metric=THROUGHPUT, noun="throughput", unit="tokens/s"),
        Objective(
            name="capacity",
            metric="capacity_qps",
            noun="capacity",
            unit="requests/s",
            resolution=CAPACITY_RESOLUTION,
        ),
        Objective(name="goodput", metric="goodput_requests_per_s", noun="goodput", unit="requests/s within every SLO"),
    )
}
