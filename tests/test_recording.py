"""Every figure of 24 runs and 6 studies is as it was recorded: `python -P tests/support/recording.py` records anew."""

from __future__ import annotations

import pytest
from recording import COMMANDS, answer, differences, recorded_answers


@pytest.mark.parametrize("command", COMMANDS)
def test_answers_as_recorded(command: str) -> None:
    assert list(differences(answer(command), recorded_answers()[command])) == []


def test_nothing_else_is_recorded() -> None:
    assert list(recorded_answers()) == list(COMMANDS)


def test_differences_are_found() -> None:
    recorded = {"a": 1.0, "b": [1, 2], "c": None}
    assert list(differences(recorded, recorded)) == []
    assert list(differences({"a": 1.0 + 1e-8, "b": [1, 3], "d": None}, recorded)) == [
        ".a: 1.00000001, recorded 1.0",
        ".b[1]: 3, recorded 2",
        ".c: only in what was recorded",
        ".d: only in what was found",
    ]
