"""A chunked-prefill serving engine: model, paged KV cache, schedulers, executors and metrics."""

from .bubbles import BUBBLE_CAUSES, Bubbles, find_bubbles, replay_stages
from .config import EngineConfig
from .engine import Engine
from .executor import (
    AnyExecutor,
    DecodeRunner,
    Executor,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PipelinedExecutor,
    PipelinedStepResult,
    StepResult,
    num_stages,
)
from .kv_cache import BlockManager
from .metrics import (
    SLO,
    TBT_QUANTILE_LEVELS,
    Distribution,
    Metrics,
    compute_metrics,
    tbt_gaps,
    tbt_quantiles_ms,
)
from .pipeline import PIPELINE_STAGES, PipelineResult, replay
from .policies import PAPER_POLICIES, POLICIES, POLICY_NAMES
from .record import Iterations, Requests, RunRecord
from .request import Batch, Request, Sequence, Workload
from .run import Monitor, Progress
from .slo import SLO_MULTIPLES, ReferenceDecode, reference_decode, resolve_slo, sound_stop
from .token_costs import TokenCosts
from .workloads.presets import PRESETS, preset_workload
from .workloads.traces import TRACE_FORMATS, load_prompts, load_trace
from .workloads.workload import ARRIVAL_KINDS, assign_arrivals

__all__ = [
    "ARRIVAL_KINDS",
    "BUBBLE_CAUSES",
    "PAPER_POLICIES",
    "PIPELINE_STAGES",
    "POLICIES",
    "POLICY_NAMES",
    "PRESETS",
    "SLO",
    "SLO_MULTIPLES",
    "TBT_QUANTILE_LEVELS",
    "TRACE_FORMATS",
    "AnyExecutor",
    "Batch",
    "BlockManager",
    "Bubbles",
    "DecodeRunner",
    "Distribution",
    "Engine",
    "EngineConfig",
    "Executor",
    "Iterations",
    "Metrics",
    "Monitor",
    "NonFiniteLogitsError",
    "OutOfMemoryError",
    "PipelineResult",
    "PipelinedExecutor",
    "PipelinedStepResult",
    "Progress",
    "ReferenceDecode",
    "Request",
    "Requests",
    "RunRecord",
    "Sequence",
    "StepResult",
    "TokenCosts",
    "Workload",
    "assign_arrivals",
    "compute_metrics",
    "find_bubbles",
    "load_prompts",
    "load_trace",
    "num_stages",
    "preset_workload",
    "reference_decode",
    "replay",
    "replay_stages",
    "resolve_slo",
    "sound_stop",
    "tbt_gaps",
    "tbt_quantiles_ms",
]
