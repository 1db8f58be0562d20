"""The sentences of the report: each states what the data of one run folder show, with the figures it rests on."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from .budgets.trials import at_recommended, edge_penalty, highest, lowest, noise_fraction
from .data.answer import Answer, Estimate
from .data.run_folder import RunFolder
from .text import beside_slo, change, count, listing, milliseconds, percent, rate, significant

#: A largest gap this many times the P99 is called a stall that the P99 hides.
STALL_RATIO = 3.0


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """How sure the recommendation is: a word, and the reasons for it."""

    level: str
    reasons: str


def judge_confidence(answer: Answer) -> Confidence:
    """High: at least three repeats, all inside the SLO, throughput within ±5%. Moderate: at least two repeats, all
    inside. Low: everything else, no TBT data included. Repeats on a modelled clock are identical and measure no
    noise: never more than moderate. Where the study states its own confidence, that is the word."""
    stated = answer.stated_confidence
    if stated is not None and stated.level:
        return Confidence(level=stated.level, reasons=stated.statement)
    tbt = answer.expected.get("tbt_p99_ms")
    throughput = answer.expected.get("total_tokens_per_s")
    anything = tbt or throughput
    if anything is None:
        return Confidence(level="none", reasons="Nothing was measured for a recommendation.")
    identical = _identical(anything) and (throughput is None or _identical(throughput))
    reasons = [_repeat_reason(anything, throughput, identical=identical)]
    limit_ms = answer.slo.tbt_p99_ms
    inside = False
    if tbt and limit_ms:
        worst_ms = tbt.high if tbt.high is not None else tbt.value
        inside = worst_ms <= limit_ms
        side = beside_slo(worst_ms, limit_ms, inside="inside")
        reasons.append(f"The highest P99 TBT, {milliseconds(worst_ms)}, is {side}.")
    ties = [item.label for item in answer.alternatives if item.tie]
    if ties:
        reasons.append(f"The difference to {listing(ties)} is inside the spread: a tie.")
    noise = throughput.half_spread if throughput else 0.0
    level = "low"
    if inside and anything.repeats >= 2:
        level = "high" if anything.repeats >= 3 and noise <= 0.05 and not identical else "moderate"
    return Confidence(level=level, reasons=" ".join(reasons))


def _identical(estimate: Estimate) -> bool:
    return estimate.repeats > 1 and estimate.low == estimate.high


def _repeat_reason(measured: Estimate, throughput: Estimate | None, *, identical: bool) -> str:
    if measured.repeats < 2:
        return "Measured once, so there is no spread to judge a difference by."
    if identical:
        return f"{measured.repeats} identical repeats, as on a modelled clock: they say nothing about noise."
    spread = f", throughput within ±{percent(max(throughput.half_spread, 0.001))}" if throughput else ""
    return f"Measured {measured.repeats} times{spread}."


def budget_finding(folder: RunFolder, budgets: pd.DataFrame) -> str:
    """What the budgets differ in: where the SLO ends, and what a token past an edge costs."""
    search = at_recommended(folder.search, folder.answer)
    stopped = search[search["state"] == "pruned"]["token_budget"]
    num_stopped = stopped[~stopped.isin(budgets["token_budget"])].nunique()
    return " ".join(
        part for part in (_slo_sentence(folder.answer, budgets, num_stopped), _edge_sentence(budgets)) if part
    )


def _slo_sentence(answer: Answer, budgets: pd.DataFrame, num_stopped: int) -> str:
    limit_ms = answer.slo.tbt_p99_ms
    chosen = budgets[budgets["recommended"]]
    if budgets["tbt_p99_ms"].isna().all():
        fastest = highest(budgets, "total_tokens_per_s")
        return (
            "No request has a time between tokens, so the SLO has no data; "
            f"budget {fastest['label']} is fastest at {rate(fastest['total_tokens_per_s'])} tokens/s."
        )
    if chosen.empty:
        best = lowest(budgets, "tbt_p99_ms")
        return f"The lowest P99 TBT is {milliseconds(best['tbt_p99_ms'])}, at budget {best['label']}."
    row = chosen.iloc[0]
    if not limit_ms:
        return f"Budget {row['label']} gives a P99 TBT of {milliseconds(row['tbt_p99_ms'])}; no SLO was set."
    side = beside_slo(row["tbt_p99_ms"], limit_ms)
    if answer.status == "infeasible":
        return (
            f"No budget meets the SLO of {milliseconds(limit_ms)}: the closest, {row['label']}, has a P99 TBT of "
            f"{milliseconds(row['tbt_p99_ms'])}, {side.replace('the SLO', 'it')}."
        )
    missed = budgets[budgets["feasible"].isin([False])]
    if missed.empty:
        boundary = f"all {count(len(budgets), 'budget')} that ran to the end meet it"
    else:
        first = missed.iloc[0]
        boundary = (
            f"{len(missed)} of {count(len(budgets), 'budget')} miss it, the smallest of them {first['label']} "
            f"({milliseconds(first['tbt_p99_ms'])})"
        )
    return (
        f"Budget {row['label']} holds P99 TBT at {milliseconds(row['tbt_p99_ms'])}, {side} of "
        f"{milliseconds(limit_ms)}; {boundary}"
        + (f", and {num_stopped} more were stopped early." if num_stopped else ".")
    )


def _edge_sentence(budgets: pd.DataFrame) -> str:
    penalty = edge_penalty(budgets, "total_tokens_per_s")
    if penalty is None:
        return ""
    slowdown, pairs = penalty
    over = f"(median of {count(pairs, 'pair')})"
    amount = change(slowdown)
    if not amount:
        return f"One token past an edge leaves throughput as it is {over}."
    sentence = f"One token past an edge changes throughput by {amount} {over}"
    noise = noise_fraction(budgets, "total_tokens_per_s")
    if noise is None:
        return f"{sentence}, but nothing was repeated, so no gain is claimed."
    if abs(slowdown) <= noise:
        return f"{sentence}, inside the ±{percent(noise)} spread of the repeats: a tie."
    return f"{sentence}, outside the ±{percent(noise)} spread of the repeats."


def tail_finding(folder: RunFolder, rows: pd.DataFrame) -> str:
    """Whether a single long gap stands above the P99 of any budget."""
    ratios = rows["tbt_max_ms"] / rows["tbt_p99_ms"]
    stalled = rows[ratios >= STALL_RATIO]
    if stalled.empty:
        first, last = rows.iloc[0], rows.iloc[-1]
        grows = (
            f"From budget {first['label']} to {last['label']} P99 goes from {milliseconds(first['tbt_p99_ms'])} to "
            f"{milliseconds(last['tbt_p99_ms'])} and the median from {milliseconds(first['tbt_p50_ms'])} to "
            f"{milliseconds(last['tbt_p50_ms'])}"
            if len(rows) > 1
            else f"Budget {first['label']} has a median of {milliseconds(first['tbt_p50_ms'])} and a P99 of "
            f"{milliseconds(first['tbt_p99_ms'])}"
        )
        times = significant(float(ratios.max()), 2)
        return f"{grows}; no gap is longer than {times} times its budget's P99."
    worst = highest(stalled.assign(ratio=ratios), "ratio")
    chosen = stalled[stalled["recommended"]]
    shown = chosen.iloc[0] if len(chosen) else worst
    others = f" {len(stalled)} of {len(rows)} budgets have such a gap" if len(rows) > 1 else ""
    if others:
        spared = rows[rows["recommended"] & ~rows["label"].isin(stalled["label"])]
        others += f", the recommended {spared.iloc[0]['label']} does not." if len(spared) else "."
    return (
        f"At budget {shown['label']} the longest gap is {milliseconds(shown['tbt_max_ms'])}, "
        f"{significant(shown['tbt_max_ms'] / shown['tbt_p99_ms'], 2)} times the P99 of "
        f"{milliseconds(shown['tbt_p99_ms'])}: a stall that the P99 does not show.{others}"
    )


def pipeline_finding(folder: RunFolder, budgets: pd.DataFrame) -> str:
    """Which budgets keep the pipeline fullest, and whether the difference is more than noise."""
    metric = folder.answer.bubble_metric
    rows = budgets[budgets[metric].notna()]
    if rows.empty:
        return "No trial carries a bubble fraction for this stage count."
    stages = folder.answer.bubble_stages
    low, high = lowest(rows, metric), highest(rows, metric)
    chosen = rows[rows["recommended"]]
    own = f", and {percent(chosen.iloc[0][metric])} at the recommended {chosen.iloc[0]['label']}" if len(chosen) else ""
    if len(rows) == 1:
        return f"With {stages} stages, {percent(low[metric])} of the pipeline stands idle at budget {low['label']}."
    spread = float((rows[f"{metric}_high"] - rows[f"{metric}_low"]).max())
    tie = " The difference is inside the spread of the repeats: a tie." if high[metric] - low[metric] <= spread else ""
    return (
        f"With {stages} stages, the pipeline idles {percent(low[metric])} of the time at budget {low['label']}, "
        f"{percent(high[metric])} at {high['label']}{own}.{tie}"
    )
