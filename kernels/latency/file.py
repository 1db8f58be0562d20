"""Latency tables as versioned JSON files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

import numpy as np

from ..errors import TileBudgetError
from ..model_shape import ModelShape
from .step_curve import EdgePrior, StepCurve
from .surface import Surface
from .table import LatencyTable

SCHEMA = "tilebudget.latency_table/1"

Json = dict[str, object]


class LatencyFileError(TileBudgetError):
    """A file is no latency table, or of a schema that this version does not read."""


def save_table(table: LatencyTable, path: str | Path) -> None:
    """Write a table as JSON, at once or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(table_to_json(table), indent=1), encoding="utf-8")
    os.replace(part, path)


def load_table(path: str | Path) -> LatencyTable:
    """The table of a file written by `save_table`. LatencyFileError when it is none, or is damaged."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LatencyFileError(f"latency table {path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise LatencyFileError(f"latency table {path} has schema {found!r}: this version reads {SCHEMA}")
    try:
        return table_from_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise LatencyFileError(f"latency table {path} is damaged: {error!r}") from error


def table_to_json(table: LatencyTable) -> Json:
    """The table as a JSON document."""
    return {
        "schema": SCHEMA,
        "device": table.device,
        "model": asdict(table.model),
        "dtype": table.dtype,
        "tensor_parallel": table.tensor_parallel,
        "origin": dict(table.origin),
        "notes": list(table.notes),
        "overhead": {
            "latency_ms": table.overhead_ms,
            "std_ms": table.overhead_std_ms,
            "source": table.overhead_source,
            "request_ms": table.request_overhead_ms,
        },
        "layer_ops": [_curve_to_json(curve) for curve in table.layer_ops],
        "once_ops": [_curve_to_json(curve) for curve in table.once_ops],
        "logits": _curve_to_json(table.logits),
        "prefill": _surface_to_json(table.prefill),
        "decode": _surface_to_json(table.decode),
    }


def table_from_json(document: Mapping[str, object]) -> LatencyTable:
    """The table of a JSON document; KeyError, TypeError or ValueError where it does not describe one."""
    overhead = cast(Json, document["overhead"])
    return LatencyTable(
        device=str(document["device"]),
        model=ModelShape(**cast("dict[str, int]", document["model"])),  # type: ignore[arg-type]
        dtype=str(document["dtype"]),
        tensor_parallel=cast(int, document["tensor_parallel"]),
        origin=cast("dict[str, str]", document["origin"]),
        notes=tuple(cast("list[str]", document["notes"])),
        overhead_ms=cast(float, overhead["latency_ms"]),
        overhead_std_ms=cast(float, overhead["std_ms"]),
        overhead_source=str(overhead["source"]),
        request_overhead_ms=cast(float, overhead["request_ms"]),
        layer_ops=tuple(_curve_from_json(row) for row in cast("list[Json]", document["layer_ops"])),
        once_ops=tuple(_curve_from_json(row) for row in cast("list[Json]", document["once_ops"])),
        logits=_curve_from_json(cast(Json, document["logits"])),
        prefill=_surface_from_json(cast(Json, document["prefill"])),
        decode=_surface_from_json(cast(Json, document["decode"])),
    )


def _curve_to_json(curve: StepCurve) -> Json:
    return {
        "op": curve.op,
        "kind": curve.kind,
        "note": curve.note,
        "tokens": curve.tokens.tolist(),
        "latency_ms": curve.latency_ms.tolist(),
        "std_ms": curve.std_ms.tolist(),
        "sources": curve.sources.tolist(),
        "prior": {
            "alignment": curve.prior.alignment,
            "hint_tokens": curve.prior.hint_tokens.tolist(),
            "hint_odds": curve.prior.hint_odds.tolist(),
        },
    }


def _curve_from_json(row: Json) -> StepCurve:
    prior = cast(Json, row["prior"])
    return StepCurve(
        op=str(row["op"]),
        kind=str(row["kind"]),
        note=str(row["note"]),
        tokens=np.array(row["tokens"], dtype=np.int64),
        latency_ms=np.array(row["latency_ms"], dtype=np.float64),
        std_ms=np.array(row["std_ms"], dtype=np.float64),
        sources=np.array(row["sources"], dtype=np.int8),
        prior=EdgePrior(
            alignment=cast(float, prior["alignment"]),
            hint_tokens=np.array(prior["hint_tokens"], dtype=np.int64),
            hint_odds=np.array(prior["hint_odds"], dtype=np.float64),
        ),
    )


def _surface_to_json(surface: Surface) -> Json:
    return {
        "note": surface.note,
        "rows": surface.rows.tolist(),
        "columns": surface.columns.tolist(),
        "latency_ms": surface.latency_ms.tolist(),
        "std_ms": surface.std_ms.tolist(),
        "sources": surface.sources.tolist(),
    }


def _surface_from_json(row: Json) -> Surface:
    return Surface(
        note=str(row["note"]),
        rows=np.array(row["rows"], dtype=np.int64),
        columns=np.array(row["columns"], dtype=np.int64),
        latency_ms=np.array(row["latency_ms"], dtype=np.float64),
        std_ms=np.array(row["std_ms"], dtype=np.float64),
        sources=np.array(row["sources"], dtype=np.int8),
    )
