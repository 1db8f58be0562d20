"""A linear layer: weight ``[outputs, inputs]`` and an optional bias."""

from __future__ import annotations

import torch
from torch import Tensor


class Linear:
    """``y = x @ weight.T + bias`` for ``x`` ``[rows, inputs]``.

    In fp32 on a CPU the weight lies transposed, ``[inputs, outputs]``: there MKL is up to twice as fast for a few rows
    (decodes) and no slower for many. In bf16 oneDNN, and on CUDA cuBLAS, want it as checkpoints have it.
    """

    __slots__ = ("_matrix", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        turned = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._matrix = weight.t().contiguous() if turned else weight.t()
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The weight ``[outputs, inputs]``; a view."""
        return self._matrix.t()

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self._matrix)
        return torch.addmm(self.bias, x, self._matrix)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual + y``, in place of ``residual``: the product accumulates there, which saves a pass."""
        if self.bias is not None:
            residual.add_(self.bias)
        return residual.addmm_(x, self._matrix)
