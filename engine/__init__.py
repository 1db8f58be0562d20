"""A chunked-prefill serving engine: model, paged KV cache, schedulers, executors and metrics."""

from .config import POLICY_NAMES, EngineConfig
from .engine import Engine, Monitor, Progress
from .executor import Executor, NonFiniteLogitsError, OutOfMemoryError, StepResult
from .kv_cache import BlockManager
from .record import Iterations, Requests, RunRecord
from .request import Batch, Request, Sequence, Workload

__all__ = [
    "POLICY_NAMES",
    "Batch",
    "BlockManager",
    "Engine",
    "EngineConfig",
    "Executor",
    "Iterations",
    "Monitor",
    "NonFiniteLogitsError",
    "OutOfMemoryError",
    "Progress",
    "Request",
    "Requests",
    "RunRecord",
    "Sequence",
    "StepResult",
    "Workload",
]
