"""A device of virtual time whose cost is known, so that every test can say what the study must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tilebudget.engine import Batch, BlockManager, EngineConfig, StepResult


class StairDevice:
    """An iteration costs ``base`` plus ``per_tile`` for every begun tile of ``tile`` tokens.

    ``fault`` is called with the engine config before each iteration: it may raise, or return a duration in the place
    of the computed one.
    """

    virtual_time = True
    needs_token_ids = False
    max_position = 100_000
    vocab_size = 100

    def __init__(
        self,
        *,
        base_s: float = 0.004,
        per_tile_s: float = 0.004,
        tile: int = 128,
        fault: Callable[[EngineConfig], float | None] | None = None,
    ) -> None:
        self.base_s = base_s
        self.per_tile_s = per_tile_s
        self.tile = tile
        self.fault = fault
        self.config = EngineConfig()
        self.runs: list[int | None] = []

    def describe(self) -> Mapping[str, str | int | float]:
        return {"device": "stair", "dtype": "fp32", "model": "toy"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return 4096

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        self.config = config
        self.runs.append(config.token_budget)

    def execute(self, batch: Batch) -> StepResult:
        if self.fault is not None and (duration_s := self.fault(self.config)) is not None:
            return StepResult(duration_s)
        return StepResult(self.base_s + self.per_tile_s * -(-batch.num_tokens // self.tile))
