"""Small checkpoints of every family, made with transformers, and what transformers generates from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

FAMILIES = ("llama", "llama31", "mistral", "qwen2", "qwen3")


def _build(family: str) -> Any:
    import transformers as hf

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        config = hf.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)
        return hf.LlamaForCausalLM(config)
    if family == "llama31":
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, rope_parameters=scaling, tie_word_embeddings=True))
    if family == "mistral":
        return hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=128))
    if family == "qwen2":
        return hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, tie_word_embeddings=True))
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes, head_dim=16))


def _randomise(model: torch.nn.Module) -> None:
    """Weights of a size that keeps logits apart: transformers' own initialisation leaves them nearly tied."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.5, generator=generator)
        else:
            parameter.data.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)


def rewrite_config_in_older_style(folder: Path) -> None:
    """Turn ``rope_parameters`` into ``rope_theta`` and ``rope_scaling``, as transformers 4 wrote them."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    config["rope_scaling"] = None if parameters["rope_type"] == "default" else parameters
    path.write_text(json.dumps(config))


def _make(family: str, folder: Path) -> SimpleNamespace:
    """Its ``folder``, ``prompts``, ``num_outputs``, and the ``outputs`` and ``logits`` of each prompt."""
    torch.manual_seed(0)
    model = _build(family).eval()
    _randomise(model)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 97, (1, length), generator=generator) for length in (23, 1, 41, 8, 17, 30)]
    num_outputs = (9, 12, 5, 14, 1, 11)
    outputs, logits = [], []
    for prompt, count in zip(prompts, num_outputs, strict=True):
        made = model.generate(
            prompt, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        outputs.append(tuple(made.sequences[0, prompt.shape[1] :].tolist()))
        logits.append(torch.cat(made.logits))
    model.save_pretrained(folder, max_shard_size="60KB" if family == "llama" else "5GB")
    if family in ("llama31", "qwen2"):
        rewrite_config_in_older_style(folder)
    return SimpleNamespace(
        folder=folder,
        prompts=tuple(tuple(prompt[0].tolist()) for prompt in prompts),
        num_outputs=num_outputs,
        outputs=tuple(outputs),
        logits=tuple(logits),
    )


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SimpleNamespace]:
    """Callable: family to its checkpoint and transformers' greedy outputs, each made once a session."""
    made: dict[str, SimpleNamespace] = {}

    def get(family: str) -> SimpleNamespace:
        if family not in made:
            made[family] = _make(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get
