"""Loading a trace file of any known format, found by its columns or fields, into a workload."""

from __future__ import annotations

import json
from pathlib import Path

from ..request import Workload
from .csv_traces import CSV_FORMATS, read_csv
from .json_traces import read_mooncake, read_prompts, read_sharegpt
from .workload import RawRequests, assemble_workload

#: ``azure``: TIMESTAMP,ContextTokens,GeneratedTokens (2023 and 2024). ``burstgpt``: Timestamp (s), Request tokens,
#: Response tokens, 6 or 8 columns. ``lengths``: num_prefill_tokens,num_decode_tokens, with or without arrived_at.
#: ``mooncake``: JSON lines, timestamp in ms. ``sharegpt``: conversations. ``prompts``: JSON lines of token ids.
TRACE_FORMATS = (*CSV_FORMATS, "mooncake", "sharegpt", "prompts")

_JSON_LINE_FIELDS = {"prompts": "prompt_token_ids", "mooncake": "input_length", "sharegpt": "conversations"}


def load_trace(
    path: str | Path,
    *,
    format: str = "auto",
    num_requests: int | None = None,
    max_model_len: int | None = None,
    overlong: str = "clip",
    tokenizer: str | Path | None = None,
) -> Workload:
    """The requests of a trace file by time of arrival, the first at 0.

    format: one of ``TRACE_FORMATS``, or ``auto`` to tell by column names and fields.
    num_requests: the first so many that can be served; None takes all.
    max_model_len, overlong: what becomes of longer requests, see ``assemble_workload``; both dropped and clipped rows
        are counted in the workload and named in its notes.
    tokenizer: local Hugging Face folder that counts ShareGPT's tokens; without one, characters ÷ 4.
    A format without a clock (``sharegpt``, ``prompts``, ``lengths`` without arrived_at) gives ``has_arrivals`` False.
    Raises ValueError naming the file, the line and the field of anything that is not what the format says.
    """
    path = Path(path)
    if format != "auto" and format not in TRACE_FORMATS:
        raise ValueError(f"format={format!r}: must be auto or one of {', '.join(TRACE_FORMATS)}")
    if not path.is_file():
        raise ValueError(f"trace {path}: {'is not a file' if path.exists() else 'no such file'}")
    found = _json_format(path) if format == "auto" else format
    raw: RawRequests
    if found == "mooncake":
        raw = read_mooncake(path)
    elif found == "sharegpt":
        raw = read_sharegpt(path, tokenizer)
    elif found == "prompts":
        raw = read_prompts(path)
    else:
        found, raw = read_csv(path, found)
    return assemble_workload(
        raw,
        name=path.stem,
        source=f"{path.name} ({found})",
        num_requests=num_requests,
        max_model_len=max_model_len,
        overlong=overlong,
    )


def load_prompts(path: str | Path, *, num_requests: int | None = None) -> Workload:
    """The requests of a file of ``{"prompt_token_ids": [...], "output_tokens": n}`` lines, all at time 0, uncut.

    Raises ValueError naming the file, the line and the field.
    """
    return load_trace(path, format="prompts", num_requests=num_requests)


def _json_format(path: Path) -> str | None:
    """The JSON format that the beginning of the file speaks of; None when it is not JSON."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        head = file.read(1 << 16).lstrip()
    if not head.startswith(("{", "[")):
        return None
    if head.startswith("["):
        if '"conversations"' in head:
            return "sharegpt"
    else:
        first = head.split("\n", 1)[0]
        for name, field in _JSON_LINE_FIELDS.items():
            if f'"{field}"' in first:
                return name
        if len(head) < 1 << 16:  # else the line may go on beyond what was read
            _check_json(path, first)
    raise ValueError(
        f"{path}: line 1: JSON without prompt_token_ids (prompts), input_length (mooncake) or conversations (sharegpt)"
    )


def _check_json(path: Path, line: str) -> None:
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line 1: must be one JSON object ({error.msg} at column {error.colno})") from None
