"""What a study maximises, among the budgets that meet the SLO."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...engine import Workload

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

    def on_noisy_device(self) -> Objective:
        """The same, told apart no finer than a device with noise can tell."""
        return replace(self, resolution=NOISY_CAPACITY_RESOLUTION) if self.resolution else self

    def format(self, value: float) -> str:
        """The value with its unit."""
        return f"{value:,.0f} {self.unit}" if self.metric == THROUGHPUT else f"{value:.3g} {self.unit}"


#: The objective that the traffic decides.
AUTO = "auto"

#: Share by which the two rates differ between which a capacity lies: on a device that repeats itself to the bit, and on
#: one whose runs scatter by more than the finer one could tell.
CAPACITY_RESOLUTION = 0.0025
NOISY_CAPACITY_RESOLUTION = 0.01

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


def resolve_objective(name: str, workload: Workload) -> tuple[Objective, str]:
    """The objective that ``name`` means for the requests of ``workload``, and a sentence that says why.

    ``auto`` is capacity for requests that arrive over time: there the arrivals, not the budget, set the throughput of
    every budget that keeps up. Requests that are all there at once have no rate to raise, so it is throughput.
    """
    if name != AUTO:
        arrivals_limit = name == "throughput" and not workload.saturated
        note = "The objective is as asked."
        if arrivals_limit:
            note = (
                "Requests arrive over time, so where the device keeps up with them the arrivals limit throughput, not "
                "the budget: ask for capacity instead."
            )
        return OBJECTIVES[name], note
    if workload.saturated:
        return OBJECTIVES["throughput"], "Every request is there at once, so the study maximises throughput."
    return (
        OBJECTIVES["capacity"],
        "Requests arrive over time, so the study maximises capacity: the highest rate at which every limit holds.",
    )


def parse_share(name: str, text: str) -> float:
    """A share such as ``1%`` or ``0.01``, at least 0 and below 1. Raises ValueError that names the field ``name``."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(%?)", text.strip())
    share = float(match[1]) / (100.0 if match[2] else 1.0) if match is not None else -1.0
    if not 0.0 <= share < 1.0:
        raise ValueError(f"{name}={text!r}: must be a share of at least 0 and below 1, such as 1% or 0.01")
    return share
