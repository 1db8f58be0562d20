"""The forward pass of a decoder-only transformer over one flattened hybrid batch."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from .config import ModelConfig
from .linear import Linear
from .torch_ops import Attend, PagedKV, TorchOps, rope_frequencies
from .weights import LayerWeights, ModelWeights

__all__ = ["Model", "rope_frequencies"]


class AllReduce(Protocol):
    """Adds a tensor up over the tensor-parallel ranks of a stage."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in its place."""


class Model:
    """Config and weights, and what they compute by way of ``ops``. Llama, Mistral, Qwen2 and Qwen3 blocks.

    A ``Part`` of a model is one too: ``config`` then has the sizes of the part, and the ranks that share its layers add
    up what attention and MLP give by way of ``group``, one all-reduce for each.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: TorchOps | None = None,
        group: AllReduce | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.device
        self.dtype = weights.dtype
        self.ops = ops or TorchOps(config, self.dtype, self.device)
        self.group = group

    def new_pages(self, num_blocks: int, block_size: int) -> PagedKV:
        """An empty KV cache of this model's shape."""
        return self.ops.new_pages(num_blocks, block_size)

    def linears(self) -> list[Linear]:
        """One of every kind of linear layer that the forward pass multiplies with."""
        layer, lm_head = self.weights.layers[0], self.weights.lm_head
        return [layer.qkv, layer.o, layer.up, layer.down, *([] if lm_head is None else [lm_head])]

    def forward(self, rows: Tensor, emit_rows: Tensor | None, attend: Attend) -> Tensor:
        """Logits ``[len(emit_rows), vocab_size]`` of the flattened batch ``rows``; those of all rows for None.

        ``rows`` are token ids; in a later pipeline stage the hidden states ``[rows, hidden_size]`` that the one before
        returned, which are overwritten. A stage that is not the last returns hidden states; a tensor-parallel rank of
        the last the logits of its slice of the vocabulary. ``attend`` is that of the iteration (``PagedKV.plan``); it
        writes the keys and values of all rows.
        """
        ops, weights, layers = self.ops, self.weights, self.weights.layers
        residual = rows if weights.embedding is None else F.embedding(rows, weights.embedding)
        x = ops.norm(residual, layers[0].input_norm)
        for index, layer in enumerate(layers):
            x = self._add_norm(residual, layer.o, attend(index, self._heads(layer, x)), layer.mlp_norm)
            x = ops.activation(ops.linear(layer.up, x))
            if index + 1 < len(layers):
                x = self._add_norm(residual, layer.down, x, layers[index + 1].input_norm)
        residual = self._add(residual, layers[-1].down, x)
        if weights.final_norm is None or weights.lm_head is None:
            return residual
        if emit_rows is not None:
            residual = residual.index_select(0, emit_rows)
        return ops.linear(weights.lm_head, ops.norm(residual, weights.final_norm))

    def _add(self, residual: Tensor, layer: Linear, x: Tensor) -> Tensor:
        """``residual + layer(x)``, in place of ``residual``, over all ranks."""
        if self.group is None:
            return self.ops.add(residual, layer, x)
        return residual.add_(self.group.all_reduce(self.ops.linear(layer, x)))

    def _add_norm(self, residual: Tensor, layer: Linear, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of ``residual + layer(x)``, which takes the place of ``residual``."""
        if self.group is None:
            return self.ops.add_norm(residual, layer, x, weight)
        return self.ops.norm(self._add(residual, layer, x), weight)

    def _heads(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """Queries and keys, normed where the model does, and values: ``[num rows, heads, head_dim]``."""
        num_heads = self.config.num_heads
        heads = self.ops.linear(layer.qkv, x).view(len(x), -1, self.config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + self.config.num_kv_heads]
            q.copy_(self.ops.norm(q, layer.q_norm))
            k.copy_(self.ops.norm(k, layer.k_norm))
        return heads
