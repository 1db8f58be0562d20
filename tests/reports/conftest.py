"""The report that several tests look at, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_study import make_folder
from tilebudget.reports import build_report


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a feasible study with failed and stopped trials, repeats and policies."""
    return build_report(make_folder().write(tmp_path_factory.mktemp("study")))
