"""What the latency model expects of one budget's run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """P99 TBT (None where no request has a second token), throughput, the study's objective (``score``), and whether
    the SLO is expected to hold."""

    token_budget: int
    tbt_p99_ms: float | None
    total_tokens_per_s: float
    feasible: bool
    score: float
