"""The executor that has no device: iterations take what a latency table says, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from ...kernels.latency.compiled import CompiledLatency
from ...kernels.latency.silicon import Silicon, system_spec
from ...kernels.latency.silicon_table import silicon_table
from ...kernels.latency.table import LatencyTable
from ..config import EngineConfig
from ..executor import OutOfMemoryError, StepResult
from ..kv_cache import BlockManager
from ..model.config import ModelConfig
from ..model.hf_config import resolve_model
from ..policies import POLICIES
from ..request import Batch

#: Share of the device's memory for weights and KV cache together, vLLM's default.
MEMORY_FRACTION = 0.9

#: Bytes of a weight of the linear layers. Embeddings, logits and the KV cache stay in 2 bytes, as in the tables.
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
ELEMENT_BYTES = 2

#: Batches up to this many tokens are looked up in unrolled tables; larger ones, rare, in the table itself.
LARGEST_UNROLLED_TOKENS = 32768


class ModelledExecutor:
    """An ``Executor`` over a ``LatencyTable``, of one GPU of its tensor-parallel group. No tensors, no token ids.

    ``memory_bytes`` is the memory of one GPU; None when it is not known, and the KV cache then is as large as the
    requests can use. Raises ValueError when the table was made for other sizes than ``model`` has.
    """

    virtual_time = True
    needs_token_ids = False

    def __init__(self, table: LatencyTable, model: ModelConfig, *, memory_bytes: int | None = None) -> None:
        sizes = {
            "num_layers": model.num_layers,
            "hidden": model.hidden_size,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "intermediate": model.intermediate_size,
        }
        for name, size in sizes.items():
            if getattr(table.model, name) != size:
                raise ValueError(
                    f"table is for a model with {name}={getattr(table.model, name)}: {model.name} has {size}"
                )
        self.table = table
        self.model = model
        self.memory_bytes = memory_bytes
        self.max_position = model.max_position
        self.vocab_size = model.vocab_size
        self._latency: CompiledLatency | None = None

    @classmethod
    def from_silicon(
        cls,
        model: str,
        *,
        system: str,
        framework: str = "vllm",
        version: str | None = None,
        dtype: str = "bf16",
        tensor_parallel: int = 1,
    ) -> Self:
        """A GPU out of the silicon tables: ``system`` such as h200_sxm, ``framework`` vllm, sglang or trtllm.

        ``model`` is a preset's name or a Hugging Face folder, whose weights are not read. Raises ValueError for an
        unknown model, dtype or degree, and SiliconError when the tables are not installed or lack what is asked for.
        """
        config, _ = resolve_model(model)
        silicon = Silicon.open(system, framework, version)
        table = silicon_table(silicon, config.shape, dtype, tensor_parallel)
        return cls(table, config, memory_bytes=system_spec(system).memory_bytes)

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype, degree, and where the table is from (framework, its version, tool)."""
        return {
            "device": self.table.device,
            "kind": "modelled",
            "model": self.model.name,
            "num_parameters": self.model.num_parameters,
            "dtype": self.table.dtype,
            "tensor_parallel": self.table.tensor_parallel,
            **{name: value for name, value in self.table.origin.items() if name != "system"},
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on one GPU: everything is split over the tensor-parallel group."""
        return weight_bytes(self.model, self.table, self.model.num_layers, is_first=True, is_last=True)

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        """Blocks in ``MEMORY_FRACTION`` of the GPU's memory after the weights, and no more than ``max_num_seqs``
        requests of ``max_model_len`` can use. Raises OutOfMemoryError when not one request fits."""
        useful = config.max_num_seqs * config.max_blocks_per_seq
        if self.memory_bytes is None:
            return useful
        return min(useful, num_kv_blocks(self.memory_bytes, self.weight_bytes, self.model.name, self.table, config))

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Unroll the table as far as the largest batch of ``config``; kept for later runs that need no more."""
        self._latency = unroll(self.table, config, self._latency)

    def execute(self, batch: Batch) -> StepResult:
        """What the table says of ``batch``."""
        if self._latency is None:
            raise RuntimeError("execute was called before start")
        return StepResult(self._latency.iteration_s(*batch_shape(batch)))

    def decode_run_s(self, batch: Batch, num_iterations: int) -> list[float]:
        """Seconds of each of the next iterations of the decodes of ``batch``."""
        if self._latency is None:
            raise RuntimeError("decode_run_s was called before start")
        kv_tokens = sum([sequence.num_tokens for sequence in batch.decodes])
        return self._latency.decode_run_s(len(batch.decodes), kv_tokens, num_iterations)


def batch_shape(batch: Batch) -> tuple[list[tuple[int, int]], int, int, int]:
    """What ``CompiledLatency.iteration_s`` asks of a batch: chunks, decodes, their KV tokens, rows of logits."""
    decodes = batch.decodes
    num_decodes = num_logits = len(decodes)
    chunks: list[tuple[int, int]] = []
    for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True):
        computed = sequence.num_computed
        chunks.append((tokens, computed))
        if computed + tokens >= sequence.num_tokens:
            num_logits += 1
    return chunks, num_decodes, sum([sequence.num_tokens for sequence in decodes]), num_logits


