from __future__ import annotations

import pytest
from tilebudget.autotune.study.space import SearchSpace, thin_edges
from tilebudget.engine import TokenCosts


def budgets(space: SearchSpace, kind: str) -> list[int]:
    return [candidate.token_budget for candidate in space.candidates if candidate.kind == kind]


def test_candidates_lie_on_past_and_between_the_edges() -> None:
    space = SearchSpace([128, 256, 512], min_budget=64, max_budget=640)
    assert budgets(space, "aligned") == [128, 256, 512]
    assert budgets(space, "plus_one") == [129, 257, 513]
    assert budgets(space, "mid_tile") == [192, 384, 576]


def test_bounds_cut_edges_and_offsets() -> None:
    space = SearchSpace([32, 128, 256], min_budget=100, max_budget=256)
    assert [candidate.token_budget for candidate in space.candidates] == [128, 129, 192, 256]


def test_a_budget_that_is_both_edge_and_offset_counts_as_aligned_once() -> None:
    space = SearchSpace([8, 9, 10], min_budget=1, max_budget=10)
    assert [(c.token_budget, c.kind) for c in space.candidates] == [(8, "aligned"), (9, "aligned"), (10, "aligned")]


def test_whole_prompt_is_in_the_space_even_above_the_bound() -> None:
    space = SearchSpace([128, 256], min_budget=64, max_budget=256, whole_prompt=1040)
    assert space.whole_prompt is not None
    assert (space.whole_prompt.token_budget, space.whole_prompt.kind) == (1040, "whole_prompt")
    assert space.at(*(space.params_of(1040) or (0, ""))) == space.whole_prompt


def test_partner_is_the_other_side_of_the_edge() -> None:
    space = SearchSpace([128, 256], min_budget=64, max_budget=512)
    by_budget = {candidate.token_budget: candidate for candidate in space.candidates}
    assert space.partner(by_budget[256]) == by_budget[257]
    assert space.partner(by_budget[257]) == by_budget[256]
    assert space.partner(by_budget[192]) == by_budget[128]


def test_ladder_spans_the_space_on_edges() -> None:
    space = SearchSpace(range(128, 8193, 128), min_budget=128, max_budget=8192)
    rungs = [candidate.token_budget for candidate in space.ladder(4)]
    assert rungs == [128, 512, 2048, 8192]


def test_no_edge_inside_the_bounds_compares_the_bounds() -> None:
    space = SearchSpace([4096], min_budget=32, max_budget=64)
    assert space.edges == (32, 64)


def test_bad_bounds_name_the_rule() -> None:
    with pytest.raises(ValueError, match="min_budget=64, max_budget=32: need 1 <= min_budget <= max_budget"):
        SearchSpace([128], min_budget=64, max_budget=32)


def test_thinning_keeps_the_edge_of_most_tile_sizes() -> None:
    assert thin_edges([64, 1008, 1024, 1040, 2048]) == (64, 1024, 2048)
    assert thin_edges(range(64, 513, 64)) == tuple(range(64, 513, 64))


def test_with_costs_a_rung_is_where_a_token_costs_least_and_peaks_are_known() -> None:
    """A tile of 64 costs 2 ms up to 256 tokens, then 2.5 ms and 3 ms once: 256 is the cheapest around, 320 is not."""
    edges = tuple(range(64, 1025, 64))
    cost_ms = tuple(2.0 * (edge // 64) if edge <= 256 else 3.0 + 2.5 * (edge // 64) for edge in edges)
    costs = TokenCosts(tokens=edges, cost_ms=cost_ms, edges=edges)
    plain = SearchSpace(edges, min_budget=64, max_budget=1024)
    known = SearchSpace(edges, min_budget=64, max_budget=1024, costs=costs)
    assert plain.cheapest_around() == ()
    assert [one.token_budget for one in plain.ladder(3)] == [64, 256, 1024]
    peaks = {one.token_budget for one in known.cheapest_around()}
    assert 256 in peaks
    assert 320 not in peaks
    assert [one.token_budget for one in known.ladder(3)][1] == 256
