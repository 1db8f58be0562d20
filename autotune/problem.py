"""What one study is about: executor, workload, SLO and the budgets to try, made from the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..engine import EngineConfig, Executor, Workload
from ..engine.metrics import SLO
from ..engine.presets import preset_workload
from ..engine.slo import ReferenceDecode, reference_decode, resolve_slo
from ..engine.traces import load_trace
from ..engine.workload import assign_arrivals
from ..kernels.tiles import tile_edges
from .config import TuneConfig
from .space import SearchSpace, thin_edges

#: Largest budget tried where the settings name none.
DEFAULT_MAX_BUDGET = 8192


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that the runs of one study share."""

    config: TuneConfig
    executor: Executor
    workload: Workload
    engine_config: EngineConfig
    slo: SLO
    facts: DeviceFacts
    space: SearchSpace

    @property
    def variance_metric(self) -> str:
        """The pipeline variance that the study minimises."""
        return f"bubble_fraction_{self.config.pipeline_stages}"


def load_workload(config: TuneConfig) -> Workload:
    """The requests that ``config`` names, with their arrivals: a trace's own times, a preset saturated, unless
    ``arrivals`` says otherwise."""
    if config.trace is not None:
        workload = load_trace(
            config.trace,
            num_requests=config.num_requests,
            max_model_len=config.max_model_len,
            overlong=config.overlong,
        )
        default_arrivals = "trace" if workload.has_arrivals else "saturated"
    else:
        workload = preset_workload(
            config.workload,
            num_requests=config.num_requests,
            seed=config.seed,
            max_model_len=config.max_model_len,
            overlong=config.overlong,
        )
        default_arrivals = "saturated"
    kind = config.arrivals or ("poisson" if config.qps is not None else default_arrivals)
    return assign_arrivals(workload, kind=kind, qps=config.qps, seed=config.seed)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What was read off the device when the study began; a resumed study keeps it, so that all its trials are held to
    one SLO. ``edges``: token counts after which one more token costs a step, and ``edge_source`` where they are from.
    """

    reference: ReferenceDecode
    num_kv_blocks: int
    edges: tuple[int, ...]
    edge_source: str

    def to_json(self) -> dict[str, object]:
        """The object of ``profile.json``, but for the candidates."""
        reference = asdict(self.reference)
        return {
            "edges": [{"tokens": edge, "source": self.edge_source} for edge in self.edges],
            "num_kv_blocks": self.num_kv_blocks,
            "reference_decode": {"duration_ms": self.reference.duration_s * 1e3, **reference},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceFacts:
        """The inverse of ``to_json``. Raises KeyError or TypeError when ``data`` is something else."""
        reference = {field.name: data["reference_decode"][field.name] for field in fields(ReferenceDecode)}
        return cls(
            reference=ReferenceDecode(**reference),
            num_kv_blocks=data["num_kv_blocks"],
            edges=tuple(edge["tokens"] for edge in data["edges"]),
            edge_source=data["edges"][0]["source"],
        )


def read_device(config: TuneConfig, executor: Executor, workload: Workload, edges: Iterable[int] | None) -> DeviceFacts:
    """Measure the reference decode iteration and settle KV size and edges."""
    engine_config = _engine_config(config, executor, config.num_kv_blocks)
    num_kv_blocks = config.num_kv_blocks or executor.default_num_kv_blocks(engine_config)
    _, max_budget = _bounds(config, workload)
    return DeviceFacts(
        reference=reference_decode(executor, replace(engine_config, num_kv_blocks=num_kv_blocks)),
        num_kv_blocks=num_kv_blocks,
        edges=thin_edges(tile_edges(max_budget) if edges is None else edges),
        edge_source="multiples of the GEMM's BLOCK_M" if edges is None else "given",
    )


def state_problem(config: TuneConfig, executor: Executor, workload: Workload, facts: DeviceFacts) -> Problem:
    """Everything that the runs of the study share."""
    min_budget, max_budget = _bounds(config, workload)
    space = SearchSpace(
        facts.edges,
        min_budget=min_budget,
        max_budget=max_budget,
        whole_prompt=max(request.prompt_tokens for request in workload.requests) + config.max_num_seqs,
    )
    return Problem(
        config=config,
        executor=executor,
        workload=workload,
        engine_config=_engine_config(config, executor, facts.num_kv_blocks),
        slo=resolve_slo(config.tbt_slo, facts.reference),
        facts=facts,
        space=space,
    )


def _engine_config(config: TuneConfig, executor: Executor, num_kv_blocks: int | None) -> EngineConfig:
    return EngineConfig(
        token_budget=config.max_num_seqs,
        policy=config.policy,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(config.max_model_len, executor.max_position),
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        seed=config.seed,
    )


def _bounds(config: TuneConfig, workload: Workload) -> tuple[int, int]:
    """Smallest and largest budget of the space."""
    min_budget = config.min_budget or config.max_num_seqs
    return min_budget, config.max_budget or max(min_budget, min(DEFAULT_MAX_BUDGET, workload.num_prompt_tokens))


def workload_summary(workload: Workload) -> dict[str, object]:
    """What ``environment.json`` and the recommendation say of a workload."""
    return {
        "name": workload.name,
        "source": workload.source,
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
        "num_dropped": workload.num_dropped,
        "num_clipped": workload.num_clipped,
        "saturated": workload.saturated,
        "notes": list(workload.notes),
    }
