"""The tensors of a model: read from a Hugging Face folder of safetensors, or drawn at random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..distributed.partition import Part
from .config import ModelConfig
from .linear import Linear


class Piece(NamedTuple):
    """The half-open range of a tensor along one dimension that is wanted."""

    dim: int
    start: int
    stop: int


#: ``(name, shape, piece)`` to that piece of the tensor of that name and (whole) shape, on the model's device and in its
#: dtype; to the whole tensor for None.
TensorSource = Callable[[str, tuple[int, ...], Piece | None], Tensor]


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
    """Everything that the forward pass multiplies with. ``lm_head`` shares ``embedding`` where they are tied.

    In a pipeline only the first stage has ``embedding``, only the last one ``final_norm`` and ``lm_head``; else None.
    """

    embedding: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor | None
    lm_head: Linear | None

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.layers[0].input_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Their type."""
        return self.layers[0].input_norm.dtype


def load_weights(
    folder: str | Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, part: Part | None = None
) -> ModelWeights:
    """The weights in ``folder``: ``model.safetensors``, or shards listed in ``model.safetensors.index.json``.

    With a ``part`` only what it holds is read. Raises ValueError naming the file and the tensor when one is missing,
    damaged, or shaped unlike ``config`` says.
    """
    return _assemble(config, part or Part.whole(config), _CheckpointReader(Path(folder), dtype, device).read)


def random_weights(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0, part: Part | None = None
) -> ModelWeights:
    """Weights scaled by ``1 / sqrt(inputs)`` so that activations neither vanish nor overflow.

    Each tensor is drawn by ``seed`` and its name alone, so a ``part`` has the values that it has in the whole model.
    """

    def draw(name: str, shape: tuple[int, ...], piece: Piece | None) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        digest = blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest))
        tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor.normal_(std=shape[-1] ** -0.5, generator=generator)
        return tensor if piece is None else _cut(tensor, piece).clone()

    return _assemble(config, part or Part.whole(config), draw)


def _cut(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)


def _assemble(config: ModelConfig, part: Part, read: TensorSource) -> ModelWeights:
    table = (config.vocab_size, config.hidden_size)
    embedding = read("model.embed_tokens.weight", table, None) if part.is_first else None
    indices = range(part.first_layer, part.first_layer + part.num_layers)
    layers = tuple(_layer(config, part, f"model.layers.{index}.", read) for index in indices)
    if not part.is_last:
        return ModelWeights(embedding=embedding, layers=layers, final_norm=None, lm_head=None)
    token_ids = None if part.size == 1 else Piece(0, *part.slice_of(config.vocab_size))
    if not config.tie_embeddings:
        lm_head = read("lm_head.weight", table, token_ids)
    elif embedding is None:
        lm_head = read("model.embed_tokens.weight", table, token_ids)
    else:
        lm_head = embedding if token_ids is None else _cut(embedding, token_ids)
    final_norm = read("model.norm.weight", (config.hidden_size,), None)
    return ModelWeights(embedding=embedding, layers=layers, final_norm=final_norm, lm_head=Linear(lm_head))


def _layer(config: ModelConfig, part: Part, prefix: str, read: TensorSource) -> LayerWeights:
    """One layer. Of a tensor-parallel rank the projections into heads and into the MLP have its share of the outputs
    (their rows), the ones back its share of the inputs (their columns): Megatron-LM (2019), section 3."""
    hidden, head_dim, split = config.hidden_size, config.head_dim, part.size > 1

    def norm(name: str, size: int) -> Tensor:
        return read(f"{prefix}{name}.weight", (size,), None)

    def into(parts: Iterable[tuple[str, int, int]], bias: bool) -> Linear:
        """Several projections of the hidden state as one, the rows of each, ``count`` groups of ``width``, in order."""
        weights, biases = [], []
        for name, count, width in parts:
            start, stop = part.slice_of(count)
            piece = Piece(0, start * width, stop * width) if split else None
            weights.append(read(f"{prefix}{name}.weight", (count * width, hidden), piece))
            if bias:
                biases.append(read(f"{prefix}{name}.bias", (count * width,), piece))
        return Linear(_stack(weights), _stack(biases) if bias else None)

    def back(name: str, count: int, width: int, bias: bool) -> Linear:
        """A projection to the hidden state. The ranks' results are added up, so the first one alone has the bias."""
        start, stop = part.slice_of(count)
        piece = Piece(1, start * width, stop * width) if split else None
        weight = read(f"{prefix}{name}.weight", (hidden, count * width), piece)
        return Linear(weight, read(f"{prefix}{name}.bias", (hidden,), None) if bias and part.rank == 0 else None)

    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.intermediate_size
    kv = [("self_attn.k_proj", kv_heads, head_dim), ("self_attn.v_proj", kv_heads, head_dim)]
    gate = [("mlp.gate_proj", inner, 1)] if config.gated_mlp else []
    return LayerWeights(
        input_norm=norm("input_layernorm", hidden),
        qkv=into([("self_attn.q_proj", heads, head_dim), *kv], config.qkv_bias),
        q_norm=norm("self_attn.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm("self_attn.k_norm", head_dim) if config.qk_norm else None,
        o=back("self_attn.o_proj", heads, head_dim, config.o_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        up=into([*gate, ("mlp.up_proj", inner, 1)], config.mlp_bias),
        down=back("mlp.down_proj", inner, 1, config.mlp_bias),
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

    def read(self, name: str, shape: tuple[int, ...], piece: Piece | None) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ValueError(f"{self._folder}: tensor {name!r} is missing from its safetensors files")
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                stored = opened.get_slice(name)
                found = tuple(stored.get_shape())
                if found == shape:
                    tensor: Tensor = stored[_index_of(piece)]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: cannot read tensor {name!r}: {error}") from None
        if found != shape:
            raise ValueError(f"{file}: tensor {name!r} is {found}: must be {shape} by config.json")
        if not tensor.is_floating_point():
            raise ValueError(f"{file}: tensor {name!r} is {tensor.dtype}: must be a floating point type")
        # copy: without it the tensor stays a view of the mapped file, unaligned and read from disk on first use.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)


def _index_of(piece: Piece | None) -> tuple[slice, ...]:
    if piece is None:
        return (slice(None),)
    return (*[slice(None)] * piece.dim, slice(piece.start, piece.stop))


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
