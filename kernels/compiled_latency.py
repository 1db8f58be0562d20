"""A latency table unrolled into plain lists, so that a lookup is an index and a run of decodes one short loop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .latency import IterationShape, LatencyTable
from .sweep import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A surface as rows of plain floats; a value is a row's, linear between columns and beyond the last."""

    columns: list[float]
    inverse_widths: list[float]
    values: list[list[float]]

    def at(self, row: int, column: float) -> float:
        cell = min(max(bisect_right(self.columns, column) - 1, 0), len(self.inverse_widths) - 1)
        low = self.values[row][cell]
        slope = (self.values[row][cell + 1] - low) * self.inverse_widths[cell]
        value = low + slope * max(column - self.columns[cell], 0.0)
        return value if column <= self.columns[-1] else max(value, self.values[row][-1])

    def along(self, row: int, columns: Iterable[float]) -> list[float]:
        """The same at many columns that rise, with the same arithmetic to the last bit.

        Plain floats: a run between two arrivals has some ten columns, where an array costs more than it saves.
        """
        edges, values = self.columns, self.values[row]
        end, last_cell, least = edges[-1], len(self.inverse_widths) - 1, values[-1]
        left = low = slope = 0.0
        until = float("-inf")  # where the next cell begins
        found = []
        for column in columns:
            if column >= until:
                cell = min(max(bisect_right(edges, column) - 1, 0), last_cell)
                left, low = edges[cell], values[cell]
                slope = (values[cell + 1] - low) * self.inverse_widths[cell]
                until = edges[cell + 1] if cell < last_cell else float("inf")
            value = low + slope * (column - left) if column > left else low
            found.append(least if value < least and column > end else value)
        return found


class CompiledLatency:
    """Latencies of whole iterations from a table, up to ``max_tokens`` tokens and ``max_requests`` decodes at once.

    Larger batches are looked up in the table itself: slower, but with the same rules. The whole of a lookup is in
    float64, and `decode_run_ms` gives bit for bit what `iteration_ms` gives for each of its iterations.
    """

    def __init__(self, table: LatencyTable, *, max_tokens: int, max_requests: int) -> None:
        if max_tokens < 1 or max_requests < 1:
            raise ValueError(f"max_tokens is {max_tokens} and max_requests {max_requests}: both must be 1 or more")
        self.table = table
        self.max_tokens, self.max_requests = max_tokens, max_requests
        self._tokens_ms: list[float] = table.tokens_ms(np.arange(max_tokens + 1)).tolist()
        self._logits_ms: list[float] = table.logits_ms(np.arange(max_tokens + 1)).tolist()
        layers = table.model.num_layers
        self._prefill = _unrolled(table.prefill.columns, table.prefill.dense_rows(max_tokens) * layers)
        self._decode = _unrolled(table.decode.columns, table.decode.dense_rows(max_requests) * layers)
        self._shared_launch_ms = table.shared_launch_ms()

    def iteration_ms(
        self, chunks: Iterable[tuple[int, int]], num_decodes: int, decode_kv_tokens: int, num_logits: int
    ) -> float:
        """Latency of one iteration: chunks of (tokens, prefix), decodes with their KV tokens in all, logits rows."""
        chunks = list(chunks)
        num_tokens = num_decodes + sum(chunk for chunk, _ in chunks)
        if num_tokens > self.max_tokens or num_decodes > self.max_requests or num_logits > self.max_tokens:
            shape = IterationShape(
                chunks=tuple(chunks),
                num_decodes=num_decodes,
                decode_kv_tokens=decode_kv_tokens,
                num_logits=num_logits,
            )
            return self.table.iteration(shape).latency_ms
        total = self._fixed_ms(num_tokens, num_decodes + len(chunks), num_logits)
        if chunks:
            attention = -self._shared_launch_ms * (len(chunks) - 1)
            for chunk, prefix in chunks:
                attention += self._prefill.at(chunk, prefix)
            total += attention
        if num_decodes:
            total += self._decode.at(num_decodes, decode_kv_tokens / num_decodes)
        return total

    def decode_run_ms(self, num_decodes: int, decode_kv_tokens: int, num_iterations: int) -> list[float]:
        """Latencies of as many decode-only iterations on end, of the same requests.

        ``decode_kv_tokens`` is that of the first iteration; each adds one token for each request.
        """
        if num_decodes < 1 or num_iterations < 0:
            raise ValueError(
                f"num_decodes is {num_decodes} and num_iterations {num_iterations}: at least 1 and 0 are needed"
            )
        kv_tokens = range(decode_kv_tokens, decode_kv_tokens + num_decodes * num_iterations, num_decodes)
        if num_decodes > min(self.max_tokens, self.max_requests):
            return [self.iteration_ms((), num_decodes, kv, num_decodes) for kv in kv_tokens]
        fixed = self._fixed_ms(num_decodes, num_decodes, num_decodes)
        attention = self._decode.along(num_decodes, [kv / num_decodes for kv in kv_tokens])
        return [fixed + attention_ms for attention_ms in attention]

    def _fixed_ms(self, num_tokens: int, num_requests: int, num_logits: int) -> float:
        """All of an iteration but attention."""
        overhead = self.table.overhead_ms + self.table.request_overhead_ms * num_requests
        return overhead + self._tokens_ms[num_tokens] + self._logits_ms[num_logits]


def _unrolled(columns: IntArray, values: FloatArray) -> _Rows:
    edges = columns.astype(np.float64)
    return _Rows(columns=edges.tolist(), inverse_widths=(1.0 / np.diff(edges)).tolist(), values=values.tolist())
