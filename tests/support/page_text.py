"""Reads a page of the reports: what a reader sees, and the data of its figures."""

from __future__ import annotations

import base64
import json
import re
from html import unescape

import numpy as np

Figure = dict[str, list[dict[str, object]]]

#: The names of a report's figures.
ALL_FIGURES = {
    "budgets",
    "tails",
    "throughput",
    "roofline",
    "free_prefill",
    "staircase",
    "timeline",
    "policy_tails",
    "chunking",
    "pipeline",
    "stages",
    "predictions",
    "history",
    "importance",
}


def words(page: str) -> str:
    """What a reader sees: no markup, no plotly.js, no figure data."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def figures(page: str) -> dict[str, Figure]:
    """The figures embedded in the page, by name."""
    found = re.findall(r'<script type="application/json" id="figure-(\w+)">(.*?)</script>', page, flags=re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def numbers(values: object) -> list[float]:
    """A coordinate of a plotly trace as numbers; plotly writes arrays in base64."""
    if isinstance(values, dict):
        stored = np.frombuffer(base64.b64decode(values["bdata"]), dtype=np.dtype(values["dtype"]))
        return [float(value) for value in stored]
    return [float("nan") if value is None else float(value) for value in values] if isinstance(values, list) else []
