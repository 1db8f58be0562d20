"""How far a kernel may be from its reference, by dtype: the largest error and the root mean square, both bounded.

A maximum alone passes a result that is slightly wrong everywhere; a mean alone passes one that is badly wrong once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: (largest error over the largest reference value, RMS error over RMS of the reference), for an output of the dtype.
#: One unit in the last place is 2^-7 (bf16) or 2^-10 (fp16) of a value; both sides round once, attention also rounds
#: the probabilities, and Triton's interpreter truncates to bf16, one unit off wherever torch rounds up. fp32 leaves
#: room for another order of summation.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.bfloat16: (1.2e-2, 8e-3),
    torch.float16: (2e-3, 1e-3),
    torch.float32: (1e-5, 2e-6),
}


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """How far a result is from its reference, relative to the reference's largest value and RMS, and the bounds."""

    max_error: float
    rms_error: float
    max_allowed: float
    rms_allowed: float

    @property
    def within(self) -> bool:
        """Whether both errors are within their bounds; False if either is NaN."""
        return self.max_error <= self.max_allowed and self.rms_error <= self.rms_allowed


def deviation(result: torch.Tensor, reference: torch.Tensor) -> Deviation:
    """How far result is from reference, which has the same shape and dtype; zero if both are empty.

    Raises ValueError if the shapes or dtypes differ or no tolerance is known for the dtype.
    """
    if result.shape != reference.shape or result.dtype != reference.dtype:
        raise ValueError(
            f"result: {tuple(result.shape)} {result.dtype}, must be like the reference, "
            f"{tuple(reference.shape)} {reference.dtype}"
        )
    if result.dtype not in TOLERANCES:
        raise ValueError(f"result.dtype={result.dtype}: must be one of {', '.join(map(str, TOLERANCES))}")
    max_allowed, rms_allowed = TOLERANCES[result.dtype]
    max_error = rms_error = 0.0
    if result.numel():
        want, error = reference.double(), result.double() - reference.double()
        tiny = torch.finfo(result.dtype).tiny
        max_error = float(error.abs().max() / want.abs().max().clamp_min(tiny))
        rms_error = float(error.square().mean().sqrt() / want.square().mean().sqrt().clamp_min(tiny))
    return Deviation(max_error=max_error, rms_error=rms_error, max_allowed=max_allowed, rms_allowed=rms_allowed)
