"""compare.html: the answers of several studies side by side (GPUs, models, SLOs), one file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .budgets.trials import summarise_budgets
from .compare_figures import (
    Study,
    draw_answers,
    draw_first_tokens,
    draw_latencies,
    draw_tails_at_answers,
    draw_throughputs,
)
from .data.run_folder import RunFolder, read_run_folder
from .findings import judge_confidence
from .page import moment, render_page, write_atomically
from .tables import Column
from .text import KIND_NAMES, budget_label, count, listing, milliseconds, percent, rate

COMPARE_NAME = "compare.html"
STATUS_WORDS = {"feasible": "met", "infeasible": "missed", "no_data": "no data"}
#: What may tell two studies apart, in the order in which a label names it.
_PARTS = ("device", "model", "dtype", "tensor_parallel", "pipeline_parallel")
_WORDS = {"tensor_parallel": "TP {}", "pipeline_parallel": "PP {}"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One study in the table, as printed."""

    label: str
    cells: tuple[str, ...]


COLUMNS = (
    Column(title="Study", numeric=False),
    Column(title="Budget", unit="tokens"),
    Column(title="Kind", numeric=False),
    Column(title="Model", numeric=False),
    Column(title="SLO", unit="P99 TBT"),
    Column(title="SLO", unit="met or missed", numeric=False),
    Column(title="P99 TBT"),
    Column(title="P99 TTFT"),
    Column(title="Capacity", unit="requests/s"),
    Column(title="Throughput", unit="total tok/s"),
    Column(title="Output", unit="tok/s"),
    Column(title="Bubbles", unit="by stages"),
    Column(title="Confidence", numeric=False),
    Column(title="Traffic", numeric=False),
    Column(title="Tuned", numeric=False),
)


def build_comparison(run_folders: Sequence[Path], output: Path) -> Path:
    """The path of ``output``, a page on the studies of ``run_folders`` in their order, written atomically.

    Raises ValueError where there are fewer than two, or naming the folder or file that is wrong.
    """
    if len(run_folders) < 2:
        raise ValueError(f"run_folders has {len(run_folders)}: a comparison needs at least 2 run folders")
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"output={str(output)!r}: must be a file, in a folder that is there")
    folders = [read_run_folder(Path(path), records=False) for path in run_folders]
    studies = [
        Study(label=label, folder=folder, budgets=summarise_budgets(folder.search, folder.answer))
        for label, folder in zip(study_labels(folders), folders, strict=True)
    ]
    drawings = [
        draw_answers(studies),
        draw_throughputs(studies),
        draw_latencies(studies),
        draw_first_tokens(studies),
        draw_tails_at_answers(studies),
    ]
    page = render_page(
        "compare.html.j2",
        drawings,
        {
            "title": f"Token budgets of {count(len(studies), 'study', 'studies')}",
            "subject": listing([study.label for study in studies]),
            "traffic_note": _traffic_note(folders),
            "columns": COLUMNS,
            "rows": [_row(study) for study in studies],
        },
    )
    write_atomically(output, page)
    return output


def study_labels(folders: Sequence[RunFolder]) -> list[str]:
    """A short name for each study: as many of the things that they do not share as tell them apart, else the folder."""
    differing = _differing(folders)
    names = [folder.path.resolve().name for folder in folders]
    for length in range(1, len(differing[0]) + 1):
        labels = [", ".join(parts[:length]) for parts in differing]
        if len(set(labels)) == len(labels):
            return labels
    shared = [", ".join(parts) for parts in differing]
    return [f"{label} ({name})" if label else name for label, name in zip(shared, names, strict=True)]


def _differing(folders: Sequence[RunFolder]) -> list[list[str]]:
    """What each study is about, less what all of them share."""
    parts = [_parts(folder) for folder in folders]
    places = [place for place in range(len(parts[0])) if len({own[place] for own in parts}) > 1]
    return [[own[place] for place in places] for own in parts]


def _parts(folder: RunFolder) -> tuple[str, ...]:
    key, slo = folder.answer.key, folder.answer.slo
    named = [_WORDS.get(name, "{}").format(key.get(name, "?")) for name in _PARTS]
    limit = "no SLO" if slo.tbt_p99_ms is None else f"SLO {milliseconds(slo.tbt_p99_ms)}"
    return (*named, limit, _traffic(folder))


def _traffic(folder: RunFolder) -> str:
    return folder.environment.child("workload").text("name", "unnamed workload")


def _traffic_note(folders: Sequence[RunFolder]) -> str:
    names = list(dict.fromkeys(_traffic(folder) for folder in folders))
    if len(names) == 1:
        return f"All studies serve {names[0]}."
    return f"The studies serve different traffic ({listing(names)}): their figures differ for that reason too."


def _row(study: Study) -> Row:
    answer = study.folder.answer
    chosen = study.chosen
    kind = "" if chosen is None else str(chosen["kind"])

    budget = answer.marked_label if answer.token_budget is None else budget_label(answer.token_budget)
    return Row(
        label=study.label,
        cells=(
            budget or "–",
            KIND_NAMES.get(kind, kind) or "–",
            str(answer.key.get("model", "–")),
            milliseconds(answer.slo.tbt_p99_ms),
            STATUS_WORDS[answer.status],
            milliseconds(answer.value("tbt_p99_ms")),
            milliseconds(answer.value("ttft_p99_ms")),
            rate(answer.value("capacity_qps")),
            rate(answer.value("total_tokens_per_s")),
            rate(answer.value("output_tokens_per_s")),
            f"{percent(answer.value(answer.bubble_metric), 1)} of {answer.bubble_stages}",
            judge_confidence(answer).level,
            _traffic(study.folder),
            moment(answer.created_at),
        ),
    )
