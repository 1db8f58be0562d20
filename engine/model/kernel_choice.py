"""Which operations of a model run in torch and which in our Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from ...kernels.latency.measure import time_calls
from ...kernels.ops.tolerances import deviation
from ..config import KERNELS
from ..kv_cache import BlockManager
from ..request import Batch, Request, Sequence
from .config import ModelConfig
from .input import ModelInput, build_input
from .torch_ops import TorchOps
from .triton_ops import OPERATIONS, TritonOps, unsupported
from .weights import ModelWeights

#: Rows of the two batches that both sides are timed on: decodes alone, and one prompt chunk.
NUM_DECODES, CHUNK_TOKENS = 32, 512
DECODE_CONTEXT = 1024
BLOCK_SIZE = 16
CALLS_IN_A_ROW = 16


def choose_ops(kernels: str, config: ModelConfig, weights: ModelWeights) -> TorchOps:
    """The op set for ``kernels``: ``torch``, ``triton`` (what fits the model; the rest in torch, with the reason), or
    ``auto``: torch on a CPU, on CUDA what is faster of the two, operation by operation, and gives the same result.

    Raises ValueError for another name, and for ``triton`` on a CPU outside Triton's interpreter.
    """
    device, dtype = weights.device, weights.dtype
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r}: must be one of {', '.join(KERNELS)}")
    if kernels == "torch" or (kernels == "auto" and device.type == "cpu"):
        return TorchOps(config, dtype, device)
    if device.type == "cpu" and not knobs.runtime.interpret:
        raise ValueError(
            "kernels='triton': needs a CUDA device; on a CPU only Triton's interpreter runs them, for tests"
        )
    if kernels == "auto":
        with torch.cuda.device(device):  # Triton launches on the current device
            ops = measured_ops(config, weights)
            torch.cuda.empty_cache()  # what was timed must not count as used when the KV cache is sized
            return ops
    reasons = unsupported(config, dtype)
    use = [operation for operation in OPERATIONS if operation not in reasons]
    return TritonOps(config, dtype, device, use=use, notes=reasons)


@torch.inference_mode()
def measured_ops(
    config: ModelConfig,
    weights: ModelWeights,
    *,
    num_decodes: int = NUM_DECODES,
    chunk_tokens: int = CHUNK_TOKENS,
    decode_context: int = DECODE_CONTEXT,
    repeats: int = 9,
) -> TorchOps:
    """The op set that was faster here, operation by operation, over the two batches (geometric mean of the ratios).

    A kernel that fails, or whose result is off by more than ``kernels.ops.tolerances`` allows, is not used and its note
    says so.
    """
    device, dtype = weights.device, weights.dtype
    one_layer = replace(config, num_layers=1)  # the KV cache of one layer is enough
    notes = dict(unsupported(config, dtype))
    supported = [operation for operation in OPERATIONS if operation not in notes]
    sides = (TorchOps(one_layer, dtype, device), TritonOps(one_layer, dtype, device, use=supported))
    batches = {"decodes": (num_decodes, decode_context), "chunk": (chunk_tokens, chunk_tokens)}
    use: list[str] = []
    for operation in supported:
        ratios = []
        try:
            for batch, (rows, context) in batches.items():
                calls = _calls(operation, sides, weights, batch, rows, min(context, config.max_position))
                found = deviation(calls[1](0), calls[0](0))
                # Both sides round, so they may be twice as far from each other as one from the truth.
                if not (found.max_error <= 2 * found.max_allowed and found.rms_error <= 2 * found.rms_allowed):
                    raise ValueError(f"off by {found.max_error:.1e} of the largest value on {rows} rows of {batch}")
                # Decodes run in a captured graph if our attention runs them, and launch by launch if torch's does.
                graphs = device.type == "cuda" and batch == "decodes"
                captured = (
                    operation != "attention" and "attention" in use,
                    operation == "attention" or "attention" in use,
                )
                torch_ms, triton_ms = (
                    _time_ms(call, device, graphs and capture, repeats)
                    for call, capture in zip(calls, captured, strict=True)
                )
                ratios.append(torch_ms / triton_ms)
        except Exception as error:  # whatever a compiler or driver raises
            notes[operation] = f"the kernel failed: {type(error).__name__}: {error}".split("\n")[0]
            continue
        notes[operation] = ", ".join(
            f"{ratio:.2f} times torch's speed on {rows} rows of {batch}"
            for ratio, (batch, (rows, _)) in zip(ratios, batches.items(), strict=True)
        )
        if math.prod(ratios) >= 1.0:
            use.append(operation)
    return TritonOps(config, dtype, device, use=use, notes=notes)


Call = Callable[[int], Tensor]


def _calls(
    operation: str, sides: Iterable[TorchOps], weights: ModelWeights, batch: str, rows: int, context: int
) -> list[Call]:
    """The timed call of an operation for each op set, all on the same inputs. A call is told how often it ran before,
    and takes the weights of another layer each time, so that they come from memory as in a model."""
    layers, device, dtype = weights.layers, weights.device, weights.dtype
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    def norm(ops: TorchOps) -> Call:
        return lambda index: ops.norm(hidden, layers[index % len(layers)].input_norm)

    def activation(ops: TorchOps) -> Call:
        return lambda index: ops.activation(up)

    def linear(ops: TorchOps) -> Call:
        def call(index: int) -> Tensor:
            layer = layers[index % len(layers)]
            ops.linear(layer.qkv, hidden)
            ops.linear(layer.o, mixed)
            ops.linear(layer.up, hidden)
            return ops.linear(layer.down, inner)

        return call

    def attention(ops: TorchOps) -> Call:
        step, kv = _attention_batch(batch, rows, context, device)
        attend = ops.new_pages(kv.num_blocks, kv.block_size).plan(step)
        return lambda _: attend(0, qkv.clone().view(rows, -1, ops.config.head_dim))  # clone: some rotate in place

    layer = layers[0]
    hidden, up, qkv = (
        random(rows, layer.qkv.weight.shape[1]),
        *(random(rows, len(w.weight)) for w in (layer.up, layer.qkv)),
    )
    mixed, inner = (random(rows, w.weight.shape[1]) for w in (layer.o, layer.down))
    build = {"norm": norm, "activation": activation, "linear": linear, "attention": attention}[operation]
    return [build(ops) for ops in sides]


def _attention_batch(batch: str, rows: int, context: int, device: torch.device) -> tuple[ModelInput, BlockManager]:
    """``rows`` decodes at ``context`` tokens, or one chunk of ``rows`` tokens at the end of ``context``."""
    count = rows if batch == "decodes" else 1
    blocks_per_seq = -(-context // BLOCK_SIZE)
    kv = BlockManager(
        num_blocks=count * blocks_per_seq, block_size=BLOCK_SIZE, max_num_seqs=count, max_blocks_per_seq=blocks_per_seq
    )
    sequences = []
    for index in range(count):
        request = Request(arrival_s=0.0, prompt_tokens=context, output_tokens=1)
        sequence = Sequence(index, request, np.zeros(context, dtype=np.int64))
        kv.hold(sequence, context)
        sequence.num_computed = context - (1 if batch == "decodes" else rows)
        sequences.append(sequence)
    made = Batch(sequences) if batch == "decodes" else Batch([], sequences, [rows])
    return build_input(made, kv, device), kv


def _time_ms(call: Call, device: torch.device, captured: bool, repeats: int) -> float:
    """Median time of one call: of the device alone where it is captured, else with what launching takes the host."""
    if device.type == "cpu":
        return time_calls(call, device, repeats=repeats).median_ms
    for index in range(2):
        call(index)
    torch.cuda.synchronize(device)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(CALLS_IN_A_ROW):
                call(index)
        return time_calls(lambda _: graph.replay(), device, repeats=repeats).median_ms / CALLS_IN_A_ROW
    samples_ms = []
    for _ in range(repeats):
        began_s = perf_counter()
        for index in range(CALLS_IN_A_ROW):
            call(index)
        torch.cuda.synchronize(device)
        samples_ms.append((perf_counter() - began_s) * 1e3 / CALLS_IN_A_ROW)
    return median(samples_ms)
