"""The one tree of operational failures. It lives in the lowest layer so that every package can raise from it.

Bad input is a ``ValueError`` instead: it names the field, the value and the rule.
"""

from __future__ import annotations


class TileBudgetError(Exception):
    """Root of every operational failure: the input was fine, the work could not be done."""
