"""The policy ``faster_transformer``: one batch to its end."""

from __future__ import annotations

from serve import serve


def test_faster_transformer_serves_one_batch_to_its_end() -> None:
    batches = serve([(10, 2), (20, 4), (5, 1)], policy="faster_transformer", max_num_seqs=2)
    assert batches == [
        ([], {0: 10, 1: 20}, 0),
        ([0, 1], {}, 0),
        ([1], {}, 0),
        ([1], {}, 0),
        ([], {2: 5}, 0),
    ]
