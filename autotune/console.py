"""What the command line prints besides results: progress on stderr, and the short summary of a recommendation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .recommendation.recommendation import Alternative, Recommendation
from .scoring.objective import THROUGHPUT
from .scoring.selection import promising
from .study.trial import TrialRow

PHASES = {
    "search": "searching budgets",
    "repeat": "repeating the best",
    "anchor": "checking for drift",
    "sensitivity": "asking what would change it",
    "policy": "comparing policies",
    "yardstick": "measuring the yardstick",
}


class TuneProgress:
    """A progress bar on stderr with the best budget so far; plain lines where stderr is no terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[best]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, best="")
        self._best: TrialRow | None = None

    def __enter__(self) -> TuneProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, phase: str, done: int, planned: int, row: TrialRow | None) -> None:
        """One run has finished; 0 ``planned``: nobody knows how many there will be, no ``row``: it is no trial."""
        if row is not None and phase == "search" and promising(row):
            self._best = max(self._best or row, row, key=lambda one: one.score)
        best = "no feasible budget yet" if self._best is None else f"best so far {describe_setting(self._best)}"
        self._bar.update(self._task, description=PHASES[phase], completed=done, total=planned or None, best=best)
        if row is not None and not self.console.is_terminal:
            self.console.print(
                f"{phase} {done}/{planned}: {describe_row(row)}; {best}", soft_wrap=True, highlight=False
            )


@contextmanager
def counting_progress(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar that is told (done, planned); silent where stderr is no terminal."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, planned: bar.update(task, completed=done, total=planned)


def describe_setting(row: TrialRow) -> str:
    """The budget of a run, with ``max_num_seqs`` where that is searched."""
    return f"{row.token_budget}" + ("" if row.max_num_seqs is None else f" (max_num_seqs {row.max_num_seqs})")


def describe_row(row: TrialRow) -> str:
    """One run in one line."""
    what = f"{row.policy} budget {describe_setting(row)}"
    if row.state != "complete":
        return f"{what} {row.state}: {row.reason}"
    tbt, ttft = row.metrics.get("tbt_p99_ms"), row.metrics.get("ttft_p99_ms")
    ttft_text = "" if ttft is None else f", P99 TTFT {ttft:,.0f} ms"
    tbt_text = "no TBT" if tbt is None else f"P99 TBT {tbt:.3g} ms"
    qps = row.metrics.get("capacity_qps")
    rate_text = "" if qps is None else f", capacity {qps:.3g} requests/s"
    return f"{what}: {tbt_text}{ttft_text}, {row.metric(THROUGHPUT):,.0f} tokens/s{rate_text}"


def print_recommendation(console: Console, recommendation: Recommendation, folder: str) -> None:
    """The verdict, the alternatives and where the rest is."""
    if recommendation.objective_note:
        console.print(recommendation.objective_note, soft_wrap=True, highlight=False)
    console.print(recommendation.verdict, soft_wrap=True, highlight=False)
    # Columns of what was searched besides the budget.
    entries = recommendation.alternatives
    more = [name for name in ("max_num_seqs", "policy") if any(getattr(entry, name) is not None for entry in entries)]
    asked = any(entry.capacity_rps is not None or entry.capacity_at_most_rps is not None for entry in entries)
    words = {"max_num_seqs": "seqs", "policy": "policy"}
    headings = (
        "budget",
        *(words[name] for name in more),
        "kind",
        *(("capacity req/s",) if asked else ()),
        "P99 TTFT ms",
        "P99 TBT ms",
        "tokens/s",
        f"bubbles ({recommendation.bubble_stages} stages)",
        "why not",
    )
    table = Table(*headings, box=None, pad_edge=False)
    # Budgets that are only known to serve less are many, and have no figures of their own.
    bounded = [entry for entry in entries if entry.capacity_rps is None and entry.capacity_at_most_rps is not None]
    measured = [entry for entry in entries if entry not in bounded]
    for entry in measured:
        table.add_row(
            str(entry.token_budget),
            *(str(getattr(entry, name)) for name in more),
            entry.kind,
            *((_number(entry.capacity_rps, ".3g"),) if asked else ()),
            _number(None if entry.ttft_p99_s is None else entry.ttft_p99_s * 1e3, ",.0f"),
            _number(entry.tbt_p99_ms, ".1f"),
            _number(entry.total_tokens_per_s, ",.0f"),
            _number(entry.bubble_fraction, ".1%"),
            entry.reason,
        )
    if measured:
        console.print()
        console.print(table)
    for reason, budgets in _by_reason(bounded).items():
        console.print(f"{', '.join(map(str, sorted(budgets)))}: {reason}", soft_wrap=True, highlight=False)
    console.print()
    for server, command in recommendation.launch_commands().items():
        console.print(f"{server}: {command}", soft_wrap=True, highlight=False, markup=False)
    if recommendation.launch_notice is not None:
        console.print(recommendation.launch_notice, soft_wrap=True, highlight=False, markup=False)
    console.print(f"report: {folder}/report.html", soft_wrap=True, highlight=False, markup=False)


def _by_reason(entries: Sequence[Alternative]) -> dict[str, list[int]]:
    """The budgets of ``entries`` by why they were not chosen."""
    found: dict[str, list[int]] = {}
    for entry in entries:
        found.setdefault(entry.reason, []).append(entry.token_budget)
    return found


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
