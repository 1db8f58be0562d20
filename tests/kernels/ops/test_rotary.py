"""RoPE with the KV write against its reference and a rotation of complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tilebudget.kernels.ops.rotary import rotary_write, rotary_write_cost, rotary_write_ref

Compare = Callable[[torch.Tensor, torch.Tensor], None]


class _Case(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def _case(
    tokens: int, heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> _Case:
    """Queries, keys and values as views of one fused projection; slots scattered over the pages."""
    q_heads, kv_heads = heads
    fused = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    q, k, v = torch.split(fused, [q_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    num_blocks = tokens // block_size + 2
    cache = torch.full((num_blocks, block_size, kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    angles = torch.arange(400.0)[:, None] * 10000.0 ** -torch.linspace(0, 1, head_dim // 2)[None, :]
    return _Case(
        q=q.view(tokens, q_heads, head_dim),
        k=k.view(tokens, kv_heads, head_dim),
        v=v.view(tokens, kv_heads, head_dim),
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        positions=torch.randint(0, 400, (tokens,), device=device),
        slot_mapping=torch.randperm(num_blocks * block_size, device=device)[:tokens],
        k_cache=cache,
        v_cache=cache.clone(),
    )


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "block_size", "dtype"),
    [
        (1, (1, 1), 16, 1, torch.float32),
        (15, (4, 4), 32, 16, torch.float16),
        (16, (4, 1), 24, 16, torch.bfloat16),
        (17, (8, 1), 16, 5, torch.float32),
        (33, (9, 3), 20, 7, torch.bfloat16),
        (0, (2, 1), 16, 16, torch.float32),
    ],
)
def test_against_reference(
    tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    assert_close: Compare,
) -> None:
    case = _case(tokens, heads, head_dim, block_size, dtype, device)
    caches = case.k_cache.clone(), case.v_cache.clone()
    want = rotary_write_ref(*case[:7], *caches)
    out = torch.full((tokens, heads[0], head_dim), float("nan"), dtype=dtype, device=device)
    assert rotary_write(*case, out=out) is out
    assert_close(out, want)
    assert_close(case.k_cache, caches[0])
    assert torch.equal(case.v_cache, caches[1])


def test_is_a_rotation_in_the_complex_plane(device: torch.device, assert_close: Compare) -> None:
    case = _case(9, (3, 1), 16, 4, torch.float32, device)
    turn = torch.complex(case.cos, case.sin)[case.positions][:, None, :]
    turned = torch.complex(case.q[..., :8].contiguous(), case.q[..., 8:].contiguous()) * turn
    assert_close(rotary_write(*case), torch.cat([turned.real, turned.imag], dim=-1))


def test_padding_is_not_written_and_queries_may_turn_in_place(device: torch.device, assert_close: Compare) -> None:
    case = _case(8, (2, 2), 16, 4, torch.float32, device)
    case.slot_mapping[2:] = -1
    want = rotary_write_ref(*case[:7], case.k_cache.clone(), case.v_cache.clone())
    rotary_write(*case, out=case.q)
    assert_close(case.q, want)
    untouched = torch.ones(case.k_cache.shape[0] * 4, dtype=torch.bool)
    untouched[case.slot_mapping[:2].cpu()] = False
    for cache in (case.k_cache, case.v_cache):
        assert bool((cache.flatten(0, 1)[untouched] == 7).all())
        assert not bool((cache.flatten(0, 1)[~untouched] == 7).any())


def test_bad_input_is_named(device: torch.device) -> None:
    case = _case(4, (2, 1), 16, 4, torch.float32, device)
    with pytest.raises(ValueError, match=r"k\.shape=\(3, 1, 16\): must be \(4, 1, 16\)"):
        rotary_write(*case._replace(k=case.k[:3]))
    with pytest.raises(ValueError, match=r"slot_mapping\.dtype=torch\.float32"):
        rotary_write(*case._replace(slot_mapping=case.slot_mapping.float()))
    with pytest.raises(ValueError, match=r"sin\.shape=\(400, 4\): must be \(any, 8\)"):
        rotary_write(*case._replace(sin=case.sin[:, :4]))
    with pytest.raises(ValueError, match=r"v_cache\.dtype=torch\.float16"):
        rotary_write(*case._replace(v_cache=case.v_cache.half()))
    with pytest.raises(ValueError, match="must be even"):
        rotary_write(*case._replace(q=case.q[..., :15]))


def test_cost() -> None:
    cost = rotary_write_cost(3, 4, 2, 16, torch.bfloat16)
    assert cost.flops == 3 * 3 * 6 * 16
    assert cost.bytes == 2 * 2 * (3 * 6 * 16 + 3 * 2 * 16) + 4 * 3 * 16
