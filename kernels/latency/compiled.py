"""A latency table unrolled into plain lists, so that a lookup is an index and a run of decodes one short loop."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sweep import FloatArray, IntArray
from .table import IterationShape, LatencyTable


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """A surface as rows of plain floats; a value is a row's, linear between columns and beyond the last."""

    columns: list[float]
    inverse_widths: list[float]
    values: list[list[float]]

    def at(self, row: int, column: float) -> float:
        edges, values = self.columns, self.values[row]
        cell = self._cell(column)
        low, left = values[cell], edges[cell]
        if column <= left:
            return low
        value = low + (values[cell + 1] - low) * self.inverse_widths[cell] * (column - left)
        return values[-1] if value < values[-1] and column > edges[-1] else value

    def seconds_along(self, row: int, kv_tokens: range, fixed_ms: float) -> list[float]:
        """Seconds of ``fixed_ms`` and the value of each column ``kv / kv_tokens.step`` together, with the arithmetic
        of ``at`` to the last bit.

        Plain floats: a run between two arrivals has some ten columns, where an array costs more than it saves.
        """
        values, requests = self.values[row], kv_tokens.step
        found: list[float] = []
        while kv_tokens:
            cell = self._cell(kv_tokens[0] / requests)
            low, left, end = values[cell], self.columns[cell], self.columns[cell + 1]
            slope = (values[cell + 1] - low) * self.inverse_widths[cell]
            inside = kv_tokens[: max(0, -(-(int(end) * requests - kv_tokens.start) // requests))]
            if inside and inside.start >= left * requests:
                found += [(fixed_ms + (low + slope * (kv / requests - left))) * 1e-3 for kv in inside]
            else:  # before the first column, or beyond the last one
                inside = kv_tokens if cell == len(self.inverse_widths) - 1 else inside[:1]
                found += [(fixed_ms + self.at(row, kv / requests)) * 1e-3 for kv in inside]
            kv_tokens = kv_tokens[len(inside) :]
        return found

    def _cell(self, column: float) -> int:
        cell = bisect_right(self.columns, column) - 1
        last_cell = len(self.inverse_widths) - 1
        return 0 if cell < 0 else cell if cell < last_cell else last_cell


class CompiledLatency:
    """Latencies of whole iterations from a table, up to ``max_tokens`` tokens and ``max_requests`` decodes at once.

    Larger batches are looked up in the table itself: slower, but with the same rules. The whole of a lookup is in
    float64, and `decode_run_s` gives bit for bit what `iteration_s` gives for each of its iterations.
    """

    def __init__(self, table: LatencyTable, *, max_tokens: int, max_requests: int) -> None:
        if max_tokens < 1 or max_requests < 1:
            raise ValueError(f"max_tokens is {max_tokens} and max_requests {max_requests}: both must be 1 or more")
        self.table = table
        self.max_tokens, self.max_requests = max_tokens, max_requests
        overhead_ms = table.overhead_ms + table.request_overhead_ms * np.arange(max_tokens + 1)
        self._requests_ms: list[float] = overhead_ms.tolist()
        self._tokens_ms: list[float] = table.tokens_ms(np.arange(max_tokens + 1)).tolist()
        self._logits_ms: list[float] = table.logits_ms(np.arange(max_tokens + 1)).tolist()
        layers = table.model.num_layers
        self._prefill = _unrolled(table.prefill.columns, table.prefill.dense_rows(max_tokens) * layers)
        self._decode = _unrolled(table.decode.columns, table.decode.dense_rows(max_requests) * layers)
        self._shared_launch_ms = table.shared_launch_ms()

    def iteration_s(
        self, chunks: Sequence[tuple[int, int]], num_decodes: int, decode_kv_tokens: int, num_logits: int
    ) -> float:
        """Latency of one iteration: chunks of (tokens, prefix), decodes with their KV tokens in all, logits rows."""
        num_tokens = num_decodes
        for chunk, _ in chunks:
            num_tokens += chunk
        if num_tokens > self.max_tokens or num_decodes > self.max_requests or num_logits > self.max_tokens:
            shape = IterationShape(
                chunks=tuple(chunks),
                num_decodes=num_decodes,
                decode_kv_tokens=decode_kv_tokens,
                num_logits=num_logits,
            )
            return self.table.iteration(shape).latency_ms * 1e-3
        total_ms = self._requests_ms[num_decodes + len(chunks)] + self._tokens_ms[num_tokens]
        total_ms += self._logits_ms[num_logits]
        if chunks:
            attention_ms = -self._shared_launch_ms * (len(chunks) - 1)
            for chunk, prefix in chunks:
                attention_ms += self._prefill.at(chunk, prefix)
            total_ms += attention_ms
        if num_decodes:
            total_ms += self._decode.at(num_decodes, decode_kv_tokens / num_decodes)
        return total_ms * 1e-3

    def decode_run_s(self, num_decodes: int, decode_kv_tokens: int, num_iterations: int) -> list[float]:
        """Latencies of as many decode-only iterations on end, of the same requests.

        ``decode_kv_tokens`` is that of the first iteration; each adds one token for each request.
        """
        if num_decodes < 1 or num_iterations < 0:
            raise ValueError(
                f"num_decodes is {num_decodes} and num_iterations {num_iterations}: at least 1 and 0 are needed"
            )
        kv_tokens = range(decode_kv_tokens, decode_kv_tokens + num_decodes * num_iterations, num_decodes)
        if num_decodes > self.max_tokens or num_decodes > self.max_requests:
            return [self.iteration_s((), num_decodes, kv, num_decodes) for kv in kv_tokens]
        fixed_ms = self._requests_ms[num_decodes] + self._tokens_ms[num_decodes] + self._logits_ms[num_decodes]
        return self._decode.seconds_along(num_decodes, kv_tokens, fixed_ms)


def _unrolled(columns: IntArray, values: FloatArray) -> _Rows:
    edges = columns.astype(np.float64)
    return _Rows(columns=edges.tolist(), inverse_widths=(1.0 / np.diff(edges)).tolist(), values=values.tolist())
