"""The operations of the forward pass in plain torch, and the KV cache in the layout that they want."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import TILE_ROWS, PagedAttention, causal_band
from .config import ModelConfig, RopeConfig
from .input import ModelInput, Spans, send
from .kv_pages import KVPages
from .linear import Linear

#: Called with a layer's index and its heads ``[rows, queries + keys + values, head_dim]``, not yet rotated: writes keys
#: and values into the layer's pages and returns the attention output ``[rows, num_heads * head_dim]``.
Attend = Callable[[int, Tensor], Tensor]


class PagedKV(Protocol):
    """A KV cache and the attention over it: what knows the layout of the pages."""

    num_blocks: int
    block_size: int
    num_bytes: int

    def plan(self, step: ModelInput) -> Attend:
        """The attention of one iteration, to be called for each layer in turn."""

    def prepare(self, *, max_query_len: int, max_context_len: int) -> None:
        """Pay now for whatever iterations within these bounds would otherwise pay for on their first run."""

    def clear(self) -> None:
        """Back to zeros."""


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


def rope_tables(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair's angle, float32 ``[num_positions, head_dim / 2]`` each."""
    positions = torch.arange(num_positions, device=device)[:, None].float()
    angles = positions * rope_frequencies(config.rope, config.head_dim).to(device)
    return angles.cos(), angles.sin()


class TorchOps:
    """What a decoder layer is made of, as torch computes it. Of one model on one device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._fused_norm = device.type == "cuda" or dtype != torch.float32

    def describe(self) -> dict[str, str]:
        """Which implementation runs each operation."""
        return {"kernels": "torch"}

    def prepare(self, linears: list[Linear], *, max_tokens: int) -> None:
        """Pay now for whatever iterations of up to ``max_tokens`` rows would otherwise pay for on their first run."""

    def new_pages(self, num_blocks: int, block_size: int) -> PagedKV:
        """An empty KV cache."""
        return TorchPagedKV(self.config, num_blocks, block_size, self.dtype, self.device)

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """``layer`` of ``x`` ``[rows, inputs]``."""
        return layer(x)

    def add(self, residual: Tensor, layer: Linear, x: Tensor) -> Tensor:
        """``residual + layer(x)``, in place of ``residual``."""
        return layer.add_to(residual, x)

    def add_norm(self, residual: Tensor, layer: Linear, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of ``residual + layer(x)``, which takes the place of ``residual``."""
        return self.norm(self.add(residual, layer, x), weight)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        if self._fused_norm:
            normed: Tensor = F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
            return normed
        # On a CPU rms_norm is five passes over x; this is three.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale: Tensor = norm.square_().mul_(1 / x.shape[-1]).add_(self.config.rms_norm_eps).rsqrt_()
        return (x * scale).mul_(weight)

    def activation(self, up: Tensor) -> Tensor:
        """SiLU(gate) * up of the fused projection, GELU where the model has no gate."""
        if not self.config.gated_mlp:
            return F.gelu(up)
        gate, up = up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class TorchPagedKV:
    """A ``PagedKV`` of ``KVPages``, its attention in torch operations."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.pages = KVPages(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = self.pages.num_bytes
        self._config = config
        self._dtype = dtype
        self._device = device
        tables = rope_tables(config, min(config.max_position, num_blocks * block_size), device)
        self._cos, self._sin = (table.to(dtype) for table in tables)
        self._band: Tensor | None = None
        self._attention: PagedAttention | None = None

    def plan(self, step: ModelInput) -> Attend:
        """The attention of one iteration: mask and page indices are made here, once for all layers."""
        config, layers, rows = self._config, self.pages.layers, step.rows
        self._attention = attention = PagedAttention(rows.spans, self._device, self._mask(rows.spans), self._attention)
        positions, pages, offsets = send([rows.positions, rows.pages, rows.offsets], self._device)
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        angles: list[Tensor] = []  # of the rows, from the first layer on

        def attend(index: int, heads: Tensor) -> Tensor:
            if not angles:
                angles.extend(table.index_select(0, positions)[:, None] for table in (self._cos, self._sin))
            rotated = _rotate(heads[:, :num_rotated], *angles)
            q, k, v = rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_rotated:]
            layers[index].write(pages, offsets, k, v)
            return attention(q, k, v, layers[index])

        return attend

    def prepare(self, *, max_query_len: int, max_context_len: int) -> None:
        """Nothing: torch's operations are compiled already."""

    def clear(self) -> None:
        """Back to zeros."""
        self.pages.clear()

    def _mask(self, spans: Spans) -> Tensor | None:
        if self._device.type == "cpu" and len(spans.num_rows) > spans.num_decodes:
            reach = int(spans.kv_lens.max())
            if self._band is None or self._band.shape[1] < reach + TILE_ROWS:
                self._band = causal_band(min(2 * reach, self._config.max_position), self._dtype, self._device)
        return self._band


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + head_dim / 2)`` of every head."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = first.shape[-1]
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated
