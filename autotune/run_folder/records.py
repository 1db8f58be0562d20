"""``iterations.parquet`` and ``requests.parquet``: what the runs that the report draws did, at few bytes a token.

A whole trace generates millions of tokens. A token comes at the end of an iteration, so a request's tokens are kept as
iteration numbers, which rise by one from token to token and pack to next to nothing; the time is the iteration's end.
Tokens that came at other times (a server's, over the network) are kept as times.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...engine import BUBBLE_CAUSES, RunRecord, find_bubbles
from ...engine.record import IntArray, Iterations
from ..study.trial import TrialRow

ITERATIONS_FILE, REQUESTS_FILE = "iterations.parquet", "requests.parquet"

_RUN = [("run", pa.string()), ("token_budget", pa.int64()), ("policy", pa.string())]
ITERATIONS_SCHEMA = pa.schema(
    [
        *_RUN,
        ("start_s", pa.float64()),
        ("duration_s", pa.float32()),
        ("num_decodes", pa.int32()),
        ("num_prefill_tokens", pa.int32()),
        ("num_requests", pa.int32()),
        ("kv_blocks_used", pa.int32()),
        ("num_preemptions", pa.int32()),
        ("stage_start_s", pa.list_(pa.float64())),
        ("stage_end_s", pa.list_(pa.float64())),
        *((f"bubble_{cause}_s", pa.float32()) for cause in BUBBLE_CAUSES),
    ]
)
REQUESTS_SCHEMA = pa.schema(
    [
        *_RUN,
        ("request", pa.int32()),
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int32()),
        ("output_tokens", pa.int32()),
        ("first_scheduled_s", pa.float64()),
        ("num_generated", pa.int32()),
        ("num_preemptions", pa.int32()),
        ("status", pa.string()),
        ("token_iteration", pa.list_(pa.int32())),
        ("token_s", pa.list_(pa.float64())),
    ]
)
#: Whole numbers that rise slowly pack best as differences; times as their bytes side by side.
_ENCODINGS = {
    ITERATIONS_FILE: {"start_s": "BYTE_STREAM_SPLIT", "duration_s": "BYTE_STREAM_SPLIT"},
    REQUESTS_FILE: {
        "token_iteration.list.element": "DELTA_BINARY_PACKED",
        "token_s.list.element": "BYTE_STREAM_SPLIT",
        "arrival_s": "BYTE_STREAM_SPLIT",
        "first_scheduled_s": "BYTE_STREAM_SPLIT",
    },
}
_DICTIONARIES = ["run", "policy", "status"]


def iteration_table(row: TrialRow, record: RunRecord) -> pa.Table:
    """One row an iteration of a run; on a pipeline with the times of its stages and their idle time before it."""
    iterations = record.iterations
    columns: dict[str, object] = {
        name: getattr(iterations, name)
        for name in ITERATIONS_SCHEMA.names
        if getattr(iterations, name, None) is not None
    }
    if iterations.stage_start_s is not None and iterations.stage_end_s is not None and len(iterations):
        columns |= {"stage_start_s": list(iterations.stage_start_s), "stage_end_s": list(iterations.stage_end_s)}
        causes = find_bubbles(iterations).idle_s.T
        columns |= {f"bubble_{cause}_s": idle_s for cause, idle_s in zip(BUBBLE_CAUSES, causes, strict=True)}
    return _table(row, ITERATIONS_SCHEMA, columns, len(iterations))


def request_table(row: TrialRow, record: RunRecord) -> pa.Table:
    """One row a request of a run: ``token_iteration`` lists the iterations that ended with a token of it; where tokens
    came at other times it is null, and ``token_s`` lists these."""
    columns = record.requests
    names = [name for name in REQUESTS_SCHEMA.names if hasattr(columns, name)]
    order = np.argsort(record.token_request, kind="stable")
    offsets = np.zeros(len(columns) + 1, dtype=np.int32)
    np.cumsum(np.bincount(record.token_request, minlength=len(columns)), out=offsets[1:])
    numbers = _iteration_of(record.iterations, record)
    name, values = ("token_s", record.token_s) if numbers is None else ("token_iteration", numbers)
    item = REQUESTS_SCHEMA.field(name).type.value_type
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[order], type=item))
    return _table(
        row,
        REQUESTS_SCHEMA,
        {"request": np.arange(len(columns)), **{name: getattr(columns, name) for name in names}, name: lists},
        len(columns),
    )


def write_tables(tables: Iterable[pa.Table], name: str, file: Path) -> None:
    """Write the tables of ``name`` to ``file``, each run a row group, so that a reader can skip the others."""
    schema = {ITERATIONS_FILE: ITERATIONS_SCHEMA, REQUESTS_FILE: REQUESTS_SCHEMA}[name]
    with pq.ParquetWriter(
        file, schema, compression="zstd", use_dictionary=_DICTIONARIES, column_encoding=_ENCODINGS[name]
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=max(1, len(table)))


def _iteration_of(iterations: Iterations, record: RunRecord) -> IntArray | None:
    """The iteration whose end is the time of each token; None where any token came at another time."""
    ends_s = iterations.end_s
    if not len(ends_s) or not (np.diff(ends_s) > 0).all():
        return None
    numbers = np.minimum(np.searchsorted(ends_s, record.token_s), len(ends_s) - 1)
    return numbers if np.array_equal(ends_s[numbers], record.token_s) else None


def _table(row: TrialRow, schema: pa.Schema, columns: dict[str, object], length: int) -> pa.Table:
    same = {name: pa.repeat(pa.scalar(getattr(row, name), type=kind), length) for name, kind in _RUN}
    given = {**same, **columns}
    arrays = [
        given[field.name]
        if isinstance(given.get(field.name), pa.Array)
        else pa.array(given[field.name], type=field.type)
        if field.name in given
        else pa.nulls(length, type=field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
