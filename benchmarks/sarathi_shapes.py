"""The shapes of Sarathi-Serve's measurements (OSDI'24 artifact), ours beside theirs, from a modelled A100.

    python -P benchmarks/sarathi_shapes.py [--json] [--data FOLDER] [--model yi-34b --tensor-parallel 2]

Three shapes: decode throughput grows almost in proportion to the batch while prefill throughput saturates; chunking a
prompt costs most at 512 tokens and nothing at 2048; three decodes ride along with a chunk of 1021 for nothing. The
artifact's files do not name its models, so ratios are compared, not times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd
from tilebudget.engine.modelled.executor import ModelledExecutor
from tilebudget.kernels.latency.table import IterationShape, LatencyTable

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CONTEXT_TOKENS = 1024

Row = dict[str, str | int | float]


def decode_ms(table: LatencyTable, batch: int) -> float:
    shape = IterationShape(num_decodes=batch, decode_kv_tokens=batch * CONTEXT_TOKENS, num_logits=batch)
    return table.iteration(shape).latency_ms


def prefill_ms(table: LatencyTable, prompt_tokens: int, chunk_size: int) -> float:
    """A prompt in chunks, one an iteration."""
    starts = range(0, prompt_tokens, chunk_size)
    return sum(
        table.iteration(
            IterationShape(chunks=((min(chunk_size, prompt_tokens - start), start),), num_logits=1)
        ).latency_ms
        for start in starts
    )


def throughput(table: LatencyTable, data: Path) -> list[Row]:
    """Tokens per second against the smallest batch, so many times as much."""
    rows: list[Row] = []
    for phase, column in (("decode", "batch_num_decode_tokens"), ("prefill", "batch_num_prefill_tokens")):
        theirs = pd.read_csv(data / f"sarathi_osdi_figure-2_{phase}.csv").sort_values(column)
        tokens = theirs[column].astype(int).tolist()
        seconds = theirs["batch_execution_time"].tolist()
        ours_ms = [decode_ms(table, n) if phase == "decode" else prefill_ms(table, n, n) for n in tokens]
        for n, their_s, our_ms in zip(tokens, seconds, ours_ms, strict=True):
            rows.append(
                {
                    "shape": f"{phase} throughput",
                    "at": n,
                    "theirs": n / their_s / (tokens[0] / seconds[0]),
                    "ours": n / our_ms / (tokens[0] / ours_ms[0]),
                }
            )
    return rows


def chunking(table: LatencyTable, data: Path) -> list[Row]:
    """Time of a prompt in chunks over its time in one piece."""
    rows: list[Row] = []
    for _, row in pd.read_csv(data / "sarathi_osdi_figure-9_chunking-overhead.csv").iterrows():
        prompt, chunk = int(row["prefill_length"]), int(row["chunk_size"])
        if chunk >= 16384:
            continue
        ours = prefill_ms(table, prompt, chunk) / prefill_ms(table, prompt, prompt)
        rows.append(
            {
                "shape": f"chunks of {chunk}",
                "at": prompt,
                "theirs": float(row["prefill_execution_time_relative"]),
                "ours": ours,
            }
        )
    return rows


def piggybacking(table: LatencyTable, data: Path) -> list[Row]:
    """Time of decodes with a chunk, and of decodes alone, over the time of the 1024-token prefill."""
    frame = pd.read_csv(data / "sarathi_osdi_table-2_results.csv")
    columns = (frame[f"batch_num_{kind}_tokens"].astype(int).tolist() for kind in ("prefill", "decode"))
    shapes = list(zip(*columns, strict=True))
    theirs = frame["batch_execution_time"].tolist()

    def ours_ms(prefill: int, decodes: int) -> float:
        chunks = ((prefill, 0),) if prefill else ()
        return table.iteration(
            IterationShape(
                chunks=chunks,
                num_decodes=decodes,
                decode_kv_tokens=decodes * CONTEXT_TOKENS,
                num_logits=decodes + len(chunks),
            )
        ).latency_ms

    alone = shapes.index((1024, 0))
    return [
        {
            "shape": f"{prefill} prefill + {decodes} decodes",
            "at": prefill + decodes,
            "theirs": their / theirs[alone],
            "ours": ours_ms(prefill, decodes) / ours_ms(1024, 0),
        }
        for (prefill, decodes), their in zip(shapes, theirs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with the sarathi_osdi_*.csv files")
    parser.add_argument("--device", default="a100_sxm")
    parser.add_argument("--kernels", default="sglang")
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    executor = ModelledExecutor.from_silicon(
        arguments.model,
        system=arguments.device,
        framework=arguments.kernels,
        tensor_parallel=arguments.tensor_parallel,
    )
    rows = [
        *throughput(executor.table, arguments.data),
        *chunking(executor.table, arguments.data),
        *piggybacking(executor.table, arguments.data),
    ]
    if arguments.json:
        print(json.dumps({"device": dict(executor.describe()), "rows": rows}))
        return
    print(f"{'shape':28}{'at tokens':>10}{'theirs':>9}{'ours':>9}   (ratios)")
    for row in rows:
        print(f"{row['shape']:28}{row['at']:>10}{row['theirs']:>9.3f}{row['ours']:>9.3f}")


if __name__ == "__main__":
    main()
