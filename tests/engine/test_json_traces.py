"""JSON traces: Mooncake lines, ShareGPT conversations and prompt files, with every fault named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tilebudget.engine import Workload, load_prompts, load_trace

MOONCAKE = (
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3052, "input_length": 7319, "output_length": 490, "hash_ids": [0, 14]}\n'
)
TWO_NUMBERS = MOONCAKE + (
    '{"timestamp": 3100, "input_length": 2748, "output_length": 274 61, "hash_ids": [0, 28]}\n'
    '{"timestamp": 6000, "input_length": 120, "output_length": 12, "hash_ids": [29]}\n'
)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Callable: text to the path of a file that holds it."""

    def make(text: str) -> Path:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(text.encode())
        return path

    return make


def rows(workload: Workload) -> list[tuple[float, int, int]]:
    return [(request.arrival_s, request.prompt_tokens, request.output_tokens) for request in workload.requests]


def test_case_1_two_numbers_in_one_field(write: Write) -> None:
    path = write(TWO_NUMBERS)
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 3: output_length='274 61': must be one JSON value")):
        load_trace(path)


def test_case_1_on_the_file(shared: Callable[[str], Path]) -> None:
    path = shared("cases/mooncake_two_numbers.jsonl")
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 3: output_length='274 61'")):
        load_trace(path)


def test_mooncake_counts_milliseconds(write: Write) -> None:
    workload = load_trace(write(MOONCAKE))
    assert rows(workload) == [(0.0, 6758, 500), (3.052, 7319, 490)]
    assert workload.source == "trace.jsonl (mooncake)"


def test_the_real_mooncake_trace(shared: Callable[[str], Path]) -> None:
    workload = load_trace(shared("data/mooncake_conversation_1000.jsonl"))
    assert (len(workload.requests), workload.num_prompt_tokens, workload.num_output_tokens) == (1000, 13732944, 349357)
    assert workload.requests[-1].arrival_s == 330.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "input_length": 5}', "output_length is missing; found timestamp, input_length"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 1}', "input_length=-5: must be a whole number"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 1}', "input_length=5.5: must be a whole number"),
        ('{"timestamp": 1, "input_length": "5", "output_length": 1}', "input_length='5': must be a whole number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length=True: must be a whole number"),
        ('{"timestamp": 1, "input_length": null, "output_length": 1}', "input_length=None: must be a whole number"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 1}', "timestamp=nan: must be a finite number"),
        ('{"timestamp": "1", "input_length": 5, "output_length": 1}', "timestamp='1': must be a finite number"),
        ('{"timestamp": 1, "input_length": , "output_length": 1}', "input_length='': must be one JSON value"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1', "output_length='1': must be one JSON value"),
        ("[1, 5, 1]", "must be an object, found [1, 5, 1]"),
        ("timestamp 1", "not valid JSON"),
    ],
)
def test_a_bad_field_is_named_with_its_line(write: Write, line: str, message: str) -> None:
    path = write(MOONCAKE + "\n" + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 4: {message}")):
        load_trace(path)


def test_json_of_another_kind(write: Write) -> None:
    with pytest.raises(ValueError, match="JSON without prompt_token_ids"):
        load_trace(write('{"prompt": "hello"}\n'))
    with pytest.raises(ValueError, match="JSON without prompt_token_ids"):
        load_trace(write('[{"prompt": "hello"}]\n'))
    with pytest.raises(ValueError, match=r"line 1: must be one JSON object \(.* at column \d+\)"):
        load_trace(write('{"timestamp":\n'))


CONVERSATIONS = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 9},
            {"from": "gpt", "value": "y" * 40},
            {"from": "human", "value": "x" * 4},
            {"from": "gpt", "value": "y" * 8},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "unasked"}, {"from": "human", "value": "why?"}]},
    {"id": "c", "conversations": [{"from": "user", "value": "x" * 20}, {"from": "assistant", "value": "y" * 12}]},
]


def test_sharegpt_is_one_request_an_answer(write: Write) -> None:
    """Characters / 4 rounded up: 9 -> 3, 40 -> 10, 4 -> 1, 8 -> 2; the second answer's prompt is all before it."""
    workload = load_trace(write(json.dumps(CONVERSATIONS, indent=1)))
    assert rows(workload) == [(0.0, 3, 10), (0.0, 14, 2), (0.0, 5, 3)]
    assert workload.num_dropped == 1, "the answer without a question"
    assert not workload.has_arrivals
    assert workload.notes[0].startswith("tokens counted as characters / 4, rounded up")


