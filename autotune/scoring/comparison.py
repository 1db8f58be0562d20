"""Which of two settings is better, from runs of both in the same rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

#: A difference of no more than this share is a tie when it lies inside the range of the rounds, even where the pairing
#: shows it: nobody runs a larger budget for it.
TIE_MARGIN = 0.01

#: Student's t at 97.5%, by degrees of freedom from 1 on; more of them than listed take the last, which is cautious.
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)

PAIRED_TEST = "paired t-test of the rounds, two-sided, 95%"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How much higher the first of two is, as a share of the second: the mean over ``num_pairs`` rounds and its 95%
    confidence interval. ``outcome``: ``higher`` or ``lower`` (shown, and by more than ``TIE_MARGIN`` or than the rounds
    scatter), ``tie`` (shown to be less), or ``open`` (neither is shown)."""

    outcome: str
    difference: float
    low: float
    high: float
    num_pairs: int


def compare(
    one: Mapping[int, float], other: Mapping[int, float], *, exact: bool = False, resolution: float = 0.0
) -> Comparison:
    """Compare two settings by their figures in the rounds that both ran, with Student's paired t-test.

    Within a round both serve the same requests on the same machine within minutes, so what a round did to both falls
    out of the difference. ``exact``: the device repeats itself to the bit, so one round decides; differences up to
    ``resolution`` are a tie then. Without a common round, or with one on a device with noise, the outcome is open.
    """
    rounds = sorted(one.keys() & other.keys())
    scale = fmean([abs(other[number]) for number in rounds]) if rounds else 0.0
    if not rounds:
        return Comparison(outcome="open", difference=math.nan, low=-math.inf, high=math.inf, num_pairs=0)
    changes = [(one[number] - other[number]) / (scale or 1.0) for number in rounds]
    difference = fmean(changes)
    if exact:
        outcome = "tie" if abs(difference) <= resolution else _side(difference)
        return Comparison(
            outcome=outcome, difference=difference, low=difference, high=difference, num_pairs=len(rounds)
        )
    half = math.inf
    if len(changes) > 1:
        half = _T975[min(len(changes) - 1, len(_T975)) - 1] * stdev(changes) / math.sqrt(len(changes))
    low, high = difference - half, difference + half
    margin = max(TIE_MARGIN, resolution)
    shown = low > 0.0 or high < 0.0
    small = abs(difference) <= margin and _overlap([one[n] for n in rounds], [other[n] for n in rounds])
    tie = small if shown else max(-low, high) <= margin
    outcome = "tie" if tie else _side(difference) if shown else "open"
    return Comparison(outcome=outcome, difference=difference, low=low, high=high, num_pairs=len(rounds))


def _side(difference: float) -> str:
    return "higher" if difference > 0.0 else "lower"


def _overlap(one: list[float], other: list[float]) -> bool:
    return min(one) <= max(other) and min(other) <= max(one)
