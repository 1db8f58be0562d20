"""The pipeline that has no devices: stages take what a latency table says of their layers, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from ...kernels.latency.compiled import CompiledLatency
from ...kernels.latency.silicon import Silicon, SystemSpec, system_spec
from ...kernels.latency.silicon_table import silicon_table
from ...kernels.latency.table import LatencyTable
from ..config import EngineConfig
from ..distributed.partition import Partition
from ..executor import PipelinedStepResult
from ..kv_cache import BlockManager
from ..model.hf_config import resolve_model
from ..pipeline_clock import PipelineClock
from ..request import Batch
from .executor import ELEMENT_BYTES, ModelledExecutor, batch_shape, num_kv_blocks, unroll, weight_bytes


@dataclass(frozen=True, kw_only=True)
class Link:
    """What carries the activations from one stage to the next: ``latency_s`` and the bytes at ``bytes_per_s``."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0.0:
            raise ValueError(f"bytes_per_s={self.bytes_per_s}: must be above 0")
        if not self.latency_s >= 0.0:
            raise ValueError(f"latency_s={self.latency_s}: must be 0 or more")

    @classmethod
    def of_gbit(cls, gbit_per_s: float) -> Self:
        """A link of so many Gbit/s, without latency."""
        return cls(bytes_per_s=gbit_per_s * 1e9 / 8)


