"""The tensors of a model: read from a Hugging Face folder of safetensors, or drawn at random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .linear import Linear
from .model_config import ModelConfig

#: ``(name, shape)`` to the tensor of that name on the model's device and in its dtype.
TensorSource = Callable[[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One decoder layer. ``qkv`` holds the query, key and value rows in that order, ``up`` the gate and up rows."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    up: Linear
    down: Linear


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """Everything that the forward pass multiplies with. ``lm_head`` shares ``embedding`` where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


def load_weights(folder: str | Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """The weights in ``folder``: ``model.safetensors``, or shards listed in ``model.safetensors.index.json``.

    Raises ValueError naming the file and the tensor when one is missing, damaged, or shaped unlike ``config`` says.
    """
    return _assemble(config, _CheckpointReader(Path(folder), dtype, device).read)


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> ModelWeights:
    """Weights drawn by ``seed``, scaled by ``1 / sqrt(inputs)`` so that activations neither vanish nor overflow."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        return tensor.normal_(std=shape[-1] ** -0.5, generator=generator)

    return _assemble(config, draw)


def _assemble(config: ModelConfig, read: TensorSource) -> ModelWeights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = read("model.embed_tokens.weight", (vocab, hidden))
    layers = tuple(_layer(config, f"model.layers.{index}.", read) for index in range(config.num_layers))
    final_norm = read("model.norm.weight", (hidden,))
    lm_head = embedding if config.tie_embeddings else read("lm_head.weight", (vocab, hidden))
    return ModelWeights(embedding=embedding, layers=layers, final_norm=final_norm, lm_head=Linear(lm_head))


def _layer(config: ModelConfig, prefix: str, read: TensorSource) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size, head_dim = config.q_size, config.kv_size, config.head_dim

    def norm(name: str, size: int) -> Tensor:
        return read(f"{prefix}{name}.weight", (size,))

    def linear(parts: Iterable[tuple[str, int]], inputs: int, bias: bool) -> Linear:
        """Several projections of the same input as one, their rows stacked in order."""
        weights = [read(f"{prefix}{name}.weight", (size, inputs)) for name, size in parts]
        biases = [read(f"{prefix}{name}.bias", (size,)) for name, size in parts] if bias else []
        return Linear(_stack(weights), _stack(biases) if bias else None)

    attention = [("self_attn.q_proj", q_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)]
    up = [("mlp.gate_proj", inner)] if config.gated_mlp else []
    return LayerWeights(
        input_norm=norm("input_layernorm", hidden),
        qkv=linear(attention, hidden, config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        o=linear([("self_attn.o_proj", hidden)], q_size, config.o_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        up=linear([*up, ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=linear([("mlp.down_proj", hidden)], inner, config.mlp_bias),
    )


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _CheckpointReader:
    """Finds each tensor's file once and reads tensors on demand."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._folder = folder
        self._file_of = _index(folder)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"{self._folder}: tensor {name!r} is missing from its safetensors files")
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: cannot read tensor {name!r}: {error}") from None
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{file}: tensor {name!r} is {tuple(tensor.shape)}: must be {shape} by config.json")
        if not tensor.is_floating_point():
            raise ValueError(f"{file}: tensor {name!r} is {tensor.dtype}: must be a floating point type")
        # copy: without it the tensor stays a view of the mapped file, unaligned and read from disk on first use.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)


def _index(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): folder / str(file) for name, file in weight_map.items()}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index}: must be a JSON object with a weight_map of tensor to file") from None
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json in that folder")
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return dict.fromkeys(opened.keys(), file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from None
