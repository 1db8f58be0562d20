"""The trials of a study gathered by token budget: one row a budget, with the spread of its repeats."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..data.answer import Answer
from ..data.run_folder import METRIC_COLUMNS, NUM_QUANTILES
from ..text import budget_label

KIND_ORDER = ("aligned", "plus_one", "mid_tile", "whole_prompt")
#: A relative difference that no run-to-run spread was measured for is never called a gain below this.
MIN_SPREAD = 0.005


def summarise_budgets(search: pd.DataFrame, answer: Answer) -> pd.DataFrame:
    """One row a budget with a complete run, in order of budget, unlimited last.

    Columns: ``token_budget`` (NaN is unlimited), ``label``, ``kind``, ``num_runs``, ``feasible`` (True only where
    every run was; None where none had data), ``recommended``, ``quantiles`` (median TBT quantiles, ms, or None), and
    for each metric ``m``: ``m`` (the median), ``m_low`` and ``m_high`` (the extremes). A budget that was repeated is
    represented by its repeats alone, so that its spread is that of runs made under equal conditions.
    Only runs ``at_recommended`` settings count.
    """
    runs = at_recommended(search[search["state"] == "complete"], answer)
    runs = runs.assign(label=[budget_label(budget) for budget in runs["token_budget"]])
    repeated = set(runs.loc[runs["role"] == "repeat", "label"])
    runs = runs[(runs["role"] == "repeat") | ~runs["label"].isin(repeated)]
    groups = runs.groupby("label", sort=False)
    metrics = list(METRIC_COLUMNS)
    frame = pd.concat(
        [
            groups[["token_budget", "kind"]].first(),
            groups.size().rename("num_runs"),
            groups[metrics].median(),
            groups[metrics].min().add_suffix("_low"),
            groups[metrics].max().add_suffix("_high"),
        ],
        axis=1,
    ).reset_index(names="label")
    members = {str(label): group for label, group in groups}
    frame["feasible"] = pd.Series(
        [_all_feasible(members[label]["feasible"]) for label in frame["label"]], index=frame.index, dtype=object
    )
    frame["quantiles"] = pd.Series(
        [_median_quantiles(members[label]["tbt_quantiles_ms"]) for label in frame["label"]],
        index=frame.index,
        dtype=object,
    )
    frame["recommended"] = frame["label"] == answer.marked_label
    return frame.sort_values("token_budget", na_position="last").reset_index(drop=True)


def at_recommended(runs: pd.DataFrame, answer: Answer) -> pd.DataFrame:
    """``runs`` at the recommended policy and ``max_num_seqs``, where the study tried several of them."""
    for name in ("policy", "max_num_seqs"):
        words = [f"{value:.0f}" if isinstance(value, float) else value for value in runs[name]]
        alike = np.array([word == answer.engine.get(name) for word in words], dtype=bool)
        if runs[name].nunique() > 1 and alike.any():
            runs = runs[alike]
    return runs


def only_bounded(runs: pd.DataFrame) -> pd.Series:
    """Which of ``runs`` ended with an upper bound on capacity: the one question put to them was answered with no."""
    return (runs["state"] == "pruned") & runs["capacity_at_most_qps"].notna()


def _all_feasible(flags: pd.Series) -> bool | None:
    known = [bool(flag) for flag in flags if flag is not None]
    return all(known) if known else None


def _median_quantiles(column: pd.Series) -> np.ndarray | None:
    """The median over runs of each TBT quantile, ms; None where no run has them."""
    lists = [
        np.asarray(values, dtype=float)
        for values in column
        if isinstance(values, list | np.ndarray) and len(values) == NUM_QUANTILES
    ]
    lists = [values for values in lists if np.isfinite(values).all()]
    return np.median(lists, axis=0) if lists else None


def lowest(frame: pd.DataFrame, column: str) -> pd.Series:
    """The row with the smallest value in ``column``, missing values aside; the first of equals."""
    return frame.sort_values(column, kind="stable").iloc[0]


def highest(frame: pd.DataFrame, column: str) -> pd.Series:
    """The row with the largest value in ``column``, missing values aside; the first of equals."""
    return frame.sort_values(column, kind="stable", ascending=False).iloc[0]


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
