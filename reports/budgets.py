"""The trials of a study gathered by token budget: one row a budget, with the spread of its repeats."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .answer import Answer
from .run_folder import METRIC_COLUMNS, NUM_QUANTILES
from .text import budget_label

KIND_ORDER = ("aligned", "plus_one", "mid_tile", "whole_prompt")
#: A relative difference that no run-to-run spread was measured for is never called a gain below this.
MIN_SPREAD = 0.005


def summarise_budgets(search: pd.DataFrame, answer: Answer) -> pd.DataFrame:
    """One row a budget with a complete run, in order of budget, unlimited last.

    Columns: ``token_budget`` (NaN is unlimited), ``label``, ``kind``, ``num_runs``, ``feasible`` (True only where
    every run was; None where none had data), ``recommended``, and for each metric ``m``: ``m`` (the median),
    ``m_low`` and ``m_high`` (the extremes). A budget that was repeated is represented by its repeats alone, so that
    its spread is that of runs made under equal conditions. Where a study tried several policies, only the
    recommended one counts.
    """
    rows = search[search["state"] == "complete"]
    policy = answer.engine.get("policy")
    if rows["policy"].nunique() > 1 and policy in set(rows["policy"]):
        rows = rows[rows["policy"] == policy]
    summaries = [_summarise(budget, group) for budget, group in rows.groupby("token_budget", dropna=False)]
    columns = ["token_budget", "label", "kind", "num_runs", "feasible"]
    frame = pd.DataFrame(summaries, columns=None if summaries else columns)
    frame["recommended"] = [
        answer.status != "no_data" and label == budget_label(answer.token_budget) for label in frame["label"]
    ]
    return frame.sort_values("token_budget", na_position="last").reset_index(drop=True)


def _summarise(token_budget: object, group: pd.DataFrame) -> dict[str, object]:
    repeats = group[group["role"] == "repeat"]
    runs = repeats if len(repeats) else group
    known = [flag for flag in runs["feasible"] if flag is not None]
    summary: dict[str, object] = {
        "token_budget": token_budget,
        "label": budget_label(float(str(token_budget))),
        "kind": group["kind"].iloc[0],
        "num_runs": len(runs),
        "feasible": all(known) if known else None,
    }
    for metric in METRIC_COLUMNS:
        values = runs[metric].dropna()
        summary[metric] = values.median() if len(values) else np.nan
        summary[f"{metric}_low"] = values.min() if len(values) else np.nan
        summary[f"{metric}_high"] = values.max() if len(values) else np.nan
    summary["quantiles"] = _median_quantiles(runs["tbt_quantiles_ms"])
    return summary


def _median_quantiles(column: pd.Series) -> np.ndarray | None:
    """The median over runs of each TBT quantile, ms; None where no run has them."""
    lists = [
        np.asarray(values, dtype=float)
        for values in column
        if isinstance(values, list | np.ndarray) and len(values) == NUM_QUANTILES
    ]
    lists = [values for values in lists if np.isfinite(values).all()]
    return np.median(lists, axis=0) if lists else None


def noise_fraction(budgets: pd.DataFrame, metric: str) -> float | None:
    """The widest relative half-spread of ``metric`` among repeated budgets; None where nothing was repeated."""
    repeated = budgets[(budgets["num_runs"] > 1) & (budgets[metric] > 0)]
    if repeated.empty:
        return None
    half = (repeated[f"{metric}_high"] - repeated[f"{metric}_low"]) / 2 / repeated[metric]
    return float(max(half.max(), MIN_SPREAD))


def edge_penalty(budgets: pd.DataFrame, metric: str) -> tuple[float, int] | None:
    """What one token past the edge does to ``metric``: the median relative change over pairs edge → edge + 1, and
    the number of pairs; None where the study holds no pair."""
    at = {row["token_budget"]: row[metric] for _, row in budgets[budgets["kind"] == "aligned"].iterrows()}
    past = budgets[budgets["kind"] == "plus_one"]
    changes = [
        row[metric] / at[row["token_budget"] - 1] - 1
        for _, row in past.iterrows()
        if at.get(row["token_budget"] - 1, 0) > 0 and np.isfinite(row[metric])
    ]
    return (float(np.median(changes)), len(changes)) if changes else None
