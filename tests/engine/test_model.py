"""The forward pass against transformers, and rotary frequencies against its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tilebudget.engine import Batch, BlockManager, Request, Sequence
from tilebudget.engine.model.config import PRESETS, ModelConfig, RopeConfig
from tilebudget.engine.model.hf_config import from_hf
from tilebudget.engine.model.input import build_input
from tilebudget.engine.model.model import Model, rope_frequencies
from tilebudget.engine.model.weights import load_weights, random_weights

CPU = torch.device("cpu")

#: dtype -> largest and root mean square error of logits of size 10 against transformers in the same dtype's weights.
LOGIT_TOLERANCE = {torch.float32: (1e-4, 2e-5), torch.bfloat16: (0.6, 0.12), torch.float16: (0.06, 0.012)}


def prompt_logits(model: Model, token_ids: list[int], *, every_row: bool = True) -> torch.Tensor:
    """Logits of one prompt run as one chunk."""
    kv = BlockManager(num_blocks=64, block_size=4, max_num_seqs=1, max_blocks_per_seq=64)
    request = Request(arrival_s=0.0, prompt_tokens=len(token_ids), output_tokens=1)
    sequence = Sequence(0, request, np.array(token_ids))
    kv.hold(sequence, len(token_ids))
    step = build_input(Batch([], [sequence], [len(token_ids)]), kv, CPU)
    if every_row:
        step = replace(step, emit_rows=torch.arange(len(token_ids)))
    with torch.inference_mode():
        return model.forward(step.token_ids, step.emit_rows, model.new_pages(64, 4).plan(step)).float()


@pytest.mark.parametrize("dtype", list(LOGIT_TOLERANCE))
@pytest.mark.parametrize("family", ["llama", "llama31", "mistral", "qwen2", "qwen3"])
def test_logits_of_every_row_equal_transformers(
    family: str, dtype: torch.dtype, reference: Callable[[str], SimpleNamespace]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = reference(family).folder
    token_ids = [*reference(family).prompts[2], *reference(family).prompts[5]]
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = peer(torch.tensor([token_ids])).logits[0]
    model = Model(from_hf(folder), load_weights(folder, from_hf(folder), dtype=dtype, device=CPU))

    error = prompt_logits(model, token_ids) - expected
    largest, mean = LOGIT_TOLERANCE[dtype]
    assert error.abs().max().item() < largest
    assert error.square().mean().sqrt().item() < mean


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (RopeConfig(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (
            RopeConfig(theta=5e5, rope_type="linear", factor=4.0),
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        ),
        (
            PRESETS["llama-3.1-8b"].rope,
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_rope_frequencies_equal_transformers(rope: RopeConfig, parameters: dict[str, object]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=parameters
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(rope_frequencies(rope, 128), expected, rtol=2e-6, atol=0)


def test_only_rows_that_emit_get_logits() -> None:
    model = tiny_model()
    rows = prompt_logits(model, list(range(20)), every_row=False)
    assert rows.shape == (1, model.config.vocab_size)
    torch.testing.assert_close(rows[0], prompt_logits(model, list(range(20)))[-1], rtol=1e-5, atol=1e-5)


def test_model_without_a_gate_is_down_gelu_up() -> None:
    """falcon-180b's MLP: zero every other path and the logits are those of a two-layer perceptron."""
    model = tiny_model(gated_mlp=False, num_layers=1)
    layer = model.weights.layers[0]
    layer.o.weight.zero_()
    logits = prompt_logits(model, [3, 1, 4])

    assert model.weights.embedding is not None
    assert model.weights.lm_head is not None
    x = model.weights.embedding[[3, 1, 4]]
    norm = torch.nn.RMSNorm(model.config.hidden_size, eps=model.config.rms_norm_eps)
    with torch.no_grad():
        y = x + torch.nn.functional.gelu(norm(x) @ layer.up.weight.T) @ layer.down.weight.T
        torch.testing.assert_close(logits, norm(y) @ model.weights.lm_head.weight.T, rtol=1e-4, atol=1e-5)


def tiny_model(**changes: object) -> Model:
    config: ModelConfig = replace(PRESETS["tiny-llama"], **changes)  # type: ignore[arg-type]
    return Model(config, random_weights(config, dtype=torch.float32, device=CPU))
