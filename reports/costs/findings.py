"""The sentences on what one more token costs, and the range of token counts that they are about."""

from __future__ import annotations

import numpy as np

from ..data.answer import Answer
from ..data.run_folder import RunFolder
from ..data.staircase import BudgetCost, Edge, TokenStaircase
from ..text import change, count, milliseconds, percent, rate

ABSENT = "This run folder holds no tile analysis (tiles.json), so what one more token costs is not shown."


def studied_range(folder: RunFolder, stairs: TokenStaircase) -> tuple[float, float]:
    """The token counts to draw: half the smallest candidate budget to twice the largest, as far as measured."""
    budgets = [*folder.candidates, *([folder.answer.token_budget] if folder.answer.token_budget else [])]
    first, last = float(stairs.tokens[0]), float(stairs.tokens[-1])
    if not budgets:
        return first, last
    low, high = max(first, min(budgets) / 2), min(last, max(budgets) * 2)
    return (low, high) if int(((stairs.tokens >= low) & (stairs.tokens <= high)).sum()) > 1 else (first, last)


def edges_within(edges: tuple[Edge, ...], low: float, high: float) -> list[Edge]:
    """The edges that lie inside low…high tokens."""
    return [edge for edge in edges if low <= edge.tokens and edge.next_tokens <= high]


def token_cost_finding(folder: RunFolder) -> str:
    """What one more token costs at the recommended budget, and where the largest step of the studied range is."""
    stairs = folder.staircase
    if stairs is None or not len(stairs.tokens):
        return ABSENT
    steps = [edge for edge in edges_within(stairs.edges, *studied_range(folder, stairs)) if edge.is_step]
    sentences = [_budget_sentence(folder.answer, stairs)]
    if steps:
        largest = max(steps, key=lambda edge: edge.jump_pct)
        sentences.append(
            f"Of {count(len(steps), 'step')} in the range drawn, the largest is {largest.tokens} → "
            f"{largest.next_tokens}: {jump(largest.jump_pct, largest.uncertainty_pct)}."
        )
    else:
        sentences.append("No step stands out of the noise in the range drawn.")
    return " ".join(sentence for sentence in sentences if sentence)


def jump(change_pct: float, uncertainty_pct: float | None = None) -> str:
    """``+105% ± 2.7%``: a change with its sign, and one standard error where it is known."""
    text = change(change_pct / 100) or "no change"
    return f"{text}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{percent(uncertainty_pct / 100)}" if uncertainty_pct else text


def _budget_sentence(answer: Answer, stairs: TokenStaircase) -> str:
    budget = answer.token_budget
    if budget is None:
        return ""
    word = "closest" if answer.status == "infeasible" else "recommended"
    cost = stairs.cost_at(budget)
    if cost is None:
        around = stairs.neighbours(budget)
        where = f"it lies between the measured {around[0]} and {around[1]}" if around else "it is outside the sweep"
        return f"The {word} budget {budget} was not measured: {where}."
    here = f"At the {word} budget {budget} a layer takes {milliseconds(cost.layer_ms)}"
    if cost.one_more_ms is None or cost.one_more_pct is None or cost.next_tokens is None:
        return f"{here}; nothing was measured close above it."
    step = stairs.step_after(budget)
    step_up = jump(cost.one_more_pct, step.uncertainty_pct if step else None)
    one = "one more token makes" if cost.next_tokens == budget + 1 else f"at {cost.next_tokens}, measured next, it is"
    it = " it" if cost.next_tokens == budget + 1 else ""
    sentence = f"{here}; {one}{it} {milliseconds(cost.layer_ms + cost.one_more_ms)}, {step_up}"
    if step and stairs.num_layers:
        sentence += f" ({milliseconds(cost.one_more_ms * stairs.num_layers)} in {stairs.num_layers} layers)"
    return f"{sentence}{'' if step else ', which is no step'}.{_rate_sentence(cost, stairs)}"


def _rate_sentence(cost: BudgetCost, stairs: TokenStaircase) -> str:
    """Whether a smaller measured count already has as many tokens per ms."""
    smaller = stairs.tokens < cost.tokens
    if not smaller.any():
        return ""
    per_ms = stairs.tokens[smaller] / stairs.layer_ms[smaller]
    best = int(np.argmax(per_ms))
    if per_ms[best] <= cost.tokens_per_ms:
        return f" Its {rate(cost.tokens_per_ms)} tokens/ms are more than any smaller count has."
    return (
        f" It has {rate(cost.tokens_per_ms)} tokens/ms; {int(stairs.tokens[smaller][best])} already has "
        f"{rate(float(per_ms[best]))}."
    )
