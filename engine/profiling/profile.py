"""Measures the latency table of a device here, by timing the real model's own iterations.

Coarse grid first, then token counts by bisection where neighbours disagree, then the fine grid. Then, in turns, some
time of the same again in shuffled order and an engine run of a synthetic workload, to which the parts of the table are
scaled: so that drift of the machine hits all alike. The coarse grid is always finished, the rest as far as the time
allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from ...kernels.latency.sampling import AdaptiveSampler
from ...kernels.latency.table import IterationShape, LatencyTable
from ..config import EngineConfig
from ..engine import Engine
from ..executor import Executor, ExecutorWrapper, StepResult
from ..model.config import ModelConfig
from ..modelled.executor import ModelledExecutor
from ..modelled.jitter import Jitter, JitteredExecutor
from ..request import Batch, Workload
from ..run import Progress
from ..workloads.presets import preset_workload
from .file import Measurements, read_measurements, save_profile
from .fit import Subject, TimedIteration, calibrate, fit_table, midmean, predict_runs
from .grid import ProfileGrid
from .timer import IterationTimer, loop_overhead_ms

_log = logging.getLogger(__name__)

#: Token counts that the table has when the time suffices.
MAX_TOKEN_POINTS = 40

#: Samples of each iteration: at the first visit (after one to warm up), at each later one, and at most. A visit takes
#: no more than the share of the allowed time, but for its first sample.
FIRST_SAMPLES, ROUND_SAMPLES, MAX_SAMPLES = 2, 1, 30
SLOW_SHARE = 0.01

#: By which share of the allowed time each phase ends; then the share that each turn of the last one takes, which is
#: some seconds at least.
TOKENS_UNTIL, FINE_UNTIL, TURN_SHARE = 0.25, 0.45, 0.18
MIN_TURN_S = 2.0

#: Whole runs: the workload that they are drawn from, and how many iterations a file keeps.
RUN_WORKLOAD = "azure-conv"
MAX_RUN_ITERATIONS = 20_000

#: Multiples of it, less their whole parts, are spread evenly over 0..1 however many there are.
GOLDEN_RATIO = (np.sqrt(5) - 1) / 2

#: Of what an executor says of itself, what a table says in fields of its own.
_SAID_BY_TABLE = ("device", "model", "dtype", "num_parameters", "tensor_parallel")

#: Told how much of the allowed time has passed: percent, 100. Nothing is being timed meanwhile.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured table: how many iterations were timed at how many points, the factors from whole engine runs, and the
    median relative error of the table on the iterations of these runs and their scatter around it (None where there was
    no time for any, or for enough)."""

    table: LatencyTable
    num_points: int
    num_samples: int
    num_run_iterations: int
    factors: Mapping[str, float]
    median_error: float | None
    jitter: Jitter | None


