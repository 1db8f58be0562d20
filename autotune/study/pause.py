"""Waiting for other processes without asking all the time."""

from __future__ import annotations

import time


class Pause:
    """Sleeps when called: briefly at first, longer when nothing has happened for a while."""

    def __init__(self, shortest_s: float = 0.01, longest_s: float = 0.5) -> None:
        self._next_s = shortest_s
        self._longest_s = longest_s

    def __call__(self) -> None:
        """Sleep."""
        time.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)
