"""Shared fixtures. Refuses a repository root on sys.path: there our kernels/ would shadow transformers' own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# One thread for each of the two workers; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU the Triton kernels run in its interpreter. What triton.jit makes is settled when triton is first
# imported, so this comes before any test module, in every pytest-xdist worker alike.
if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

if any(Path(entry or os.getcwd()).resolve() == ROOT for entry in sys.path):
    raise pytest.UsageError(
        f"{ROOT} is on sys.path, so `import kernels` would find our folder; run `python -P -m pytest` or `make test`"
    )


def shared_file(name: str) -> Path:
    """A file of ../shared (data or cases); skips the test where the folder is absent."""
    path = ROOT.parent / "shared" / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not here")
    return path


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Callable that resolves a path below ../shared or skips."""
    return shared_file
