"""Older files are read, newer ones as far as they are known, and the published schema is that of the classes."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from tilebudget.autotune import Recommendation
from tilebudget.autotune.recommendation.schema import SCHEMA_VERSION, published_schema, recommendation_schema

VERSION_1_0 = Path(__file__).parent / "data" / "recommendation-1.0.json"


def test_a_file_of_schema_1_0_is_read_and_written_in_the_schema_of_today(tmp_path: Path) -> None:
    old = json.loads(VERSION_1_0.read_text())
    assert old["schema_version"] == "1.0"
    loaded = Recommendation.load(VERSION_1_0)
    assert loaded.schema_version == SCHEMA_VERSION
    written = json.loads(json.dumps(loaded.to_json()))
    added = {"ttft_ms", "ttft_quantile", "e2e_ms", "e2e_quantile"}
    assert {name: value for name, value in written["slo"].items() if name not in added} == old["slo"]
    newer = {"ttft_p50_s", "ttft_p99_s", "capacity_rps", "capacity_at_most_rps"}
    for entry, was in zip(written["alternatives"], old["alternatives"], strict=True):
        assert {name: value for name, value in entry.items() if name not in newer} == {
            **was,
            **dict.fromkeys(entry.keys() - newer - was.keys()),
        }
    assert written["engine"] == old["engine"] | {"kv_blocks_fixed": False, "model_name": None}
    # The lines are made anew: since 1.5 with the model's hub id, which a server can load, and what the study assumed.
    assert written["launch"]["vllm"].startswith("vllm serve meta-llama/Llama-3.1-8B-Instruct ")
    same = old.keys() - {"schema_version", "slo", "alternatives", "engine", "launch", "flags"}
    assert {name: written[name] for name in same} == {name: old[name] for name in same}
    (tmp_path / "recommendation.json").write_text(json.dumps(written))
    assert Recommendation.load(tmp_path) == loaded


def test_fields_of_a_later_minor_version_are_left_out() -> None:
    later = json.loads(VERSION_1_0.read_text()) | {"schema_version": "1.99.0", "mood": "sunny"}
    later["key"]["colour"] = "blue"
    loaded = Recommendation.from_json(later)
    assert loaded.key == Recommendation.load(VERSION_1_0).key
    assert "mood" not in loaded.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": "2.0.0"}, "schema_version='2.0.0': this release reads schema 1"),
        ({"schema_version": None}, "schema_version='None'"),
        ({"token_budget": "512"}, "token_budget='512': must be integer"),
        ({"token_budget": True}, "token_budget=True: must be integer"),
        ({"key": {"model": "m", "device": "d"}}, "key.dtype missing"),
        ({"key": []}, r"key=\[\]: must be an object"),
        (
            {"expected": {"tbt_p99_ms": {"value": "fast", "low": 1, "high": 2, "repeats": 3}}},
            "expected.tbt_p99_ms.value",
        ),
        ({"alternatives": [1]}, r"alternatives\[0\]=1: must be an object"),
        ({"status": "maybe"}, "status='maybe': must be one of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recommendation.from_json({**json.loads(VERSION_1_0.read_text()), **change})


def test_the_published_schema_is_that_of_the_classes() -> None:
    """After a change of the classes: write ``recommendation_schema(Recommendation)`` to the file again."""
    assert json.loads(published_schema()) == recommendation_schema(Recommendation)
    assert files("tilebudget.autotune.recommendation").joinpath("recommendation.schema.json").is_file()


def test_a_recommendation_validates_against_the_published_schema() -> None:
    schema = json.loads(published_schema())
    written = json.loads(json.dumps(Recommendation.load(VERSION_1_0).to_json()))
    assert problems(schema, written) == []
    assert problems(schema, {**written, "seed": "zero"}) == ["seed: not integer"]
    assert problems(schema, {name: written[name] for name in written if name != "key"}) == ["key missing"]


def problems(schema: dict[str, object], value: object, where: str = "") -> list[str]:
    """What is wrong with ``value`` by the keywords of JSON Schema that the file uses, as its specification has them."""
    kinds: dict[str, type | tuple[type, ...]] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    choices = schema.get("anyOf")
    if isinstance(choices, list):
        tried = [problems(choice, value, where) for choice in choices]
        return [] if [] in tried else tried[0]
    kind = schema.get("type")
    if isinstance(kind, str) and not (
        isinstance(value, kinds[kind]) and (kind == "boolean") == isinstance(value, bool)
    ):
        return [f"{where}: not {kind}"]
    found: list[str] = []
    if isinstance(value, dict):
        required, properties = schema.get("required", []), schema.get("properties", {})
        assert isinstance(required, list)
        assert isinstance(properties, dict)
        found += [f"{name} missing" for name in required if name not in value]
        rest = schema.get("additionalProperties", {})
        for name, item in value.items():
            found += problems(properties.get(name, rest), item, f"{where}.{name}".lstrip("."))
    if isinstance(value, list):
        items = schema.get("items", {})
        assert isinstance(items, dict)
        found += [problem for item in value for problem in problems(items, item, f"{where}[]")]
    return found
