"""The forward pass in our Triton kernels against the one in torch, in the interpreter where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tilebudget.engine import Batch, BlockManager, Engine, EngineConfig, Request, RunRecord, Sequence, Workload
from tilebudget.engine.model.config import PRESETS, ModelConfig, RopeConfig
from tilebudget.engine.model.decode_graphs import DecodeGraphs, batch_ladder, greedy
from tilebudget.engine.model.input import build_input, lay_out
from tilebudget.engine.model.kernel_choice import choose_ops, measured_ops
from tilebudget.engine.model.model import Model
from tilebudget.engine.model.torch_ops import TorchOps
from tilebudget.engine.model.triton_ops import OPERATIONS, TritonOps, TritonPagedKV, attention_input, unsupported
from tilebudget.engine.model.weights import ModelWeights, random_weights
from tilebudget.engine.torch_executor import TorchExecutor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

LLAMA = ModelConfig(
    name="small-llama",
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    max_position=512,
)
#: Llama's plain block, Qwen2's biases (and a head size that is no power of two), Qwen3's normed heads, 4 to a KV head.
FAMILIES = {
    "llama": replace(LLAMA, rope=RopeConfig(theta=5e5, rope_type="linear", factor=4.0), tie_embeddings=True),
    "qwen2": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True, head_dim=24),
    "qwen3": replace(LLAMA, qk_norm=True, num_heads=4, num_kv_heads=1, head_dim=32),
}

#: dtype -> largest error of logits of size 4 against torch's op set in the same dtype.
LOGIT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float16: 0.012}


def make_weights(config: ModelConfig, dtype: torch.dtype = torch.float32) -> ModelWeights:
    """Random weights with norms and biases that matter."""
    weights = random_weights(config, dtype=dtype, device=DEVICE, seed=3)
    generator = torch.Generator(DEVICE).manual_seed(4)
    for layer in weights.layers:
        for norm in (layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm):
            if norm is not None:
                norm.uniform_(0.5, 1.5, generator=generator)
        for linear in (layer.qkv, layer.o, layer.up, layer.down):
            if linear.bias is not None:
                linear.bias.normal_(std=0.5, generator=generator)
    return weights


def both(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Model, Model]:
    """The model in torch and in Triton, on the same weights."""
    weights = make_weights(config, dtype)
    return Model(config, weights), Model(config, weights, choose_ops("triton", config, weights))


class Server:
    """Runs batches by hand on both models and compares the logits of every emitting row."""

    def __init__(self, config: ModelConfig, *, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.models = both(config, dtype)
        self.kv = BlockManager(num_blocks=64, block_size=block_size, max_num_seqs=8, max_blocks_per_seq=32)
        self.pages = [model.new_pages(64, block_size) for model in self.models]
        self.tolerance = LOGIT_TOLERANCE[dtype]
        self.rng = np.random.default_rng(0)

    def sequence(self, prompt_tokens: int) -> Sequence:
        """A request with blocks for its prompt and 40 more tokens."""
        request = Request(arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=40)
        sequence = Sequence(0, request, self.rng.integers(0, LLAMA.vocab_size, prompt_tokens + 40))
        self.kv.hold(sequence, prompt_tokens + 40)
        return sequence

    def step(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]] | None = None) -> None:
        """One iteration on both sides; then the sequences move on."""
        chunks = chunks or []
        batch = Batch(decodes, [sequence for sequence, _ in chunks], [tokens for _, tokens in chunks])
        logits = []
        with torch.inference_mode():
            for model, pages in zip(self.models, self.pages, strict=True):
                step = build_input(batch, self.kv, DEVICE)
                rows = torch.arange(len(step.token_ids), device=DEVICE)
                logits.append(model.forward(step.token_ids, rows, pages.plan(step)).float())
        torch_logits, triton_logits = logits
        assert torch_logits.abs().max() > 1.0
        assert (triton_logits - torch_logits).abs().max().item() < self.tolerance
        if self.models[0].dtype == torch.float32:
            assert torch.equal(torch_logits.argmax(-1), triton_logits.argmax(-1))
        for sequence, tokens in [*((sequence, 1) for sequence in decodes), *chunks]:
            sequence.num_computed += tokens
            sequence.num_tokens = max(sequence.num_tokens, sequence.num_computed)
            if sequence.num_computed == sequence.num_tokens:
                sequence.num_tokens += 1


@pytest.mark.parametrize("family", list(FAMILIES))
def test_hybrid_batches_give_the_logits_of_torch(family: str) -> None:
    """Whole prompts, a chunk over its prefix, decodes beside chunks, decodes alone; pages of 4, ragged ends."""
    server = Server(FAMILIES[family], block_size=4)
    first, second, third = server.sequence(7), server.sequence(8), server.sequence(1)
    server.step([], [(first, 7)])
    server.step([first], [(second, 5), (third, 1)])
    server.step([third], [(second, 3)])
    server.step([first, second, third])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_within_its_tolerance(dtype: torch.dtype) -> None:
    server = Server(FAMILIES["qwen3"], block_size=16, dtype=dtype)
    first, second = server.sequence(9), server.sequence(2)
    server.step([], [(first, 9)])
    server.step([first], [(second, 2)])
    server.step([first, second])


def serve(executor: TorchExecutor, config: EngineConfig) -> RunRecord:
    requests = tuple(
        Request(arrival_s=0.0, prompt_tokens=prompt, output_tokens=output)
        for prompt, output in ((3, 6), (1, 3), (9, 3), (5, 1))
    )
    return Engine(executor).run(Workload(name="test", requests=requests), config)


CONFIG = EngineConfig(token_budget=8, max_num_seqs=3, max_model_len=16, block_size=4)
ONE_LAYER = replace(LLAMA, num_layers=1)


@pytest.fixture(scope="module")
def expected() -> RunRecord:
    """What torch generates."""
    return serve(TorchExecutor(both(ONE_LAYER)[0]), CONFIG)


def test_engine_generates_the_tokens_of_torch_when_requests_are_preempted(expected: RunRecord) -> None:
    """Five blocks hold 20 tokens: too few for three requests, so that one is preempted and recomputed as a chunk."""
    record = serve(TorchExecutor(both(ONE_LAYER)[1]), replace(CONFIG, num_kv_blocks=5))
    assert record.iterations.num_preemptions.sum() > 0
    assert record.outputs == expected.outputs


def test_padded_decodes_generate_the_same_tokens(expected: RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of decodes run padded to 2 or 3: the buffers of captured graphs, without the capture."""
    executor = TorchExecutor(both(ONE_LAYER)[1], cuda_graphs=False)
    kv = BlockManager(num_blocks=12, block_size=4, max_num_seqs=3, max_blocks_per_seq=4)
    executor.start(CONFIG, kv)
    pages = executor._cache
    assert isinstance(pages, TritonPagedKV)
    graphs = DecodeGraphs(executor.model, pages, max_num_seqs=3, max_blocks_per_seq=4, capture=False)
    graphs.sizes = [2, 3]
    launched, launch = [], graphs.launch

    def count_launch(size: int) -> torch.Tensor:
        launched.append(size)
        return launch(size)

    monkeypatch.setattr(graphs, "launch", count_launch)
    executor._graphs = graphs
    padded = serve(executor, replace(CONFIG, num_kv_blocks=12))
    assert padded.outputs == expected.outputs
    iterations = padded.iterations
    only_decodes = iterations.num_decodes[iterations.num_prefill_tokens == 0].tolist()
    assert launched == [2 if count <= 2 else 3 for count in only_decodes]
    assert 1 in only_decodes, "no batch was padded"