def measure_profile(
    executor: Executor,
    model: ModelConfig,
    config: EngineConfig,
    *,
    time_limit_s: float = 60.0,
    out: Path | None = None,
    on_progress: OnProgress | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Profile:
    """Profile ``executor``, which runs ``model``, for batches within the limits of ``config`` (its budget, sequences,
    context and KV cache), in about ``time_limit_s`` by ``clock`` (seconds).

    ``out`` is written when done, and now and then on the way; a profile that is there already is continued.
    ``on_progress`` is called between any two iterations of engine runs, and any two visits of a point. Raises
    ValueError when that one is of another device, model or limits, or ``time_limit_s`` is not above 0, and
    TileBudgetError when the device cannot run the iterations.
    """
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s={time_limit_s}: must be above 0")
    return _Profiler(executor, model, config, time_limit_s, out, on_progress, clock).run()


def modelled_as(profile: Profile, model: ModelConfig, *, seed: int = 0) -> Executor:
    """The profiled device as a model: what its table says, scattered as its runs were, where that is known."""
    executor = ModelledExecutor(profile.table, model)
    return executor if profile.jitter is None else JitteredExecutor(executor, profile.jitter, seed=seed)


class _Profiler:
    """The state of one profile in the making."""

    def __init__(
        self,
        executor: Executor,
        model: ModelConfig,
        config: EngineConfig,
        time_limit_s: float,
        out: Path | None,
        on_progress: OnProgress | None,
        clock: Callable[[], float],
    ) -> None:
        self.executor, self.model = executor, model
        self.out, self.on_progress, self.clock = out, on_progress, clock
        self.began_s, self.time_limit_s = clock(), time_limit_s
        self.saved_s = self.began_s
        num_blocks = config.num_kv_blocks or executor.default_num_kv_blocks(config)
        max_model_len = min(config.max_model_len, executor.max_position, num_blocks * config.block_size)
        self.grid = ProfileGrid(
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_tokens=config.token_budget or config.max_num_seqs * max_model_len,
            pool_tokens=num_blocks * config.block_size,
            block_size=config.block_size,
        )
        self.config = replace(
            config, policy="sarathi", token_budget=max(self.grid.most_tokens, config.max_num_seqs),
            max_model_len=max_model_len, num_kv_blocks=num_blocks,
        )  # fmt: skip
        described = executor.describe()
        self.subject = Subject(
            device=str(described.get("device_name", described["device"])),
            model=model.shape,
            dtype=str(described.get("dtype", "fp32")),
            origin={
                **{name: str(value) for name, value in described.items() if name not in _SAID_BY_TABLE},
                "framework": str(described.get("kernels", described["device"])),
                "version": str(described.get("torch", "")),
                "tool": "tilebudget profile",
            },
        )
        self.done = Measurements() if out is None else read_measurements(out, self.subject, self.grid)
        self.random = np.random.default_rng(config.seed)
        self.max_samples = 1 if executor.virtual_time else MAX_SAMPLES

    def run(self) -> Profile:
        if not self.executor.virtual_time:
            loop_ms, loop_request_ms = loop_overhead_ms(self.config)
            self.subject = replace(self.subject, loop_ms=loop_ms, loop_request_ms=loop_request_ms)
        self.timer = IterationTimer(self.executor, self.config, self.config.num_kv_blocks or 1)
        coarse = [*self.grid.shapes(fine=False), self.grid.tokens_shape(self.grid.most_tokens)]
        self._visit_new(coarse, until=float("inf"))
        self._bisect_tokens()
        self._visit_new(self.grid.shapes(fine=True), until=FINE_UNTIL)
        while not self.executor.virtual_time and self._share() < 1.0:
            self._run_engine()
            self._repeat_points()
        return self._finish()

    def _share(self) -> float:
        """Of the allowed time, what has passed."""
        return (self.clock() - self.began_s) / self.time_limit_s

    def _visit_new(self, shapes: list[IterationShape], *, until: float) -> None:
        missing = [shape for shape in dict.fromkeys(shapes) if not self.done.samples.get(shape)]
        for place in self.random.permutation(len(missing)).tolist():
            if self._share() >= until:
                return
            self._visit(missing[place])

    def _visit(self, shape: IterationShape) -> None:
        """A few more samples of one iteration: fewer where it is slow."""
        known = self.done.samples.get(shape, [])
        wanted = min(ROUND_SAMPLES if known else FIRST_SAMPLES, self.max_samples - len(known))
        if wanted < 1:
            return
        found = self.timer.time_ms(shape, 1)
        affordable = SLOW_SHARE * self.time_limit_s * 1e3 / max(found[0], 1e-9)
        if not known and affordable >= 2 and not self.executor.virtual_time:
            found = []  # it was the warm-up
        more = min(wanted, max(1, int(affordable))) - len(found)
        found += self.timer.time_ms(shape, more)
        self.done.samples[shape] = known + found
        self._checkpoint()

    def _bisect_tokens(self) -> None:
        sampler = AdaptiveSampler(self.grid.token_candidates(), MAX_TOKEN_POINTS)
        for tokens in self.grid.token_candidates():
            if found := self.done.samples.get(self.grid.tokens_shape(tokens)):
                sampler.tell(tokens, midmean(found))
        while self._share() < TOKENS_UNTIL and (asked := sampler.ask()):
            for tokens in asked:
                shape = self.grid.tokens_shape(tokens)
                self._visit(shape)
                sampler.tell(tokens, midmean(self.done.samples[shape]))

    def _turn_end(self) -> float:
        """The share at which a turn that begins now is over."""
        return min(1.0, self._share() + max(TURN_SHARE, MIN_TURN_S / self.time_limit_s))

    def _repeat_points(self) -> None:
        """One turn of points in random order."""
        until = self._turn_end()
        shapes = list(self.done.samples)
        for place in self.random.permutation(len(shapes)).tolist():
            if self._share() >= until:
                return
            self._visit(shapes[place])

    def _run_engine(self) -> None:
        """One turn of an engine run of a synthetic workload: a full one, for what it is to show is how full batches
        differ from the same one repeated."""
        number = max((one.run for one in self.done.runs), default=-1) + 1
        least, most = self.config.max_num_seqs, self.config.token_budget or self.config.max_num_seqs
        place = (0.5 + number * GOLDEN_RATIO) % 1.0
        config = replace(self.config, token_budget=round(least * (most / least) ** place))
        until = self._turn_end()
        workload = self._workload(config, (until - self._share()) * self.time_limit_s)

        def monitor(_: Progress) -> str | None:
            self._tell_progress()
            return "out of time" if self._share() >= until else None

        recorder = _ShapeRecorder(self.executor)
        record = Engine(recorder).run(workload, config, monitor=monitor)
        durations_ms = (record.iterations.duration_s * 1e3).tolist()
        self.done.runs += [
            TimedIteration(shape=shape, duration_ms=duration_ms, run=number)
            for shape, duration_ms in zip(recorder.shapes, durations_ms, strict=True)
        ]
        self._checkpoint()

    def _workload(self, config: EngineConfig, limit_s: float) -> Workload:
        """The fullest workload that is expected to end within ``limit_s``; where none is, the smallest."""
        table = fit_table(self.done.samples, self.grid, self.subject)
        engine = Engine(ModelledExecutor(table, self.model))
        seqs, longest = config.max_num_seqs, config.max_model_len
        for num_requests, divisor in ((2 * seqs, 1), (seqs, 1), (seqs, 2), (seqs, 4), (seqs // 2, 4), (seqs // 4, 8)):
            workload = preset_workload(
                RUN_WORKLOAD,
                num_requests=max(1, num_requests),
                seed=config.seed,
                max_model_len=max(2, longest // divisor),
            )
            modelled = engine.run(workload, config).iterations
            if modelled.start_s[-1] + modelled.duration_s[-1] <= limit_s:
                break
        return workload

    def _tell_progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress(min(100, int(100 * self._share())), 100)

    def _checkpoint(self) -> None:
        self._tell_progress()
        if self.out is not None and self.clock() - self.saved_s > 2.0:
            save_profile(self.out, self.done, self.subject, self.grid, None)
            self.saved_s = self.clock()

    def _finish(self) -> Profile:
        if len(self.done.runs) > MAX_RUN_ITERATIONS:
            picked = self.random.choice(len(self.done.runs), MAX_RUN_ITERATIONS, replace=False)
            self.done.runs[:] = [self.done.runs[place] for place in sorted(picked.tolist())]
        table = fit_table(self.done.samples, self.grid, self.subject)
        table, factors = calibrate(table, self.done.runs)
        predicted_ms, measured_ms, numbers = predict_runs(table, self.done.runs)
        error = float(np.median(np.abs(predicted_ms / measured_ms - 1.0))) if self.done.runs else None
        if error is not None:
            scales = ", ".join(f"{name} {factor:.3f}" for name, factor in factors.items())
            note = (
                f"scaled to {len(self.done.runs)} iterations of whole engine runs ({scales}), "
                f"whose durations it then misses by {error:.1%} in the median"
            )
            table = replace(table, notes=(*table.notes, note))
        if self.out is not None:
            save_profile(self.out, self.done, self.subject, self.grid, table)
        return Profile(
            table=table,
            num_points=len(self.done.samples),
            num_samples=sum(len(found) for found in self.done.samples.values()),
            num_run_iterations=len(self.done.runs),
            factors=factors,
            median_error=error,
            jitter=Jitter.of(predicted_ms, measured_ms, numbers),
        )


class _ShapeRecorder(ExecutorWrapper):
    """An executor that also notes the shape of each iteration."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.shapes: list[IterationShape] = []

    def execute(self, batch: Batch) -> StepResult:
        self.shapes.append(shape_of(batch))
        return super().execute(batch)


def shape_of(batch: Batch) -> IterationShape:
    """What a latency table needs to know of ``batch``."""
    chunks = list(zip(batch.chunks, batch.chunk_tokens, strict=True))
    num_ending = sum(sequence.num_computed + tokens >= sequence.num_tokens for sequence, tokens in chunks)
    return IterationShape(
        chunks=tuple((tokens, sequence.num_computed) for sequence, tokens in chunks),
        num_decodes=len(batch.decodes),
        decode_kv_tokens=sum(sequence.num_tokens for sequence in batch.decodes),
        num_logits=len(batch.decodes) + num_ending,
    )
