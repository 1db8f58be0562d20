"""The forward pass of a decoder-only transformer over one flattened hybrid batch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import TILE_ROWS, PagedAttention, causal_band
from .kv_pages import KVPages
from .model_config import ModelConfig, RopeConfig
from .model_input import ModelInput, Spans
from .weights import LayerWeights, ModelWeights


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, float32 ``[head_dim / 2]``.

    Source: RoFormer (2021) equation 15; the ``llama3`` stretch is that of Meta's Llama 3.1 release.
    """
    frequencies = rope.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.rope_type == "linear":
        frequencies = frequencies / rope.factor
    elif rope.rope_type == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        frequencies = torch.lerp(frequencies / rope.factor, frequencies, kept.clamp(0.0, 1.0))
    return frequencies.float()


class Model:
    """Config and weights, and what they compute. Llama, Mistral, Qwen2 and Qwen3 blocks."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._fused_norm = self.device.type == "cuda" or self.dtype != torch.float32
        self._band: Tensor | None = None
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(self.device)

    def new_pages(self, num_blocks: int, block_size: int) -> KVPages:
        """An empty KV cache of this model's shape."""
        config = self.config
        return KVPages(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def attention(self, spans: Spans) -> PagedAttention:
        """The attention of an iteration with these spans, for ``forward``."""
        if self.device.type == "cpu" and len(spans.num_rows) > spans.num_decodes:
            reach = int(spans.kv_lens.max())
            if self._band is None or self._band.shape[1] < reach + TILE_ROWS:
                self._band = causal_band(min(2 * reach, self.config.max_position), self.dtype, self.device)
        return PagedAttention(spans, self.device, self._band)

    def forward(self, step: ModelInput, attention: PagedAttention, cache: KVPages) -> Tensor:
        """Logits ``[len(step.emit_rows), vocab_size]``; writes the keys and values of all rows into ``cache``."""
        cos, sin = self._rotation(step.positions)
        x = F.embedding(step.token_ids, self.weights.embedding)
        for layer, pages in zip(self.weights.layers, cache.layers, strict=True):
            q, k, v = self._heads(layer, self._norm(x, layer.input_norm), cos, sin)
            pages.write(step.pages, step.offsets, k, v)
            layer.o.add_to(x, attention(q, k, v, pages))
            layer.down.add_to(x, self._activation(layer.up(self._norm(x, layer.mlp_norm))))
        x = self._norm(x.index_select(0, step.emit_rows), self.weights.final_norm)
        return self.weights.lm_head(x)

    def _heads(self, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed where the model does and rotated, and values: ``[num rows, heads, head_dim]``."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, : config.num_heads], heads[:, config.num_heads : num_rotated]
            q.copy_(self._norm(q, layer.q_norm))
            k.copy_(self._norm(k, layer.k_norm))
        rotated = _rotate(heads[:, :num_rotated], cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], heads[:, num_rotated:]

    def _activation(self, up: Tensor) -> Tensor:
        if not self.config.gated_mlp:
            return F.gelu(up)
        gate, up = up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        if self._fused_norm:
            normed: Tensor = F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
            return normed
        # On a CPU rms_norm is five passes over x; this is three.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale: Tensor = norm.square_().mul_(1 / x.shape[-1]).add_(self.config.rms_norm_eps).rsqrt_()
        return (x * scale).mul_(weight)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every row's angles, ``[num rows, 1, head_dim / 2]`` in the model's dtype."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + head_dim / 2)`` of every head."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = first.shape[-1]
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated
