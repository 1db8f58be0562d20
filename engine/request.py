"""Requests, the workload that holds them, and the state of one request inside the engine."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request of a workload: when it arrives, how long its prompt is, how many tokens it generates.

    The keys and values of the first ``cached_tokens`` of the prompt come with it, computed elsewhere (modelled devices
    only). Raises ValueError when a length is below 1, the arrival is negative, no prompt token is left to compute, or
    the given token ids disagree with ``prompt_tokens``.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prompt_token_ids: tuple[int, ...] | None = None
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.arrival_s >= 0.0 or self.arrival_s == float("inf"):
            raise ValueError(f"arrival_s={self.arrival_s}: must be a finite number of seconds, 0 or more")
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens={self.prompt_tokens}: must be at least 1")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens={self.output_tokens}: must be at least 1")
        if not 0 <= self.cached_tokens < self.prompt_tokens:
            raise ValueError(
                f"cached_tokens={self.cached_tokens}: must be 0 or more, and below prompt_tokens={self.prompt_tokens}"
            )
        if self.prompt_token_ids is not None and len(self.prompt_token_ids) != self.prompt_tokens:
            raise ValueError(
                f"prompt_token_ids has {len(self.prompt_token_ids)} ids: prompt_tokens says {self.prompt_tokens}"
            )

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in order of arrival, and what was left out while they were loaded.

    ``num_dropped`` rows could not be served (no prompt or no output tokens, or longer than allowed);
    ``num_clipped`` were shortened. ``saturated`` says that every request is there at time 0, so that
    scheduling delay measures the queue and not the system. ``source`` says where the requests come from;
    ``has_arrivals`` is False where that has no clock (every arrival is 0 until ``assign_arrivals`` gives one).
    """

    name: str
    requests: tuple[Request, ...]
    source: str = ""
    num_dropped: int = 0
    num_clipped: int = 0
    notes: tuple[str, ...] = ()
    has_arrivals: bool = True
    saturated: bool = field(init=False)

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError(f"workload {self.name!r} has no requests: at least one is needed")
        arrivals = [request.arrival_s for request in self.requests]
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise ValueError(f"workload {self.name!r}: requests must be in order of arrival_s")
        object.__setattr__(self, "saturated", arrivals[-1] == 0.0)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)


class Sequence:
    """The engine's state of one request.

    ``num_tokens`` counts the known tokens (prompt and generated), of ``total_tokens`` at the end; ``num_computed``
    those whose keys and values are in the cache. A prefill (the first, or the recomputation after a preemption) runs
    until ``num_computed == num_tokens``; that iteration yields the next token. ``slot`` is the row of the block table
    that it holds while it runs, -1 otherwise; ``kv_capacity`` the tokens its blocks can hold. ``is_decode`` says that
    its prefill has ended, so that it gets a token in each iteration. ``note`` is what the policy remembers of it.
    """

    __slots__ = (
        "arrival_s",
        "first_scheduled_s",
        "index",
        "is_decode",
        "kv_capacity",
        "last_token_s",
        "note",
        "num_computed",
        "num_preemptions",
        "num_tokens",
        "output_tokens",
        "prompt_tokens",
        "request",
        "slot",
        "token_ids",
        "total_tokens",
    )

    def __init__(self, index: int, request: Request, token_ids: npt.NDArray[np.int64] | None = None) -> None:
        self.index = index
        self.request = request
        self.arrival_s = request.arrival_s
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.total_tokens = request.total_tokens
        self.num_tokens = request.prompt_tokens
        self.num_computed = request.cached_tokens
        self.num_preemptions = 0
        self.slot = -1
        self.kv_capacity = 0
        self.first_scheduled_s = float("nan")
        self.last_token_s = float("nan")
        self.token_ids = token_ids
        self.is_decode = False
        self.note: str | None = None

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose keys and values are not in the cache: 1 for a decode."""
        return self.num_tokens - self.num_computed

    @property
    def num_generated(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - self.prompt_tokens

    @property
    def finished(self) -> bool:
        """True once every output token is generated."""
        return self.num_tokens >= self.total_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated token ids; empty on a modelled device, which has no tokens."""
        if self.token_ids is None:
            return []
        return [int(t) for t in self.token_ids[self.prompt_tokens : self.prompt_tokens + self.num_generated]]


@dataclass(slots=True)
class Batch:
    """What one iteration runs: decode rows first (one token each), then prompt chunks, flattened.

    Row ``i`` of ``chunks`` computes ``chunk_tokens[i]`` tokens of that sequence from its ``num_computed``
    on. The state of the sequences is that from before the iteration.
    """

    decodes: SequenceOf[Sequence]
    chunks: SequenceOf[Sequence] = ()
    chunk_tokens: SequenceOf[int] = ()
    num_preempted: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens over all chunks."""
        return sum(self.chunk_tokens)

    @property
    def num_tokens(self) -> int:
        """Rows of the token-wise layers: decodes and chunk tokens."""
        return len(self.decodes) + sum(self.chunk_tokens)

    @property
    def num_requests(self) -> int:
        """Requests that this iteration serves."""
        return len(self.decodes) + len(self.chunks)
