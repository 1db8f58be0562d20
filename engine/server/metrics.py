"""What a server tells of itself on ``/metrics``: iterations, preemptions, KV use, prefix cache hits, KV blocks.

Read from the Prometheus text of vLLM and SGLang (which offers it with ``--enable-metrics``); a server that offers
neither has no data here, which is None and not 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

#: Names by meaning, the first that a server has. Counters count since its start, gauges are of the moment.
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
KV_FRACTION = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
ITERATIONS = ("vllm:iteration_tokens_total_count",)
ITERATION_TOKENS = ("vllm:iteration_tokens_total_sum",)
PREFIX_HIT_TOKENS = ("vllm:prefix_cache_hits_total",)

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)
_CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(frozen=True, kw_only=True)
class ServerCounters:
    """What a server reported over one run; None where it does not say.

    num_iterations, mean_tokens_per_iteration, num_preemptions: growth of its counters over the run.
    kv_peak_fraction: the highest of the samples taken during the run, so a short peak may be missed.
    prefix_hit_tokens: prompt tokens that its prefix cache answered, for which nothing was computed.
    num_kv_blocks: blocks of its KV cache.
    """

    num_iterations: int | None = None
    mean_tokens_per_iteration: float | None = None
    num_preemptions: int | None = None
    kv_peak_fraction: float | None = None
    prefix_hit_tokens: int | None = None
    num_kv_blocks: int | None = None


@dataclass(frozen=True, kw_only=True)
class ServerView:
    """What a run on a server has in place of iterations.

    counters: what the server told of itself. busy_s: seconds with a request in flight, from its arrival to its last
    token. sent_s: when each request was sent, NaN where it was not. late_s: the longest that the client was late, in
    sending or reading. event_gaps_s: gaps between the events of each stream, whatever number of tokens they bring
    (``vllm bench serve`` calls these ITL); num_shared_events: the events with more than one token.
    """

    counters: ServerCounters
    busy_s: float
    sent_s: npt.NDArray[np.float64]
    late_s: float
    event_gaps_s: npt.NDArray[np.float64]
    num_shared_events: int

    def to_json(self) -> dict[str, float | None]:
        """The same for a JSON document, the gaps as percentiles in ms; None where there is no gap."""
        levels = (50, 90, 99)
        gaps_ms = (
            (np.percentile(self.event_gaps_s, levels) * 1e3).tolist()
            if len(self.event_gaps_s)
            else [None] * len(levels)
        )
        return {
            **asdict(self.counters),
            "client_late_ms": self.late_s * 1e3,
            **{f"event_gap_p{level}_ms": gap for level, gap in zip(levels, gaps_ms, strict=True)},
            "num_shared_events": self.num_shared_events,
        }


def read_counters(texts: Sequence[str]) -> ServerCounters:
    """Counters of one run from the ``/metrics`` texts taken before it, during it and after it, in order."""
    if not texts:
        return ServerCounters()
    samples = [parse_samples(text) for text in texts]
    iterations, tokens = _growth(samples, ITERATIONS), _growth(samples, ITERATION_TOKENS)
    fractions = [fraction for sample in samples for fraction in _first(sample, KV_FRACTION)]
    return ServerCounters(
        num_iterations=None if iterations is None else round(iterations),
        mean_tokens_per_iteration=tokens / iterations if tokens is not None and iterations else None,
        num_preemptions=_rounded(_growth(samples, PREEMPTIONS)),
        kv_peak_fraction=max(fractions, default=None),
        prefix_hit_tokens=_rounded(_growth(samples, PREFIX_HIT_TOKENS)),
        num_kv_blocks=_num_kv_blocks(texts[-1]),
    )


def parse_samples(text: str) -> dict[str, list[float]]:
    """Samples of a Prometheus text by name, one for each set of labels (an engine of a data-parallel server)."""
    samples: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            samples.setdefault(name, []).append(float(value))
        except ValueError:
            continue  # a line of another format
    return samples


def _first(sample: dict[str, list[float]], names: Sequence[str]) -> list[float]:
    return next((sample[name] for name in names if name in sample), [])


def _growth(samples: Sequence[dict[str, list[float]]], names: Sequence[str]) -> float | None:
    before, after = _first(samples[0], names), _first(samples[-1], names)
    return sum(after) - sum(before) if before and after else None


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _num_kv_blocks(text: str) -> int | None:
    labels = _CACHE_CONFIG.search(text)
    blocks = _NUM_BLOCKS.search(labels[1]) if labels else None
    return int(blocks[1]) if blocks else None
