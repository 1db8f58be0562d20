"""Request traces in JSON: Mooncake lines, ShareGPT conversations, and prompt files of token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import isfinite
from pathlib import Path

import numpy as np

from .workload import RawRequests

#: Characters that count as one token where no tokenizer is given.
CHARACTERS_PER_TOKEN = 4

_ASSISTANTS = {"gpt", "chatgpt", "assistant", "model", "bot", "bing", "bard"}

JsonObject = dict[str, object]
TokenCounter = Callable[[str], int]


def read_mooncake(path: Path) -> RawRequests:
    """Rows of ``{"timestamp": ms, "input_length": n, "output_length": n, ...}``, one a line.

    Raises ValueError naming the file, the line and the field.
    """
    arrival_s, prompts, outputs = [], [], []
    for line, row in _read_lines(path):
        arrival_s.append(_number(path, line, row, "timestamp") / 1e3)
        prompts.append(_whole_number(path, line, row, "input_length"))
        outputs.append(_whole_number(path, line, row, "output_length"))
    return RawRequests(prompt_tokens=prompts, output_tokens=outputs, arrival_s=np.array(arrival_s, dtype=np.float64))


def read_prompts(path: Path) -> RawRequests:
    """Rows of ``{"prompt_token_ids": [...], "output_tokens": n}``, one a line; no arrival times.

    Raises ValueError naming the file, the line and the field; a prompt and an output have at least one token.
    """
    ids: list[tuple[int, ...]] = []
    outputs = []
    for line, row in _read_lines(path):
        prompt = _field(path, line, row, "prompt_token_ids")
        if not isinstance(prompt, list) or not prompt or not all(_is_token_id(token) for token in prompt):
            raise ValueError(
                f"{path}: line {line}: prompt_token_ids={_short(prompt)}: must be a list of at least one whole number, "
                "each 0 or more"
            )
        output = _whole_number(path, line, row, "output_tokens")
        if output < 1:
            raise ValueError(f"{path}: line {line}: output_tokens={output}: must be at least 1")
        ids.append(tuple(prompt))
        outputs.append(output)
    return RawRequests(prompt_tokens=[len(prompt) for prompt in ids], output_tokens=outputs, prompt_token_ids=ids)


def read_sharegpt(path: Path, tokenizer: str | Path | None) -> RawRequests:
    """One request for every answer of every conversation: its prompt is all the turns before it.

    So the Sarathi-Serve paper reads openchat_sharegpt4. Lengths are those of the turns' text, by ``tokenizer`` (a
    local Hugging Face folder) or as characters ÷ 4, rounded up; a prompt's is the sum over its turns. The file is a
    JSON list of ``{"conversations": [{"from": ..., "value": ...}]}``, or has one such object a line; it has no arrival
    times. An answer that opens a conversation has no prompt, so its row has 0 prompt tokens.
    Raises ValueError naming the file, the conversation and the field.
    """
    count, rule = _token_counter(tokenizer)
    prompts, outputs = [], []
    for place, conversation in _read_conversations(path):
        turns = conversation.get("conversations")
        if not isinstance(turns, list):
            raise ValueError(f"{path}: {place}: conversations={_short(turns)}: must be a list of turns")
        num_before = 0
        for index, turn in enumerate(turns):
            if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
                raise ValueError(f"{path}: {place}: conversations[{index}].value: must be there and be text")
            num_tokens = count(turn["value"])
            if str(turn.get("from", "")).casefold() in _ASSISTANTS:
                prompts.append(num_before)
                outputs.append(num_tokens)
            num_before += num_tokens
    if not prompts:
        raise ValueError(f"{path}: no conversation has an answer (from: gpt or assistant)")
    return RawRequests(
        prompt_tokens=prompts,
        output_tokens=outputs,
        notes=(f"tokens counted {rule}; one request an answer, all turns before it are its prompt",),
    )


def _token_counter(tokenizer: str | Path | None) -> tuple[TokenCounter, str]:
    if tokenizer is None:
        return (
            lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)
        ), f"as characters / {CHARACTERS_PER_TOKEN}, rounded up"
    if not Path(tokenizer).is_dir():
        raise ValueError(f"tokenizer={str(tokenizer)!r}: must be a local folder with a Hugging Face tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(f"tokenizer={str(tokenizer)!r}: needs the package transformers, which is not here") from error
    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    return (lambda text: len(loaded.encode(text, add_special_tokens=False))), f"by the tokenizer {Path(tokenizer).name}"


def _read_conversations(path: Path) -> Iterator[tuple[str, JsonObject]]:
    text = _read_text(path)
    if not text.lstrip().startswith("["):
        for line, row in _read_lines(path):
            yield f"line {line}", row
        return
    try:
        conversations = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from error
    for index, conversation in enumerate(conversations):
        if not isinstance(conversation, dict):
            raise ValueError(f"{path}: conversation {index}: must be an object, found {_short(conversation)}")
        yield f"conversation {index}", conversation


def _read_lines(path: Path) -> Iterator[tuple[int, JsonObject]]:
    """Line number and object of every line that is not blank."""
    num_rows = 0
    # Not splitlines(): that would also cut at separators that JSON allows inside a string.
    for line, text in enumerate(_read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {line}: {_explain(text, error)}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {line}: must be an object, found {_short(row)}")
        num_rows += 1
        yield line, row
    if not num_rows:
        raise ValueError(f"{path}: is empty: at least one request is needed")


def _explain(text: str, error: json.JSONDecodeError) -> str:
    """Which field of a broken line the parser was in, and what stands there."""
    fields = list(re.finditer(r'"(\w+)"\s*:\s*([^,}\]]*)', text[: error.pos] + text[error.pos :].partition(",")[0]))
    before = [field for field in fields if field.start() < error.pos]
    if not before:
        return f"not valid JSON: {error.msg} at column {error.colno}"
    name, found = before[-1].groups()
    return f"{name}={found.strip()!r}: must be one JSON value ({error.msg} at column {error.colno})"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8: {error}") from error


def _field(path: Path, line: int, row: JsonObject, name: str) -> object:
    if name not in row:
        raise ValueError(f"{path}: line {line}: {name} is missing; found {', '.join(row) or 'no field'}")
    return row[name]


def _number(path: Path, line: int, row: JsonObject, name: str) -> float:
    value = _field(path, line, row, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{path}: line {line}: {name}={_short(value)}: must be a finite number")
    return float(value)


def _whole_number(path: Path, line: int, row: JsonObject, name: str) -> int:
    value = _field(path, line, row, name)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{path}: line {line}: {name}={_short(value)}: must be a whole number, 0 or more")
    return int(value)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
