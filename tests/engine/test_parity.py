"""Greedy outputs equal transformers' token for token, whatever the batching does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_executor import TOKEN_COSTS
from tilebudget.engine import POLICIES, POLICY_NAMES, Batch, Engine, EngineConfig, Request, StepResult, Workload
from tilebudget.engine.model.model import Model
from tilebudget.engine.torch_executor import TorchExecutor
from torch import Tensor

FAMILIES = ("llama", "llama31", "mistral", "qwen2", "qwen3")
ROOMY, TIGHT = None, 18  # KV blocks of 4 tokens: 18 hold any one request but not all six


class RecordingExecutor(TorchExecutor):
    """Keeps the logits of every emitted token, by request."""

    def __init__(self, model: Model, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.logits: dict[int, list[Tensor]] = {}
        self._last = torch.empty(0)
        forward = model.forward

        def record(*args: Any) -> Tensor:
            self._last = forward(*args)
            return self._last

        model.forward = record  # type: ignore[assignment,method-assign]

    def execute(self, batch: Batch) -> StepResult:
        ended = [
            sequence
            for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True)
            if sequence.num_computed + tokens == sequence.num_tokens
        ]
        result = super().execute(batch)
        for sequence, row in zip([*batch.decodes, *ended], self._last, strict=True):
            self.logits.setdefault(sequence.index, []).append(row)
        return result


@pytest.fixture(scope="module")
def executors(reference: Callable[[str], SimpleNamespace]) -> Callable[[str], RecordingExecutor]:
    made: dict[str, RecordingExecutor] = {}

    def get(family: str) -> RecordingExecutor:
        if family not in made:
            made[family] = RecordingExecutor.from_model(reference(family).folder)
        made[family].logits = {}
        return made[family]

    return get


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workload_of(expected: SimpleNamespace) -> Workload:
    requests = [
        Request(arrival_s=0.0, prompt_tokens=len(prompt), output_tokens=count, prompt_token_ids=prompt)
        for prompt, count in zip(expected.prompts, expected.num_outputs, strict=True)
    ]
    return Workload(name="parity", requests=tuple(requests))


@pytest.mark.parametrize("num_kv_blocks", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("token_budget", [8, 17, 64, None])
@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_outputs_equal_transformers(
    family: str,
    policy: str,
    token_budget: int | None,
    num_kv_blocks: int | None,
    reference: Callable[[str], SimpleNamespace],
    executors: Callable[[str], RecordingExecutor],
) -> None:
    expected, executor = reference(family), executors(family)
    config = EngineConfig(
        token_budget=token_budget,
        policy=policy,
        max_num_seqs=6,
        max_model_len=64,
        block_size=4,
        num_kv_blocks=num_kv_blocks,
        token_costs=TOKEN_COSTS,
    )
    record = Engine(executor).run(workload_of(expected), config)

    assert record.outputs == expected.outputs
    for index, rows in executor.logits.items():
        torch.testing.assert_close(torch.stack(rows), expected.logits[index], atol=1e-4, rtol=0)
    can_preempt = POLICIES[policy].victim is not None
    assert (record.iterations.num_preemptions.sum() > 0) == (num_kv_blocks == TIGHT and can_preempt)