def unroll(table: LatencyTable, config: EngineConfig, before: CompiledLatency | None = None) -> CompiledLatency:
    """``table`` unrolled as far as the largest batch of ``config``; ``before``, if that goes as far."""
    budget = config.token_budget if POLICIES[config.policy].heeds_budget else None
    wanted = LARGEST_UNROLLED_TOKENS if budget is None else max(budget, config.max_num_seqs)
    num_tokens = min(max(wanted, config.max_num_seqs), LARGEST_UNROLLED_TOKENS)
    if before is not None and before.max_tokens >= num_tokens and before.max_requests >= config.max_num_seqs:
        return before
    return CompiledLatency(
        table,
        max_tokens=max(num_tokens, before.max_tokens if before else 0),
        max_requests=max(config.max_num_seqs, before.max_requests if before else 0),
    )


def weight_bytes(model: ModelConfig, table: LatencyTable, num_layers: int, *, is_first: bool, is_last: bool) -> int:
    """Bytes of weights on one GPU of a stage of ``num_layers`` layers: the embedding on the first stage, the LM head on
    the last (tied, one copy serves both where they are the same stage), all split over the tensor-parallel group."""
    matrix = model.vocab_size * model.hidden_size
    num_matrices = 1 if is_first and is_last and model.tie_embeddings else is_first + is_last
    layers = model.num_parameters - matrix * (1 if model.tie_embeddings else 2)
    layers_bytes = layers * num_layers // model.num_layers * WEIGHT_BYTES[table.dtype]
    return (layers_bytes + matrix * num_matrices * ELEMENT_BYTES) // table.tensor_parallel


def kv_bytes_per_token(table: LatencyTable) -> int:
    """Bytes of the keys and values of one token in the table's layers, on one GPU."""
    shape = table.model
    return 2 * shape.num_layers * shape.kv_heads_per_gpu(table.tensor_parallel) * shape.head_dim * ELEMENT_BYTES


def num_kv_blocks(
    memory_bytes: int, weight_bytes: int, model_name: str, table: LatencyTable, config: EngineConfig
) -> int:
    """KV blocks of the table's layers in ``MEMORY_FRACTION`` of a GPU's memory after its weights. Raises
    OutOfMemoryError when they do not hold one request of ``max_model_len``."""
    block_bytes = kv_bytes_per_token(table) * config.block_size
    free_bytes = int(memory_bytes * MEMORY_FRACTION) - weight_bytes
    blocks = max(0, free_bytes // block_bytes)
    if blocks < config.max_blocks_per_seq:
        raise OutOfMemoryError(
            f"{model_name} on {table.tensor_parallel} x {table.device}: "
            f"{MEMORY_FRACTION} of {memory_bytes / 1e9:.0f} GB less {weight_bytes / 1e9:.1f} GB of "
            f"{table.dtype} weights holds {blocks} KV blocks, one request of {config.max_model_len} tokens "
            f"needs {config.max_blocks_per_seq}"
        )
    return blocks
