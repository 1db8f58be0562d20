"""The examples in the docstrings of the API and of the README give what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from types import ModuleType

import pytest
from tilebudget.autotune import (
    NearestMatchWarning,
    Recommendation,
    save_recommendation,
)
from tilebudget.autotune.recommendation import exports, recommendation, schema, store

EXAMPLE = Path(__file__).parent / "data" / "recommendation-1.0.json"
README = Path(__file__).parents[2] / "README.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("module", [exports, recommendation, schema, store], ids=lambda module: module.__name__)
def test_docstrings(module: ModuleType) -> None:
    result = doctest.testmod(module, extraglobs={"example": EXAMPLE}, optionflags=OPTIONS)
    assert result.attempted > 0
    assert result.failed == 0


def test_readme() -> None:
    """The README's session, with the example in the store in place of a study's answer."""
    save_recommendation(Recommendation.load(EXAMPLE))
    found = re.search(r"```pycon\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    session = doctest.DocTestParser().get_doctest(found[1], {}, "README", str(README), 0)
    with pytest.warns(NearestMatchWarning):
        assert doctest.DocTestRunner(optionflags=OPTIONS).run(session).failed == 0
