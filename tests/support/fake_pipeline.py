"""A pipeline without a model: the fake executor's paged cache of token ids, stage times of a function's choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from fake_executor import FakeExecutor
from tilebudget.engine import Batch, BlockManager, EngineConfig, PipelinedStepResult
from tilebudget.engine.pipeline_clock import PipelineClock

StageTimes = Callable[[int, Batch], Sequence[float]]


class FakePipeline:
    """A ``PipelinedExecutor``; ``stage_s(iteration, batch)`` gives the seconds of each stage. It computes a batch when
    it is submitted, or with ``late`` when it is collected: a real one does so somewhere between the two."""

    virtual_time = True
    needs_token_ids = True

    def __init__(
        self,
        num_stages: int,
        stage_s: StageTimes,
        *,
        transfer_s: float = 0.0,
        default_blocks: int = 4096,
        late: bool = False,
    ) -> None:
        self.num_stages = num_stages
        self.stage_s = stage_s
        self.transfer_s = transfer_s
        self.late = late
        self.inner = FakeExecutor(lambda iteration, batch: 0.0, default_blocks=default_blocks)
        self.max_position = self.inner.max_position
        self.vocab_size = self.inner.vocab_size
        self.submitted: list[tuple[float, tuple[int, ...], list[float]]] = []

    def describe(self) -> dict[str, str | int | float]:
        return {"device": "fake pipeline"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return self.inner.default_blocks

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        self.inner.start(config, kv)
        self.clock = PipelineClock(self.num_stages)
        self.in_flight: deque[tuple[Batch, PipelinedStepResult]] = deque()
        self.submitted = []

    def submit(self, batch: Batch, now_s: float) -> None:
        assert len(self.in_flight) < self.num_stages, "more micro-batches in flight than stages"
        running = {id(sequence) for other, _ in self.in_flight for sequence in (*other.decodes, *other.chunks)}
        mine = [*batch.decodes, *batch.chunks]
        assert not running & {id(sequence) for sequence in mine}, "a request is in flight twice"
        times = list(self.stage_s(len(self.submitted), batch))
        token_ids = None if self.late else self.inner.execute(batch).token_ids
        start_s, end_s = self.clock.enter(now_s, times, [self.transfer_s] * (self.num_stages - 1))
        self.submitted.append((now_s, tuple(sequence.index for sequence in mine), times))
        self.in_flight.append((batch, PipelinedStepResult(start_s, end_s, token_ids)))

    def wait_until(self, until_s: float) -> bool:
        return bool(self.in_flight[0][1].stage_end_s[-1] <= until_s)

    def collect(self) -> PipelinedStepResult:
        batch, result = self.in_flight.popleft()
        return replace(result, token_ids=self.inner.execute(batch).token_ids) if self.late else result
