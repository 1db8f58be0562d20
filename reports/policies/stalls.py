"""Generation stalls in a run: intervals in which requests that are decoding get no token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..data.run_folder import TokenTimes

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Each time from when requests were decoding to the end of the iteration that gave decodes a token, seconds."""

    start_s: FloatArray
    end_s: FloatArray

    @property
    def durations_s(self) -> FloatArray:
        return self.end_s - self.start_s

    def longer_than(self, limit_s: float) -> Waits:
        """The waits longer than ``limit_s``: the stalls."""
        keep = self.durations_s > limit_s
        return Waits(start_s=self.start_s[keep], end_s=self.end_s[keep])

    def __len__(self) -> int:
        return len(self.start_s)


def find_waits(iterations: pd.DataFrame, tokens: TokenTimes) -> Waits:
    """Every wait of the running decodes, one for each iteration that holds decodes.

    A wait starts at the end of the last iteration with decodes, or when the first of the waiting requests got its
    first token, whichever is later; it ends with the next iteration that holds decodes. An iteration that only
    prefills while requests are decoding therefore lengthens a wait (an eager prefill), and so does a hybrid
    iteration that itself takes long (a whole prompt beside decodes).
    """
    iterations = iterations.sort_values("start_s")
    start_s = iterations["start_s"].to_numpy(dtype=float)
    end_s = start_s + iterations["duration_s"].to_numpy(dtype=float)
    has_decodes = iterations["num_decodes"].to_numpy() > 0
    busy = _num_decoding(tokens, start_s) > 0
    ends = np.flatnonzero(has_decodes)
    if not len(ends):
        return Waits(start_s=np.empty(0), end_s=np.empty(0))
    previous = np.concatenate([[-1], ends[:-1]])
    # The first iteration after the last decodes at whose start somebody already waits for a next token.
    waiting = np.flatnonzero(busy | has_decodes)
    begin = waiting[np.searchsorted(waiting, previous + 1)]
    return Waits(start_s=start_s[begin], end_s=end_s[ends])


def _num_decoding(tokens: TokenTimes, at_s: FloatArray) -> npt.NDArray[np.int64]:
    """How many requests have had a first token and not yet their last at each of ``at_s``."""
    lengths = np.diff(tokens.offsets)
    first = np.sort(tokens.times_s[tokens.offsets[:-1][lengths > 0]])
    last = np.sort(tokens.times_s[tokens.offsets[1:][lengths > 0] - 1])
    # Half a nanosecond: an iteration starts when the previous one ends, to the last bit or to rounding.
    instant = at_s + 5e-10
    return np.searchsorted(first, instant, side="right") - np.searchsorted(last, instant, side="right")
