"""The tables under the staircase: its largest edges, what budgets cost, and where the latencies come from."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.run_folder import RunFolder
from ..data.staircase import LAYER_OP, BudgetCost, Edge, TokenStaircase
from ..tables import Column
from ..text import count, rate, significant
from .findings import edges_within, jump, studied_range

MAX_EDGES = 12
MAX_BUDGETS = 20
#: Budgets that servers ship with or people set by habit.
COMMON_BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PLACES = {
    "edge": "on an edge",
    "past_edge": "just past an edge",
    "mid": "between edges",
    "common": "on no edge",
    "past_common": "after a common budget",
}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as printed; ``marked`` is the row of the recommended budget, if it is in it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    marked: int | None = None


def cost_tables(folder: RunFolder) -> list[Table]:
    """The tables of the staircase that have a row: edges, budgets, sources; none without a tile analysis."""
    stairs = folder.staircase
    if stairs is None or not len(stairs.tokens):
        return []
    tables = [_edge_table(folder, stairs), _budget_table(folder, stairs), _source_table(stairs)]
    return [table for table in tables if table.rows]


def _edge_table(folder: RunFolder, stairs: TokenStaircase) -> Table:
    inside = edges_within((*stairs.edges, *stairs.op_edges), *studied_range(folder, stairs))
    steps = sorted((edge for edge in inside if edge.is_step), key=lambda edge: -edge.jump_pct)
    more = len(steps) - MAX_EDGES
    return Table(
        title="Largest steps",
        columns=(
            Column(title="Operation", numeric=False),
            Column(title="After", unit="tokens"),
            Column(title="To", unit="tokens"),
            Column(title="Latency", unit="ms"),
            Column(title="Jump", unit="± standard error"),
            Column(title="Why", numeric=False),
        ),
        rows=tuple(_edge_row(edge) for edge in steps[:MAX_EDGES]),
        note=f"{count(more, 'smaller step')} of the range drawn not listed." if more > 0 else "",
    )


def _edge_row(edge: Edge) -> tuple[str, ...]:
    return (
        "the layer" if edge.op == LAYER_OP else edge.op,
        f"{edge.tokens}",
        f"{edge.next_tokens}",
        f"{significant(edge.latency_ms)} → {significant(edge.next_latency_ms)}",
        jump(edge.jump_pct, edge.uncertainty_pct),
        edge.explanation + _waves(edge),
    )


def _waves(edge: Edge) -> str:
    """Which of our own tile shapes need another wave there: the largest of them, the rest counted."""
    if not edge.waves:
        return ""
    others = len(edge.waves) - 1
    rest = f" (so do {count(others, 'other shape')})" if others > 1 else " (so does 1 other shape)" if others else ""
    return f"; a tile of {edge.waves[-1].replace('->', '→')}{rest}"


def _budget_table(folder: RunFolder, stairs: TokenStaircase) -> Table:
    chosen = folder.answer.token_budget
    wanted = dict.fromkeys([*([chosen] if chosen else []), *COMMON_BUDGETS, *folder.candidates])
    costs = [cost for cost in map(stairs.cost_at, wanted) if cost is not None]
    shown = sorted(costs[:MAX_BUDGETS], key=lambda cost: cost.tokens)
    padded = any(cost.tokens_per_ms_if_padded is not None for cost in shown)
    notes = []
    if len(costs) > len(shown):
        notes.append(f"{count(len(costs) - len(shown), 'more candidate')} not listed.")
    if padded:
        notes.append("If padded: as if the odd count cost what its padding to the next measured multiple does.")
    return Table(
        title="What one more token costs at a budget",
        columns=(
            Column(title="Budget", unit="tokens"),
            Column(title="Tokens/ms", unit="of one layer"),
            *((Column(title="If padded", unit="tokens/ms"),) if padded else ()),
            Column(title="Layer", unit="ms"),
            *((Column(title="Iteration", unit="ms, linear layers"),) if stairs.num_layers else ()),
            Column(title="One more token", unit="% of the layer"),
            Column(title="Up to", unit="tokens"),
            Column(title="Where", numeric=False),
        ),
        rows=tuple(_budget_row(cost, stairs, padded=padded) for cost in shown),
        note=" ".join(notes),
        marked=next((place for place, cost in enumerate(shown) if cost.tokens == chosen), None),
    )


def _budget_row(cost: BudgetCost, stairs: TokenStaircase, *, padded: bool) -> tuple[str, ...]:
    where = PLACES.get(cost.place, cost.place) or "between edges"
    return (
        f"{cost.tokens}",
        rate(cost.tokens_per_ms),
        *((rate(cost.tokens_per_ms_if_padded),) if padded else ()),
        significant(cost.layer_ms),
        *((significant(cost.layer_ms * stairs.num_layers),) if stairs.num_layers else ()),
        "–" if cost.one_more_pct is None else jump(cost.one_more_pct),
        "–" if cost.next_tokens is None or cost.one_more_pct is None else f"{cost.next_tokens}",
        where + (", worth trying" if cost.worth_trying else ""),
    )


def _source_table(stairs: TokenStaircase) -> Table:
    operations = sorted(stairs.operations, key=lambda item: not item.in_layer)
    return Table(
        title="Where the latencies come from",
        columns=(
            Column(title="Operation", numeric=False),
            Column(title="In the layer", numeric=False),
            Column(title="Source", numeric=False),
            Column(title="Points"),
            Column(title="Noise", unit="% of a point"),
            Column(title="Note", numeric=False),
        ),
        rows=tuple(
            (
                item.op,
                "yes" if item.in_layer else "no",
                item.source,
                f"{item.num_points:,}",
                "–" if item.noise_pct is None else significant(item.noise_pct, 2),
                item.note or "–",
            )
            for item in operations
        ),
        note=_sentences(stairs.notes),
    )


def _sentences(notes: tuple[str, ...]) -> str:
    """The analysis' own notes, each a sentence; those on one operation stand in its row already."""
    general = [note for note in notes if " is transferred: " not in note]
    return " ".join(f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in general)