def test_padding_rows_write_nothing() -> None:
    model = both(LLAMA)[1]
    pages = model.new_pages(4, 4)
    assert isinstance(pages, TritonPagedKV)
    pages._pages.fill_(7.0)
    graphs = DecodeGraphs(model, pages, max_num_seqs=4, max_blocks_per_seq=2, capture=False)
    kv = BlockManager(num_blocks=4, block_size=4, max_num_seqs=4, max_blocks_per_seq=2)
    sequence = Sequence(0, Request(arrival_s=0.0, prompt_tokens=6, output_tokens=1), np.arange(6))
    kv.hold(sequence, 6)
    sequence.num_computed = 5
    graphs.sizes = [4]
    assert graphs.load(Batch([sequence]), kv) == 4
    assert len(graphs.launch(4)) == 4
    written = (pages._pages != 7.0).flatten(4).any(-1)  # [keys and values, layers, blocks, slots]
    block = int(kv.block_table[sequence.slot, 1])
    expected = torch.zeros_like(written)
    expected[:, :, block, 1] = True
    assert torch.equal(written, expected)


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (50, [1, 2, 4, 8, 16, 24, 32, 48, 50])],
)
def test_batch_ladder(max_num_seqs: int, expected: list[int]) -> None:
    assert batch_ladder(max_num_seqs) == expected


