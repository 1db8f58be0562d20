"""What `tilebudget run` and `tilebudget tune` answered when they were last recorded, and the command that records them.

    python -P tests/support/recording.py

writes tests/data/recording.json anew. Record only where a change is meant to change figures, and look at the diff:
`tests/test_recording.py` holds every later version against it.

The command lines are below. All of them are deterministic: a modelled device computes its times, and of a run on the
CPU only the tokens and the counts are kept. Wall-clock times, dates, commands and paths are left out.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import cast
from unittest.mock import patch

DATA = Path(__file__).resolve().parents[1] / "data"
RECORDING = DATA / "recording.json"

#: A latency table as a file, of a made-up device and tiny-llama. The command lines call it profile.json.
PROFILE = DATA / "profile.json"

#: Devices, models, policies, budgets, degrees and pipelines.
RUNS = (
    "--device h200_sxm --dtype fp8 --model llama-3.1-8b --token-budget 512",
    "--device h200_sxm --dtype fp8 --model llama-3.1-8b --token-budget 513 --seed 1",
    "--device h200_sxm --model llama-3.1-70b --tensor-parallel 8 --token-budget 1024 --kernels trtllm --qps 4",
    "--device a100_sxm --model llama-2-7b --token-budget 256 --policy vllm_v0 --max-model-len 4096",
    "--device a100_sxm --model mistral-7b --token-budget 2048 --policy orca --workload azure-code",
    "--device a100_sxm --model mistral-7b --token-budget unlimited --policy faster_transformer",
    "--device a100_sxm --model qwen2.5-7b --token-budget 300 --policy tile_aligned --tensor-parallel 2 --seed 2",
    "--device a100_sxm --model yi-34b --token-budget 512 --tensor-parallel 4 --qps 1 --arrivals fixed",
    "--device h100_sxm --model qwen3-8b --token-budget 768 --kernels sglang --qps 8",
    "--device h100_sxm --model llama-2-70b --tensor-parallel 4 --token-budget 640 --workload sharegpt --seed 3",
    "--device b200_sxm --dtype fp8 --model llama-3.1-70b --token-budget 4096 --workload mooncake-conv",
    "--device l40s --model mistral-7b --token-budget 192 --num-kv-blocks 2000",
    "--device l40s --model llama-3.1-8b --dtype fp8 --token-budget 384 --policy vllm_v0 --num-kv-blocks 1200",
    "--device rtx_pro_6000_server --model llama-3.1-8b --token-budget 2048 --kernels sglang --qps 5",
    "--device gb200 --dtype fp8 --model qwen3-8b --token-budget 1024 --policy tile_aligned --workload arxiv --seed 4",
    "--device h200_sxm --model tiny-llama --token-budget 128 --max-model-len 2048 --block-size 32",
    "--device a100_sxm --model falcon-180b --tensor-parallel 4 --pipeline-parallel 2 --pipeline-link 100"
    " --token-budget 512 --max-model-len 2048",
    "--device h100_sxm --model llama-3.1-70b --tensor-parallel 2 --pipeline-parallel 4 --token-budget 1024",
    "--device h200_sxm --dtype fp8 --model yi-34b --pipeline-parallel 2 --pipeline-split 25,35 --token-budget 256"
    " --policy orca --seed 5",
    "--device profile.json --token-budget 64",
    "--device profile.json --token-budget 97 --pipeline-parallel 2 --policy vllm_v0 --qps 30 --seed 6",
    "--device cpu --prompts prompts.jsonl --token-budget 16 --num-kv-blocks 9",
    "--device cpu --prompts prompts.jsonl --token-budget 48 --policy orca --num-kv-blocks 12 --seed 1",
    "--device cpu --prompts prompts.jsonl --token-budget unlimited --policy vllm_v0 --seed 2",
)

#: Objectives, limits, searched settings, pipelines.
STUDIES = (
    "--device h200_sxm --dtype fp8 --model llama-3.1-8b",
    "--device a100_sxm --model mistral-7b --qps 4 --ttft-slo 2s",
    "--device h100_sxm --model qwen3-8b --kernels sglang --objective goodput --qps 10 --e2e-slo p90:8s --seed 1",
    "--device a100_sxm --model falcon-180b --tensor-parallel 4 --pipeline-parallel 2 --pipeline-link 100"
    " --max-model-len 2048 --tbt-slo relaxed",
    "--device l40s --model llama-3.1-8b --search token_budget,max_num_seqs,policy --max-num-seqs 16 --seed 2",
    "--device profile.json --tbt-slo 1.5ms --policy tile_aligned",
)

COMMANDS = (
    *(f"run --json --num-requests 40 {words}" for words in RUNS),
    *(f"tune --json --num-requests 40 --num-trials 5 --workers 1 --run-dir study {words}" for words in STUDIES),
)

LEFT_OUT = ("created_at", "command")

#: What is kept of the metrics of a run on the CPU, whose clock is the wall's.
COUNTS = ("tbt_count", "num_iterations", "mean_tokens_per_iteration", "full_budget_share", "num_preemptions")


def answer(command: str) -> dict[str, object]:
    """The figures of the JSON document that ``tilebudget COMMAND`` prints, in a folder of its own."""
    document = json.loads(_output(command))
    figures = {name: value for name, value in document.items() if name not in LEFT_OUT}
    if "statuses" in figures:
        figures["statuses"] = dict(sorted(Counter(figures["statuses"]).items()))
    if "--device cpu" in command:
        del figures["device"]
        figures["metrics"] = {name: figures["metrics"][name] for name in COUNTS}
    return figures


def differences(found: object, recorded: object, at: str = "") -> Iterator[str]:
    """Where two documents differ: other keys, other words, or numbers more than a billionth apart."""
    if isinstance(found, dict) and isinstance(recorded, dict):
        for name in sorted({*found, *recorded}):
            if name not in found or name not in recorded:
                yield f"{at}.{name}: only in {'what was recorded' if name in recorded else 'what was found'}"
            else:
                yield from differences(found[name], recorded[name], f"{at}.{name}")
    elif isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        for index, pair in enumerate(zip(found, recorded, strict=True)):
            yield from differences(*pair, f"{at}[{index}]")
    elif isinstance(found, float) and isinstance(recorded, float):
        if abs(found - recorded) > 1e-9 * abs(recorded):
            yield f"{at}: {found}, recorded {recorded}"
    elif found != recorded:
        yield f"{at}: {found!r}, recorded {recorded!r}"


def recorded_answers() -> Mapping[str, object]:
    """The recorded document of each command."""
    return cast("dict[str, object]", json.loads(RECORDING.read_text(encoding="utf-8")))


def _output(command: str) -> str:
    from tilebudget.autotune import cli

    output, errors, code = io.StringIO(), io.StringIO(), 0
    with (
        _own_folder() as folder,
        redirect_stdout(output),
        redirect_stderr(errors),
        patch.object(sys, "argv", ["tilebudget", *command.split()]),
        patch.dict(os.environ, {"TILEBUDGET_HOME": f"{folder}/store"}),
        # The lock of the CPU lies there. No time is kept, so nobody has to wait for another command's run.
        patch.object(tempfile, "tempdir", folder),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    if code not in (0, cli.EXIT_INFEASIBLE):
        raise RuntimeError(f"tilebudget {command} gave {code}: {errors.getvalue()}")
    return output.getvalue()


@contextmanager
def _own_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name, chdir(name):
        shutil.copy(PROFILE, "profile.json")
        rows = [{"prompt_token_ids": list(range(5, 25 + 9 * index)), "output_tokens": 3 + index} for index in range(6)]
        Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        yield name


def main() -> None:
    # As the tests run, see tests/conftest.py.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    answers = {}
    for number, command in enumerate(COMMANDS, start=1):
        print(f"{number}/{len(COMMANDS)} {command}", file=sys.stderr)
        answers[command] = answer(command)
    RECORDING.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
