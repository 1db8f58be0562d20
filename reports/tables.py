"""The tables of the report as printed cells; each cell keeps the value that it is sorted by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

import pandas as pd

from .budgets.history import outcome
from .budgets.trials import at_recommended, only_bounded
from .data.answer import Alternative, Answer, Sensitivity
from .data.json_object import JsonObject
from .data.run_folder import RunFolder
from .text import KIND_NAMES, POLICY_NAMES, budget_label, percent, rate, significant

MAX_ALTERNATIVES = 8

#: Amounts of change from which on a grid is shorter than a list.
MIN_GRID_COLUMNS = 2


@dataclass(frozen=True, kw_only=True)
class Column:
    """A heading; ``numeric`` columns are right-aligned and sort as numbers."""

    title: str
    unit: str = ""
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is printed, and the key it sorts by (a number in text, or the text)."""

    text: str
    key: str


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """One row of the trial table; ``tone`` marks failed and stopped runs and the recommended budget."""

    tone: str
    cells: tuple[Cell, ...]


PREDICTED_TBT = Column(title="Predicted P99", unit="ms")
PREDICTED_THROUGHPUT = Column(title="Predicted", unit="total tok/s")
MAX_SEQS = Column(title="Max seqs")
CAPACITY = Column(title="Capacity", unit="requests/s")
#: Its title is completed by the stages that the study went by.
BUBBLES = Column(title="Bubbles", unit="%")
_TRIAL_COLUMNS = (
    Column(title="#"),
    Column(title="Run", numeric=False),
    Column(title="Budget", unit="tokens"),
    MAX_SEQS,
    Column(title="Kind", numeric=False),
    Column(title="Policy", numeric=False),
    Column(title="Outcome", numeric=False),
    CAPACITY,
    Column(title="P50 TBT", unit="ms"),
    Column(title="P99 TBT", unit="ms"),
    PREDICTED_TBT,
    Column(title="P99.9 TBT", unit="ms"),
    Column(title="Max TBT", unit="ms"),
    Column(title="P50 TTFT", unit="ms"),
    Column(title="P99 TTFT", unit="ms"),
    Column(title="Throughput", unit="total tok/s"),
    PREDICTED_THROUGHPUT,
    Column(title="Output", unit="tok/s"),
    BUBBLES,
    Column(title="Iteration CV"),
    Column(title="Took", unit="s"),
    Column(title="Reason", numeric=False),
)


def trial_columns(folder: RunFolder) -> tuple[Column, ...]:
    """The headings of the trial table; the predicted ones only where a run has a prediction, the most sequences
    only where they were searched, the capacity only where it was maximised."""
    hidden = [] if folder.has_predictions else [PREDICTED_TBT, PREDICTED_THROUGHPUT]
    hidden += [] if folder.searched_seqs else [MAX_SEQS]
    hidden += [] if folder.has_capacity else [CAPACITY]
    own = replace(BUBBLES, title=f"Bubbles, {folder.answer.bubble_stages} stages")
    return tuple(own if column is BUBBLES else column for column in _TRIAL_COLUMNS if column not in hidden)


def trial_rows(folder: RunFolder) -> list[TrialRow]:
    """Every engine run of the study in order of its start, policy runs included."""
    runs = folder.trials.sort_values("started_at", kind="stable")
    alike = set(at_recommended(runs[runs["role"] != "policy"], folder.answer).index)
    bounded = set(runs[only_bounded(runs)].index)
    return [
        _trial_row(folder, place, row, alike=index in alike, bounded=index in bounded)
        for place, (index, row) in enumerate(runs.iterrows(), start=1)
    ]


def _trial_row(folder: RunFolder, place: int, row: pd.Series, *, alike: bool, bounded: bool) -> TrialRow:
    """``alike``: it ran with the recommended settings, but for the budget. ``bounded``: it has only an upper bound."""
    predicted, bubbles = folder.has_predictions, row[folder.answer.bubble_metric]
    ended = outcome(str(row["state"]), row["feasible"])
    if bounded:
        ended = f"no more than {rate(row['capacity_at_most_qps'])} requests/s"
    budget = float(row["token_budget"])
    tone = {"failed": "failed", "pruned": "stopped"}.get(str(row["state"]), "")
    if not tone and budget_label(budget) == folder.answer.marked_label and alike:
        tone = "chosen"
    return TrialRow(
        tone=tone,
        cells=(
            Cell(text=str(place), key=str(place)),
            _word(row["run"]),
            Cell(text=budget_label(budget), key=str(budget) if isfinite(budget) else "1e300"),
            *((_figure(row["max_num_seqs"]),) if folder.searched_seqs else ()),
            _word(KIND_NAMES.get(str(row["kind"]), str(row["kind"]))),
            _word(POLICY_NAMES.get(str(row["policy"]), str(row["policy"]))),
            _word(ended),
            *((_capacity(row["capacity_qps"], row["capacity_at_most_qps"]),) if folder.has_capacity else ()),
            *(_figure(row[f"tbt_{level}_ms"]) for level in ("p50", "p99")),
            *((_figure(row["predicted_tbt_p99_ms"]),) if predicted else ()),
            *(_figure(row[f"tbt_{level}_ms"]) for level in ("p999", "max")),
            *(_figure(row[f"ttft_{level}_ms"]) for level in ("p50", "p99")),
            _rate(row["total_tokens_per_s"]),
            *((_rate(row["predicted_total_tokens_per_s"]),) if predicted else ()),
            _rate(row["output_tokens_per_s"]),
            Cell(text=percent(bubbles, 1).removesuffix("%"), key=_key(bubbles)),
            _figure(row["iteration_cv"]),
            _figure(row["elapsed_s"]),
            _word(row["reason"]),
        ),
    )


