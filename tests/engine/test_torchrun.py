"""The command under ``torchrun``: rank 0 runs it, every rank is a stage of its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

TILEBUDGET = Path(sys.executable).parent / "tilebudget"


def test_two_ranks_on_gloo_generate_what_transformers_does(
    tmp_path: Path, reference: Callable[[str], SimpleNamespace]
) -> None:
    expected = reference("llama")
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"prompt_token_ids": prompt, "output_tokens": count}
        for prompt, count in zip(expected.prompts, expected.num_outputs, strict=True)
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    # --standalone: torchrun picks a free port.
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        *(TILEBUDGET, "run", "--device", "cpu", "--model", expected.folder, "--prompts", prompts, "--json"),
        *("--pipeline-parallel", "2", "--token-budget", "8", "--max-num-seqs", "3", "--max-model-len", "64"),
    ]
    done = subprocess.run(
        [*torchrun, "--no-python", *map(str, command)],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert tuple(map(tuple, document["outputs"])) == expected.outputs
    assert document["device"]["pipeline_parallel"] == 2
