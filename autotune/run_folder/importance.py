"""``importance.json``: which parameter of the search sets the best trials apart, by Optuna's PED-ANOVA."""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

from ..study.trial import TrialRow

IMPORTANCE_FILE = "importance.json"

#: The best share of the trials that is set against all; fewer trials than MIN_TRIALS tell nothing.
BEST_SHARE = 0.25
MIN_TRIALS = 8


def parameter_importance(rows: Sequence[TrialRow], metrics: Sequence[tuple[str, bool]]) -> dict[str, object] | None:
    """The object of ``importance.json``: metric → parameter → share; None where too few trials are complete.

    The parameters are ``edge_index``, the place of a budget's edge among those tried, ``kind``, where it lies from it,
    and ``max_num_seqs`` and ``policy`` where the study tried several. ``metrics`` are columns of ``trials.parquet``,
    each with whether more of it is better.
    """
    complete = [row for row in rows if row.state == "complete"]
    found = {}
    for metric, more_is_better in metrics:
        known = [row for row in complete if math.isfinite(row.metric(metric))]
        shares = _shares(known, [(-1.0 if more_is_better else 1.0) * row.metric(metric) for row in known])
        if shares:
            found[metric] = shares
    return {"evaluator": "PED-ANOVA", "best_share": BEST_SHARE, "metrics": found} if found else None


def _shares(rows: Sequence[TrialRow], values: Sequence[float]) -> dict[str, float]:
    """Importances that sum to 1, lower values being better; empty where the rows are few or all alike."""
    if len(rows) < MIN_TRIALS or len(set(values)) < 2:
        return {}
    edges = sorted({_edge(row) for row in rows})
    distributions: dict[str, BaseDistribution] = {
        "edge_index": IntDistribution(0, len(edges) - 1),
        "kind": CategoricalDistribution(sorted({row.kind for row in rows})),
    }
    more = [name for name in ("max_num_seqs", "policy") if len({getattr(row, name) for row in rows}) > 1]
    for name in more:
        distributions[name] = CategoricalDistribution(sorted({getattr(row, name) for row in rows}))
    # One objective and no constraints, whatever the search itself had.
    study = optuna.create_study(direction="minimize")
    for row, value in zip(rows, values, strict=True):
        params = {"edge_index": edges.index(_edge(row)), "kind": row.kind}
        params |= {name: getattr(row, name) for name in more}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE)
    return {name: float(share) for name, share in get_param_importances(study, evaluator=evaluator).items()}


def _edge(row: TrialRow) -> int:
    return row.token_budget if row.edge_tokens is None else row.edge_tokens
