"""Checkpoints, one file and sharded, read back tensor by tensor; damage is named; random weights are reproducible."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tilebudget.engine.model.config import PRESETS
from tilebudget.engine.model.hf_config import from_hf
from tilebudget.engine.model.weights import ModelWeights, load_weights, random_weights

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, from_hf(folder), dtype=dtype, device=CPU)


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_projections_are_fused_in_order(family: str, reference: Callable[[str], SimpleNamespace]) -> None:
    folder = reference(family).folder
    saved, weights = checkpoint_tensors(folder), load(folder)
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        for fused, names in (
            (layer.qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.up, ("mlp.gate_proj", "mlp.up_proj")),
            (layer.o, ("self_attn.o_proj",)),
            (layer.down, ("mlp.down_proj",)),
        ):
            torch.testing.assert_close(fused.weight, torch.cat([saved[f"{prefix}{n}.weight"] for n in names]))
            if fused.bias is not None:
                torch.testing.assert_close(fused.bias, torch.cat([saved[f"{prefix}{n}.bias"] for n in names]))
            assert (fused.bias is not None) == (f"{prefix}{names[0]}.bias" in saved)
        assert (layer.q_norm is not None) == (family == "qwen3")


def test_a_sharded_checkpoint_was_really_sharded(reference: Callable[[str], SimpleNamespace]) -> None:
    assert len(list(reference("llama").folder.glob("*.safetensors"))) > 1
    assert len(list(reference("qwen3").folder.glob("*.safetensors"))) == 1


def test_tied_embeddings_are_the_output_layer(reference: Callable[[str], SimpleNamespace]) -> None:
    tied, untied = load(reference("qwen2").folder), load(reference("qwen3").folder)
    assert tied.lm_head
    assert untied.lm_head
    assert untied.embedding is not None
    torch.testing.assert_close(tied.lm_head.weight, tied.embedding)
    assert not torch.equal(untied.lm_head.weight, untied.embedding)


def test_weights_are_cast_to_the_dtype_asked_for(reference: Callable[[str], SimpleNamespace]) -> None:
    weights = load(reference("qwen3").folder, torch.bfloat16)
    assert weights.embedding is not None
    assert weights.embedding.dtype == weights.layers[0].qkv.weight.dtype == torch.bfloat16


@pytest.fixture
def copy_of(reference: Callable[[str], SimpleNamespace], tmp_path: Path) -> Callable[[str], Path]:
    def copy(family: str) -> Path:
        return Path(shutil.copytree(reference(family).folder, tmp_path / family))

    return copy


def test_missing_tensor_is_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.layers.1.self_attn.k_norm.weight' is missing"):
        load(folder)


def test_wrong_shape_is_named_with_both_shapes(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3")
    config = replace(from_hf(folder), vocab_size=98)
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is \(97, 48\): must be \(98, 48\)"):
        load_weights(folder, config, dtype=torch.float32, device=CPU)


def test_integer_weights_are_refused(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.norm.weight' is torch.int8: must be a floating point type"):
        load(folder)


def test_truncated_file_is_named(copy_of: Callable[[str], Path]) -> None:
    file = copy_of("qwen3") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        load(file.parent)


def test_missing_shard_and_damaged_index_are_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("llama")
    index = folder / "model.safetensors.index.json"
    shard = json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    (folder / shard).unlink()
    with pytest.raises(ValueError, match=rf"{shard}: cannot read tensor"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: must be a JSON object with a weight_map"):
        load(folder)


def test_folder_without_weights_is_named(copy_of: Callable[[str], Path]) -> None:
    folder = copy_of("qwen3")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load(folder)


def test_random_weights_depend_on_the_seed_alone() -> None:
    config = PRESETS["tiny-llama"]
    first, again, other = (random_weights(config, dtype=torch.float32, device=CPU, seed=s) for s in (0, 0, 1))
    assert torch.equal(first.layers[3].down.weight, again.layers[3].down.weight)
    assert not torch.equal(first.layers[3].down.weight, other.layers[3].down.weight)
    assert first.layers[0].up.weight.std().item() == pytest.approx(256**-0.5, rel=0.02)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True, "gated_mlp": False, "qkv_bias": True, "qk_norm": True}]
)
def test_num_parameters_counts_the_tensors(changes: dict[str, Any]) -> None:
    config = replace(PRESETS["tiny-llama"], **changes)
    weights = random_weights(config, dtype=torch.float32, device=CPU)
    assert weights.embedding is not None
    assert weights.final_norm is not None
    assert weights.lm_head is not None
    tensors = [weights.embedding, weights.final_norm]
    tensors += [] if config.tie_embeddings else [weights.lm_head.weight]
    for layer in weights.layers:
        linears = (layer.qkv, layer.o, layer.up, layer.down)
        tensors += [layer.input_norm, layer.mlp_norm, *(linear.weight for linear in linears)]
        tensors += [t for t in (layer.q_norm, layer.k_norm, *(linear.bias for linear in linears)) if t is not None]
    assert config.num_parameters == sum(tensor.numel() for tensor in tensors)
