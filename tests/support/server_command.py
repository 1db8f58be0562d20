"""The command line of the tests' streaming server."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import fake_server


def fake_server_command(options: str = "") -> str:
    """A template for ``--command``; ``options`` are the fake server's."""
    program = f"{shlex.quote(sys.executable)} -S {shlex.quote(str(Path(fake_server.__file__)))}"
    return (
        f"{program} --port {{port}} --max-num-batched-tokens {{token_budget}} --max-num-seqs {{max_num_seqs}} {options}"
    )
