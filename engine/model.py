"""The forward pass of a decoder-only transformer over one flattened hybrid batch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import PagedAttention
from .model_config import ModelConfig, RopeConfig
from .model_input import ModelInput
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
        self._frequencies = rope_frequencies(config.rope, config.head_dim).to(self.device)

    def new_cache(self, num_slots: int) -> Tensor:
        """An empty KV cache ``[num_layers, num_slots, 2, num_kv_heads, head_dim]``, zeroed.

        Zeroed, because a masked key still multiplies its value by 0, and 0 times leftover NaN is NaN.
        """
        config = self.config
        shape = (config.num_layers, num_slots, 2, config.num_kv_heads, config.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device).zero_()

    def forward(self, step: ModelInput, cache: Tensor) -> Tensor:
        """Logits ``[len(step.emit_rows), vocab_size]``; writes the keys and values of all rows into ``cache``."""
        attention = PagedAttention(step.spans, self.device)
        cos, sin = self._rotation(step.positions)
        x = F.embedding(step.token_ids, self.weights.embedding)
        for layer, kv in zip(self.weights.layers, cache.unbind(0), strict=True):
            x = x + self._attend(layer, self._norm(x, layer.input_norm), cos, sin, step.kv_slots, kv, attention)
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
        x = self._norm(x.index_select(0, step.emit_rows), self.weights.final_norm)
        return self.weights.lm_head(x)

    def _attend(
        self,
        layer: LayerWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_slots: Tensor,
        cache: Tensor,
        attention: PagedAttention,
    ) -> Tensor:
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        q, k, v = heads[:, : config.num_heads], heads[:, config.num_heads : num_rotated], heads[:, num_rotated:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q.copy_(self._norm(q, layer.q_norm))
            k.copy_(self._norm(k, layer.k_norm))
        rotated = _rotate(heads[:, :num_rotated], cos, sin)
        kv = torch.stack((rotated[:, config.num_heads :], v), dim=1)
        cache.index_copy_(0, kv_slots, kv)
        return layer.o(attention(rotated[:, : config.num_heads], cache))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        up = layer.up(x)
        if not self.config.gated_mlp:
            return layer.down(F.gelu(up))
        gate, up = up.chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every row's angles, ``[num rows, 1, head_dim / 2]`` in the model's dtype."""
        angles = (positions[:, None].float() * self._frequencies)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + head_dim / 2)`` of every head."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
