"""The local store of recommendations, and loading one by name, folder or file."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from ..kernels.errors import TileBudgetError
from .recommendation import Recommendation, model_key


class RecommendationNotFoundError(TileBudgetError):
    """The store has no recommendation for what was asked."""


def store_dir() -> Path:
    """``$TILEBUDGET_HOME``, or ``tilebudget`` below the XDG data folder."""
    home = os.environ.get("TILEBUDGET_HOME")
    if home:
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "tilebudget"


def save_recommendation(recommendation: Recommendation) -> Path:
    """Put ``recommendation`` into the store, in place of an older one with the same key; returns its file."""
    folder = store_dir()
    folder.mkdir(parents=True, exist_ok=True)
    key = asdict(recommendation.key)
    name = "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)) for value in key.values())
    file = folder / f"{name}.json"
    temporary = folder / f".{name}-{os.getpid()}"
    temporary.write_text(json.dumps(recommendation.to_json(), indent=2) + "\n")
    temporary.replace(file)
    return file


def load_recommendation(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
) -> Recommendation:
    """Load a recommendation from a run folder, a JSON file, or the local store by model name.

    What is given besides is checked: a path with another key raises RecommendationMismatchError, a store without
    a match RecommendationNotFoundError (listing what it has), several matches ValueError naming the keys that tell
    them apart. A broken file raises ValueError.
    """
    wanted = {
        "device": device,
        "dtype": dtype,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
    }
    path = Path(model)
    if (path / "recommendation.json").is_file() or path.suffix == ".json":
        recommendation = Recommendation.load(path)
        recommendation.assert_matches(
            device=device, dtype=dtype, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel
        )
        return recommendation
    stored = [Recommendation.load(file) for file in sorted(store_dir().glob("*.json"))]
    matches = [
        entry
        for entry in stored
        if entry.key.model == model_key(model)
        and all(value is None or getattr(entry.key, name) == value for name, value in wanted.items())
    ]
    if not matches:
        asked = ", ".join(f"{name}={value}" for name, value in {"model": model, **wanted}.items() if value is not None)
        have = "; ".join(str(entry.key) for entry in stored) or "nothing"
        raise RecommendationNotFoundError(f"no recommendation for {asked}; the store has: {have}")
    if len(matches) > 1:
        keys = "; ".join(str(entry.key) for entry in matches)
        raise ValueError(f"model={str(model)!r}: several recommendations fit, name the rest of the key: {keys}")
    return matches[0]
