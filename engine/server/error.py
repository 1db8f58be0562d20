"""What is raised when a server under measurement does not do its part."""

from __future__ import annotations

from ...kernels.errors import TileBudgetError


class ServerError(TileBudgetError):
    """A server did not start, died, stalled, answered with an error or gave other tokens than asked."""


class ConnectionLostError(ServerError):
    """A stream broke off; the server may have died."""
