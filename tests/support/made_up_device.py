"""A modelled device whose table is simple enough that every test can say what the study must find."""

from __future__ import annotations

import numpy as np
from tilebudget.engine.model.config import PRESETS
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.kernels.latency.step_curve import StepCurve
from tilebudget.kernels.latency.surface import Surface
from tilebudget.kernels.latency.sweep import Sweep
from tilebudget.kernels.latency.table import LatencyTable

EDGES = range(64, 1025, 64)


def modelled() -> ModelledExecutor:
    """A device whose iteration takes 1 ms and 1 ms for every begun tile of 64 tokens."""
    model = PRESETS["tiny-llama"]
    tokens = np.array(sorted({1, *EDGES, *(edge + 1 for edge in EDGES), 4096}))
    latency_ms = -(-tokens // 64) / model.num_layers
    nothing = np.zeros((2, 2))

    def surface() -> Surface:
        return Surface(
            rows=np.array([1, 4096]),
            columns=np.array([1, 4096]),
            latency_ms=nothing + 1e-9,
            std_ms=nothing,
            sources=np.zeros((2, 2), dtype=np.int8),
        )

    def curve(op: str, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> StepCurve:
        return StepCurve.of(Sweep(op=op, tokens=tokens, latency_ms=values, tensor_parallel=1))

    table = LatencyTable(
        device="made_up",
        model=model.shape,
        dtype="bf16",
        tensor_parallel=1,
        layer_ops=(curve("mlp_up_proj", latency_ms),),
        logits=curve("logits", np.full(len(tokens), 1e-9)),
        prefill=surface(),
        decode=surface(),
        overhead_ms=1.0,
        request_overhead_ms=0.0,
        origin={"framework": "none", "version": "1"},
    )
    return ModelledExecutor(table, model)