def _figure(value: float) -> Cell:
    return Cell(text=significant(value) if isfinite(value) else "–", key=_key(value))


def _rate(value: float) -> Cell:
    return Cell(text=rate(value), key=_key(value))


def _capacity(measured: float, at_most: float) -> Cell:
    bound = not isfinite(measured) and isfinite(at_most)
    return Cell(text=f"at most {rate(at_most)}", key=_key(at_most)) if bound else _rate(measured)


def _word(value: object) -> Cell:
    return Cell(text=str(value), key=str(value).lower())


def _key(value: float) -> str:
    """Empty for a missing value: those stay last whichever way the column is sorted."""
    return repr(float(value)) if isfinite(value) else ""


@dataclass(frozen=True, kw_only=True)
class SensitivityGrid:
    """What the budget becomes: a column an amount of change, a row a thing that changes; ``moves`` tells those that
    move the budget, or of which it is not known."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Sensitivity, ...]], ...]
    moves: tuple[str, ...]


def sensitivity_grid(answer: Answer) -> SensitivityGrid | None:
    """Changes such as ``SLO halved`` as a grid; None where there are none, or they do not fill one."""
    cells: dict[str, dict[str, Sensitivity]] = {}
    for item in answer.sensitivity:
        name, _, amount = item.change.partition(" ")
        cells.setdefault(name, {})[amount] = item
    columns = tuple(next(iter(cells.values()), {}))
    if len(columns) < MIN_GRID_COLUMNS or any(tuple(row) != columns for row in cells.values()):
        return None
    return SensitivityGrid(
        columns=columns,
        rows=tuple((name, tuple(row.values())) for name, row in cells.items()),
        moves=tuple(item.statement for item in answer.sensitivity if item.token_budget != answer.token_budget),
    )


def compared_budgets(answer: Answer, kind: str) -> list[Alternative]:
    """The recommended budget, of ``kind``, beside the nearest alternatives; without it where nothing was expected."""
    nearest = list(answer.alternatives[:MAX_ALTERNATIVES])
    if not answer.expected or answer.marked_label is None:
        return nearest
    ttft_ms = {level: answer.value(f"ttft_{level}_ms") for level in ("p50", "p99")}
    chosen = Alternative(
        token_budget=answer.token_budget,
        kind=kind,
        feasible={"feasible": True, "infeasible": False}.get(answer.status),
        tie=False,
        reason="closest" if answer.status == "infeasible" else "recommended",
        tbt_p99_ms=answer.value("tbt_p99_ms"),
        total_tokens_per_s=answer.value("total_tokens_per_s"),
        bubble_fraction=answer.value(answer.bubble_metric),
        iteration_cv=answer.value("iteration_cv"),
        max_num_seqs=int(answer.engine.get("max_num_seqs", 0)) or None,
        policy=answer.engine.get("policy", ""),
        ttft_p50_s=None if ttft_ms["p50"] is None else ttft_ms["p50"] / 1e3,
        ttft_p99_s=None if ttft_ms["p99"] is None else ttft_ms["p99"] / 1e3,
        capacity_rps=answer.value("capacity_qps"),
    )
    return [chosen, *nearest]


def provenance(folder: RunFolder) -> Mapping[str, Mapping[str, str]]:
    """Groups of name → value: what ran, on what, over which requests."""
    environment, answer = folder.environment, folder.answer
    elsewhere = ("workload", "device", "versions", "model")
    study = {
        key.replace("_", " "): text for key, text in environment.flat().items() if key.split(" ")[0] not in elsewhere
    }
    if answer.seed:
        study.setdefault("seed", answer.seed)
    if answer.command:
        study.setdefault("command", answer.command)
    groups = {
        "Study": study,
        "Tuned for": _spaced(answer.key),
        "Engine": _spaced(answer.engine),
        "Model": _group(environment, "model"),
        "Device": _group(environment, "device"),
        "Workload": _group(environment, "workload"),
        "Edges": _edges(folder.profile),
        "Versions": _group(environment, "versions"),
    }
    return {title: rows for title, rows in groups.items() if rows}


def _edges(profile: JsonObject | None) -> dict[str, str]:
    if profile is None:
        return {}
    by_source: dict[str, list[str]] = {}
    for edge in profile.children("edges"):
        tokens = edge.number("tokens")
        if tokens is not None:
            by_source.setdefault(edge.text("source", "unnamed"), []).append(budget_label(tokens))
    rows = {source: ", ".join(tokens) for source, tokens in by_source.items()}
    reference = profile.child("reference_decode")
    duration_ms = reference.number("duration_ms")
    if duration_ms is not None:
        num_seqs, context = reference.number("num_seqs"), reference.number("context_tokens")
        shape = f"{budget_label(num_seqs)} decodes at {budget_label(context)} tokens of context"
        rows["reference decode"] = f"{significant(duration_ms)} ms ({shape}). {reference.text('note', '')}".strip()
    return rows


def _group(environment: JsonObject, key: str) -> dict[str, str]:
    """The object at ``key`` flattened, or the plain value itself."""
    value = environment.values.get(key)
    if value is None:
        return {}
    return _spaced(environment.child(key).flat()) if isinstance(value, dict) else {key: str(value)}


def _spaced(rows: Mapping[str, str]) -> dict[str, str]:
    return {key.replace("_", " "): text for key, text in rows.items() if text}
