"""Latency over two counts, such as (chunk, prefix) or (requests, KV tokens of each), on a rectangular grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .step_curve import BoolArray
from .sweep import SOURCES, FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Surface:
    """``latency_ms`` [rows, columns] at rising ``rows`` and ``columns``; ``std_ms`` and ``sources`` alike.

    Between points it is linear in either count. Below the first row or column their latency holds; beyond the last
    ones the last slope goes on where it rises (`extrapolated` marks both). ``sources`` are indices into
    sweep.SOURCES.
    """

    rows: IntArray
    columns: IntArray
    latency_ms: FloatArray
    std_ms: FloatArray
    sources: npt.NDArray[np.int8]
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            axis = getattr(self, name)
            if axis.ndim != 1 or axis.size < 2 or axis[0] < 0 or np.any(np.diff(axis) <= 0):
                raise ValueError(f"{name} must be two or more counts that rise strictly from 0 or more")
        shape = (self.rows.size, self.columns.size)
        for name in ("latency_ms", "std_ms", "sources"):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}: it must be {shape}")
        if not np.all(np.isfinite(self.latency_ms)) or np.any(self.latency_ms <= 0):
            raise ValueError("latency_ms must be finite and above 0")
        if not np.all(self.std_ms >= 0):
            raise ValueError("std_ms must be 0 or more")
        if np.any((self.sources < 0) | (self.sources >= len(SOURCES))):
            raise ValueError(f"sources must be indices into {SOURCES}")

    def at(self, rows: npt.ArrayLike, columns: npt.ArrayLike) -> FloatArray:
        """Latency in ms at each (row, column), broadcast; 0 where the row is 0. ValueError for negative counts."""
        return self._interpolate(self.latency_ms, rows, columns)

    def spread_at(self, rows: npt.ArrayLike, columns: npt.ArrayLike) -> FloatArray:
        """One standard deviation in ms at each (row, column), interpolated like the latency."""
        return self._interpolate(self.std_ms, rows, columns)

    def extrapolated(self, rows: npt.ArrayLike, columns: npt.ArrayLike) -> BoolArray:
        """Which (row, column) lie outside the grid; a row of 0 does not."""
        row, column = np.broadcast_arrays(np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64))
        outside: BoolArray = (row < self.rows[0]) | (row > self.rows[-1])
        outside |= (column < self.columns[0]) | (column > self.columns[-1])
        outside &= row != 0
        return outside

    def source_at(self, row: float, column: float) -> str:
        """Where the points around (row, column) come from: the least direct of them."""
        r = np.clip(np.searchsorted(self.rows, row, side="right") - 1, 0, self.rows.size - 2)
        c = np.clip(np.searchsorted(self.columns, column, side="right") - 1, 0, self.columns.size - 2)
        return SOURCES[int(self.sources[r : r + 2, c : c + 2].max())]

    def dense_rows(self, max_row: int) -> FloatArray:
        """[max_row + 1, columns]: latency in ms at every row from 0 to max_row, at the grid's columns."""
        return self.at(np.arange(max_row + 1)[:, None], self.columns[None, :])

    def _interpolate(self, values: FloatArray, rows: npt.ArrayLike, columns: npt.ArrayLike) -> FloatArray:
        row, column = np.broadcast_arrays(np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64))
        if np.any(row < 0) or np.any(column < 0):
            raise ValueError("a count is below 0")
        r, row_share = _place(self.rows, row)
        c, column_share = _place(self.columns, column)
        # Rows first, then columns, as the compiled table does it.
        left = _along(values[r, c], values[r + 1, c], row_share)
        right = _along(values[r, c + 1], values[r + 1, c + 1], row_share)
        out = _along(left, right, column_share)
        return np.where(row == 0, 0.0, out)


def _place(axis: IntArray, wanted: FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """The cell of each value and its share of the way through; more than 1 beyond the end, 0 before the start."""
    cell = np.clip(np.searchsorted(axis, wanted, side="right") - 1, 0, axis.size - 2)
    share = (wanted - axis[cell]) / (axis[cell + 1] - axis[cell])
    return cell, np.maximum(share, 0.0)


def _along(low: FloatArray, high: FloatArray, share: FloatArray) -> FloatArray:
    """The line from low to high; beyond high it goes on where it rises, and stays where it falls."""
    line = low + (high - low) * share
    return np.asarray(np.where(share > 1, np.maximum(line, high), line), dtype=np.float64)
