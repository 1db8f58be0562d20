"""The policy ``orca``: whole prompts beside the decodes."""

from __future__ import annotations

from serve import serve


def test_orca_adds_whole_prompts_to_the_decodes() -> None:
    batches = serve([(10, 4), (300, 2)], [0.0, 0.0005], policy="orca", token_budget=64)
    assert batches[:2] == [([], {0: 10}, 0), ([0], {1: 300}, 0)]


def test_orca_is_bounded_by_the_number_of_requests() -> None:
    batches = serve([(10, 3)] * 3, policy="orca", max_num_seqs=2)
    assert batches[0] == ([], {0: 10, 1: 10}, 0)
    assert batches[3] == ([], {2: 10}, 0)