class ModelledPipeline:
    """A ``PipelinedExecutor`` over a ``LatencyTable`` whose layers are split over the stages of ``partition``.

    A stage takes what the table says of its layers; the first one has the embedding and the host's share of an
    iteration, the last one the final norm and the LM head. Between two stages go the hidden states of every token, once
    and at 2 bytes, over ``links`` (one fewer than stages): the ranks of a tensor-parallel group send a part each, or
    the same over links of their own. ``memory_bytes`` is the memory of one GPU; the stage that has the fewest KV blocks
    decides, for a request needs its blocks in all. None as in ``ModelledExecutor``.
    """

    virtual_time = True
    needs_token_ids = False

    def __init__(
        self, table: LatencyTable, partition: Partition, links: Sequence[Link], *, memory_bytes: int | None = None
    ) -> None:
        self.table = table
        self.partition = partition
        self.links = tuple(links)
        self.memory_bytes = memory_bytes
        self.model = model = partition.config
        self.num_stages = num_stages = partition.num_stages
        if len(self.links) != num_stages - 1:
            raise ValueError(f"links has {len(self.links)}: {num_stages} stages have {num_stages - 1} between them")
        if table.tensor_parallel != partition.tensor_parallel:
            raise ValueError(
                f"table is for tensor_parallel={table.tensor_parallel}: the partition has {partition.tensor_parallel}"
            )
        self.max_position = model.max_position
        self.vocab_size = model.vocab_size
        last = num_stages - 1
        self.stage_tables = tuple(
            table.stage(layers, is_first=stage == 0, is_last=stage == last)
            for stage, layers in enumerate(partition.stage_layers)
        )
        self._latencies: list[CompiledLatency | None] = [None] * num_stages
        self._clock = PipelineClock(num_stages)
        self._in_flight: deque[PipelinedStepResult] = deque()

    @classmethod
    def from_silicon(
        cls,
        model: str,
        *,
        system: str,
        pipeline_parallel: int,
        tensor_parallel: int = 1,
        stage_layers: Sequence[int] | None = None,
        link: Link | None = None,
        framework: str = "vllm",
        version: str | None = None,
        dtype: str = "bf16",
    ) -> Self:
        """GPUs out of the silicon tables; arguments as those of ``ModelledExecutor.from_silicon`` and ``Partition.of``.

        ``link`` is what lies between all stages; None takes the system's own links: within a node, or between nodes
        where a stage ends on the last GPU of one.
        """
        config, _ = resolve_model(model)
        partition = Partition.of(
            config,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            stage_layers=stage_layers,
        )
        table = silicon_table(Silicon.open(system, framework, version), config.shape, dtype, tensor_parallel)
        spec = system_spec(system)
        links = system_links(spec, partition) if link is None else [link] * (pipeline_parallel - 1)
        return cls(table, partition, links, memory_bytes=spec.memory_bytes)

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype, degrees, layers by stage, links, and where the table is from."""
        return {
            "device": self.table.device,
            "kind": "modelled",
            "model": self.model.name,
            "num_parameters": self.model.num_parameters,
            "dtype": self.table.dtype,
            "tensor_parallel": self.partition.tensor_parallel,
            "pipeline_parallel": self.num_stages,
            "stage_layers": ",".join(map(str, self.partition.stage_layers)),
            "stage_links_gb_per_s": ",".join(f"{link.bytes_per_s / 1e9:g}" for link in self.links),
            **{name: value for name, value in self.table.origin.items() if name != "system"},
        }

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        """Blocks that the tightest stage holds, and no more than ``max_num_seqs`` requests of ``max_model_len`` in each
        micro-batch can use. Raises OutOfMemoryError when a stage does not hold one request."""
        useful = self.num_stages * config.max_num_seqs * config.max_blocks_per_seq
        if self.memory_bytes is None:
            return useful
        last = self.num_stages - 1
        blocks = [
            num_kv_blocks(
                self.memory_bytes,
                weight_bytes(self.model, self.table, layers, is_first=stage == 0, is_last=stage == last),
                f"stage {stage} of {self.model.name}",
                self.stage_tables[stage],
                config,
            )
            for stage, layers in enumerate(self.partition.stage_layers)
        ]
        return min(useful, *blocks)

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Unroll the tables of the stages as far as the largest batch of ``config``; all stages are free at 0."""
        self._latencies = [
            unroll(table, config, before) for table, before in zip(self.stage_tables, self._latencies, strict=True)
        ]
        self._clock = PipelineClock(self.num_stages)
        self._in_flight.clear()

    def stage_times_s(self, batch: Batch) -> list[float]:
        """Seconds that each stage takes for ``batch``."""
        chunks, num_decodes, kv_tokens, num_logits = batch_shape(batch)
        last = self.num_stages - 1
        times_s = []
        for stage, latency in enumerate(self._latencies):
            if latency is None:
                raise RuntimeError("a batch was submitted before start")
            rows = num_logits if stage == last else 0
            times_s.append(latency.iteration_s(chunks, num_decodes, kv_tokens, rows))
        return times_s

    def submit(self, batch: Batch, now_s: float) -> None:
        """Enter ``batch`` at ``now_s``; when it leaves each stage is known at once."""
        size = batch.num_tokens * self.model.hidden_size * ELEMENT_BYTES
        transfers_s = [link.latency_s + size / link.bytes_per_s for link in self.links]
        self._in_flight.append(PipelinedStepResult(*self._clock.enter(now_s, self.stage_times_s(batch), transfers_s)))

    def wait_until(self, until_s: float) -> bool:
        """Whether the oldest micro-batch has left the last stage by ``until_s``."""
        return bool(self._in_flight[0].stage_end_s[-1] <= until_s)

    def collect(self) -> PipelinedStepResult:
        """The oldest micro-batch in flight."""
        return self._in_flight.popleft()


AnyModelled = ModelledExecutor | ModelledPipeline


def system_links(spec: SystemSpec, partition: Partition) -> list[Link]:
    """The links between the stages, with the GPUs of ``partition`` on nodes of the system one after the other."""
    per_node = spec.num_gpus_per_node
    links = []
    for stage in range(1, partition.num_stages):
        first = stage * partition.tensor_parallel
        crosses = first // per_node != (first - 1) // per_node
        links.append(
            Link(
                bytes_per_s=spec.inter_node_bytes_per_s if crosses else spec.link_bytes_per_s,
                latency_s=spec.link_latency_s,
            )
        )
    return links
