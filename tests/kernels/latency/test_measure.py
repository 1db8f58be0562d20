from __future__ import annotations

import pytest
import torch
from tilebudget.kernels.latency.measure import MIN_COUNTS, measure_gemms, time_calls, token_grid
from tilebudget.kernels.model_shape import ModelShape

SHAPE = ModelShape(
    num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=96, vocab_size=128, name="toy"
)
CPU = torch.device("cpu")


def test_every_layer_is_measured_at_every_count() -> None:
    told: list[tuple[int, int]] = []
    sweeps = measure_gemms(
        SHAPE, tokens=[1, 17, 64], device=CPU, dtype=torch.float32, repeats=3, on_done=lambda *done: told.append(done)
    )
    assert [sweep.op for sweep in sweeps] == ["attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"]
    for sweep in sweeps:
        assert sweep.tokens.tolist() == [1, 17, 64]
        assert (sweep.latency_ms > 0).all()
        assert sweep.source == "measured"
    assert told[-1] == (12, 12)
    assert [done for done, _ in told] == list(range(1, 13))


def test_a_time_limit_leaves_counts_that_all_layers_share() -> None:
    sweeps = measure_gemms(SHAPE, tokens=range(1, 65), device=CPU, dtype=torch.float32, repeats=2, time_limit_s=0.0)
    assert {tuple(sweep.tokens.tolist()) for sweep in sweeps} == {tuple(sweeps[0].tokens.tolist())}
    assert len(sweeps[0].tokens) == MIN_COUNTS


def test_calls_rotate_after_a_warm_up() -> None:
    seen: list[int] = []
    timing = time_calls(seen.append, CPU, repeats=4)
    assert seen == [0, 1, 2, 0, 1, 2, 3]
    assert timing.median_ms >= 0


def test_a_grid_has_both_sides_of_every_multiple() -> None:
    grid = token_grid(4096)
    assert {64, 65, 512, 513, 1024, 1025, 4096} <= set(grid)
    assert max(grid) == 4096
    assert token_grid(20) == [1, 2, 4, 8, 16, 17]


def test_bad_input_names_the_rule() -> None:
    with pytest.raises(ValueError, match="kernel='cutlass': must be one of torch, triton"):
        measure_gemms(SHAPE, tokens=[1], device=CPU, dtype=torch.float32, kernel="cutlass")
    with pytest.raises(ValueError, match="tokens=\\[0\\]: must be one or more counts of at least 1"):
        measure_gemms(SHAPE, tokens=[0, 4], device=CPU, dtype=torch.float32)
