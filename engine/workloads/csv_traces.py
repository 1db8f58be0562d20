"""Request traces in CSV: Azure LLM, BurstGPT, and Sarathi's and Vidur's length files, all read by column name."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..record import FloatArray
from .workload import RawRequests

_WHOLE = re.compile(r"[0-9]+(?:\.0*)?")


@dataclass(frozen=True, kw_only=True)
class CsvFormat:
    """Which columns hold what. ``arrival`` lists names in order of preference; it may be missing when
    ``needs_arrival`` is False. ``parse_arrival`` turns one column of text into seconds from any origin."""

    prompt: str
    output: str
    arrival: tuple[str, ...]
    parse_arrival: Callable[[list[str]], FloatArray]
    needs_arrival: bool = True

    @property
    def needed(self) -> tuple[str, ...]:
        """Columns that the format cannot do without."""
        return (*(self.arrival[:1] if self.needs_arrival else ()), self.prompt, self.output)

    def fits(self, columns: list[str]) -> bool:
        """Whether a header with these columns is of this format."""
        return not set(map(_key, self.needed)) - set(map(_key, columns))


def _parse_seconds(values: list[str]) -> FloatArray:
    return np.array([float(value) for value in values], dtype=np.float64)


def _parse_timestamps(values: list[str]) -> FloatArray:
    """Seconds since the first of the list; whole nanoseconds until then, so 7 fractional digits survive."""
    # pandas takes "", "nat" and "now" for dates too.
    if not all(value[:4].isdigit() for value in values):
        raise ValueError("a date and time begins with the year")
    stamps = pd.to_datetime(pd.Series(values, dtype=object), format="ISO8601", utc=True)
    nanoseconds = stamps.to_numpy(dtype="datetime64[ns]").astype(np.int64)
    seconds: FloatArray = (nanoseconds - nanoseconds[0]) / 1e9
    return seconds


CSV_FORMATS: dict[str, CsvFormat] = {
    "azure": CsvFormat(
        prompt="ContextTokens", output="GeneratedTokens", arrival=("TIMESTAMP",), parse_arrival=_parse_timestamps
    ),
    "burstgpt": CsvFormat(
        prompt="Request tokens", output="Response tokens", arrival=("Timestamp",), parse_arrival=_parse_seconds
    ),
    "lengths": CsvFormat(
        prompt="num_prefill_tokens",
        output="num_decode_tokens",
        arrival=("arrived_at", "arrival_time", "arrival_s"),
        parse_arrival=_parse_seconds,
        needs_arrival=False,
    ),
}


def read_csv(path: Path, name: str | None) -> tuple[str, RawRequests]:
    """The format's name and the rows of a CSV trace; ``name`` None finds the format by the header.

    Arrivals are seconds from any origin, in the file's order. A byte-order mark, CRLF and blank lines are fine.
    Raises ValueError that names the file and, where it is one, the line and the column.
    """
    header, rows, lines = _read_table(path)
    if name is None:
        name = _find_format(path, header)
    form = CSV_FORMATS[name]
    keys = [_key(column) for column in header]
    missing = [column for column in form.needed if _key(column) not in keys]
    if missing:
        raise ValueError(
            f"{path}: line 1: format {name} needs the columns {', '.join(form.needed)}; missing {', '.join(missing)}, "
            f"found {', '.join(header)}"
        )
    if not rows:
        raise ValueError(f"{path}: has a header and no rows: at least one request is needed")

    def column(title: str) -> list[str]:
        place = keys.index(_key(title))
        return [row[place].strip() for row in rows]

    arrival_s, notes = None, []
    arrival = next((title for title in form.arrival if _key(title) in keys), None)
    if arrival is None:
        notes.append(f"no arrival times in the file (no column {' or '.join(form.arrival)})")
    else:
        arrival_s = _arrivals(path, arrival, column(arrival), lines, form)
        num_back = int((np.diff(arrival_s) < 0.0).sum())
        if num_back:
            notes.append(f"rows were out of order of time in {num_back} places: sorted")
    raw = RawRequests(
        prompt_tokens=_whole_numbers(path, form.prompt, column(form.prompt), lines),
        output_tokens=_whole_numbers(path, form.output, column(form.output), lines),
        arrival_s=arrival_s,
        notes=tuple(notes),
    )
    return name, raw


def _read_table(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Header, rows, and the line on which each row ends. Blank lines are left out; a ragged row is an error."""
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            for row in reader:
                if row and (len(row) > 1 or row[0].strip()):
                    rows.append(row)
                    lines.append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{path}: is empty: a header and at least one request are needed")
    header = [column.strip() for column in rows[0]]
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise ValueError(f"{path}: line {line}: has {len(row)} fields, the header has {len(header)}")
    return header, rows[1:], lines[1:]


def _find_format(path: Path, header: list[str]) -> str:
    for name, form in CSV_FORMATS.items():
        if form.fits(header):
            return name
    known = "; ".join(f"{name}: {', '.join(form.needed)}" for name, form in CSV_FORMATS.items())
    raise ValueError(f"{path}: line 1: found the columns {', '.join(header)}; a trace needs those of one of {known}")


def _key(column: str) -> str:
    return column.strip().casefold()


def _whole_numbers(path: Path, column: str, values: list[str], lines: list[int]) -> list[int]:
    numbers = []
    for value, line in zip(values, lines, strict=True):
        if not (value.isascii() and value.isdigit()):
            if not _WHOLE.fullmatch(value):
                raise ValueError(f"{path}: line {line}: {column}={value!r}: must be a whole number, 0 or more")
            value = value.partition(".")[0]
        numbers.append(int(value))
    return numbers


def _arrivals(path: Path, column: str, values: list[str], lines: list[int], form: CsvFormat) -> FloatArray:
    """All at once, because that is fast; one by one only to say which line is wrong."""
    try:
        arrivals = form.parse_arrival(values)
    except ValueError as error:
        for value, line in zip(values, lines, strict=True):
            try:
                form.parse_arrival([value])
            except ValueError:
                rule = "a date and time" if form.parse_arrival is _parse_timestamps else "a number of seconds"
                raise ValueError(f"{path}: line {line}: {column}={value!r}: must be {rule}") from error
        raise
    bad = np.flatnonzero(~np.isfinite(arrivals))
    if len(bad):
        raise ValueError(f"{path}: line {lines[bad[0]]}: {column}={values[bad[0]]!r}: must be a finite number")
    return arrivals
