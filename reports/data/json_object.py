"""A JSON object read with its file and path at hand, so that a wrong value is named where it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import cast


@dataclass(frozen=True, kw_only=True)
class JsonObject:
    """Typed reads from one JSON object; every getter raises ValueError naming file, field, rule and value."""

    file: str
    path: str = ""
    values: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> JsonObject:
        """The object in ``path``. Raises ValueError where the file is no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} in {path.parent}: not valid JSON ({error})") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path.name} in {path.parent}: must hold a JSON object, found {type(values).__name__}")
        return cls(file=path.name, values=cast("dict[str, object]", values))

    def text(self, key: str, default: str | None = None) -> str:
        """The string at ``key``, ``default`` where it is absent or null."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def number(self, key: str) -> float | None:
        """The number at ``key``; None where it is absent, null or not finite."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number or null", value)
        return float(value) if isfinite(value) else None

    def need(self, key: str) -> float:
        """The number at ``key``. Raises ValueError where there is none."""
        value = self.number(key)
        if value is None:
            raise self._wrong(key, "a number", self.values.get(key))
        return value

    def flag(self, key: str) -> bool | None:
        """The boolean at ``key``; None where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true, false or null", value)
        return value

    def child(self, key: str) -> JsonObject:
        """The object at ``key``, empty where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return JsonObject(file=self.file, path=self._at(key), values=value)

    def children(self, key: str) -> list[JsonObject]:
        """The list of objects at ``key``, empty where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, "a list of objects", value)
        return [
            JsonObject(file=self.file, path=f"{self._at(key)}[{index}]", values=item)
            for index, item in enumerate(value)
        ]

    def words(self, key: str) -> tuple[str, ...]:
        """The list of strings at ``key``, empty where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return tuple(value)

    def integers(self, key: str) -> tuple[int | None, ...]:
        """The list of whole numbers or nulls at ``key``, empty where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        whole = isinstance(value, list) and all(
            item is None or (isinstance(item, int) and not isinstance(item, bool)) for item in value
        )
        if not isinstance(value, list) or not whole:
            raise self._wrong(key, "a list of whole numbers or nulls", value)
        return tuple(value)

    def flat(self) -> dict[str, str]:
        """Every value as text for a provenance table; nested keys are joined with a space, lists with commas."""
        rows: dict[str, str] = {}
        for key, value in self.values.items():
            if isinstance(value, dict):
                rows |= {f"{key} {name}": text for name, text in self.child(key).flat().items()}
            elif isinstance(value, list):
                rows[key] = ", ".join(str(item) for item in value)
            elif isinstance(value, bool):
                rows[key] = "yes" if value else "no"
            elif value is not None:
                rows[key] = str(value)
        return rows

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _wrong(self, key: str, rule: str, value: object) -> ValueError:
        return ValueError(f"{self.file}: {self._at(key)} must be {rule}, found {value!r}")
