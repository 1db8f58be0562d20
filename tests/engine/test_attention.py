"""Paged attention against the written-out reference, for any block table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tilebudget.engine.model import attention
from tilebudget.engine.model.attention import TILE_ROWS, PagedAttention, attention_ref, causal_band
from tilebudget.engine.model.input import Spans
from tilebudget.engine.model.kv_pages import KVPages

CPU = torch.device("cpu")
HEAD_DIM = 16

#: dtype -> (largest error, root mean square error), both against fp32 on the same rounded inputs.
TOLERANCE = {
    torch.float32: (2e-6, 5e-7),
    torch.bfloat16: (4e-2, 5e-3),
    torch.float16: (5e-3, 6e-4),
}


def run(
    *,
    kv_lens: list[int],
    num_rows: list[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    block_size: int = 4,
    num_blocks: int | None = None,
    order: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    banded: bool = True,
    q_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one batch (decodes are the leading one-row sequences) and the reference's. Sequences take
    their pages in ``order``; by default a random one."""
    rng = np.random.default_rng(3)
    generator = torch.Generator().manual_seed(5)
    needed = [-(-length // block_size) for length in kv_lens]
    num_blocks = num_blocks or sum(needed) + 3
    if order is None:
        order = rng.permutation(num_blocks).tolist()
    blocks = np.zeros((len(kv_lens), max(needed)), dtype=np.int32)
    taken = 0
    for place, count in enumerate(needed):
        blocks[place, :count] = order[taken : taken + count]
        taken += count

    pages = KVPages(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=CPU,
    )
    layer = pages.layers[0]
    layer.keys.fill_(50.0)  # what other sequences left behind must not be seen
    layer.values.fill_(50.0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    expected, q_rows, k_rows, v_rows = [], [], [], []
    for place, (length, rows) in enumerate(zip(kv_lens, num_rows, strict=True)):
        q, k, v = (
            draw(rows, num_heads, HEAD_DIM),
            draw(length, num_kv_heads, HEAD_DIM),
            draw(length, num_kv_heads, HEAD_DIM),
        )
        q = q * q_scale
        at = np.arange(length)
        owned = torch.from_numpy(blocks[place, at // block_size].astype(np.int64))
        layer.write(owned, torch.from_numpy(at % block_size), k, v)
        expected.append(attention_ref(q.float(), k.float().transpose(0, 1), v.float().transpose(0, 1)))
        q_rows.append(q)
        k_rows.append(k[-rows:])
        v_rows.append(v[-rows:])

    sizes = np.array(num_rows)
    num_decodes = next((i for i, rows in enumerate(num_rows) if rows > 1), len(num_rows))
    spans = Spans(
        num_decodes=num_decodes,
        first_row=np.cumsum(sizes) - sizes,
        num_rows=sizes,
        kv_lens=np.array(kv_lens),
        blocks=blocks,
        block_size=block_size,
    )
    band = causal_band(max(kv_lens), dtype, CPU) if banded else None
    out = PagedAttention(spans, CPU, band)(torch.cat(q_rows), torch.cat(k_rows), torch.cat(v_rows), layer)
    return out.view(-1, num_heads, HEAD_DIM).float(), torch.cat(expected)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    largest, mean = TOLERANCE[dtype]
    error = got - expected
    assert error.abs().max().item() < largest
    assert error.square().mean().sqrt().item() < mean


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_mixed_batch_over_scattered_pages(dtype: torch.dtype, block_size: int) -> None:
    got, expected = run(
        kv_lens=[1, 17, 32, 5, 33, 29], num_rows=[1, 1, 1, 5, 20, 7], block_size=block_size, dtype=dtype
    )
    assert_near(got, expected, dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_every_grouping_of_heads(num_heads: int, num_kv_heads: int) -> None:
    got, expected = run(kv_lens=[9, 14, 11], num_rows=[1, 1, 6], num_heads=num_heads, num_kv_heads=num_kv_heads)
    assert_near(got, expected)


@pytest.mark.parametrize("num_blocks", [20, 400], ids=["dense, read in place", "sparse, copied out"])
def test_decodes_in_a_dense_and_in_a_sparse_pool(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []
    select = torch.Tensor.index_select

    def count(tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.ndim)
        return select(tensor, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", count)
    got, expected = run(kv_lens=[13, 22, 4, 31], num_rows=[1, 1, 1, 1], num_blocks=num_blocks)
    assert_near(got, expected)
    assert (4 in copied) == (num_blocks == 400)  # only pages have four dimensions


@pytest.mark.parametrize(
    ("order", "num_products"),
    [
        ([*range(4), *range(300, 306), 306, *range(30, 38)], 3),  # three stretches, the last before the middle one
        ([*range(4), *range(10, 16), 9, *range(20, 28)], 1),  # gaps not worth a product
        ([*range(0, 190, 10)], 1),  # copied out
    ],
)
def test_decodes_leave_out_wide_gaps_between_their_pages(
    order: list[int], num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "GAP_TOKENS", 32)
    products = []
    bmm = torch.bmm

    def count(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        products.append(len(out))
        return bmm(*tensors, out=out)

    monkeypatch.setattr(torch, "bmm", count)
    got, expected = run(kv_lens=[13, 22, 4, 31], num_rows=[1, 1, 1, 1], num_blocks=310, order=order)
    assert_near(got, expected)
    assert len(products) == 2 * num_products  # with keys and with values


@pytest.mark.parametrize("rows", [2, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS + 7])
@pytest.mark.parametrize("prefix", [0, 1, 150])
def test_chunks_around_the_tile_size(rows: int, prefix: int) -> None:
    got, expected = run(kv_lens=[prefix + rows], num_rows=[rows])
    assert_near(got, expected)


@pytest.mark.parametrize("prefix", [0, 37])
def test_chunks_without_a_band_as_on_cuda(prefix: int) -> None:
    got, expected = run(kv_lens=[prefix + 40], num_rows=[40], banded=False)
    assert_near(got, expected)


def test_scores_far_apart_do_not_underflow() -> None:
    """Scores some hundreds apart: whole pages weigh nothing, and the result is still exact and not 0 / 0."""
    got, expected = run(kv_lens=[40, 61, 50], num_rows=[1, 1, 9], q_scale=300.0)
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)  # fp32 scores of 1000 are 6e-5 apart


def decode_spans(kv_lens: list[int], blocks: list[list[int]]) -> Spans:
    count = len(kv_lens)
    return Spans(
        num_decodes=count,
        first_row=np.arange(count),
        num_rows=np.ones(count, dtype=np.int64),
        kv_lens=np.array(kv_lens),
        blocks=np.array(blocks, dtype=np.int32),
        block_size=4,
    )


@pytest.mark.parametrize(
    ("kv_lens", "blocks", "reused"),
    [
        ([7, 3], [[4, 1], [2, 9]], True),  # one more token in each last page; a stale entry is the same
        ([5, 2], [[4, 1], [2, 9]], True),  # recomputed after a preemption into the very same pages, shorter
        ([9, 3], [[4, 1, 0], [2, 9, 0]], False),  # a new page
        ([7, 3], [[4, 3], [2, 9]], False),  # another sequence of the same length
        ([7], [[4, 1]], False),  # one has finished
    ],
)
def test_next_iteration_reuses_indices_only_where_they_hold(
    kv_lens: list[int], blocks: list[list[int]], reused: bool
) -> None:
    pages = KVPages(
        num_layers=1, num_blocks=12, block_size=4, num_kv_heads=2, head_dim=HEAD_DIM, dtype=torch.float32, device=CPU
    )
    generator = torch.Generator().manual_seed(1)
    layer = pages.layers[0]
    layer.keys.normal_(generator=generator)
    layer.values.normal_(generator=generator)
    q = torch.randn((len(kv_lens), 4, HEAD_DIM), generator=generator)
    k = torch.zeros((len(kv_lens), 2, HEAD_DIM))

    before = PagedAttention(decode_spans([6, 2], [[4, 1], [2, 9]]), CPU, None)
    after = PagedAttention(decode_spans(kv_lens, blocks), CPU, None, before)
    fresh = PagedAttention(decode_spans(kv_lens, blocks), CPU, None)

    assert (after._decodes is before._decodes) == reused
    assert torch.equal(after(q, k, k, layer), fresh(q, k, k, layer))
