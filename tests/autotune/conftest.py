"""What the tests of autotune share: a store of their own, and a small workload."""

from __future__ import annotations

from pathlib import Path

import pytest
from tilebudget.engine import Request, Workload


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a store of its own."""
    folder = tmp_path / "store"
    monkeypatch.setenv("TILEBUDGET_HOME", str(folder))
    return folder


@pytest.fixture
def workload() -> Workload:
    """24 requests, all at once: prompts of 300 to 990 tokens, 12 output tokens each."""
    return Workload(
        name="toy",
        requests=tuple(Request(arrival_s=0.0, prompt_tokens=300 + 30 * index, output_tokens=12) for index in range(24)),
    )
