"""How far the iterations of real runs scatter around what a latency table says of them, and the same scatter modelled.

A table knows the median iteration. P99 TBT is as much about the others: a core that was taken away, a cold cache, a
clock that fell. Without them a budget whose iterations all have the same size would be predicted to have no tail.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

import numpy as np

from ...kernels.latency.sweep import FloatArray, IntArray
from ..config import EngineConfig
from ..executor import ExecutorWrapper, StepResult
from ..kv_cache import BlockManager
from ..request import Batch
from .executor import ModelledExecutor

#: Iterations that a class of durations has at least, and classes at most: a pause of some milliseconds is much to a
#: short iteration and little to a long one.
MIN_ITERATIONS, MAX_CLASSES = 100, 6

#: Quantiles kept of each class.
NUM_LEVELS = 400


@dataclass(frozen=True, kw_only=True, eq=False)
class Jitter:
    """Measured ÷ predicted durations of iterations within their runs: ``ratios`` ``[classes, NUM_LEVELS]`` at evenly
    spaced levels, by class of predicted durations, whose upper ends in ms, but for the last one's, are ``edges_ms``
    ``[classes - 1]``."""

    edges_ms: FloatArray
    ratios: FloatArray

    @classmethod
    def of(cls, predicted_ms: FloatArray, measured_ms: FloatArray, runs: IntArray) -> Self | None:
        """The scatter of iterations around what was predicted of them, the mean of each run (``runs`` has its number
        for each iteration) taken as predicted right: one that ran in a slow minute is no scatter within any run. None
        where there are too few to tell."""
        num_classes = min(MAX_CLASSES, len(predicted_ms) // MIN_ITERATIONS)
        if not num_classes:
            return None
        order = np.argsort(predicted_ms, kind="stable")
        _, owners = np.unique(runs, return_inverse=True)
        of_runs = np.bincount(owners, measured_ms) / np.bincount(owners, predicted_ms)
        ratios = (measured_ms / predicted_ms / of_runs[owners])[order]
        classes = np.array_split(ratios, num_classes)
        ends = np.cumsum([len(one) for one in classes])[:-1]
        levels = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
        return cls(
            edges_ms=predicted_ms[order][ends - 1],
            ratios=np.array([np.quantile(one, levels) for one in classes]),
        )


class JitteredExecutor(ExecutorWrapper):
    """A modelled device whose iterations scatter as those of real runs did; each run draws the same by ``seed``.

    It advances decodes one iteration at a time, for no two are alike.
    """

    def __init__(self, inner: ModelledExecutor, jitter: Jitter, *, seed: int = 0) -> None:
        super().__init__(inner)
        self._seed = seed
        self._edges_s: list[float] = (jitter.edges_ms * 1e-3).tolist()
        self._ratios: list[list[float]] = jitter.ratios.tolist()

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        super().start(config, kv)
        self._random = np.random.default_rng(self._seed)

    def execute(self, batch: Batch) -> StepResult:
        predicted_s = self.inner.execute(batch).model_s
        place = bisect_left(self._edges_s, predicted_s)
        return StepResult(predicted_s * self._ratios[place][int(self._random.integers(NUM_LEVELS))])
