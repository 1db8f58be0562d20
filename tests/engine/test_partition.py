"""How models are cut: every layer, head and column once, and parts that compute what the whole does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tilebudget.engine import Batch, BlockManager, Request, Sequence
from tilebudget.engine.distributed.partition import Partition, even_layers
from tilebudget.engine.model.config import PRESETS
from tilebudget.engine.model.hf_config import from_hf
from tilebudget.engine.model.input import ModelInput, build_input
from tilebudget.engine.model.model import Model
from tilebudget.engine.model.weights import load_weights, random_weights
from torch import Tensor

CPU = torch.device("cpu")
FAMILIES = ("llama", "llama31", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(80, 2, (40, 40)), (7, 1, (7,)), (5, 2, (3, 2)), (7, 3, (2, 3, 2)), (10, 4, (2, 3, 3, 2)), (11, 4, (3, 3, 3, 2))],
)
def test_even_layers(num_layers: int, num_stages: int, expected: tuple[int, ...]) -> None:
    assert even_layers(num_layers, num_stages) == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pipeline_parallel": 5}, r"pipeline_parallel=5: must be from 1 to the model's 4 layers"),
        ({"pipeline_parallel": 0}, r"pipeline_parallel=0: must be"),
        ({"tensor_parallel": 0}, r"tensor_parallel=0: must be at least 1"),
        ({"tensor_parallel": 3}, r"tensor_parallel=3: must divide the 8 heads"),
        ({"pipeline_parallel": 2, "stage_layers": (3, 2)}, r"stage_layers=\(3, 2\): must be at least one layer"),
        ({"pipeline_parallel": 2, "stage_layers": (4, 0)}, r"stage_layers=\(4, 0\)"),
        ({"pipeline_parallel": 2, "stage_layers": (4,)}, r"must name the layers of 2 stages"),
    ],
)  # fmt: skip
def test_a_cut_that_cannot_be_is_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Partition.of(PRESETS["tiny-llama"], **settings)


def test_kv_heads_that_neither_divide_nor_repeat_are_refused() -> None:
    config = replace(PRESETS["tiny-llama"], num_heads=12, num_kv_heads=4)
    with pytest.raises(
        ValueError, match=r"tensor_parallel=6: must divide the 4 KV heads, or be a multiple of their number"
    ):
        Partition.of(replace(config, intermediate_size=720), tensor_parallel=6)


def test_sizes_of_a_rank_are_those_of_the_latency_tables() -> None:
    """``ModelShape.gemms`` has the shapes that vLLM's ranks multiply with."""
    config = PRESETS["tiny-llama"]
    for degree in (1, 2, 4, 8):
        part = Partition.of(config, tensor_parallel=degree, pipeline_parallel=2, stage_layers=(1, 3)).part(
            2 * degree - 1
        )
        layer = random_weights(config, dtype=torch.float32, device=CPU, part=part).layers[0]
        shapes = {
            "attn_pre_proj": layer.qkv,
            "attn_post_proj": layer.o,
            "mlp_up_proj": layer.up,
            "mlp_down_proj": layer.down,
        }
        assert {name: tuple(linear.weight.shape) for name, linear in shapes.items()} == config.shape.gemms(degree)


@pytest.mark.parametrize("stage_layers", [(2, 2), (1, 2, 1)])
def test_a_part_has_the_values_of_the_whole(stage_layers: tuple[int, ...]) -> None:
    config = PRESETS["tiny-llama"]
    whole = random_weights(config, dtype=torch.float32, device=CPU, seed=5)
    partition = Partition.of(config, tensor_parallel=2, pipeline_parallel=len(stage_layers), stage_layers=stage_layers)
    parts = [
        random_weights(config, dtype=torch.float32, device=CPU, seed=5, part=partition.part(rank))
        for rank in range(partition.num_ranks)
    ]
    layer = 0
    for stage in range(partition.num_stages):
        first, second = parts[2 * stage : 2 * stage + 2]
        for index in range(stage_layers[stage]):
            expected = whole.layers[layer + index]
            down = torch.cat([first.layers[index].down.weight, second.layers[index].down.weight], dim=1)
            assert torch.equal(down, expected.down.weight)
        layer += stage_layers[stage]
    assert layer == config.num_layers
    assert [part.embedding is not None for part in parts] == [True, True] + [False] * (len(parts) - 2)
    assert [part.lm_head is not None for part in parts] == [False] * (len(parts) - 2) + [True, True]
    heads = [part.lm_head.weight for part in parts if part.lm_head]
    assert whole.lm_head is not None
    assert torch.equal(torch.cat(heads), whole.lm_head.weight)


class ThreadGroup:
    """All-reduce between threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30.0)
        self.given: dict[int, Tensor] = {}

    def member(self, rank: int) -> SimpleNamespace:
        def all_reduce(x: Tensor) -> Tensor:
            self.given[rank] = x.clone()
            self.barrier.wait()
            total = torch.stack([self.given[key] for key in sorted(self.given)]).sum(0)
            self.barrier.wait()
            return x.copy_(total)

        return SimpleNamespace(all_reduce=all_reduce)


@pytest.mark.parametrize(("tensor_parallel", "pipeline_parallel"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_compute_the_logits_of_the_whole(
    family: str, tensor_parallel: int, pipeline_parallel: int, reference: Callable[[str], SimpleNamespace]
) -> None:
    """4 ranks on 2 KV heads: each KV head is on two of them."""
    expected = reference(family)
    config = from_hf(expected.folder)
    token_ids = [*expected.prompts[2], *expected.prompts[5]]
    step = one_chunk(token_ids)
    whole = Model(config, load_weights(expected.folder, config, dtype=torch.float32, device=CPU))
    partition = Partition.of(config, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)

    rows = [step.token_ids] * tensor_parallel
    for stage in range(partition.num_stages):
        group = ThreadGroup(tensor_parallel)
        models = []
        for rank in range(tensor_parallel):
            part = partition.part(stage * tensor_parallel + rank)
            weights = load_weights(expected.folder, config, dtype=torch.float32, device=CPU, part=part)
            models.append(Model(part.local(config), weights, group=group.member(rank)))
        rows = run_side_by_side(models, rows, step)
    torch.testing.assert_close(torch.cat(rows, dim=1), forward(whole, step.token_ids, step), rtol=1e-4, atol=1e-4)


def run_side_by_side(models: list[Model], rows: list[Tensor], step: ModelInput) -> list[Tensor]:
    made: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        made[rank] = forward(models[rank], rows[rank], step)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(len(models))]


def forward(model: Model, rows: Tensor, step: ModelInput) -> Tensor:
    with torch.inference_mode():
        return model.forward(rows, None, model.new_pages(64, 4).plan(step)).float()


def one_chunk(token_ids: list[int]) -> ModelInput:
    kv = BlockManager(num_blocks=64, block_size=4, max_num_seqs=1, max_blocks_per_seq=64)
    request = Request(arrival_s=0.0, prompt_tokens=len(token_ids), output_tokens=1)
    sequence = Sequence(0, request, np.array(token_ids))
    kv.hold(sequence, len(token_ids))
    return build_input(Batch([], [sequence], [len(token_ids)]), kv, CPU)
