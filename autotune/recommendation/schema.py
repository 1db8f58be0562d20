"""The schema of ``recommendation.json``: its version, reading older files, and the published JSON Schema.

The version is semantic: a patch changes words, a minor version adds fields that may be absent, a major version changes
or removes a field. This release reads every version of its own major number, and older ones through ``MIGRATIONS``.
The dataclasses of ``recommendation.py`` are the schema; what is here derives from their types.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib import resources
from typing import TypeVar, Union, cast, get_args, get_origin, get_type_hints

SCHEMA_VERSION = "1.6.0"
SCHEMA_FILE = "recommendation.schema.json"

Json = dict[str, object]
T = TypeVar("T")

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _from_1_0(data: Json) -> Json:
    """1.0 wrote its version with two numbers; all else stayed."""
    return {**data, "schema_version": "1.1.0"}


def _from_1_1(data: Json) -> Json:
    """1.2.0 adds objective, confidence, sensitivity, and limits on TTFT and E2E, all of which may be absent."""
    return {**data, "schema_version": "1.2.0"}


def _from_1_2(data: Json) -> Json:
    """1.3.0 adds max_num_seqs and policy of alternatives, which may be absent."""
    return {**data, "schema_version": "1.3.0"}


def _from_1_3(data: Json) -> Json:
    """1.4.0 adds bubble_metric, and bubble_fraction of alternatives, which may be absent."""
    return {**data, "schema_version": "1.4.0"}


def _from_1_4(data: Json) -> Json:
    """1.5.0 adds TTFT and capacity, of the budget and of its alternatives, the decision, and kv_blocks_fixed and
    model_name of engine, which may be absent."""
    return {**data, "schema_version": "1.5.0"}


def _from_1_5(data: Json) -> Json:
    """1.6.0 adds best_by_load, which may be absent."""
    return {**data, "schema_version": "1.6.0"}


#: What turns a file of one version into one of a later version; applied until none fits.
MIGRATIONS: Mapping[str, Callable[[Json], Json]] = {
    "1.0": _from_1_0,
    "1.1.0": _from_1_1,
    "1.2.0": _from_1_2,
    "1.3.0": _from_1_3,
    "1.4.0": _from_1_4,
    "1.5.0": _from_1_5,
}


def migrate(data: Mapping[str, object]) -> Json:
    """``data`` in the words of this release. Raises ValueError where its version cannot be read.

    A later minor version is read too: what it adds is left out.

    >>> migrate({"schema_version": "1.0"})
    {'schema_version': '1.6.0'}
    >>> migrate({"schema_version": "2.0.0"})
    Traceback (most recent call last):
    ValueError: schema_version='2.0.0': this release reads schema 1, up to 1.6.0 in full
    """
    found = dict(data)
    while (step := MIGRATIONS.get(str(found.get("schema_version")))) is not None:
        found = step(found)
    version = str(found.get("schema_version"))
    major = SCHEMA_VERSION.split(".")[0]
    if version.split(".")[0] != major:
        raise ValueError(
            f"schema_version={version!r}: this release reads schema {major}, up to {SCHEMA_VERSION} in full"
        )
    return found


def decode(kind: type[T], data: Mapping[str, object], where: str = "") -> T:
    """An instance of the dataclass ``kind`` from a JSON object; unknown keys are left out.

    Raises ValueError that names the fields that are missing, or the one whose value has another type.
    """
    hints = get_type_hints(kind)
    owned = fields(kind)  # type: ignore[arg-type]
    missing = [where + field.name for field in owned if field.name not in data and not _optional(field)]
    if missing:
        raise ValueError(f"not a recommendation: {', '.join(missing)} missing")
    values = {
        field.name: _decode(hints[field.name], data[field.name], where + field.name)
        for field in owned
        if field.name in data
    }
    return kind(**values)


def recommendation_schema(kind: type) -> Json:
    """The JSON Schema (draft 2020-12) of the dataclass ``kind`` with the lines for each server that its file adds."""
    schema = _schema(kind)
    properties = cast(Json, schema["properties"])
    for name in ("launch", "flags"):
        properties[name] = {"type": "object", "additionalProperties": {"type": "string"}}
    properties["schema_version"] = {
        "type": "string",
        "pattern": rf"^{SCHEMA_VERSION.split('.')[0]}\.[0-9]+(\.[0-9]+)?$",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tilebudget recommendation",
        "description": f"Schema {SCHEMA_VERSION}. Units end the names; expected figures are medians of repeats.",
        **schema,
    }


def published_schema() -> str:
    """The text of the JSON Schema that is installed with the package."""
    return resources.files(__package__).joinpath(SCHEMA_FILE).read_text(encoding="utf-8")


def _optional(field: Field[object]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _decode(hint: object, value: object, where: str) -> object:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _decode(inner[0], value, where)
    if hint is object:
        return value
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "an object")
        return {str(key): _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Sequence:
        if not isinstance(value, list | tuple):
            raise _wrong(where, value, "a list")
        return [_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise _wrong(where, value, "an object")
        return decode(hint, value, f"{where}.")
    return _scalar(hint, value, where)


def _scalar(hint: object, value: object, where: str) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and (whole or isinstance(value, float)):
        return float(cast(float, value))
    if (hint is int and whole) or (hint in (str, bool) and type(value) is hint):
        return value
    raise _wrong(where, value, _JSON_TYPES[cast(type, hint)])


def _wrong(where: str, value: object, rule: str) -> ValueError:
    return ValueError(f"{where}={value!r}: must be {rule}")


def _schema(hint: object) -> Json:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument) for argument in arguments]}
    if hint is object:
        return {}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    if origin is Sequence:
        return {"type": "array", "items": _schema(arguments[0])}
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return {
            "type": "object",
            "properties": {field.name: _schema(hints[field.name]) for field in fields(hint)},
            "required": [field.name for field in fields(hint) if not _optional(field)],
        }
    return {"type": _JSON_TYPES[cast(type, hint)]}
