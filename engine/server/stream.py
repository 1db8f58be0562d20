"""One streaming completion as its bytes come in: when each token arrived.

An event is one ``data:`` line of the stream with generated text. It counts the tokens that the server says it brings:
the growth of ``usage.completion_tokens`` where usage comes with every event, else the length of its ``token_ids``, else
one; an event that has no text and only says why the stream ends brings none, unless the final usage counts one more
(a last token may have no text). Where events were not counted by the server and its final usage disagrees, that total
is dealt evenly over them.

The rule for several tokens in one event: they are spread evenly over the time since the event before, the last of them
at the event's own time. All tokens of a first event arrive with it. So with one token an event, TBT is exactly the gap
between events; with n of them it is a gap of one n-th, n times, and no sum is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..record import FloatArray
from .error import ServerError


class TokenStream:
    """What one completion has brought so far.

    ``event_s`` and ``event_tokens`` have an entry an event that brought tokens; ``output_tokens`` is the server's own
    count, None where it gave none; ``finish_reason`` its word on why it ended.
    """

    __slots__ = (
        "_closing_s",
        "_pending",
        "_uncounted",
        "done",
        "event_s",
        "event_tokens",
        "finish_reason",
        "output_tokens",
    )

    def __init__(self) -> None:
        self.event_s: list[float] = []
        self.event_tokens: list[int] = []
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        self._pending = b""
        self._uncounted = False  # whether any event came without a count
        self._closing_s: float | None = None  # when an event came that only says why the stream ends

    def feed(self, data: bytes, now_s: float) -> list[float]:
        """Take in bytes that were read at ``now_s``; returns the gaps between tokens (seconds) that they end.

        Raises ServerError when the server reports an error in the stream, or sends what is no event.
        """
        *lines, self._pending = (self._pending + data).split(b"\n")
        gaps_s: list[float] = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = True
                continue
            num_tokens = self._read(payload, now_s)
            if num_tokens > 0:
                gaps_s += self._add(now_s, num_tokens)
            elif self._closing_s is not None and self.output_tokens == sum(self.event_tokens) + 1:
                gaps_s += self._add(self._closing_s, 1)
        return gaps_s

    @property
    def num_tokens(self) -> int:
        """Tokens that came: the server's count where it gave one."""
        return sum(self.event_tokens) if self.output_tokens is None else self.output_tokens

    def token_times(self) -> FloatArray:
        """When each token arrived, by the rule above: ascending, one entry a token."""
        if not self.event_s:
            return np.empty(0)
        total = self.num_tokens
        upto = np.cumsum(self.event_tokens)
        if self._uncounted and total != upto[-1]:
            upto = np.round(np.arange(1, len(upto) + 1) * (total / len(upto)))
        return np.interp(np.arange(1, total + 1), upto, self.event_s)

    def event_gaps(self) -> FloatArray:
        """Seconds between events, however many tokens they bring: what ``vllm bench serve`` calls ITL."""
        return np.diff(np.array(self.event_s))

    def _add(self, now_s: float, num_tokens: int) -> list[float]:
        gaps_s = [(now_s - self.event_s[-1]) / num_tokens] * num_tokens if self.event_s else []
        self.event_s.append(now_s)
        self.event_tokens.append(num_tokens)
        return gaps_s

    def _read(self, payload: bytes, now_s: float) -> int:
        """Tokens that one event brings."""
        try:
            event = json.loads(payload)
        except ValueError:
            raise ServerError(f"the stream has an event that is not JSON: {_excerpt(payload)}") from None
        if not isinstance(event, dict) or "error" in event:
            raise ServerError(f"the server reports an error in the stream: {_excerpt(payload)}")
        usage = event.get("usage")
        counted: int | None = usage.get("completion_tokens") if isinstance(usage, dict) else None
        before = self.output_tokens or 0
        if counted is not None:
            self.output_tokens = counted
        choices = event.get("choices")
        if not choices:
            return 0
        choice: Mapping[str, Any] = choices[0]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if counted is not None:
            return counted - before
        if isinstance(choice.get("token_ids"), list):
            return len(choice["token_ids"])
        if choice.get("finish_reason") and not choice.get("text"):
            self._closing_s = now_s
            return 0
        self._uncounted = True
        return 1


def _excerpt(payload: bytes) -> str:
    text = payload.decode("utf-8", "replace")
    return text if len(text) <= 300 else f"{text[:300]}..."
