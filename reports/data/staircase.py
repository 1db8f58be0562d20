"""The tile analysis of a run folder as the report shows it: ``tiles.json``, what ``tilebudget tiles --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .json_object import JsonObject

#: How far off the next measured count may be for its price to be called that of one more token.
ONE_MORE_TOKENS = 32
#: The layer's own edges carry this operation name.
LAYER_OP = "layer"
_NO_SUBJECT = ("tensor_parallel", "num_layers", "min_jump_pct", "format", "num_dropped")


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A step or drop between two neighbouring measured counts of one operation (or of the layer); ms of one layer."""

    op: str
    tokens: int
    next_tokens: int
    latency_ms: float
    next_latency_ms: float
    jump_pct: float
    uncertainty_pct: float
    is_step: bool
    explanation: str
    waves: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BudgetCost:
    """A measured token count as a budget; ``one_more_*`` is None where nothing was measured close above it."""

    tokens: int
    place: str
    layer_ms: float
    tokens_per_ms: float
    tokens_per_ms_if_padded: float | None
    next_tokens: int | None
    one_more_pct: float | None
    one_more_ms: float | None
    worth_trying: bool | None


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Where the latencies of one operation come from: measured, table or transferred, with a note on how."""

    op: str
    source: str
    num_points: int
    noise_pct: float | None
    note: str
    in_layer: bool


@dataclass(frozen=True, kw_only=True)
class TokenStaircase:
    """One layer's latency by token count at the study's tensor-parallel degree, its edges and its budgets.

    ``tokens`` ascends; ``layer_ms`` is the sum of ``layer_ops`` on one GPU. ``edges`` are the layer's, ``op_edges``
    the confirmed steps of the layer's operations.
    """

    subject: Mapping[str, str]
    tensor_parallel: int
    num_layers: int | None
    layer_ops: tuple[str, ...]
    tokens: npt.NDArray[np.int64]
    layer_ms: npt.NDArray[np.float64]
    edges: tuple[Edge, ...]
    op_edges: tuple[Edge, ...]
    budgets: Mapping[int, BudgetCost]
    operations: tuple[Operation, ...]
    notes: tuple[str, ...]

    def cost_at(self, tokens: int) -> BudgetCost | None:
        """What the budget ``tokens`` costs; None where that count was not measured."""
        known = self.budgets.get(tokens)
        if known is not None:
            return known
        index = int(np.searchsorted(self.tokens, tokens))
        if index >= len(self.tokens) or int(self.tokens[index]) != tokens:
            return None
        here_ms = float(self.layer_ms[index])
        following = int(self.tokens[index + 1]) if index + 1 < len(self.tokens) else None
        near = following is not None and following - tokens <= ONE_MORE_TOKENS
        more_ms = float(self.layer_ms[index + 1]) - here_ms if near else None
        return BudgetCost(
            tokens=tokens,
            place="",
            layer_ms=here_ms,
            tokens_per_ms=tokens / here_ms,
            tokens_per_ms_if_padded=None,
            next_tokens=following,
            one_more_pct=None if more_ms is None else 100 * more_ms / here_ms,
            one_more_ms=more_ms,
            worth_trying=None,
        )

    def neighbours(self, tokens: float) -> tuple[int, int] | None:
        """The measured counts on either side of one that was not; None outside the measured range."""
        index = int(np.searchsorted(self.tokens, tokens))
        return None if index in (0, len(self.tokens)) else (int(self.tokens[index - 1]), int(self.tokens[index]))

    def step_after(self, tokens: int) -> Edge | None:
        """The layer's step right after ``tokens``, if there is one."""
        return next((edge for edge in self.edges if edge.is_step and edge.tokens == tokens), None)


def parse_staircase(json: JsonObject) -> TokenStaircase:
    """The staircase in ``json``. Raises ValueError naming the field that is wrong."""
    degree = int(json.number("tensor_parallel") or 1)
    layer_ops = json.words("layer_ops")
    points = [(row.need("tokens"), row.need("layer_ms")) for row in json.children("layer_staircase")]
    points = sorted((tokens, layer_ms) for tokens, layer_ms in points if tokens > 0 and layer_ms > 0)
    num_layers = json.number("num_layers")
    layers = [row for row in json.children("layer_edges") if _degree(row) == degree]
    steps = [row for row in json.children("edges") if _degree(row) == degree and row.text("op") in layer_ops]
    return TokenStaircase(
        subject={
            key: str(value)
            for key, value in json.values.items()
            if isinstance(value, str | int | float) and not isinstance(value, bool) and key not in _NO_SUBJECT
        },
        tensor_parallel=degree,
        num_layers=None if num_layers is None else int(num_layers),
        layer_ops=layer_ops,
        tokens=np.array([tokens for tokens, _ in points], dtype=np.int64),
        layer_ms=np.array([layer_ms for _, layer_ms in points], dtype=np.float64),
        edges=tuple(_edge(row) for row in layers),
        op_edges=tuple(_edge(row) for row in steps),
        budgets={cost.tokens: cost for cost in map(_budget, json.children("budgets"))},
        operations=tuple(
            Operation(
                op=row.text("op"),
                source=row.text("source", "unnamed"),
                num_points=int(row.number("num_points") or 0),
                noise_pct=row.number("noise_pct"),
                note=row.text("note", ""),
                in_layer=row.text("op") in layer_ops,
            )
            for row in json.children("operations")
            if _degree(row) == degree
        ),
        notes=json.words("notes"),
    )


def _degree(row: JsonObject) -> int:
    return int(row.number("tensor_parallel") or 1)


def _edge(row: JsonObject) -> Edge:
    return Edge(
        op=row.text("op"),
        tokens=int(row.need("tokens")),
        next_tokens=int(row.need("next_tokens")),
        latency_ms=row.need("latency_ms"),
        next_latency_ms=row.need("next_latency_ms"),
        jump_pct=row.need("jump_pct"),
        uncertainty_pct=row.number("jump_uncertainty_pct") or 0.0,
        is_step=row.text("kind", "step") == "step",
        explanation=row.text("explanation", ""),
        waves=row.words("waves"),
    )


def _budget(row: JsonObject) -> BudgetCost:
    next_tokens = row.number("next_tokens")
    return BudgetCost(
        tokens=int(row.need("tokens")),
        place=row.text("place", ""),
        layer_ms=row.need("layer_ms"),
        tokens_per_ms=row.need("tokens_per_ms"),
        tokens_per_ms_if_padded=row.number("tokens_per_ms_if_padded"),
        next_tokens=None if next_tokens is None else int(next_tokens),
        one_more_pct=row.number("one_more_pct"),
        one_more_ms=row.number("one_more_ms"),
        worth_trying=row.flag("worth_trying"),
    )