def test_batch_ladder_stays_short_and_pads_little() -> None:
    ladder = batch_ladder(1024)
    assert len(ladder) < 32
    assert all(after - before <= before / 2 for before, after in pairwise(ladder) if before >= 16)


def test_greedy_marks_every_row_when_a_logit_is_not_finite() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    assert greedy(logits).tolist() == [1, 0]
    logits[1, 2] = float("nan")
    assert greedy(logits).tolist() == [-1, -1]


@pytest.mark.parametrize("use", [*([operation] for operation in OPERATIONS), []])
def test_each_operation_can_be_chosen_by_itself(use: list[str]) -> None:
    server = Server(LLAMA, block_size=4)
    torch_model = server.models[0]
    mixed = Model(LLAMA, torch_model.weights, TritonOps(LLAMA, torch.float32, DEVICE, use=use))
    server.models, server.pages = (torch_model, mixed), [model.new_pages(64, 4) for model in (torch_model, mixed)]
    first, second = server.sequence(3), server.sequence(2)
    server.step([], [(first, 3)])
    server.step([first], [(second, 2)])
    described = mixed.ops.describe()
    assert {name for name in OPERATIONS if described[f"{name}_kernel"] == "triton"} == set(use)


@pytest.mark.parametrize(
    ("changes", "operation", "reason"),
    [
        ({"head_dim": 256}, "attention", "head_dim 256 is above 128"),
        ({"num_heads": 64, "num_kv_heads": 1}, "attention", "64 query heads share a KV head, at most 32 can"),
        ({"hidden_size": 65536}, "norm", "hidden_size 65536 is above 32768"),
        ({"gated_mlp": False}, "activation", "the MLP has no gate"),
    ],
)
def test_what_does_not_fit_runs_in_torch_and_says_why(changes: Mapping[str, int], operation: str, reason: str) -> None:
    config = replace(LLAMA, num_layers=1, **changes)  # type: ignore[arg-type]
    assert reason in unsupported(config, torch.float32)[operation]
    with pytest.raises(ValueError, match=f"use='{operation}'"):
        TritonOps(config, torch.float32, DEVICE, use=[operation])
    small = replace(config, hidden_size=min(config.hidden_size, 64))
    if operation != "norm":
        ops = choose_ops("triton", small, make_weights(small))
        assert reason in ops.describe()[f"{operation}_kernel"]
        assert ops.describe()["kernels"] == "triton and torch"


def test_every_preset_fits_the_kernels_in_bf16() -> None:
    reasons = {name: unsupported(config, torch.bfloat16) for name, config in PRESETS.items()}
    assert {name: list(reason) for name, reason in reasons.items() if reason} == {"falcon-180b": ["activation"]}


def test_automatic_choice_times_both_and_keeps_the_faster() -> None:
    """The interpreter is far slower than torch, so torch wins everywhere; the notes carry the ratios."""
    weights = make_weights(ONE_LAYER)
    ops = measured_ops(ONE_LAYER, weights, num_decodes=1, chunk_tokens=3, decode_context=5, repeats=2)
    described = ops.describe()
    for operation in OPERATIONS:
        assert "times torch's speed on 1 rows of decodes" in described[f"{operation}_kernel"]
        if DEVICE.type == "cpu":
            assert described[f"{operation}_kernel"].startswith("torch (0.")


