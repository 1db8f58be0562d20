"""report.html from a run folder: one file that loads nothing, safe to open, to mail and to print."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path

import pandas as pd
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from .answer import Answer, Estimate
from .budgets import summarise_budgets
from .cost_tables import cost_tables
from .figures import draw_budgets, draw_pipeline, draw_tails
from .findings import judge_confidence
from .history import draw_history
from .lanes import build_lanes, policy_rows
from .predictions import draw_predictions
from .run_folder import RunFolder, read_run_folder
from .style import Drawing
from .tables import provenance, trial_columns, trial_rows
from .text import KIND_NAMES, SERVER_NAMES, budget_label, count, milliseconds, percent, rate, significant
from .timeline import draw_timeline
from .token_cost import draw_token_cost

REPORT_NAME = "report.html"
STATUS_WORDS = {"feasible": "meets the SLO", "infeasible": "no budget meets the SLO", "no_data": "no data for the SLO"}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One expected figure of the card, with its spread and a line of context."""

    title: str
    value: str
    unit: str
    spread: str
    context: str


def build_report(run_folder: Path) -> Path:
    """The path of ``report.html``, built from the other files of ``run_folder`` and written atomically.

    The page is self-contained: plotly.js, styles and data are inline, and its Content-Security-Policy forbids every
    request. Raises ValueError naming the file when the folder is no run folder or a file in it is wrong.
    """
    folder = read_run_folder(Path(run_folder))
    page = render_report(folder)
    path = folder.path / REPORT_NAME
    _write_atomically(path, page)
    return path


def render_report(folder: RunFolder) -> str:
    """The page as HTML text."""
    budgets = summarise_budgets(folder.search, folder.answer)
    lanes = build_lanes(folder)
    drawings = [
        draw_budgets(folder, budgets),
        draw_tails(folder, budgets),
        draw_token_cost(folder),
        draw_timeline(folder, lanes),
        draw_pipeline(folder, budgets),
        draw_predictions(folder),
        draw_history(folder),
    ]
    answer = folder.answer
    scripts = _scripts()
    return _page().render(
        answer=answer,
        verdict=_lead(answer.verdict),
        status_words=STATUS_WORDS[answer.status],
        confidence=judge_confidence(answer),
        tiles=_tiles(answer),
        kind=_kind(budgets),
        kind_names=KIND_NAMES,
        launch=[(SERVER_NAMES.get(name, name), _arguments(command)) for name, command in answer.launch.items()],
        created=_moment(answer.created_at),
        drawings={drawing.name: drawing for drawing in drawings},
        figures={drawing.name: _embed(drawing) for drawing in drawings if drawing.figure is not None},
        cost_tables=cost_tables(folder),
        policies=policy_rows(folder, lanes),
        columns=trial_columns(folder),
        rows=trial_rows(folder),
        problems=_problems(folder),
        traffic=_traffic(folder),
        provenance=provenance(folder),
        stages=answer.bubble_metric.rsplit("_", 1)[1],
        css=Markup(_template_text("report.css")),
        scripts=[Markup(script) for script in scripts],
        script_hashes=Markup(" ".join(scripts.values())),
    )


def _tiles(answer: Answer) -> list[Tile]:
    """The four figures of the card: P50 and P99 TBT, throughput, bubbles."""
    expected, slo_ms = answer.expected, answer.slo.tbt_p99_ms
    p99 = expected.get("tbt_p99_ms")
    versus = ""
    if p99 and slo_ms:
        versus = f"{percent(abs(1 - p99.value / slo_ms))} {'under' if p99.value <= slo_ms else 'over'} the SLO"
    largest = expected.get("tbt_max_ms")
    output = expected.get("output_tokens_per_s")
    cv = expected.get("iteration_cv")
    stages = answer.bubble_metric.rsplit("_", 1)[1]
    return [
        _tile("P99 time between tokens", "ms", p99, 1.0, versus),
        _tile(
            "Median time between tokens",
            "ms",
            expected.get("tbt_p50_ms"),
            1.0,
            f"largest {milliseconds(largest.value)}" if largest else "",
        ),
        _tile(
            "Throughput",
            "tokens/s",
            expected.get("total_tokens_per_s"),
            1.0,
            f"of which output {rate(output.value)}" if output else "",
        ),
        _tile(
            f"Pipeline bubbles, {stages} stages",
            "%",
            expected.get(answer.bubble_metric),
            100.0,
            f"iteration CV {cv.value:.2f}" if cv else "",
        ),
    ]


def _tile(title: str, unit: str, estimate: Estimate | None, scale: float, context: str) -> Tile:
    if estimate is None:
        return Tile(title=title, value="no data", unit="", spread="", context=context)
    form = rate if unit == "tokens/s" else significant
    spread = "one run, no spread"
    if estimate.low is not None and estimate.high is not None and estimate.repeats > 1:
        spread = f"{form(estimate.low * scale)} to {form(estimate.high * scale)} over {estimate.repeats} runs"
    return Tile(title=title, value=form(estimate.value * scale), unit=unit, spread=spread, context=context)


def _lead(verdict: str) -> tuple[str, str]:
    """The verdict's opening, set large, and the rest: a first sentence shorter than a line takes the next with it."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", verdict)
    opening = 2 if len(sentences) > 1 and len(sentences[0]) < 40 else 1
    return " ".join(sentences[:opening]), " ".join(sentences[opening:])


def _arguments(command: str) -> list[str]:
    """The command cut before each flag, spaces kept, so that a line breaks between flags; joined it is unchanged."""
    return re.split(r"(\s+)(?=-)", command)


def _moment(iso: str) -> str:
    """``2026-01-05 10:02 UTC`` for an ISO 8601 stamp with a zone; anything else as it stands."""
    try:
        moment = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment.tzinfo else f"{moment:%Y-%m-%d %H:%M}"


def _kind(budgets: pd.DataFrame) -> str:
    chosen = budgets[budgets["recommended"]]
    return str(chosen.iloc[0]["kind"]) if len(chosen) else ""


def _problems(folder: RunFolder) -> list[tuple[str, str, str]]:
    """Failed runs first, then stopped ones: what happened, why, and the runs (budgets) that share this reason."""
    rows = folder.trials[folder.trials["state"].isin(["failed", "pruned"])].sort_values("state", kind="stable")
    words = {"failed": "failed", "pruned": "stopped early"}
    groups: dict[tuple[str, str], list[str]] = {}
    for _, row in rows.iterrows():
        cause = (words[row["state"]], row["reason"] or "no reason recorded")
        groups.setdefault(cause, []).append(f"{row['run']} ({budget_label(row['token_budget'])})")
    return [(what, why, ", ".join(runs)) for (what, why), runs in groups.items()]


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


def _embed(drawing: Drawing) -> Markup:
    """The figure as JSON that is safe inside a script element."""
    text = "{}" if drawing.figure is None else str(drawing.figure.to_json(engine="json"))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(escaped)


def _inline(script: str) -> str:
    """``script`` so that no end tag inside it can close its element."""
    return script.replace("</script", "<\\/script").replace("\r\n", "\n").strip()


def _csp_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _scripts() -> dict[str, str]:
    """The scripts of the page, in order, with their hashes for its Content-Security-Policy."""
    scripts = (_inline(get_plotlyjs()), _inline(_template_text("report.js")))
    return {script: _csp_hash(script) for script in scripts}


@cache
def _page() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ms": milliseconds, "rate": rate, "percent": percent, "budget": budget_label}
    return environment.from_string(_template_text("report.html.j2"))


def _template_text(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
