"""When the stages of a pipeline work: the one rule by which micro-batches move through it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .record import FloatArray


class PipelineClock:
    """The stages of a pipeline in virtual time, all free at 0.

    Micro-batch k enters stage s at the later of: when it left stage s - 1, its transfer added, and when micro-batch
    k - 1 left stage s. Transfers overlap with the work of the stages. How many are in flight is the caller's business.
    """

    def __init__(self, num_stages: int) -> None:
        if num_stages < 1:
            raise ValueError(f"num_stages={num_stages}: must be at least 1")
        self.free_s = [0.0] * num_stages

    def enter(
        self, ready_s: float, stage_s: Sequence[float], transfer_s: Sequence[float]
    ) -> tuple[FloatArray, FloatArray]:
        """When each stage begins and ends the next micro-batch, which is there at ``ready_s``.

        ``stage_s``: seconds of work by stage. ``transfer_s``: seconds from each stage to the next, one fewer.
        """
        free_s = self.free_s
        starts_s, ends_s = [], []
        now_s = ready_s
        for stage, work_s in enumerate(stage_s):
            if stage:
                now_s += transfer_s[stage - 1]
            now_s = max(now_s, free_s[stage])
            starts_s.append(now_s)
            now_s += work_s
            ends_s.append(now_s)
            free_s[stage] = now_s
        return np.array(starts_s), np.array(ends_s)
