"""What an iteration's token-wise layers cost by its number of tokens, for the policy that trims to cheap counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite


@dataclass(frozen=True, kw_only=True)
class TokenCosts:
    """Milliseconds of an iteration's token-wise layers at ``tokens`` (rising counts), a line between neighbours.

    ``edges`` are the counts after which one more token costs a step; with a point on each side of an edge the line
    between them keeps the step. What is the same for every iteration, or grows evenly with its tokens, may be left out.
    Raises ValueError that names the field, its value and the rule.
    """

    tokens: tuple[int, ...]
    cost_ms: tuple[float, ...]
    edges: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.cost_ms):
            raise ValueError(f"tokens has {len(self.tokens)} counts: needs one at least, and as many cost_ms")
        for name, counts in (("tokens", self.tokens), ("edges", self.edges)):
            if any(later <= earlier for earlier, later in pairwise((0, *counts))):
                raise ValueError(f"{name}={counts}: must be above 0 and rise")
        if not all(isfinite(cost_ms) and cost_ms > 0.0 for cost_ms in self.cost_ms):
            raise ValueError(f"cost_ms={self.cost_ms}: every cost must be a finite number above 0")

    @classmethod
    def from_edges(cls, edges: Iterable[int]) -> TokenCosts:
        """Costs where only the edges are known: a count costs what it would padded up to the next edge (tile
        arithmetic, in no unit). Raises ValueError when there is no edge."""
        rising = tuple(sorted(set(edges)))
        if not rising:
            raise ValueError("edges is empty: costs need one edge at least")
        points: dict[int, float] = {}
        for before, edge in pairwise((0, *rising)):
            points[before + 1] = points[edge] = float(edge)
        return cls(tokens=tuple(points), cost_ms=tuple(points.values()), edges=rising)

    def at(self, num_tokens: int) -> float:
        """Milliseconds at ``num_tokens``: 0 at 0, the first point's below it, in proportion beyond the last one."""
        if num_tokens <= self.tokens[0]:
            return self.cost_ms[0] if num_tokens > 0 else 0.0
        above = bisect_left(self.tokens, num_tokens)
        if above == len(self.tokens):
            return self.cost_ms[-1] * num_tokens / self.tokens[-1]
        low, high = self.tokens[above - 1], self.tokens[above]
        low_ms, high_ms = self.cost_ms[above - 1], self.cost_ms[above]
        return low_ms + (high_ms - low_ms) * (num_tokens - low) / (high - low)
