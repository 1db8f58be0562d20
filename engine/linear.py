"""A linear layer: weight ``[outputs, inputs]`` and an optional bias."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """``y = x @ weight.T + bias`` over the last dimension of ``x``."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
