"""One kernel in one configuration, as the compiler sees it without any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..ops.gemm_tiles import TileConfig

#: Triton's names of the element types.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What to compile: a kernel function, its argument types, constants and launch options.

    ``function`` is "module:name" below `tilebudget.kernels.ops`. ``arguments`` maps each runtime argument to its
    Triton type, or to None where the launcher passes None. ``divisible`` names the arguments that are
    multiples of 16. ``default`` says whether the launcher would choose this configuration; ``tile`` is set
    for the GEMM.
    """

    kernel: str
    config: str
    dtype: str
    function: str
    arguments: Mapping[str, str | None]
    constants: Mapping[str, int | float | bool | str]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    default: bool
    tile: TileConfig | None = None
