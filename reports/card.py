"""The recommendation card: its figures with their spread, its words, and the launch commands."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .data.answer import Answer, Estimate
from .text import SERVER_NAMES, beside_slo, budget_label, listing, metric_figure, milliseconds, rate, significant


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
    """The figures of the card: capacity where it was maximised, P99 TBT and TTFT, throughput, bubbles."""
    output, cv = answer.value("output_tokens_per_s"), answer.value("iteration_cv")
    capacity = answer.estimate("capacity_qps") if answer.objective == "capacity" else None
    return [
        *(
            [_tile("Capacity", "requests/s", capacity, 1.0, _times_own_rate(answer, capacity.value))]
            if capacity
            else ()
        ),
        _latency_tile(answer, "time between tokens", "tbt", answer.slo.tbt_p99_ms),
        _latency_tile(
            answer, "time to first token", "ttft", answer.slo.ttft_ms if answer.slo.ttft_quantile == 0.99 else None
        ),
        _tile(
            "Throughput at your rate" if answer.own_rate_rps else "Throughput",
            "tokens/s",
            answer.estimate("total_tokens_per_s"),
            1.0,
            f"of which output {rate(output)}" if output is not None else "",
        ),
        _tile(
            f"Pipeline bubbles, {answer.bubble_stages} stages",
            "%",
            answer.estimate(answer.bubble_metric),
            100.0,
            f"iteration CV {cv:.2f}" if cv is not None else "",
        ),
    ]


def _latency_tile(answer: Answer, name: str, metric: str, limit_ms: float | None) -> Tile:
    """The P99 with its side of the limit and its median; the median alone in files that have no P99."""
    p99, p50 = answer.estimate(f"{metric}_p99_ms"), answer.estimate(f"{metric}_p50_ms")
    if p99 is None and p50 is not None:
        return _milliseconds_tile(f"Median {name}", p50, "")
    context = [beside_slo(p99.value, limit_ms)] if p99 and limit_ms else []
    context += [f"median {milliseconds(p50.value)}"] if p50 else []
    return _milliseconds_tile(f"P99 {name}", p99, "; ".join(context))


def _milliseconds_tile(title: str, estimate: Estimate | None, context: str) -> Tile:
    long = estimate is not None and estimate.value >= 10_000
    return _tile(title, "s" if long else "ms", estimate, 1e-3 if long else 1.0, context)


def _times_own_rate(answer: Answer, capacity_rps: float) -> str:
    own = answer.own_rate_rps
    return f"{capacity_rps / own:.1f} times your rate of {rate(own)}" if own else ""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why this budget: what decided, in a sentence, and the figures on both sides."""

    rule: str
    statement: str
    figures: str


RULES = {
    "objective": "the objective decided",
    "ttft_p99": "P99 time to first token decided",
    "tbt_p99": "P99 time between tokens decided",
    "bubble_fraction": "pipeline bubbles decided",
    "smaller_budget": "equal in all, so the smaller",
    "only_one": "the only one",
}


def reason(answer: Answer) -> Reason | None:
    """The step of the rule that decided; None in files that do not say."""
    decision = answer.decision
    if decision is None:
        return None
    own, other = metric_figure(decision.metric, decision.chosen), metric_figure(decision.metric, decision.other)
    sides = ""
    if own != other and own and other and decision.over is not None:
        chosen, over = budget_label(answer.token_budget), budget_label(decision.over)
        sides = f"{chosen} has {own}, {over} has {other}."
    group = [budget_label(budget) for budget in decision.group]
    equals = f"Counted as equal before that: {listing(group, 12)}." if len(group) > 1 else ""
    return Reason(
        rule=RULES.get(decision.rule, decision.rule.replace("_", " ")),
        statement=decision.statement,
        figures=" ".join(part for part in (sides, equals) if part),
    )


def _tile(title: str, unit: str, estimate: Estimate | None, scale: float, context: str) -> Tile:
    if estimate is None:
        return Tile(title=title, value="no data", unit="", spread="", context=context)
    form = rate if unit in ("tokens/s", "requests/s") else significant
    spread = "one run, no spread"
    if estimate.low is not None and estimate.high is not None and estimate.repeats > 1:
        spread = f"{form(estimate.low * scale)} to {form(estimate.high * scale)} over {estimate.repeats} runs"
    return Tile(title=title, value=form(estimate.value * scale), unit=unit, spread=spread, context=context)


def lead(answer: Answer) -> tuple[str, str]:
    """The verdict's opening, set large, and the rest: a first sentence shorter than a line takes the next with it.

    Confidence, the objective, what decided and what changes the budget have their own places, so the verdict's words
    on them are left out."""
    stated = answer.stated_confidence
    elsewhere = [item.statement for item in answer.sensitivity] + [answer.objective_note]
    if answer.decision is not None:
        elsewhere.append(answer.decision.statement)
    if stated is not None:
        elsewhere.append(f"Confidence: {stated.level}. {stated.statement}")
    verdict = answer.verdict
    for words in elsewhere:
        verdict = verdict.replace(words, "") if words else verdict
    verdict = " ".join((verdict.strip() or answer.verdict).split())
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", verdict)
    opening = 2 if len(sentences) > 1 and len(sentences[0]) < 40 else 1
    return " ".join(sentences[:opening]), " ".join(sentences[opening:])