def test_sharegpt_as_lines(write: Write) -> None:
    text = "".join(json.dumps(conversation) + "\n" for conversation in CONVERSATIONS)
    assert rows(load_trace(write(text))) == [(0.0, 3, 10), (0.0, 14, 2), (0.0, 5, 3)]


def test_sharegpt_with_a_separator_inside_a_string(write: Write) -> None:
    """JSON allows U+2028 in a string, and Python counts it as the end of a line."""
    conversation = {"conversations": [{"from": "human", "value": "a\u2028bc"}, {"from": "gpt", "value": "y"}]}
    text = json.dumps(conversation, ensure_ascii=False) + "\n"
    assert rows(load_trace(write(text))) == [(0.0, 1, 1)]


def test_sharegpt_with_a_tokenizer(write: Write, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "words"
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    turns = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]
    path = write(json.dumps([{"conversations": turns}]))
    workload = load_trace(path, tokenizer=folder)
    assert rows(workload) == [(0.0, 3, 2)]
    assert "by the tokenizer words" in workload.notes[0]
    with pytest.raises(ValueError, match="must be a local folder with a Hugging Face tokenizer"):
        load_trace(path, tokenizer="no/such-model")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([{"conversations": [{"from": "human"}]}], "conversation 0: conversations[0].value: must be there and be text"),
        ([{"conversations": [{"from": "gpt", "value": 3}]}], "conversations[0].value: must be there and be text"),
        ([{"conversations": None}], "conversation 0: conversations=None: must be a list of turns"),
        ([{"conversations": []}, 7], "conversation 1: must be an object, found 7"),
        ([{"conversations": [{"from": "human", "value": "x"}]}], "no conversation has an answer"),
    ],
)
def test_bad_sharegpt(write: Write, document: object, message: str) -> None:
    path = write(json.dumps(document))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_trace(path, format="sharegpt")
    assert str(path) in str(caught.value)


def test_broken_sharegpt_names_the_line(write: Write) -> None:
    with pytest.raises(ValueError, match="line 3: not valid JSON"):
        load_trace(write('[\n{"conversations": []},\n{"conversations": ]\n'))


def test_prompt_files(write: Write) -> None:
    path = write('{"prompt_token_ids": [5, 6, 7], "output_tokens": 4}\n{"prompt_token_ids": [1], "output_tokens": 9}\n')
    workload = load_prompts(path)
    assert rows(workload) == [(0.0, 3, 4), (0.0, 1, 9)]
    assert workload.requests[0].prompt_token_ids == (5, 6, 7)
    assert not workload.has_arrivals
    assert workload.saturated
    assert load_trace(path, num_requests=1).requests == workload.requests[:1]


def test_clipped_prompts_keep_their_first_ids(write: Write) -> None:
    path = write('{"prompt_token_ids": [5, 6, 7, 8], "output_tokens": 4}\n')
    workload = load_trace(path, max_model_len=6)
    assert workload.requests[0].prompt_token_ids == (5, 6)
    assert workload.num_clipped == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"output_tokens": 3}', "prompt_token_ids is missing; found output_tokens"),
        ('{"prompt_token_ids": [1]}', "output_tokens is missing"),
        ('{"prompt_token_ids": [], "output_tokens": 3}', "prompt_token_ids=[]: must be a list of at least one"),
        ('{"prompt_token_ids": [1, "2"], "output_tokens": 3}', "prompt_token_ids=[1, '2']: must be a list"),
        ('{"prompt_token_ids": [1, -2], "output_tokens": 3}', "prompt_token_ids=[1, -2]: must be a list"),
        ('{"prompt_token_ids": "12", "output_tokens": 3}', "prompt_token_ids='12': must be a list"),
        ('{"prompt_token_ids": [1], "output_tokens": 0}', "output_tokens=0: must be at least 1"),
        ('{"prompt_token_ids": [1], "output_tokens": 2.5}', "output_tokens=2.5: must be a whole number"),
    ],
)
def test_bad_prompt_files(write: Write, line: str, message: str) -> None:
    path = write('{"prompt_token_ids": [1], "output_tokens": 1}\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 2: {message}")):
        load_prompts(path)


@pytest.mark.parametrize("name", ["mooncake", "prompts", "sharegpt"])
def test_empty_files(write: Write, name: str) -> None:
    with pytest.raises(ValueError, match="is empty: at least one request is needed"):
        load_trace(write(""), format=name)


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": \xff}')
    with pytest.raises(ValueError, match=r"trace\.jsonl: not a text file in UTF-8"):
        load_trace(path)
