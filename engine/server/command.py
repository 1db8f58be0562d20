"""The command line of a server, filled in for one run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from itertools import pairwise

from ..config import EngineConfig

#: Gives the command line of a server for the settings of one run and the port to listen on.
CommandLine = Callable[[EngineConfig, int], str]

REQUIRED = ("token_budget", "port")
PLACEHOLDERS = (*REQUIRED, "model", "max_num_seqs", "max_model_len")

_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def template_command(template: str, *, model: str) -> CommandLine:
    """The command line that fills ``{token_budget}``, ``{port}``, ``{model}``, ``{max_num_seqs}`` and
    ``{max_model_len}`` into ``template``; other braces (JSON) stay as they are.

    Raises ValueError for a placeholder of another name, or when ``{token_budget}`` or ``{port}`` is missing.
    """
    found = _PLACEHOLDER.findall(template)
    unknown = [name for name in found if name not in PLACEHOLDERS]
    if unknown:
        raise ValueError(
            f"command={template!r}: {{{unknown[0]}}} is no placeholder; there are "
            + ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        )
    for name in REQUIRED:
        if name not in found:
            raise ValueError(f"command={template!r}: must have {{{name}}}, or every trial would start the same server")
    check_words(template)

    def fill(config: EngineConfig, port: int) -> str:
        values = {
            "token_budget": config.token_budget,
            "port": port,
            "model": shlex.quote(model),
            "max_num_seqs": config.max_num_seqs,
            "max_model_len": config.max_model_len,
        }
        return _PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)

    return fill


def check_words(command: str) -> list[str]:
    """The words of a command line as a shell splits it. Raises ValueError when a quote is left open."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"command={command!r}: {error}") from None


def served_model(command: str) -> str | None:
    """The model that a command line names: the value of ``--model`` or ``--model-path``, or the word after ``serve`` or
    ``trtllm-serve``; None when it names none."""
    words = check_words(command)
    for word, following in pairwise([*words, ""]):
        flag, separator, value = word.partition("=")
        if flag in ("--model", "--model-path"):
            return (value if separator else following) or None
        if word.endswith("serve") and following not in ("", "serve") and not following.startswith("-"):
            return following
    return None
