"""The recommendation in plain words, every number from the runs it speaks of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...engine.metrics import LIMITED, QUANTILE_FIELDS, SLO
from ...kernels.latency.step_curve import StepCurve
from ...kernels.latency.sweep import FOUR_GEMMS, SOURCES
from ...kernels.latency.table import LatencyTable
from ..scoring.objective import THROUGHPUT, Objective
from ..scoring.selection import TELLING_SHARE, Choice, Contender, Judge, Spread, chunking_buys_nothing
from ..study.space import SearchSpace


def write_verdict(
    choice: Choice,
    contenders: Sequence[Contender],
    space: SearchSpace,
    slo: SLO,
    judge: Judge,
    table: LatencyTable | None = None,
) -> str:
    """Two to six sentences: what to set, how it does against the SLO, ties, the edge, and what chunking buys; with
    the ``table`` that modelled the runs, what one more token costs on it."""
    best = choice.best
    if best is None:
        return "Every run failed, so there is nothing to recommend; the trials list their reasons."
    budget = best.candidate.token_budget
    tbt, limit_ms = best.spread("tbt_p99_ms"), slo.tbt_s * 1e3
    speed = best.spread(THROUGHPUT)
    sentences: list[str] = []
    if choice.status == "infeasible":
        over = "has no data" if tbt is None else f"is {tbt.value:.3g} ms, {tbt.value / limit_ms:.2f}x the SLO"
        sentences.append(
            f"No budget meets the SLO of {limit_ms:.3g} ms P99 TBT ({slo.name}). The closest is {budget} tokens"
            f"{_settings(best, 'at')}: its "
            f"P99 TBT {over}{_breaches(best, slo)}."
        )
    elif choice.status == "no_data":
        sentences.append(
            f"No request generates a second token, so there is no TBT and the SLO has no data. By throughput alone the "
            f"budget is {budget} tokens{_settings(best, 'at')}."
        )
    elif tbt is not None:
        sentences.append(
            f"Set the token budget to {budget}{_settings(best, 'with')}. P99 TBT is {tbt.value:.3g} ms{_range(tbt)} "
            f"against an SLO of {limit_ms:.3g} ms."
        )
    if choice.status != "no_data":
        sentences += _latencies(best, slo)
    score = best.spread(judge.objective.metric)
    if score is not None and judge.objective.metric != THROUGHPUT:
        low_high = f" ({score.low:.3g} to {score.high:.3g})" if score.repeats > 1 else ""
        sentences.append(f"{judge.objective.noun.capitalize()} is {judge.objective.format(score.value)}{low_high}.")
    if speed is not None:
        low_high = f" ({speed.low:,.0f} to {speed.high:,.0f})" if speed.repeats > 1 else ""
        where = " at the traffic's own rate" if judge.objective.name == "capacity" else ""
        sentences.append(f"Throughput{where} is {speed.value:,.0f} tokens/s{low_high}.")
    if choice.decision is not None:
        sentences.append(describe_decision(choice, judge.objective))
    sentences += [sentence for sentence in (_edge_sentence(judge, best, contenders, space),) if sentence]
    if table is not None:
        sentences.append(staircase_sentence(table, budget))
    whole = chunking_buys_nothing(judge, contenders, best, space.whole_prompt_tokens)
    if whole is not None and choice.status != "infeasible":
        sentences.append(
            f"Chunking buys nothing here: whole prompts (budget {whole.candidate.token_budget}) are as fast"
            + (" and there is no decode to protect." if choice.status == "no_data" else " and keep the SLO.")
        )
    return " ".join(sentences)


def staircase_sentence(table: LatencyTable, budget: int) -> str:
    """What one more token than ``budget`` costs on the table that modelled the runs, and where that figure is from."""
    here_ms, next_ms = table.tokens_ms([budget, budget + 1]).tolist()
    curves = [curve for curve in table.layer_ops if curve.op in FOUR_GEMMS] or table.layer_ops
    sources = {curve.source_at(budget + 1) for curve in curves}
    beyond = any(bool(curve.extrapolated(budget + 1)[0]) for curve in curves)
    worst = max(sources, key=SOURCES.index) if sources else "table"
    origin = f"{table.origin.get('framework', '')} {table.origin.get('version', '')}".strip()
    note = {"transferred": ", in part transferred from neighbouring shapes"}.get(worst, "")
    note += ", extrapolated here" if beyond else _interpolated(curves, budget)
    return (
        f"The staircase measured on {table.device} ({origin}{note}) prices "
        f"one more token: the token-wise layers of one iteration take {here_ms:.3g} ms at {budget} tokens and "
        f"{next_ms:.3g} ms at {budget + 1} ({next_ms / here_ms - 1.0:+.1%}), that is {budget / here_ms:.0f} and "
        f"{(budget + 1) / next_ms:.0f} tokens per ms. Every figure is modelled from it: a repeat gives the same again."
    )


def _interpolated(curves: Sequence[StepCurve], budget: int) -> str:
    """Between which measured counts, where not every layer was measured at ``budget`` and one token more."""
    counts = next((c.tokens for c in curves if not np.isin([budget, budget + 1], c.tokens).all()), None)
    if counts is None:
        return ""
    below, above = counts[counts <= budget], counts[counts > budget]
    return f", interpolated here between {below.max()} and {above.min()} tokens" if below.size and above.size else ""


def _settings(best: Contender, preposition: str) -> str:
    """What else was searched, as it was chosen."""
    candidate = best.candidate
    found = (("max_num_seqs", candidate.max_num_seqs), ("policy", candidate.policy))
    words = " and ".join(f"{name} {value}" for name, value in found if value is not None)
    return f" {preposition} {words}" if words else ""


def _latencies(best: Contender, slo: SLO) -> list[str]:
    """How it does against the limits on TTFT and E2E, where there are any."""
    sentences = []
    for name, limit in (("ttft", slo.ttft), ("e2e", slo.e2e)):
        spread = None if limit is None else best.spread(f"{name}_{QUANTILE_FIELDS[limit.quantile]}_ms")
        if limit is not None and spread is not None:
            sentences.append(
                f"P{limit.quantile * 100:g} {name.upper()} is {spread.value:,.4g} ms{_range(spread)} against a limit "
                f"of {limit.limit_s * 1e3:,.4g} ms."
            )
    return sentences


def _breaches(best: Contender, slo: SLO) -> str:
    """That the queue is over its limit, where P99 TBT alone would look feasible."""
    delay = best.spread("scheduling_delay_p50_ms")
    limit_s = slo.max_scheduling_delay_s
    excess = max((row.violations[1] for row in best.rows if len(row.violations) > 1), default=0.0)
    if delay is None or limit_s is None or excess <= 0.0:
        return ""
    return f", and its median scheduling delay {delay.value / 1e3:.3g} s against {limit_s:g} s"


def _range(spread: Spread) -> str:
    """The range over repeats; nothing for a single run."""
    if spread.repeats < 2:
        return ""
    return f" ({spread.low:.3g} to {spread.high:.3g} over {spread.repeats} repeats)"


def describe_alternative(contender: Contender, choice: Choice, slo: SLO, objective: Objective) -> str:
    """Why a measured budget was not chosen."""
    best = choice.best
    if best is None or not contender.rows:
        return "every repeat failed"
    if choice.status != "infeasible" and contender.feasible is False:
        tbt = contender.spread("tbt_p99_ms")
        if tbt is not None and tbt.high > slo.tbt_s * 1e3:
            return f"breaks the SLO: P99 TBT up to {tbt.high:.3g} ms"
        worst = [max(values) for values in zip(*(row.violations for row in contender.rows), strict=True)]
        broken = [name.replace("_", " ") for name, excess in zip(LIMITED, worst, strict=False) if excess > 0.0]
        return f"breaks the SLO: {' and '.join(broken) or 'a limit'} over the limit"
    at_most = contender.spread("capacity_at_most_qps")
    if contender.spread("capacity_qps") is None and at_most is not None:
        why = (contender.rows[0].reason or "").partition(": ")[2].partition(": ")[0]
        return f"serves less than {objective.format(at_most.value)} within the SLO: {why} there"
    if choice.status == "infeasible":
        return "further from the SLO"
    if contender.candidate in choice.ties:
        return f"equal in {objective.noun}; {_tie_break(contender, best)}"
    mine, theirs = contender.spread(objective.metric), best.spread(objective.metric)
    if mine is None or theirs is None or not theirs.value > 0.0:
        return f"no {objective.noun} figure"
    change = mine.value / theirs.value - 1.0
    amount = f"equal in {objective.noun}" if abs(change) < 5e-4 else f"{change:+.1%} {objective.noun}"
    if contender.rows[0].role == "search" and change >= 0.0:
        return f"{amount} in its one run, too little to be repeated"
    if change >= 0.0:
        return f"{amount}, but its iterations are less even"
    return amount


def describe_decision(choice: Choice, objective: Objective) -> str:
    """The rule that set the chosen budget apart, with the figures of both sides."""
    made, best = choice.decision, choice.best
    if made is None or best is None:
        return ""
    budget = best.candidate.token_budget
    if made.rule == "only_one":
        return f"No other budget that was compared meets the SLO, so {budget} is the choice."
    others = [str(one) for one in made.group if one != budget]
    equal = f"{objective.noun.capitalize()} is the same, within what counts, at {' and '.join(others)} tokens: "
    if made.rule == "smaller_budget":
        return f"{equal}nothing tells them apart, so the choice is the smaller budget, {budget}."
    if made.chosen is None or made.other is None or made.metric is None:
        return ""
    if made.rule == "objective":
        return (
            f"The {objective.noun} decided: {objective.format(made.chosen)} against {objective.format(made.other)} at "
            f"{made.over}, the best of the others that were measured to the end."
        )
    name, form = _TIE_BREAKS.get(made.metric, ("pipeline bubble fraction", _percent))
    return f"{equal}{name} decided, {form(made.chosen)} against {form(made.other)} at {made.over}."


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _ms(value: float) -> str:
    return f"{value:.4g} ms"


#: What decides among budgets that are equal in the objective, in words; anything else is a bubble fraction.
_TIE_BREAKS = {"ttft_p99_ms": ("P99 TTFT", _ms), "tbt_p99_ms": ("P99 TBT", _ms)}


def _tie_break(contender: Contender, best: Contender) -> str:
    """Why ``best`` was taken and not its equal: the first figure of the rule that differs by what counts."""
    for metric, (name, form) in _TIE_BREAKS.items():
        mine, theirs = contender.spread(metric), best.spread(metric)
        if mine and theirs and mine.value > (1.0 + TELLING_SHARE) * theirs.value:
            return f"{name} {form(mine.value)} against {form(theirs.value)}"
    return "the choice falls to steadier iterations, then to the smaller budget"


def _edge_sentence(judge: Judge, best: Contender, contenders: Sequence[Contender], space: SearchSpace) -> str | None:
    """What crossing the edge beside the chosen budget costs, from interleaved repeats of both sides."""
    partner_candidate = space.partner(best.candidate)
    partner = next((c for c in contenders if c.candidate == partner_candidate and c.rows), None)
    if partner is None:
        return None
    aligned, past = (best, partner) if best.candidate.kind == "aligned" else (partner, best)
    if aligned.spread(THROUGHPUT) is None or past.spread(THROUGHPUT) is None:
        return None
    found = judge.compare(past, aligned, THROUGHPUT)
    pair = f"{past.candidate.token_budget} instead of {aligned.candidate.token_budget} tokens"
    if found.outcome in ("tie", "open"):
        return f"Crossing the edge ({pair}) makes no difference beyond the noise on this device."
    return f"Crossing the edge ({pair}) changes throughput by {found.difference:+.1%}."
