"""The operations of the forward pass in our Triton kernels, and the KV cache in the layout that they want."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from ...kernels.ops.activation import silu_mul
from ...kernels.ops.attention import MAX_HEAD_DIM, attention
from ...kernels.ops.attention_tiles import (
    ATTENTION_CONFIGS,
    ATTENTION_CONFIGS_FP32,
    MAX_SPLITS,
    MIN_KEYS_PER_SPLIT,
    next_power_of_two,
    select_attention_config,
)
from ...kernels.ops.gemm import gemm
from ...kernels.ops.gemm_tiles import TileConfig, select_config
from ...kernels.ops.launch import limits_of
from ...kernels.ops.norm import MAX_HIDDEN, rms_norm
from ...kernels.ops.rotary import rotary_write
from .config import ModelConfig
from .input import BatchRows, ModelInput, send
from .linear import Linear
from .torch_ops import Attend, PagedKV, TorchOps, rope_tables

#: What may run in torch or in Triton, each for itself. ``attention`` includes the rotation and the write into the
#: pages, whose layout it decides.
OPERATIONS = ("attention", "linear", "norm", "activation")

#: Tiles stop changing where the device is full many times over; larger batches use what this many tokens use.
MAX_PREPARED_TOKENS = 16384


def unsupported(config: ModelConfig, dtype: torch.dtype) -> dict[str, str]:
    """The operations that our kernels cannot run for this model, each with the reason."""
    reasons = {}
    configs = ATTENTION_CONFIGS_FP32 if dtype == torch.float32 else ATTENTION_CONFIGS
    group, largest_group = config.num_heads // config.num_kv_heads, max(cfg.block_m for cfg in configs)
    if config.head_dim > MAX_HEAD_DIM:
        reasons["attention"] = f"head_dim {config.head_dim} is above {MAX_HEAD_DIM}"
    elif next_power_of_two(group) > largest_group:
        reasons["attention"] = f"{group} query heads share a KV head, at most {largest_group} can"
    if config.hidden_size > MAX_HIDDEN:
        reasons["norm"] = f"hidden_size {config.hidden_size} is above {MAX_HIDDEN}"
    if not config.gated_mlp:
        reasons["activation"] = "the MLP has no gate, and GELU has no kernel"
    return reasons


class TritonOps(TorchOps):
    """``TorchOps`` with the operations in ``use`` (of ``OPERATIONS``) run by our kernels.

    ``notes`` says of an operation why it runs where it does. Raises ValueError for an operation that the kernels
    cannot run for this model.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        use: Iterable[str] = OPERATIONS,
        notes: dict[str, str] | None = None,
    ) -> None:
        super().__init__(config, dtype, device)
        self.use = frozenset(use)
        self.notes = dict(notes or {})
        for operation in sorted(self.use):
            if operation not in OPERATIONS:
                raise ValueError(f"use={operation!r}: must be of {', '.join(OPERATIONS)}")
            if reason := unsupported(config, dtype).get(operation):
                raise ValueError(f"use={operation!r}: {reason}")
        self._prepared: set[tuple[TileConfig, bool, bool]] = set()

    def describe(self) -> dict[str, str]:
        """Which implementation runs each operation, and why where there was a reason."""
        described = {"kernels": "triton" if len(self.use) == len(OPERATIONS) else "triton and torch"}
        for operation in OPERATIONS:
            note = self.notes.get(operation)
            runs = "triton" if operation in self.use else "torch"
            described[f"{operation}_kernel"] = f"{runs} ({note})" if note else runs
        return described

    @torch.inference_mode()
    def prepare(self, linears: list[Linear], *, max_tokens: int) -> None:
        """Compile every tile configuration that the linear layers can select at up to ``max_tokens`` rows."""
        if "linear" not in self.use or knobs.runtime.interpret:
            return
        limits = limits_of(self.device)
        for layer in linears:
            n, k = layer.weight.shape
            # The number of tiles, and with it the choice, changes only after a multiple of the smallest BLOCK_M, 16.
            for m in range(1, min(max_tokens, MAX_PREPARED_TOKENS) + 1, 16):
                cfg = select_config(m, n, k, limits, self.dtype.itemsize)
                variant = (cfg, k % cfg.block_k == 0, layer.bias is not None)
                if variant not in self._prepared:
                    self.linear(layer, torch.zeros((m, k), dtype=self.dtype, device=self.device))
                    self._prepared.add(variant)

    def new_pages(self, num_blocks: int, block_size: int) -> PagedKV:
        """An empty KV cache."""
        if "attention" not in self.use:
            return super().new_pages(num_blocks, block_size)
        return TritonPagedKV(self.config, num_blocks, block_size, self.dtype, self.device)

    def linear(self, layer: Linear, x: Tensor) -> Tensor:
        """``layer`` of ``x`` ``[rows, inputs]``."""
        if "linear" not in self.use:
            return super().linear(layer, x)
        weight = layer.weight
        if weight.stride(-1) != 1:  # only in the interpreter: fp32 weights lie transposed on a CPU
            weight = weight.contiguous()
        return gemm(x, weight, layer.bias)

    def add(self, residual: Tensor, layer: Linear, x: Tensor) -> Tensor:
        """``residual + layer(x)``, in place of ``residual``."""
        if "linear" not in self.use:
            return super().add(residual, layer, x)
        return residual.add_(self.linear(layer, x))

    def add_norm(self, residual: Tensor, layer: Linear, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of ``residual + layer(x)``, which takes the place of ``residual``."""
        if "norm" not in self.use:
            return super().add_norm(residual, layer, x, weight)
        y = self.linear(layer, x)
        return rms_norm(y, weight, eps=self.config.rms_norm_eps, residual=residual, out=y, residual_out=residual)[0]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dimension."""
        if "norm" not in self.use:
            return super().norm(x, weight)
        # Queries and keys are normed a head at a time: reshape copies them out of the fused projection.
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, weight, eps=self.config.rms_norm_eps)[0].view(x.shape)

    def activation(self, up: Tensor) -> Tensor:
        """SiLU(gate) * up of the fused projection, GELU where the model has no gate."""
        return silu_mul(up) if "activation" in self.use else super().activation(up)


