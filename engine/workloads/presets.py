"""Synthetic workloads: lengths drawn from published quantiles of public traces. No file, no network.

Prompt and output lengths are drawn independently: in the three traces whose rows we have, their rank correlation is
0.07 (azure-conv), -0.02 (azure-code) and 0.10 (mooncake-conv).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import log
from typing import Protocol

import numpy as np

from ...kernels.errors import did_you_mean
from ..record import FloatArray, IntArray
from ..request import Workload
from .workload import RawRequests, assemble_workload

#: Standard normal quantile at 0.9.
_Z90 = 1.2815515655446004

#: Rows drawn at a time. Fixed, so that a longer workload begins with the shorter one of the same seed.
_DRAW_ROWS = 1024

_FIXED = re.compile(r"fixed:([0-9]+):([0-9]+)")


class Lengths(Protocol):
    """A distribution of token counts, drawn by inverting it."""

    def at(self, uniform: FloatArray, normal: FloatArray) -> FloatArray:
        """Lengths for uniform (0..1) or standard normal draws, whichever the distribution takes."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """The lognormal with this median and 90th percentile."""

    median: float
    p90: float

    def at(self, uniform: FloatArray, normal: FloatArray) -> FloatArray:
        """Median × exp(sigma z), with sigma from the two quantiles."""
        lengths: FloatArray = self.median * np.exp(log(self.p90 / self.median) / _Z90 * normal)
        return lengths


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The distribution through these values at ``QUANTILE_LEVELS``, straight between them."""

    values: tuple[int, ...]

    def at(self, uniform: FloatArray, normal: FloatArray) -> FloatArray:
        """The piecewise linear inverse of the distribution function."""
        lengths: FloatArray = np.interp(uniform, QUANTILE_LEVELS, self.values)
        return lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Length distributions, the most tokens of a request in the source (longer draws are drawn again), the source."""

    prompt: Lengths
    output: Lengths
    source: str
    max_total_tokens: int | None = None


QUANTILE_LEVELS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)

_PAPER = "Sarathi-Serve, OSDI'24, section 5: medians and 90th percentiles, lognormal between"

#: The two workloads of the Sarathi-Serve paper, and quantiles computed over every row of the named trace files.
PRESETS: dict[str, Preset] = {
    "sharegpt": Preset(
        prompt=LogNormal(1730, 5696),
        output=LogNormal(415, 834),
        source=f"openchat_sharegpt4 ({_PAPER})",
        max_total_tokens=8192,
    ),
    "arxiv": Preset(
        prompt=LogNormal(7059, 12985),
        output=LogNormal(208, 371),
        source=f"arxiv_summarization ({_PAPER})",
        max_total_tokens=16384,
    ),
    "azure-conv": Preset(
        prompt=Quantiles((2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050)),
        output=Quantiles((7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 954, 1000)),
        source="quantiles of the Azure LLM inference trace 2023, conversation, 19,366 rows (CC-BY 4.0)",
    ),
    "azure-code": Preset(
        prompt=Quantiles((3, 17, 75, 147, 386, 770, 1075, 1469, 1909, 2433, 3192, 5188, 7303, 7436, 7437, 7437)),
        output=Quantiles((6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 825, 1899)),
        source="quantiles of the Azure LLM inference trace 2023, code, 8,819 rows (CC-BY 4.0)",
    ),
    "mooncake-conv": Preset(
        prompt=Quantiles(
            (891, 895, 908, 1056, 1904, 4131, 6132, 8430, 10903, 15272, 19976, 28887, 45726, 88274, 121299, 121924)
        ),
        output=Quantiles((1, 3, 11, 25, 107, 227, 312, 365, 414, 459, 521, 599, 666, 1005, 2000, 2000)),
        source="quantiles of the Mooncake conversation trace (FAST'25), first 1,000 rows (Apache-2.0)",
    ),
}


def preset_workload(
    name: str, num_requests: int, *, seed: int = 0, max_model_len: int | None = None, overlong: str = "clip"
) -> Workload:
    """``num_requests`` requests of the preset ``name``, all at time 0 until ``assign_arrivals`` gives a process.

    name: one of ``PRESETS``, or ``fixed:PROMPT:OUTPUT`` for equal requests such as ``fixed:1024:1``. Draws longer than
    the source's own limit are drawn again; ones longer than ``max_model_len`` are clipped or dropped as
    ``assemble_workload`` says (dropped ones are replaced by further draws).
    Raises ValueError for an unknown name, a length of 0, or settings out of range.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests={num_requests}: must be at least 1")
    text = name.strip().lower()
    if match := _FIXED.fullmatch(text):
        prompt, output = int(match[1]), int(match[2])
        if not prompt or not output:
            raise ValueError(f"workload={name!r}: prompt and output must be at least 1 token")
        lengths = np.tile(np.array([[prompt], [output]]), num_requests)
        source = f"{num_requests} requests of {prompt} prompt and {output} output tokens"
    elif text in PRESETS:
        fits = max_model_len if overlong == "drop" else None
        lengths = _draw(PRESETS[text], num_requests, seed, fits)
        source = f"{PRESETS[text].source}, seed {seed}"
    else:
        near = did_you_mean(text, PRESETS)
        raise ValueError(f"workload={name!r}: must be one of {', '.join(PRESETS)}, or fixed:PROMPT:OUTPUT{near}")
    return assemble_workload(
        RawRequests(prompt_tokens=lengths[0].tolist(), output_tokens=lengths[1].tolist()),
        name=text,
        source=source,
        num_requests=num_requests,
        max_model_len=max_model_len,
        overlong=overlong,
    )


def _draw(preset: Preset, num_requests: int, seed: int, max_model_len: int | None) -> IntArray:
    """Rows ``[2, n]`` of which ``num_requests`` fit ``max_model_len``; all fit the preset's own limit."""
    rng = np.random.default_rng(seed)
    drawn: list[IntArray] = []
    num_fitting = num_idle = 0
    while num_fitting < num_requests:
        uniform, normal = rng.random((2, _DRAW_ROWS)), rng.standard_normal((2, _DRAW_ROWS))
        lengths = np.stack([preset.prompt.at(uniform[0], normal[0]), preset.output.at(uniform[1], normal[1])])
        rows = np.maximum(np.rint(lengths).astype(np.int64), 1)
        if preset.max_total_tokens is not None:
            rows = rows[:, rows.sum(axis=0) <= preset.max_total_tokens]
        fitting = rows.shape[1] if max_model_len is None else int((rows.sum(axis=0) <= max_model_len).sum())
        num_idle = 0 if fitting else num_idle + 1
        if num_idle == 100:
            raise ValueError(
                f"max_model_len={max_model_len}: none of {100 * _DRAW_ROWS} draws is that short; clip them instead"
            )
        drawn.append(rows)
        num_fitting += fitting
    rows = np.concatenate(drawn, axis=1)
    fits = np.ones(rows.shape[1], dtype=bool) if max_model_len is None else rows.sum(axis=0) <= max_model_len
    last: int = int(np.flatnonzero(fits)[num_requests - 1])
    return rows[:, : last + 1]
