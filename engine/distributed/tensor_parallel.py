"""What the ranks that share the layers of a stage tell each other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .messages import PeerLostError


class TensorGroup:
    """The tensor-parallel ranks of one stage, of which this process is one.

    ``first_token_id`` is where its slice of the vocabulary begins.
    """

    def __init__(self, group: dist.ProcessGroup, first_token_id: int) -> None:
        self._group = group
        self._first_token_id = first_token_id

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in its place, the same bits on all of them."""
        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        return x

    def greedy(self, logits: Tensor) -> Tensor:
        """The most probable token of every row over the whole vocabulary, of which ``logits`` ``[rows, slice]`` is this
        rank's; -1 in all rows when any logit of any rank is NaN or infinite."""
        best, token_ids = logits.float().max(dim=-1)
        finite = torch.isfinite(logits.sum(dtype=torch.float32)).expand(1)
        # One message: float64 holds a float32 logit and a token id exactly.
        mine = torch.cat([best.double(), (token_ids + self._first_token_id).double(), finite.double()])
        gathered = [torch.empty_like(mine) for _ in range(self._group.size())]
        try:
            dist.all_gather(gathered, mine, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        every = torch.stack(gathered)
        rows = len(logits)
        winner = every[:, :rows].argmax(dim=0, keepdim=True)
        chosen = every[:, rows : 2 * rows].gather(0, winner)[0].long()
        return torch.where(every[:, -1].all(), chosen, -1)
