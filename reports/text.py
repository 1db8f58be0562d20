"""Numbers and names as the report prints them: three significant digits, always with a unit."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isfinite, log10

MAX_DECIMALS = 4
KIND_NAMES = {
    "aligned": "aligned",
    "plus_one": "edge + 1",
    "mid_tile": "mid-tile",
    "whole_prompt": "whole prompt",
}
POLICY_NAMES = {
    "faster_transformer": "FasterTransformer",
    "orca": "Orca",
    "vllm_v0": "vLLM v0",
    "sarathi": "Sarathi",
    "tile_aligned": "tile-aligned",
}
SERVER_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "sarathi": "Sarathi-Serve"}


def significant(value: float, digits: int = 3) -> str:
    """``value`` at ``digits`` significant digits, with thousands separators, never in powers of ten; at most
    ``MAX_DECIMALS`` decimals, so that rounding noise prints as 0."""
    if not isfinite(value):
        return "–"
    if abs(value) < 0.5 * 10**-MAX_DECIMALS:
        return "0"
    decimals = min(digits - 1 - floor(log10(abs(value))), MAX_DECIMALS)
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def milliseconds(value: float | None) -> str:
    """A duration given in ms: ``41.2 ms``, from ten seconds on ``12.3 s``."""
    if value is None or not isfinite(value):
        return "–"
    return f"{significant(value / 1e3)} s" if value >= 10_000 else f"{significant(value)} ms"


def rate(value: float | None) -> str:
    """A throughput without its unit: whole numbers from 100 on."""
    if value is None or not isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else significant(value)


def percent(fraction: float | None, decimals: int | None = None) -> str:
    """A fraction as per cent: at ``decimals``, else one below ten and none from there on; a zero has no sign."""
    if fraction is None or not isfinite(fraction):
        return "–"
    value = 100 * fraction
    if decimals is None:
        decimals = 1 if abs(value) < 9.95 else 0
    return f"{value:z.{decimals}f}%"


def change(fraction: float) -> str:
    """A relative change with its sign: ``+2.0%``, ``−1.5%``. Empty where it rounds to zero: no difference is claimed
    that cannot be read off the figures."""
    amount = percent(abs(fraction))
    return "" if amount == "0.0%" else f"{'−' if fraction < 0 else '+'}{amount}"


def beside_slo(value: float, limit: float, *, inside: str = "under") -> str:
    """Which side of an SLO ``value`` lies on, and how far: ``12% under the SLO``, ``at the SLO``."""
    amount = percent(abs(1 - value / limit))
    if amount == "0.0%":
        return "at the SLO"
    return f"{amount} {inside if value <= limit else 'over'} the SLO"


def seconds(value: float | None) -> str:
    """A duration given in s, printed as ``milliseconds`` does."""
    return milliseconds(None if value is None else 1e3 * value)


def metric_figure(metric: str, value: float | None) -> str:
    """``value`` with the unit that the name of ``metric`` ends in; empty where there is none."""
    if value is None:
        return ""
    if metric.endswith("_ms"):
        return milliseconds(value)
    if metric.endswith("_tokens_per_s"):
        return f"{rate(value)} tokens/s"
    if metric.endswith(("_qps", "_rps", "requests_per_s")):
        return f"{rate(value)} requests/s"
    if metric.endswith("_s"):
        return seconds(value)
    return percent(value) if metric.startswith("bubble_fraction") else significant(value)


def budget_label(token_budget: float | None) -> str:
    """A token budget as an axis or a sentence names it; none is ``unlimited``."""
    return str(int(token_budget)) if token_budget is not None and isfinite(token_budget) else "unlimited"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 trial``, ``2 trials``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listing(items: Sequence[str], limit: int = 6) -> str:
    """``a, b and c``; past ``limit`` the rest is counted."""
    shown = list(items[:limit])
    if len(items) > limit:
        return f"{', '.join(shown)} and {len(items) - limit} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
