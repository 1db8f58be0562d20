"""The recommendation card: its four figures with their spread, its words, and the launch commands."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .data.answer import Answer, Estimate
from .text import SERVER_NAMES, milliseconds, percent, rate, significant


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One expected figure of the card, with its spread and a line of context."""

    title: str
    value: str
    unit: str
    spread: str
    context: str


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A server's command line, cut before each flag so that a line breaks there; joined it is unchanged. ``flags`` is
    what ``tilebudget show`` prints for it, empty where the file has none."""

    server: str
    parts: tuple[str, ...]
    flags: str


def launches(answer: Answer) -> list[Launch]:
    """The launch commands of the recommendation."""
    return [
        Launch(
            server=SERVER_NAMES.get(name, name),
            parts=tuple(re.split(r"(\s+)(?=-)", command)),
            flags=answer.flags.get(name, ""),
        )
        for name, command in answer.launch.items()
    ]


def tiles(answer: Answer) -> list[Tile]:
    """The four figures of the card: P50 and P99 TBT, throughput, bubbles."""
    expected, slo_ms = answer.expected, answer.slo.tbt_p99_ms
    p99 = expected.get("tbt_p99_ms")
    versus = ""
    if p99 and slo_ms:
        versus = f"{percent(abs(1 - p99.value / slo_ms))} {'under' if p99.value <= slo_ms else 'over'} the SLO"
    largest = expected.get("tbt_max_ms")
    output = expected.get("output_tokens_per_s")
    cv = expected.get("iteration_cv")
    stages = answer.bubble_stages
    return [
        _tile("P99 time between tokens", "ms", p99, 1.0, versus),
        _tile(
            "Median time between tokens",
            "ms",
            expected.get("tbt_p50_ms"),
            1.0,
            f"largest {milliseconds(largest.value)}" if largest else "",
        ),
        _tile(
            "Throughput",
            "tokens/s",
            expected.get("total_tokens_per_s"),
            1.0,
            f"of which output {rate(output.value)}" if output else "",
        ),
        _tile(
            f"Pipeline bubbles, {stages} stages",
            "%",
            expected.get(answer.bubble_metric),
            100.0,
            f"iteration CV {cv.value:.2f}" if cv else "",
        ),
    ]


def _tile(title: str, unit: str, estimate: Estimate | None, scale: float, context: str) -> Tile:
    if estimate is None:
        return Tile(title=title, value="no data", unit="", spread="", context=context)
    form = rate if unit == "tokens/s" else significant
    spread = "one run, no spread"
    if estimate.low is not None and estimate.high is not None and estimate.repeats > 1:
        spread = f"{form(estimate.low * scale)} to {form(estimate.high * scale)} over {estimate.repeats} runs"
    return Tile(title=title, value=form(estimate.value * scale), unit=unit, spread=spread, context=context)


def lead(answer: Answer) -> tuple[str, str]:
    """The verdict's opening, set large, and the rest: a first sentence shorter than a line takes the next with it.

    Confidence and what changes the budget have their own places on the card, so the verdict's words on them are left
    out."""
    stated = answer.stated_confidence
    elsewhere = [item.statement for item in answer.sensitivity]
    if stated is not None:
        elsewhere.append(f"Confidence: {stated.level}. {stated.statement}")
    verdict = answer.verdict
    for words in elsewhere:
        verdict = verdict.replace(words, "") if words else verdict
    verdict = " ".join(verdict.split())
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", verdict)
    opening = 2 if len(sentences) > 1 and len(sentences[0]) < 40 else 1
    return " ".join(sentences[:opening]), " ".join(sentences[opening:])
