"""The real executor: what it reuses, what it measures, and how it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tilebudget.engine import (
    BlockManager,
    Engine,
    EngineConfig,
    NonFiniteLogitsError,
    OutOfMemoryError,
    Request,
    RunRecord,
    StepResult,
    Workload,
)
from tilebudget.engine import device as device_module
from tilebudget.engine import torch_executor as executor_module
from tilebudget.engine.model.config import PRESETS
from tilebudget.engine.model.input import ModelInput
from tilebudget.engine.model.torch_ops import PagedKV
from tilebudget.engine.torch_executor import TorchExecutor

CONFIG = EngineConfig(token_budget=64, max_num_seqs=8, max_model_len=128, block_size=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def executor() -> TorchExecutor:
    return TorchExecutor.from_model("tiny-llama")


def serve(executor: TorchExecutor, config: EngineConfig = CONFIG, num_requests: int = 6) -> RunRecord:
    requests = tuple(
        Request(arrival_s=0.0, prompt_tokens=20 + 7 * index, output_tokens=5) for index in range(num_requests)
    )
    return Engine(executor).run(Workload(name="test", requests=requests), config)


def test_describe_says_what_ran(executor: TorchExecutor) -> None:
    described = executor.describe()
    assert described["device"] == "cpu"
    assert described["device_name"]
    assert (described["model"], described["dtype"]) == ("tiny-llama", "fp32")
    assert described["torch"] == torch.__version__
    assert described["num_threads"] == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_dtype_serves(dtype: str) -> None:
    record = serve(TorchExecutor.from_model("tiny-llama", dtype=dtype))
    assert record.count_status("finished") == 6
    assert all(len(output) == 5 for output in record.outputs)


def test_falcon_like_block_serves() -> None:
    config = replace(PRESETS["tiny-llama"], name="tiny-falcon", gated_mlp=False, tie_embeddings=True)
    assert serve(TorchExecutor.from_model(config)).count_status("finished") == 6


def test_seed_decides_the_random_weights(executor: TorchExecutor) -> None:
    same, other = TorchExecutor.from_model("tiny-llama"), TorchExecutor.from_model("tiny-llama", seed=1)
    assert serve(executor).outputs == serve(same).outputs != serve(other).outputs


def test_cache_and_warm_up_are_paid_once_for_a_config(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, steps = [], []
    new_pages, step = executor.model.new_pages, TorchExecutor._step

    def count_new_pages(num_blocks: int, block_size: int) -> PagedKV:
        allocated.append((num_blocks, block_size))
        return new_pages(num_blocks, block_size)

    def count_step(self: TorchExecutor, model_input: ModelInput) -> StepResult:
        steps.append(len(model_input.token_ids))
        return step(self, model_input)

    monkeypatch.setattr(executor.model, "new_pages", count_new_pages)
    monkeypatch.setattr(TorchExecutor, "_step", count_step)

    first = serve(executor)
    warm_up = len(steps) - len(first.iterations)
    assert warm_up > 0
    assert max(steps[:warm_up]) == CONFIG.token_budget
    second = serve(executor)
    assert len(steps) == warm_up + len(first.iterations) + len(second.iterations)
    assert allocated == [(first.num_kv_blocks, CONFIG.block_size)]
    assert second.outputs == first.outputs

    serve(executor, replace(CONFIG, token_budget=32))
    assert len(allocated) == 1
    serve(executor, replace(CONFIG, num_kv_blocks=40))
    assert allocated[1:] == [(40, CONFIG.block_size)]


def test_model_time_is_within_the_iteration(executor: TorchExecutor) -> None:
    iterations = serve(executor).iterations
    assert (iterations.model_s > 0).all()
    assert (iterations.model_s < iterations.duration_s).all()


def test_default_kv_blocks_are_what_the_requests_can_use(executor: TorchExecutor) -> None:
    assert executor.default_num_kv_blocks(CONFIG) == 8 * 128 // 8


def test_default_kv_blocks_are_half_of_the_free_memory(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # tiny-llama, fp32: 4 layers of 2 * 2 heads of 32 numbers, 2048 bytes a token, 16 KiB a block of 8.
    monkeypatch.setattr(executor_module, "free_memory_bytes", lambda device: 2 * 50 * 16384)
    assert executor.default_num_kv_blocks(CONFIG) == 50
    monkeypatch.setattr(executor_module, "free_memory_bytes", lambda device: 2 * 15 * 16384)
    with pytest.raises(OutOfMemoryError, match=r"128 tokens needs 16 blocks, cpu has memory for 15"):
        executor.default_num_kv_blocks(CONFIG)


def test_cache_larger_than_memory_is_refused_before_the_kernel_kills_us(
    executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr(device_module, "free_memory_bytes", lambda device: 2**30)
        with pytest.raises(OutOfMemoryError, match=r"a KV cache of 100000 blocks needs 1.5 GiB, cpu has 1.0 GiB free"):
            serve(executor, replace(CONFIG, num_kv_blocks=100000))
    assert serve(executor).count_status("finished") == 6


def test_model_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "free_memory_bytes", lambda device: 10**9)
    with pytest.raises(OutOfMemoryError, match=r"weights of falcon-180b needs? 33\d\.\d GiB, cpu has 0\.9 GiB free"):
        TorchExecutor.from_model("falcon-180b", dtype="bf16")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_torch_out_of_memory_becomes_ours(
    error: RuntimeError, executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(executor)

    def fail(*_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(executor.model, "forward", fail)
    with pytest.raises(OutOfMemoryError, match=r"an iteration of 64 tokens: .*memory"):
        serve(executor)


def test_other_runtime_errors_pass_unchanged(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(executor)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("a bug")

    monkeypatch.setattr(executor.model, "forward", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        serve(executor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_are_an_error_and_leave_no_trace(value: float, executor: TorchExecutor) -> None:
    expected = serve(executor).outputs
    embedding = executor.model.weights.embedding
    assert embedding is not None
    kept = embedding[5].clone()
    embedding[5] = value
    prompt = Request(arrival_s=0.0, prompt_tokens=30, output_tokens=2, prompt_token_ids=(5,) * 30)
    with pytest.raises(NonFiniteLogitsError, match="tiny-llama produced NaN or infinite logits"):
        Engine(executor).run(Workload(name="bad", requests=(prompt,)), CONFIG)
    embedding[5] = kept
    assert serve(executor).outputs == expected


def test_execute_before_start_is_an_error(executor: TorchExecutor) -> None:
    from tilebudget.engine import Batch

    with pytest.raises(RuntimeError, match="before start"):
        executor.execute(Batch([]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, r"device='tpu': must be cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, r"dtype='int8': must be one of fp32, bf16, fp16"),
        ({"num_threads": 0}, r"num_threads=0: must be at least 1"),
    ],
)
def test_bad_settings_name_field_and_rule(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchExecutor.from_model("tiny-llama", **settings)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device='cuda': torch finds no CUDA device"):
        TorchExecutor.from_model("tiny-llama", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cuda_serves_as_the_cpu_does(dtype: str) -> None:
    on_cuda, on_cpu = (serve(TorchExecutor.from_model("tiny-llama", device=d, dtype=dtype)) for d in ("cuda", "cpu"))
    assert on_cuda.count_status("finished") == on_cpu.count_status("finished") == 6


def test_block_manager_of_the_run_is_the_one_used(executor: TorchExecutor) -> None:
    """A second start with another table must not read the first's."""
    kv = BlockManager(num_blocks=128, block_size=8, max_num_seqs=8, max_blocks_per_seq=16)
    kv.block_table[:] = np.int32(127)
    executor.start(CONFIG, kv)
    first = serve(executor).outputs
    assert first == serve(TorchExecutor.from_model("tiny-llama")).outputs
