"""The local store of recommendations, and loading one by name, folder or file."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from math import log2
from pathlib import Path

from ...kernels.errors import TileBudgetError
from ..words import device_word, dtype_word
from .recommendation import Key, Recommendation, model_key


class RecommendationNotFoundError(TileBudgetError):
    """The store has no recommendation for what was asked."""


class NearestMatchWarning(UserWarning):
    """A recommendation that was tuned for something near to what was asked, not for it, was loaded."""


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
    name = entry_name(recommendation.key)
    file = folder / f"{name}.json"
    temporary = folder / f".{name}-{os.getpid()}"
    temporary.write_text(json.dumps(recommendation.to_json(), indent=2) + "\n")
    temporary.replace(file)
    return file


def entry_name(key: Key) -> str:
    """What the store calls a recommendation.

    >>> entry_name(Key(model="llama-3.1-8b", device="h200_sxm", dtype="fp8"))
    'llama-3.1-8b--h200_sxm--fp8--1--1'
    """
    return "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)) for value in asdict(key).values())


def load_recommendation(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
    allow_nearest: bool = False,
) -> Recommendation:
    """Load a recommendation from a run folder, a JSON file, or the local store, by model name (a preset's hub id
    is its name) or by entry name.

    What is given besides is checked: a path or an entry with another key raises RecommendationMismatchError, a store
    without a match RecommendationNotFoundError (listing what it has), several matches ValueError naming the keys that
    tell them apart. A broken file raises ValueError. With ``allow_nearest`` the nearest entry of the same model takes
    the place of one that is missing, and a NearestMatchWarning says in what it differs: a recommendation for another
    GPU is a starting point, not an answer.
    """
    if not str(model):
        raise ValueError(f"model={str(model)!r}: must be a run folder, a JSON file, or a name in the store")
    device = None if device is None else device_word(device)
    dtype = None if dtype is None else dtype_word(dtype)
    wanted = {
        "device": device,
        "dtype": dtype,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
    }
    path, entry = Path(model), store_dir() / f"{model}.json"
    for file in (path, entry):
        if (file / "recommendation.json").is_file() or (file.suffix == ".json" and (file is path or file.is_file())):
            recommendation = Recommendation.load(file)
            recommendation.assert_matches(
                device=device, dtype=dtype, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel
            )
            return recommendation
    stored = [Recommendation.load(file) for file in sorted(store_dir().glob("*.json"))]
    same_model = [entry for entry in stored if model_key(entry.key.model) == model_key(model)]
    given = {name: value for name, value in wanted.items() if value is not None}
    matches = [entry for entry in same_model if not _differing(entry.key, given)]
    asked = ", ".join(f"{name}={value}" for name, value in {"model": model, **given}.items())
    if not matches and allow_nearest and same_model:
        nearest = min(same_model, key=lambda entry: _distance(entry.key, given))
        differing = ", ".join(_differing(nearest.key, given))
        message = f"no recommendation for {asked}; the nearest was tuned for {nearest.key} ({differing} differ)"
        warnings.warn(message, NearestMatchWarning, stacklevel=2)
        return nearest
    if not matches:
        have = "; ".join(str(entry.key) for entry in stored) or "nothing"
        if (path / "study.journal").is_file():
            asked += ", a run folder without recommendation.json, whose study has not finished"
        elif path.is_dir():
            asked += ", a folder without recommendation.json"
        elif path.exists():
            asked += ", a file that does not end in .json"
        raise RecommendationNotFoundError(f"no recommendation for {asked}; the store has: {have}")
    if len(matches) > 1:
        keys = "; ".join(str(entry.key) for entry in matches)
        raise ValueError(f"model={str(model)!r}: several recommendations fit, name the rest of the key: {keys}")
    return matches[0]


def _differing(key: Key, given: Mapping[str, str | int]) -> list[str]:
    return [name for name, value in given.items() if getattr(key, name) != value]


def _distance(key: Key, given: Mapping[str, str | int]) -> tuple[float, ...]:
    """How far a key is from what was asked, worst first: another device, another dtype, then the parallel sizes by the
    factor between them, for these change the tokens per GPU the least."""
    factors = [
        abs(log2(getattr(key, name) / given[name]))
        for name in ("tensor_parallel", "pipeline_parallel")
        if name in given
    ]
    return (
        float("device" in given and key.device != given["device"]),
        float("dtype" in given and key.dtype != given["dtype"]),
        sum(factors),
    )
