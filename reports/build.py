"""report.html from a run folder: one file that loads nothing, safe to open, to mail and to print."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from .budgets.by_load import draw_by_load, load_tables
from .budgets.capacity import draw_capacities
from .budgets.figures import draw_budgets, draw_pipeline, draw_tails
from .budgets.history import draw_history
from .budgets.importance import draw_importance
from .budgets.predictions import draw_predictions
from .budgets.trials import only_bounded, summarise_budgets
from .card import launches, lead, reason, tiles
from .costs.batching import draw_chunking, draw_free_prefill, draw_roofline, draw_throughput
from .costs.tables import cost_tables
from .costs.token_cost import draw_token_cost
from .data.run_folder import RunFolder, read_run_folder
from .disaggregation import disaggregation_tables, draw_disaggregation
from .download import download_link
from .findings import judge_confidence
from .page import moment, render_page, write_atomically
from .pipelines.bubble_causes import draw_bubble_causes
from .pipelines.timeline import draw_pipeline_timeline
from .policies.lanes import build_lanes, policy_rows
from .policies.tails import draw_policy_tails
from .policies.timeline import draw_timeline
from .tables import compared_budgets, provenance, sensitivity_grid, trial_columns, trial_rows
from .text import KIND_NAMES, budget_label, count, listing, rate

REPORT_NAME = "report.html"
STATUS_WORDS = {"feasible": "meets the SLO", "infeasible": "no budget meets the SLO", "no_data": "no data for the SLO"}


def build_report(run_folder: Path) -> Path:
    """The path of ``report.html``, built from the other files of ``run_folder`` and written atomically.

    The page is self-contained: plotly.js, styles and data are inline, and its Content-Security-Policy forbids every
    request. Raises ValueError naming the file when the folder is no run folder or a file in it is wrong.
    """
    folder = read_run_folder(Path(run_folder))
    page = render_report(folder)
    path = folder.path / REPORT_NAME
    write_atomically(path, page)
    return path


def render_report(folder: RunFolder) -> str:
    """The page as HTML text."""
    budgets = summarise_budgets(folder.search, folder.answer)
    lanes = build_lanes(folder)
    drawings = [
        draw_capacities(folder, budgets) if folder.has_capacity else draw_budgets(folder, budgets),
        *([wins] if (wins := draw_by_load(folder.answer)) else []),
        draw_tails(folder, budgets),
        draw_throughput(folder),
        draw_roofline(folder),
        draw_free_prefill(folder),
        draw_token_cost(folder),
        draw_timeline(folder, lanes),
        draw_policy_tails(folder),
        draw_chunking(folder),
        draw_pipeline(folder, budgets),
        *([causes] if (causes := draw_bubble_causes(folder, budgets)) else []),
        draw_pipeline_timeline(folder, lanes),
        draw_predictions(folder),
        draw_history(folder),
        draw_importance(folder),
    ]
    yardstick = draw_disaggregation(folder)
    if yardstick is not None:
        drawings.append(yardstick)
    answer = folder.answer
    return render_page(
        "report.html.j2",
        drawings,
        {
            "answer": answer,
            "verdict": lead(answer),
            "status_words": STATUS_WORDS[answer.status],
            "confidence": judge_confidence(answer),
            "tiles": tiles(answer),
            "reason": reason(answer),
            "kind": _kind(budgets),
            "grid": sensitivity_grid(answer),
            "compared": compared_budgets(answer, _kind(budgets)),
            "kind_names": KIND_NAMES,
            "launches": launches(answer),
            "created": moment(answer.created_at),
            "tables": {
                "by_load": load_tables(answer),
                "staircase": cost_tables(folder),
                "disaggregation": disaggregation_tables(folder),
            },
            "policies": policy_rows(folder, lanes),
            "columns": trial_columns(folder),
            "rows": trial_rows(folder),
            "problems": _problems(folder),
            "traffic": _traffic(folder),
            "provenance": provenance(folder),
            "download": download_link(folder),
            "stages": answer.bubble_stages,
        },
    )


def _kind(budgets: pd.DataFrame) -> str:
    chosen = budgets[budgets["recommended"]]
    return str(chosen.iloc[0]["kind"]) if len(chosen) else ""


def _problems(folder: RunFolder) -> list[tuple[str, str, str]]:
    """Failed runs first, then stopped ones: what happened, why, and the runs (budgets) that share this reason. Those
    that ended with a bound on their capacity are one line."""
    ended = folder.trials["state"].isin(["failed", "pruned"]) & ~only_bounded(folder.trials)
    rows = folder.trials[ended].sort_values("state", kind="stable")
    words = {"failed": "failed", "pruned": "stopped early"}
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for _, row in rows.iterrows():
        reason = str(row["reason"] or "no reason recorded")
        # Reasons that differ in their figures alone are one; the table of runs has each in full.
        cause = (words[row["state"]], re.sub(r"\d+", "#", reason))
        groups.setdefault(cause, []).append((reason, f"{row['run']} ({budget_label(row['token_budget'])})"))
    return [
        (
            what,
            found[0][0] + (f" (and {len(found) - 1} alike)" if len(found) > 1 else ""),
            listing([run for _, run in found], 30),
        )
        for (what, _), found in groups.items()
    ] + _bounds(folder.trials[only_bounded(folder.trials)]["capacity_at_most_qps"])


def _bounds(at_most: pd.Series) -> list[tuple[str, str, str]]:
    if at_most.empty:
        return []
    low, high = rate(at_most.min()), rate(at_most.max())
    most = high if low == high else f"{low} to {high}"
    why = f"{count(len(at_most), 'run')} asked one question, answered with no: no more than {most} requests/s."
    return [("bounded", why, "Each with its reason is in the table of every run.")]


def _traffic(folder: RunFolder) -> str:
    """The workload in a sentence, dropped and clipped rows included."""
    workload = folder.environment.child("workload")
    parts = [count(int(workload.number("num_requests") or 0), "request")]
    for key, noun in (("num_prompt_tokens", "prompt tokens"), ("num_output_tokens", "output tokens")):
        number = workload.number(key)
        if number is not None:
            parts.append(f"{int(number):,} {noun}")
    lost = [
        f"{int(workload.number(key) or 0):,} {word}"
        for key, word in (("num_dropped", "dropped"), ("num_clipped", "clipped"))
    ]
    return f"{workload.text('name', 'unnamed workload')}: {', '.join(parts)}; {' and '.join(lost)}."