def test_automatic_choice_drops_a_kernel_that_is_wrong_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: TritonOps, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return TorchOps.norm(self, x, weight) * 1.1

    def failing(self: TritonOps, up: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(TritonOps, "norm", wrong)
    monkeypatch.setattr(TritonOps, "activation", failing)
    described = measured_ops(
        ONE_LAYER, make_weights(ONE_LAYER), num_decodes=1, chunk_tokens=3, decode_context=5, repeats=1
    ).describe()
    assert "off by 1.0e-01 of the largest value" in described["norm_kernel"]
    assert "RuntimeError: out of resource: shared memory" in described["activation_kernel"]
    assert described["norm_kernel"].startswith("torch (")


def test_attention_input_places_every_row() -> None:
    """Two decodes and a chunk of three over a prefix of five, pages of four, in a shuffled table."""
    kv = BlockManager(num_blocks=16, block_size=4, max_num_seqs=3, max_blocks_per_seq=4)
    kv.block_table[:] = np.array([[3, 1, 0, 0], [5, 0, 0, 0], [9, 2, 7, 0]])
    sequences = []
    for slot, (known, computed) in enumerate([(7, 6), (1, 0), (8, 5)]):
        sequence = Sequence(
            slot, Request(arrival_s=0.0, prompt_tokens=known, output_tokens=1), np.zeros(known, dtype=np.int64)
        )
        sequence.slot, sequence.num_computed = slot, computed
        sequences.append(sequence)
    step = attention_input(lay_out(Batch(sequences[:2], sequences[2:], [3]), kv), DEVICE)
    assert step.positions.tolist() == [6, 0, 5, 6, 7]
    assert step.slots.tolist() == [1 * 4 + 2, 5 * 4, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3]
    assert step.starts.tolist() == [0, 1, 2, 5]
    assert step.contexts.tolist() == [7, 1, 8]
    assert step.block_table.tolist() == [[3, 1], [5, 0], [9, 2]]
    assert (step.num_decodes, step.max_query_len, step.max_context_len) == (2, 3, 8)
    for tensor in (step.positions, step.slots, step.starts, step.contexts, step.block_table):
        assert tensor.dtype == torch.int32
        assert tensor.data_ptr() % 16 == 0


def test_kernels_setting_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"kernels='cutlass': must be one of auto, torch, triton"):
        TorchExecutor.from_model("tiny-llama", kernels="cutlass")
    assert TorchExecutor.from_model("tiny-llama").describe()["kernels"] == "torch"
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"kernels='triton': needs a CUDA device"):
        TorchExecutor.from_model("tiny-llama", kernels="triton")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_captured_graphs_generate_the_tokens_of_eager_launches(family: str) -> None:
    model = both(FAMILIES[family])[1]
    eager, captured = (TorchExecutor(model, cuda_graphs=graphs) for graphs in (False, True))
    assert serve(captured, CONFIG).outputs == serve(eager, CONFIG).outputs
    assert captured.describe()["cuda_graphs"] == "decodes, 3 batch sizes to 3"


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU where there is none")
def test_no_iteration_and_no_graph_waits_for_the_compiler() -> None:
    """The kernels are really compiled (for sm_90) with the launches of whole engine runs: all of it in ``start``."""
    script = Path(__file__).resolve().parent.parent / "support" / "fake_gpu.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["finished"] == 4 * 30
    by_phase = {name.split(":")[0] for name in found["compiled"]}
    assert by_phase == {"prepare"}, found["compiled"]
    kernels = {name.split(":")[1] for name in found["compiled"]}
    assert kernels == {
        "_gemm_kernel",
        "_attention_kernel",
        "_reduce_splits_kernel",
        "_rms_norm_kernel",
        "_rotary_write_kernel",
        "_silu_mul_kernel",
    }
