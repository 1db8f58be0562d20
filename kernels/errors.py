"""The one tree of operational failures. It lives in the lowest layer so that every package can raise from it.

Bad input is a ``ValueError`` instead: it names the field, the value and the rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TileBudgetError(Exception):
    """Root of every operational failure: the input was fine, the work could not be done."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """What an error's message ends with where ``word`` is a near miss of one of ``choices``; empty where it is not.

    >>> did_you_mean("Sarathy", ["orca", "sarathi"])
    '; did you mean sarathi?'
    """
    by_lower = {choice.lower(): choice for choice in choices}
    nearest = get_close_matches(word.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[nearest[0]]}?" if nearest else ""
