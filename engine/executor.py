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


@dataclass(slots=True)
class StepResult:
    """One iteration: ``model_s`` seconds in the model; the next token of each emitting row, None if modelled.

    ``token_ids`` is int64 ``[num emitting]``: one for each decode, then one for each chunk that ends its
    prefill, in the order of the batch.
    """

    model_s: float
    token_ids: npt.NDArray[np.int64] | None = None


class Device(Protocol):
    """What every executor says of itself, and how a run on it begins."""

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


class Executor(Device, Protocol):
    """Runs batches one after the other: for real (``TorchExecutor``) or from a latency table (``ModelledExecutor``)."""

    def execute(self, batch: Batch) -> StepResult:
        """Run one iteration. The sequences of ``batch`` are not changed."""


class DeviceWrapper:
    """A ``Device`` that passes everything on to another one, of which its executor runs the batches in its own way."""

    def __init__(self, inner: Device) -> None:
        self._device = inner
        self.virtual_time = inner.virtual_time
        self.needs_token_ids = inner.needs_token_ids
        self.max_position = inner.max_position
        self.vocab_size = inner.vocab_size

    def describe(self) -> Mapping[str, str | int | float]:
        return self._device.describe()

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return self._device.default_num_kv_blocks(config)

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        self._device.start(config, kv)


class ExecutorWrapper(DeviceWrapper):
    """An ``Executor`` that passes everything on to another one: for those that add something to it."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.inner = inner

    def execute(self, batch: Batch) -> StepResult:
        return self.inner.execute(batch)


@runtime_checkable
class DecodeRunner(Protocol):
    """What an executor in virtual time may offer beside ``execute``, to make long runs of decodes quick."""

    def decode_run_s(self, batch: Batch, num_iterations: int) -> list[float]:
        """Seconds of each of the next iterations, when all run the decodes of ``batch`` and each gives every one a
        token: bit for bit what ``execute`` would return one after the other. ``batch`` is not changed."""


@dataclass(frozen=True, slots=True)
class PipelinedStepResult:
    """One micro-batch that has left the last stage: when each stage began and ended it, float64 ``[num_stages]``.

    One clock for all stages: the run's in virtual time, ``time.perf_counter`` of the process that collects otherwise.
    A stage's interval is its work alone: neither the wait for the activations nor their transfer. ``token_ids`` as in
    ``StepResult``.
    """

    stage_start_s: npt.NDArray[np.float64]
    stage_end_s: npt.NDArray[np.float64]
    token_ids: npt.NDArray[np.int64] | None = None


@runtime_checkable
class PipelinedExecutor(Device, Protocol):
    """Runs batches as micro-batches of a pipeline of ``num_stages`` stages, first in, first out.

    At most ``num_stages`` are between ``submit`` and ``collect``, no two of them with a request in common, each with up
    to ``max_num_seqs`` requests: the ``BlockManager`` of ``start`` has ``num_stages * max_num_seqs`` slots. ``start``
    forgets what an earlier run left in flight. In virtual time ``start`` puts the stages' clock to 0.
    """

    num_stages: int

    def submit(self, batch: Batch, now_s: float) -> None:
        """Send a micro-batch to the first stage; in virtual time at ``now_s`` on the run's clock, which never runs
        backwards (otherwise now, and ``now_s`` says nothing). Returns at once.

        The sequences of ``batch`` stay as they are until it is collected, but other rows of the block table change.
        """

    def wait_until(self, until_s: float) -> bool:
        """Whether the oldest micro-batch in flight is done by ``until_s``: waits for it no longer than until then.

        ``until_s`` is on the clock of ``PipelinedStepResult``. A stage that failed raises its error here too.
        """

    def collect(self) -> PipelinedStepResult:
        """The oldest micro-batch in flight, waited for; raises what went wrong in a stage (a ``TileBudgetError``)."""


AnyExecutor = Executor | PipelinedExecutor


def num_stages(executor: AnyExecutor) -> int:
    """Pipeline stages of an executor; 1 of one that has no pipeline."""
    return executor.num_stages if isinstance(executor, PipelinedExecutor) else 1
