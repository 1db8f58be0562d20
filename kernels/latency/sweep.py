"""Measured latency by token count, and the two file formats that carry it.

A sweep is one operation at one tensor-parallel degree. Files are Vidur's profiling CSV
(``time_stats.<op>.median`` in ms, one row per token count and degree, any row order) or a plain
``tokens,latency_ms`` table with optional ``op``, ``tensor_parallel`` and ``std_ms`` columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

FOUR_GEMMS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
"""The four linear layers of a decoder layer, by Vidur's names (mlp_up_proj is gate and up fused)."""

SOURCES = ("measured", "table", "transferred", "derived")
"""Where a latency comes from: timed here, read from somebody's table, moved from another shape, or computed."""

_VIDUR_SHAPE_COLUMNS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """Latency of one operation at rising token counts.

    ``tokens`` rises strictly from 1 or more; ``latency_ms`` (and ``std_ms``, the spread of one timing, where
    known) has the same length. ``source`` is one of SOURCES; ``note`` says what was transferred or derived.
    """

    op: str
    tensor_parallel: int = 1
    tokens: IntArray
    latency_ms: FloatArray
    std_ms: FloatArray | None = None
    source: str = "measured"
    note: str = ""

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens, dtype=np.int64)
        latency_ms = np.asarray(self.latency_ms, dtype=np.float64)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "latency_ms", latency_ms)
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}: it must be 1 or more")
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}: it must be one of {', '.join(SOURCES)}")
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(f"tokens of {self.op} has shape {tokens.shape}: it must be a list of one or more counts")
        if latency_ms.shape != tokens.shape:
            raise ValueError(f"latency_ms of {self.op} has {latency_ms.size} values for {tokens.size} token counts")
        if tokens[0] < 1 or np.any(np.diff(tokens) <= 0):
            raise ValueError(f"tokens of {self.op} must rise strictly from 1 or more")
        if not np.all(np.isfinite(latency_ms)) or np.any(latency_ms <= 0):
            raise ValueError(f"latency_ms of {self.op} must be finite and above 0")
        if self.std_ms is not None:
            std_ms = np.asarray(self.std_ms, dtype=np.float64)
            object.__setattr__(self, "std_ms", std_ms)
            if std_ms.shape != tokens.shape or not np.all(std_ms >= 0):
                raise ValueError(f"std_ms of {self.op} must hold one value of 0 or more for each token count")

    def at(self, tokens: int) -> float:
        """Latency in ms at a measured token count; ValueError where it was not measured."""
        index = int(np.searchsorted(self.tokens, tokens))
        if index >= self.tokens.size or self.tokens[index] != tokens:
            raise ValueError(f"tokens is {tokens}: {self.op} was not measured there")
        return float(self.latency_ms[index])


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """The sweeps of one file, and what the reader did to its rows."""

    sweeps: tuple[Sweep, ...]
    format: str
    num_rows: int
    num_dropped: int = 0
    shape: dict[str, int] = field(default_factory=dict)

    def degrees(self) -> list[int]:
        """The tensor-parallel degrees in the file, ascending."""
        return sorted({sweep.tensor_parallel for sweep in self.sweeps})

    def select(self, tensor_parallel: int) -> list[Sweep]:
        """The sweeps of one degree; ValueError that lists the degrees when there is none."""
        found = [sweep for sweep in self.sweeps if sweep.tensor_parallel == tensor_parallel]
        if not found:
            raise ValueError(f"tensor_parallel is {tensor_parallel}: the file has {self.degrees()}")
        return found


def read_sweeps(path: str | Path) -> SweepFile:
    """Every sweep of a Vidur profiling CSV or a ``tokens,latency_ms`` CSV, ascending by token count.

    Rows with a latency that is absent, not finite or not above 0 are dropped and counted; several rows of one
    token count become their median. ValueError when the file is empty, or has neither format's columns.
    """
    try:
        frame = pd.read_csv(path, encoding="utf-8-sig", skipinitialspace=True)
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise ValueError(f"sweep file {path} is not a CSV table: {error}") from error
    frame.columns = [str(column).strip() for column in frame.columns]
    columns = set(frame.columns)
    if {"num_tokens"} <= columns and any(_vidur_op(column) for column in columns):
        return _read_vidur(frame, path)
    if {"tokens", "latency_ms"} <= columns:
        return _read_plain(frame, path)
    raise ValueError(
        f"sweep file {path} has columns {sorted(columns)[:8]}: it needs num_tokens and time_stats.<op>.median "
        "(Vidur's format), or tokens and latency_ms"
    )


