"""The forward pass of a decoder-only transformer over one flattened hybrid batch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .linear import Linear
from .model_config import ModelConfig
from .torch_ops import Attend, PagedKV, TorchOps, rope_frequencies
from .weights import LayerWeights, ModelWeights

__all__ = ["Model", "rope_frequencies"]


class Model:
    """Config and weights, and what they compute by way of ``ops``. Llama, Mistral, Qwen2 and Qwen3 blocks."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: TorchOps | None = None) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.ops = ops or TorchOps(config, self.dtype, self.device)

    def new_pages(self, num_blocks: int, block_size: int) -> PagedKV:
        """An empty KV cache of this model's shape."""
        return self.ops.new_pages(num_blocks, block_size)

    def linears(self) -> list[Linear]:
        """One of every kind of linear layer that the forward pass multiplies with."""
        layer = self.weights.layers[0]
        return [layer.qkv, layer.o, layer.up, layer.down, self.weights.lm_head]

    def forward(self, token_ids: Tensor, emit_rows: Tensor | None, attend: Attend) -> Tensor:
        """Logits ``[len(emit_rows), vocab_size]`` of the flattened batch ``token_ids``; those of all rows for None.

        ``attend`` is that of the iteration (``PagedKV.plan``); it writes the keys and values of all rows.
        """
        ops, layers = self.ops, self.weights.layers
        residual = F.embedding(token_ids, self.weights.embedding)
        x = ops.norm(residual, layers[0].input_norm)
        for index, layer in enumerate(layers):
            x = ops.add_norm(residual, layer.o, attend(index, self._heads(layer, x)), layer.mlp_norm)
            x = ops.activation(ops.linear(layer.up, x))
            if index + 1 < len(layers):
                x = ops.add_norm(residual, layer.down, x, layers[index + 1].input_norm)
        residual = ops.add(residual, layers[-1].down, x)
        if emit_rows is not None:
            residual = residual.index_select(0, emit_rows)
        return ops.linear(self.weights.lm_head, ops.norm(residual, self.weights.final_norm))

    def _heads(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """Queries and keys, normed where the model does, and values: ``[num rows, heads, head_dim]``."""
        num_heads = self.config.num_heads
        heads = self.ops.linear(layer.qkv, x).view(len(x), -1, self.config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + self.config.num_kv_heads]
            q.copy_(self.ops.norm(q, layer.q_norm))
            k.copy_(self.ops.norm(k, layer.k_norm))
        return heads
