"""Predict a whole Vidur sweep from 64 of its token counts, chosen by the adaptive sampler.

    python -P benchmarks/holdout.py --sweep vidur_h100_llama2_7b_mlp.csv --points 64 --json

Each operation at each tensor-parallel degree gets its own ``--points`` token counts. The sampler is told the
latencies of the counts it asked for and of no others. Where the other sweeps of the file turned out to have edges
is passed on as a hint of where to look, never how large they are (``--no-hints`` leaves that out). What is
reported, over all operations and degrees together:

- ``median_error_pct``, ``p95_error_pct``: |predicted / measured - 1| at the counts that were not chosen;
- ``jump_kept_pct``: over all sustained steps of 10% or more (the latency at the next count, and that three counts on,
  is at least 10% above), the sum of the predicted jumps (each counted up to the true one) in percent of the true ones;
  ``jump_kept_mean_pct`` is the mean of the single shares instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tilebudget.kernels.latency.sampling import AdaptiveSampler
from tilebudget.kernels.latency.sweep import FloatArray, Sweep, read_sweeps

FILE_HINT_SHARE = 1.0
"""How much an edge in any other sweep of the file counts, beside one in the same operation at another degree."""

ROUNDS = (0.5, 0.75, 1.0)
"""Shares of the points after which the sweeps tell each other of the edges they have found."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One sweep, predicted: ``predicted_ms`` at every count, ``chosen`` where it was measured."""

    sweep: Sweep
    predicted_ms: FloatArray
    chosen: frozenset[int]

    def errors(self) -> FloatArray:
        """Relative errors at the counts that were not chosen."""
        held_out = ~np.isin(self.sweep.tokens, sorted(self.chosen))
        return np.abs(self.predicted_ms[held_out] / self.sweep.latency_ms[held_out] - 1)

    def jumps(self) -> tuple[FloatArray, FloatArray]:
        """(true, kept) size of every sustained step of 10% or more, as fractions of the latency before it."""
        measured, predicted = self.sweep.latency_ms, self.predicted_ms
        true = measured[1:-2] / measured[:-3] - 1
        still = measured[3:] / measured[:-3] - 1
        kept = predicted[1:-2] / predicted[:-3] - 1
        is_step = (true >= 0.1) & (still >= 0.1)
        return true[is_step], np.clip(kept[is_step], 0.0, true[is_step])


def predict_file(sweeps: Sequence[Sweep], num_points: int, use_hints: bool = True) -> list[Prediction]:
    """Predictions of every sweep of a file. The samplers go in rounds, and hint to each other in between."""
    samplers = [AdaptiveSampler(sweep.tokens, num_points) for sweep in sweeps]
    edges: dict[int, FloatArray] = {}
    for share in ROUNDS:
        for number, (sweep, sampler) in enumerate(zip(sweeps, samplers, strict=True)):
            if use_hints:
                sampler.set_hints(_hints_for(number, sweeps, edges))
            while sampler.num_known < share * num_points and (asked := sampler.ask()):
                for tokens in asked:
                    sampler.tell(tokens, sweep.at(tokens))
            edges[number] = sampler.edges_found()
    return [
        Prediction(
            sweep=sweep,
            predicted_ms=sampler.curve(sweep.op).at(sweep.tokens),
            chosen=frozenset(sampler.known_tokens()),
        )
        for sweep, sampler in zip(sweeps, samplers, strict=True)
    ]


def _hints_for(number: int, sweeps: Sequence[Sweep], edges: Mapping[int, FloatArray]) -> FloatArray:
    """Where the other sweeps over the same counts have turned out to have edges, so far."""
    sweep = sweeps[number]
    others = [k for k in edges if k != number and np.array_equal(sweeps[k].tokens, sweep.tokens)]
    same = [k for k in others if sweeps[k].op == sweep.op]
    hints = np.zeros(sweep.tokens.size)
    if others:
        hints += FILE_HINT_SHARE * np.mean([edges[k] for k in others], axis=0)
    if same:
        hints += np.mean([edges[k] for k in same], axis=0)
    return hints


def summary(predictions: Sequence[Prediction]) -> dict[str, float]:
    """The figures of the contract over any number of predictions; NaN where there is no held-out count or jump."""
    errors = np.concatenate([prediction.errors() for prediction in predictions]) * 100
    true = np.concatenate([prediction.jumps()[0] for prediction in predictions])
    kept = np.concatenate([prediction.jumps()[1] for prediction in predictions])
    return {
        "median_error_pct": float(np.median(errors)) if errors.size else float("nan"),
        "p95_error_pct": float(np.percentile(errors, 95)) if errors.size else float("nan"),
        "jump_kept_pct": float(kept.sum() / true.sum() * 100) if true.size else float("nan"),
        "jump_kept_mean_pct": float((kept / true).mean() * 100) if true.size else float("nan"),
        "num_jumps": int(true.size),
    }


def report(predictions: Sequence[Prediction], num_points: int) -> dict[str, object]:
    """The JSON document: the contract's figures, and a row for each operation and degree."""

    def rounded(figures: dict[str, float]) -> dict[str, float | None]:
        return {key: None if np.isnan(value) else round(value, 3) for key, value in figures.items()}

    return {
        **rounded(summary(predictions)),
        "points": num_points,
        "points_are_per": "operation and tensor-parallel degree",
        "num_counts": max(prediction.sweep.tokens.size for prediction in predictions),
        "operations": [
            {
                "op": prediction.sweep.op,
                "tensor_parallel": prediction.sweep.tensor_parallel,
                "points": len(prediction.chosen),
                **rounded(summary([prediction])),
            }
            for prediction in predictions
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 on a usage error."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--sweep", required=True, help="a Vidur profiling CSV, or tokens,latency_ms")
    parser.add_argument("--points", type=int, default=64, help="token counts to choose for each operation and degree")
    parser.add_argument("--no-hints", action="store_true", help="every operation and degree on its own")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    try:
        predictions = predict_file(read_sweeps(options.sweep).sweeps, options.points, not options.no_hints)
    except (ValueError, OSError) as error:
        print(f"holdout: {error}", file=sys.stderr)
        return 2
    document = report(predictions, options.points)
    if options.json:
        print(json.dumps(document))
        return 0
    print(f"{'operation':<26}{'TP':>3}{'median':>9}{'p95':>8}{'jumps kept':>12}")
    rows = [(p.sweep.op, str(p.sweep.tensor_parallel), summary([p])) for p in predictions]
    for op, degree, figures in [*rows, ("all", "", summary(predictions))]:
        print(
            f"{op:<26}{degree:>3}{figures['median_error_pct']:>8.2f}%{figures['p95_error_pct']:>7.2f}%"
            f"{figures['jump_kept_pct']:>11.1f}%"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
