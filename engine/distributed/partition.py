"""How a model is cut up: layers over pipeline stages, and each stage over its tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process holds: ``num_layers`` layers from ``first_layer`` on, and of each slice ``rank`` of ``size``.

    The first stage (``first_layer`` is 0) also has the embedding, whole on every rank; the last one (``is_last``) the
    final norm and its slice of the vocabulary's rows of the LM head.
    """

    first_layer: int
    num_layers: int
    is_last: bool
    rank: int = 0
    size: int = 1

    @classmethod
    def whole(cls, config: ModelConfig) -> Part:
        """All of the model."""
        return cls(first_layer=0, num_layers=config.num_layers, is_last=True)

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.first_layer == 0

    def slice_of(self, count: int) -> tuple[int, int]:
        """The half-open range of ``count`` equal things (heads, columns, token ids) that falls to this rank. With fewer
        things than ranks, several ranks have the same one."""
        if count < self.size:
            first = self.rank * count // self.size
            return first, first + 1
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def local(self, config: ModelConfig) -> ModelConfig:
        """The sizes of this part as a model of its own; the hidden size and the vocabulary stay."""
        first_kv, end_kv = self.slice_of(config.num_kv_heads)
        return replace(
            config,
            num_layers=self.num_layers,
            num_heads=config.num_heads // self.size,
            num_kv_heads=end_kv - first_kv,
            intermediate_size=config.intermediate_size // self.size,
        )


@dataclass(frozen=True, kw_only=True)
class Partition:
    """``stage_layers`` layers in each pipeline stage, each of which ``tensor_parallel`` ranks share.

    Query heads and the MLP are split evenly over the ranks. KV heads too; where they are fewer than the ranks, each is
    held by several. Raises ValueError, naming the degree and the rule, when ``config`` cannot be cut like that.
    """

    config: ModelConfig
    tensor_parallel: int
    stage_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        config, degree = self.config, self.tensor_parallel
        if degree < 1:
            raise ValueError(f"tensor_parallel={degree}: must be at least 1")
        for size, what in ((config.num_heads, "heads"), (config.intermediate_size, "columns of the MLP")):
            if size % degree:
                raise ValueError(f"tensor_parallel={degree}: must divide the {size} {what}")
        if config.num_kv_heads % degree and degree % config.num_kv_heads:
            raise ValueError(
                f"tensor_parallel={degree}: must divide the {config.num_kv_heads} KV heads, or be a multiple of their "
                "number"
            )
        if not self.stage_layers or min(self.stage_layers) < 1 or sum(self.stage_layers) != config.num_layers:
            raise ValueError(
                f"stage_layers={self.stage_layers}: must be at least one layer a stage, "
                f"{config.num_layers} in all for {config.name}"
            )

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        stage_layers: Sequence[int] | None = None,
    ) -> Partition:
        """The cut into ``pipeline_parallel`` stages, as even as ``even_layers`` makes it unless ``stage_layers`` says
        how many layers each has."""
        layers = even_layers(config.num_layers, pipeline_parallel) if stage_layers is None else tuple(stage_layers)
        if len(layers) != pipeline_parallel:
            raise ValueError(f"stage_layers={layers}: must name the layers of {pipeline_parallel} stages")
        return cls(config=config, tensor_parallel=tensor_parallel, stage_layers=layers)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.stage_layers)

    @property
    def num_ranks(self) -> int:
        """Processes: stage by stage, the tensor-parallel ranks of a stage next to each other."""
        return self.num_stages * self.tensor_parallel

    def stage_of(self, rank: int) -> int:
        """The stage that process ``rank`` belongs to."""
        return rank // self.tensor_parallel

    def part(self, rank: int) -> Part:
        """What process ``rank`` holds."""
        stage = self.stage_of(rank)
        return Part(
            first_layer=sum(self.stage_layers[:stage]),
            num_layers=self.stage_layers[stage],
            is_last=stage + 1 == self.num_stages,
            rank=rank % self.tensor_parallel,
            size=self.tensor_parallel,
        )


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as they go. Odd ones fall to the middle, for the first stage has the embedding and
    the last one the LM head besides; to the earlier stages when there is no middle.

    Raises ValueError when there are more stages than layers, or none.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"pipeline_parallel={num_stages}: must be from 1 to the model's {num_layers} layers")
    share, odd = divmod(num_layers, num_stages)
    middle_first = sorted(range(num_stages), key=lambda stage: (stage in (0, num_stages - 1), stage))
    with_one_more = set(middle_first[:odd])
    return tuple(share + (stage in with_one_more) for stage in range(num_stages))
