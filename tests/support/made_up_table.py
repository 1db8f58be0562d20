"""A latency table of a device and a model that do not exist."""

from __future__ import annotations

import numpy as np
from tilebudget.engine.model.config import ModelConfig
from tilebudget.kernels.latency.step_curve import StepCurve
from tilebudget.kernels.latency.surface import Surface
from tilebudget.kernels.latency.sweep import Sweep
from tilebudget.kernels.latency.table import LatencyTable

MODEL = ModelConfig(
    name="small",
    vocab_size=1000,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position=4096,
)


def make_table(tensor_parallel: int = 1) -> LatencyTable:
    """A made-up device with a step behind every 64 tokens."""
    tokens = np.array([1, 64, 65, 128, 129, 192, 193, 256, 257, 1024])

    def curve(op: str, scale: float) -> StepCurve:
        latency_ms = scale * (0.07 + 0.03 * (-(-tokens // 64)))
        return StepCurve.of(Sweep(op=op, tokens=tokens, latency_ms=latency_ms, tensor_parallel=tensor_parallel))

    def surface(rows: list[int], columns: list[int], slope: float) -> Surface:
        grid = 0.01 + slope * np.array(rows)[:, None] * (1.0 + 0.013 * np.array(columns)[None, :] ** 0.9)
        return Surface(
            rows=np.array(rows),
            columns=np.array(columns),
            latency_ms=grid,
            std_ms=np.zeros_like(grid),
            sources=np.zeros(grid.shape, dtype=np.int8),
        )

    return LatencyTable(
        device="made_up",
        model=MODEL.shape,
        dtype="bf16",
        tensor_parallel=tensor_parallel,
        layer_ops=(curve("mlp_up_proj", 1.0), curve("mlp_down_proj", 0.7)),
        logits=curve("logits", 0.3),
        prefill=surface([1, 16, 128, 1024], [0, 128, 1024], 1e-4),
        decode=surface([1, 2, 8, 32], [1, 16, 48, 100, 2048], 1e-4),
        overhead_ms=0.2,
        request_overhead_ms=0.01,
        origin={"framework": "none", "version": "1"},
    )