def layer_sweep(sweeps: Iterable[Sweep], ops: Sequence[str] = FOUR_GEMMS, name: str = "layer") -> Sweep:
    """The sum of several operations at one degree, on the token counts that all of them have.

    The sum is ``transferred`` (and its note names the operations) as soon as one part is; ValueError names an
    operation that is absent, or says that no token count is shared.
    """
    parts = {sweep.op: sweep for sweep in sweeps if sweep.op in ops}
    missing = [op for op in ops if op not in parts]
    if missing:
        raise ValueError(f"ops {', '.join(missing)} are not among the sweeps: the {name} sum needs all of {list(ops)}")
    chosen = [parts[op] for op in ops]
    if len({sweep.tensor_parallel for sweep in chosen}) > 1:
        raise ValueError(f"the {name} sum needs sweeps of one tensor_parallel degree")
    tokens = chosen[0].tokens
    for sweep in chosen[1:]:
        tokens = np.intersect1d(tokens, sweep.tokens)
    if tokens.size == 0:
        raise ValueError(f"the operations {list(ops)} share no token count")
    latency_ms = np.zeros(tokens.size)
    variance = np.zeros(tokens.size)
    for sweep in chosen:
        index = np.searchsorted(sweep.tokens, tokens)
        latency_ms += sweep.latency_ms[index]
        if sweep.std_ms is not None:
            variance += sweep.std_ms[index] ** 2
    worst = max((sweep.source for sweep in chosen), key=SOURCES.index)
    moved = [sweep.op for sweep in chosen if sweep.source == worst]
    return Sweep(
        op=name,
        tensor_parallel=chosen[0].tensor_parallel,
        tokens=tokens,
        latency_ms=latency_ms,
        std_ms=np.sqrt(variance) if all(sweep.std_ms is not None for sweep in chosen) else None,
        source=worst,
        note="" if worst in ("measured", "table") else f"{worst}: {', '.join(moved)}",
    )


def _vidur_op(column: str) -> str | None:
    parts = column.split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "time_stats" and parts[2] == "median" else None


def _read_vidur(frame: pd.DataFrame, path: str | Path) -> SweepFile:
    shape = {}
    for column in _VIDUR_SHAPE_COLUMNS:
        if column in frame.columns:
            values = frame[column].unique()
            if len(values) > 1:
                raise ValueError(f"sweep file {path}: {column} has values {sorted(values)[:5]}; one model per file")
            if len(values) == 1:
                shape[column] = int(values[0])
    degree = "num_tensor_parallel_workers"
    if degree not in frame.columns:
        frame = frame.assign(**{degree: 1})
    sweeps: list[Sweep] = []
    dropped = 0
    ops = [op for op in (_vidur_op(column) for column in frame.columns) if op]
    for tensor_parallel in sorted(_whole(frame[degree], degree, path).unique()):
        part = frame[frame[degree] == tensor_parallel]
        for op in ops:
            std = f"time_stats.{op}.std"
            sweep, lost = _sweep(
                op,
                int(tensor_parallel),
                _whole(part["num_tokens"], "num_tokens", path),
                part[f"time_stats.{op}.median"],
                part[std] if std in part.columns else None,
            )
            dropped += lost
            if sweep is not None:
                sweeps.append(sweep)
    return _checked(sweeps, "vidur", len(frame), dropped, shape, path)


def _read_plain(frame: pd.DataFrame, path: str | Path) -> SweepFile:
    frame = frame.assign(
        op=frame["op"] if "op" in frame.columns else "latency",
        tensor_parallel=frame["tensor_parallel"] if "tensor_parallel" in frame.columns else 1,
    )
    _whole(frame["tensor_parallel"], "tensor_parallel", path)
    sweeps: list[Sweep] = []
    dropped = 0
    for key, part in frame.groupby(["op", "tensor_parallel"], sort=True):
        op, tensor_parallel = str(key[0]), int(str(key[1]))
        tokens = _whole(part["tokens"], "tokens", path)
        std = part["std_ms"] if "std_ms" in part.columns else None
        sweep, lost = _sweep(op, tensor_parallel, tokens, part["latency_ms"], std)
        dropped += lost
        if sweep is not None:
            sweeps.append(sweep)
    return _checked(sweeps, "tokens,latency_ms", len(frame), dropped, {}, path)


def _whole(values: pd.Series, column: str, path: str | Path) -> pd.Series:
    numbers = pd.to_numeric(values, errors="coerce")
    bad = numbers.isna() | (numbers < 1) | (numbers % 1 != 0)
    if bad.any():
        value = values[bad].iloc[0]
        raise ValueError(f"sweep file {path}: {column} is {value!r}; it must be a whole number of 1 or more")
    return numbers.astype(np.int64)


def _sweep(
    op: str, tensor_parallel: int, tokens: pd.Series, latency: pd.Series, std: pd.Series | None
) -> tuple[Sweep | None, int]:
    """One sweep (None when nothing usable is left) and the number of rows dropped."""
    rows = pd.DataFrame({"tokens": tokens, "latency_ms": pd.to_numeric(latency, errors="coerce")})
    rows["std_ms"] = 0.0 if std is None else pd.to_numeric(std, errors="coerce").fillna(0.0).clip(lower=0.0)
    usable = rows[np.isfinite(rows["latency_ms"]) & (rows["latency_ms"] > 0)]
    if usable.empty:
        return None, len(rows)
    merged = usable.groupby("tokens").median()
    return (
        Sweep(
            op=op,
            tensor_parallel=tensor_parallel,
            tokens=merged.index.to_numpy(dtype=np.int64),
            latency_ms=merged["latency_ms"].to_numpy(dtype=np.float64),
            std_ms=None if std is None else merged["std_ms"].to_numpy(dtype=np.float64),
        ),
        len(rows) - len(usable),
    )


def _checked(
    sweeps: list[Sweep], file_format: str, num_rows: int, num_dropped: int, shape: dict[str, int], path: str | Path
) -> SweepFile:
    if not sweeps:
        raise ValueError(f"sweep file {path} has no row with a latency above 0")
    return SweepFile(sweeps=tuple(sweeps), format=file_format, num_rows=num_rows, num_dropped=num_dropped, shape=shape)
