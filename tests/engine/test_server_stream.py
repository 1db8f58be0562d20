"""When each token of a streaming completion came, by the rule in the module's docstring."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tilebudget.engine.server.error import ServerError
from tilebudget.engine.server.stream import TokenStream


def event(text: str = "x", *, completed: int | None = None, **choice: object) -> bytes:
    body: dict[str, object] = {"choices": [{"index": 0, "text": text, **choice}]}
    if completed is not None:
        body["usage"] = {"completion_tokens": completed}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def final_usage(completed: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": completed}}).encode() + b"\n\n"


def fed(*pieces: tuple[bytes, float]) -> TokenStream:
    stream = TokenStream()
    for data, now_s in pieces:
        stream.feed(data, now_s)
    return stream


def test_one_token_an_event_arrives_with_it() -> None:
    stream = fed((event(), 1.0), (event(), 1.5), (event(), 1.75), (final_usage(3), 1.8), (b"data: [DONE]\n\n", 1.8))
    assert stream.token_times().tolist() == [1.0, 1.5, 1.75]
    assert stream.event_gaps().tolist() == [0.5, 0.25]
    assert (stream.num_tokens, stream.done) == (3, True)


def test_tokens_of_one_event_are_spread_over_the_time_since_the_event_before() -> None:
    stream = fed((event(completed=2), 1.0), (event(completed=6), 3.0), (event(completed=7), 4.0))
    assert stream.token_times().tolist() == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert stream.event_gaps().tolist() == [2.0, 1.0]


def test_live_gaps_are_those_of_the_token_times() -> None:
    stream = TokenStream()
    gaps_s = [
        gap for upto, now_s in ((1, 1.0), (4, 2.5), (5, 2.75)) for gap in stream.feed(event(completed=upto), now_s)
    ]
    np.testing.assert_allclose(gaps_s, np.diff(stream.token_times()))


def test_token_ids_count_where_usage_comes_last() -> None:
    stream = fed((event(token_ids=[5]), 1.0), (event(token_ids=[6, 7]), 2.0), (final_usage(3), 2.0))
    assert stream.token_times().tolist() == [1.0, 1.5, 2.0]


def test_a_total_without_counts_is_dealt_evenly() -> None:
    stream = fed((event(), 1.0), (event(), 2.0), (event(), 4.0), (final_usage(6), 4.0))
    assert stream.token_times().tolist() == [1.0, 1.0, 1.5, 2.0, 3.0, 4.0]


def test_an_event_that_only_ends_the_stream_brings_no_token() -> None:
    stream = fed((event(), 1.0), (event(), 2.0), (event("", finish_reason="length"), 2.5))
    assert stream.token_times().tolist() == [1.0, 2.0]
    assert stream.finish_reason == "length"


def test_a_last_token_without_text_counts_when_the_final_usage_does() -> None:
    stream = fed(
        (event(), 1.0), (event(), 2.0), (event("", finish_reason="length"), 2.5), (final_usage(3), 2.6)
    )  # fmt: skip
    assert stream.token_times().tolist() == [1.0, 2.0, 2.5]
    assert stream.event_gaps().tolist() == [1.0, 0.5]


def test_an_event_without_text_counts_when_the_server_says_so() -> None:
    """vLLM without a tokenizer sends empty text."""
    stream = fed((event("", completed=1), 1.0), (event("", completed=2, finish_reason="length"), 2.0))
    assert stream.token_times().tolist() == [1.0, 2.0]


def test_bytes_may_be_cut_anywhere() -> None:
    data = b": ping\r\n\r\n" + event(completed=1).replace(b"\n", b"\r\n") + event(completed=2) + b"data: [DONE]\n\n"
    stream = TokenStream()
    for place in range(len(data)):
        stream.feed(data[place : place + 1], float(place))
    assert stream.num_tokens == 2
    assert stream.done
    assert len(stream.token_times()) == 2


def test_no_event_no_token() -> None:
    stream = fed((final_usage(0), 1.0))
    assert len(stream.token_times()) == 0
    assert stream.num_tokens == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'data: {"error": {"message": "dead"}}\n', "reports an error in the stream: .*dead"),
        (b"data: {oops\n", "not JSON: {oops"),
        (b"data: 3\n", "reports an error"),
    ],
)
def test_what_is_no_event_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        TokenStream().feed(data, 0.0)