@dataclass(frozen=True, kw_only=True)
class AttentionInput:
    """What attention must know of one iteration; tensors are int32 on the device.

    ``positions`` and ``slots`` have one entry a row: where it stands in its sequence, and the place of its key and
    value, block * block_size + offset, negative to write none. ``starts`` ``[sequences + 1]``, ``contexts``
    ``[sequences]`` and ``block_table`` as in ``kernels.ops.attention``; the two bounds may be too large, never too
    small.
    """

    positions: Tensor
    slots: Tensor
    starts: Tensor
    contexts: Tensor
    block_table: Tensor
    num_decodes: int
    max_query_len: int
    max_context_len: int


def attention_input(rows: BatchRows, device: torch.device) -> AttentionInput:
    """The iteration with these rows; one copy to the device."""
    spans = rows.spans
    row_slots = rows.pages * spans.block_size + rows.offsets
    row_starts = np.append(spans.first_row, len(rows.positions))
    positions, slots, starts, contexts, blocks = send(
        [rows.positions, row_slots, row_starts, spans.kv_lens, spans.blocks], device, np.int32
    )
    chunks = spans.num_rows[spans.num_decodes :]
    return AttentionInput(
        positions=positions,
        slots=slots,
        starts=starts,
        contexts=contexts,
        block_table=blocks.view(spans.blocks.shape),
        num_decodes=spans.num_decodes,
        max_query_len=int(chunks.max()) if len(chunks) else 0,
        max_context_len=int(spans.kv_lens.max()),
    )


class TritonPagedKV:
    """A ``PagedKV`` with our attention kernel and pages ``[num_blocks, block_size, num_kv_heads, head_dim]``."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if num_blocks * block_size > np.iinfo(np.int32).max:
            raise ValueError(f"num_kv_blocks={num_blocks}: must be at most {np.iinfo(np.int32).max // block_size}")
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The kernels never read a slot that no context covers, but zeros cost nothing that is timed.
        self._pages = torch.zeros(shape, dtype=dtype, device=device)
        self.num_bytes = self._pages.nbytes
        self.layers = tuple(zip(self._pages[0].unbind(0), self._pages[1].unbind(0), strict=True))
        self._config = config
        self._device = device
        self._cos, self._sin = rope_tables(config, config.max_position, device)

    def plan(self, step: ModelInput) -> Attend:
        """The attention of one iteration: its tables go to the device here, once for all layers."""
        return partial(self.attend, attention_input(step.rows, self._device))

    def attend(self, step: AttentionInput, index: int, heads: Tensor) -> Tensor:
        """Attention output of layer ``index``; see ``Attend``. Rotates the queries of ``heads`` in place."""
        keys, values = self.layers[index]
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        rotary_write(q, k, v, self._cos, self._sin, step.positions, step.slots, keys, values, out=q)
        mixed = attention(
            q,
            keys,
            values,
            step.block_table,
            step.starts,
            step.contexts,
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            num_decodes=step.num_decodes,
        )
        return mixed.flatten(1)

    @torch.inference_mode()
    def prepare(self, *, max_query_len: int, max_context_len: int) -> None:
        """Compile every attention kernel that iterations within these bounds can select."""
        config, device = self._config, self._device
        if knobs.runtime.interpret:
            return
        group = config.num_heads // config.num_kv_heads
        element_bytes = self._pages.element_size()
        longest = min(max_query_len, max_context_len, self.num_blocks * self.block_size)
        lengths: dict[object, int] = {}
        for length in sorted({min(2**power, longest) for power in range(longest.bit_length() + 1)}):
            cfg = select_attention_config(
                limits_of(device),
                head_dim=config.head_dim,
                element_bytes=element_bytes,
                group=group,
                max_query_len=length,
            )
            lengths.setdefault(cfg, length)
        num_splits = [1]
        while num_splits[-1] < min(MAX_SPLITS, max_context_len // MIN_KEYS_PER_SPLIT):
            num_splits.append(2 * num_splits[-1])
        keys, values = self.layers[0]
        for length in lengths.values():
            # Strided as in the fused projection, for the compiler looks at strides too.
            num_heads = config.num_heads + 2 * config.num_kv_heads
            heads = torch.zeros((length, num_heads, config.head_dim), dtype=keys.dtype, device=device)
            q = heads[:, : config.num_heads]
            num_blocks = -(-length // self.block_size)
            starts, contexts, table = send(
                [np.array([0, length]), np.array([length]), np.zeros(num_blocks, dtype=np.int32)], device, np.int32
            )
            for splits in num_splits:
                attention(
                    q, keys, values, table[None], starts, contexts,
                    max_query_len=length, max_context_len=length, num_splits=splits,
                )  # fmt: skip

    def clear(self) -> None:
        """Back to zeros."""
        self._pages.zero_()
