"""The file of a profile: a latency table with the measurements that it was made from, so that more can be added.

It is a table's file with one more object in it, ``profile``. While the measuring goes on there is no table yet, and
the file says so by its schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from ...kernels.latency.file import LatencyFileError, table_to_json
from ...kernels.latency.table import IterationShape, LatencyTable
from .fit import Subject, TimedIteration
from .grid import ProfileGrid

PROFILE_VERSION = 2
UNFINISHED_SCHEMA = "tilebudget.unfinished_profile/1"

Json = dict[str, object]


@dataclass(kw_only=True)
class Measurements:
    """What a profile has timed: milliseconds of single iterations by shape, and the iterations of engine runs."""

    samples: dict[IterationShape, list[float]] = field(default_factory=dict)
    runs: list[TimedIteration] = field(default_factory=list)


def save_profile(
    path: Path, done: Measurements, subject: Subject, grid: ProfileGrid, table: LatencyTable | None
) -> None:
    """Write a profile as JSON, at once or not at all; ``table`` is None while the measuring goes on."""
    document: Json = {"schema": UNFINISHED_SCHEMA} if table is None else table_to_json(table)
    document["profile"] = {
        "version": PROFILE_VERSION,
        "of": _identity(subject, grid),
        "samples": [[*_shape_to_json(shape), found] for shape, found in done.samples.items()],
        "runs": [[*_shape_to_json(run.shape), run.duration_ms, run.run] for run in done.runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.write_text(json.dumps(document) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_measurements(path: Path, subject: Subject, grid: ProfileGrid) -> Measurements:
    """What the profile at ``path`` has timed so far; nothing where there is no file.

    Raises LatencyFileError when the file is no profile, ValueError when it is one of something else.
    """
    if not path.exists():
        return Measurements()
    try:
        profile = cast(Json, json.loads(path.read_text(encoding="utf-8"))["profile"])
        if profile["version"] != PROFILE_VERSION:
            raise LatencyFileError(f"profile {path} has version {profile['version']}: this reads {PROFILE_VERSION}")
        of = cast(Json, profile["of"])
        rows, runs = cast("list[list[object]]", profile["samples"]), cast("list[list[object]]", profile["runs"])
        done = Measurements(
            samples={_shape_from_json(row): [float(ms) for ms in cast("list[float]", row[4])] for row in rows},
            runs=[
                TimedIteration(shape=_shape_from_json(row), duration_ms=cast(float, row[4]), run=cast(int, row[5]))
                for row in runs
            ],
        )
    except (OSError, KeyError, TypeError, IndexError, ValueError) as error:
        raise LatencyFileError(f"{path} cannot be read as a profile to continue: {error!r}") from error
    for name, value in _identity(subject, grid).items():
        if of.get(name) != value:
            raise ValueError(
                f"out={str(path)!r}: is a profile with {name}={of.get(name)!r}, this one has {value!r}; "
                "choose another file"
            )
    return done


def _identity(subject: Subject, grid: ProfileGrid) -> Mapping[str, object]:
    """What must be equal for measurements to belong together."""
    origin = {name: value for name, value in subject.origin.items() if name in ("framework", "version", "num_threads")}
    return {
        "device": subject.device,
        "dtype": subject.dtype,
        "model": asdict(subject.model),
        **origin,
        **asdict(grid),
    }


def _shape_to_json(shape: IterationShape) -> list[object]:
    return [[list(chunk) for chunk in shape.chunks], shape.num_decodes, shape.decode_kv_tokens, shape.num_logits]


def _shape_from_json(row: list[object]) -> IterationShape:
    chunks = cast("list[list[int]]", row[0])
    return IterationShape(
        chunks=tuple((chunk, prefix) for chunk, prefix in chunks),
        num_decodes=cast(int, row[1]),
        decode_kv_tokens=cast(int, row[2]),
        num_logits=cast(int, row[3]),
    )
