"""What the engine asks of whatever runs its iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..kernels.errors import TileBudgetError
from .config import EngineConfig
from .kv_cache import BlockManager
from .request import Batch


class OutOfMemoryError(TileBudgetError):
    """The device has not the memory that the run needs."""


class NonFiniteLogitsError(TileBudgetError):
    """The model produced NaN or infinite logits."""


class NonFiniteTimeError(TileBudgetError):
    """An iteration's duration is NaN, infinite or negative."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration: ``model_s`` seconds in the model; the next token of each emitting row, None if modelled.

    ``token_ids`` is int64 ``[num emitting]``: one for each decode, then one for each chunk that ends its
    prefill, in the order of the batch.
    """

    model_s: float
    token_ids: npt.NDArray[np.int64] | None = None


class Executor(Protocol):
    """Runs batches: for real (``TorchExecutor``) or from a latency table (``ModelledExecutor``)."""

    #: True when time is what the table says, False when the engine's clock measures it.
    virtual_time: bool
    #: Whether sequences must carry token ids, and their KV blocks a table. Without, blocks are only counted.
    needs_token_ids: bool
    #: Largest context that the model takes, in tokens.
    max_position: int
    #: Vocabulary size, from which token ids of requests without any are drawn.
    vocab_size: int

    def describe(self) -> Mapping[str, str | int | float]:
        """Device, model, dtype and versions, for the run folder."""

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        """KV blocks that the device's free memory holds under ``config``; raises OutOfMemoryError when none."""

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Make ready for a run whose blocks ``kv`` manages: allocate the cache, warm up."""

    def execute(self, batch: Batch) -> StepResult:
        """Run one iteration. The sequences of ``batch`` are not changed."""


@runtime_checkable
class DecodeRunner(Protocol):
    """What an executor in virtual time may offer beside ``execute``, to make long runs of decodes quick."""

    def decode_run_s(self, batch: Batch, num_iterations: int) -> list[float]:
        """Seconds of each of the next iterations, when all run the decodes of ``batch`` and each gives every one a
        token: bit for bit what ``execute`` would return one after the other. ``batch`` is not changed."""
