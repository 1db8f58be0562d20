"""Costs by tokens: lines between points, steps where there is a point on each side, and tile arithmetic from edges."""

from __future__ import annotations

import numpy as np
import pytest
from tilebudget.engine import TokenCosts

STAIR = TokenCosts(tokens=(8, 64, 65, 128), cost_ms=(2.0, 3.0, 5.0, 6.0), edges=(64, 128))


def test_lines_join_the_points() -> None:
    counts = np.arange(8, 129)
    expected = np.interp(counts, STAIR.tokens, STAIR.cost_ms)
    assert [STAIR.at(count) for count in counts.tolist()] == pytest.approx(expected.tolist(), rel=1e-12)


def test_outside_the_points() -> None:
    assert STAIR.at(0) == 0.0
    assert STAIR.at(1) == 2.0
    assert STAIR.at(256) == pytest.approx(12.0)


def test_with_edges_alone_a_count_costs_its_padded_size() -> None:
    costs = TokenCosts.from_edges((128, 64, 192))
    assert costs.edges == (64, 128, 192)
    assert [costs.at(count) for count in (1, 63, 64, 65, 128, 129, 192, 384)] == [64, 64, 64, 128, 128, 192, 192, 384]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tokens": ()}, "tokens has 0 counts"),
        ({"cost_ms": (1.0,)}, "tokens has 2 counts"),
        ({"tokens": (2, 2)}, r"tokens=\(2, 2\): must be above 0 and rise"),
        ({"edges": (0, 4)}, r"edges=\(0, 4\): must be above 0 and rise"),
        ({"cost_ms": (1.0, float("nan"))}, "every cost must be a finite number above 0"),
        ({"cost_ms": (0.0, 1.0)}, "every cost must be a finite number above 0"),
    ],
)
def test_bad_costs_are_refused(fields: dict[str, tuple[float, ...]], match: str) -> None:
    good: dict[str, tuple[float, ...]] = {"tokens": (1, 2), "cost_ms": (1.0, 2.0), "edges": (1,)}
    with pytest.raises(ValueError, match=match):
        TokenCosts(**(good | fields))  # type: ignore[arg-type]


def test_no_edges_are_refused() -> None:
    with pytest.raises(ValueError, match="edges is empty"):
        TokenCosts.from_edges(())
