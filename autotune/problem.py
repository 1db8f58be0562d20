"""What one study is about: executor, workload, SLO and the budgets to try, made from the settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..engine import AnyExecutor, EngineConfig, PipelinedExecutor, Workload
from ..engine.metrics import SLO
from ..engine.modelled.pipeline import AnyModelled
from ..engine.server.engine import AnyEngine, Target, engine_on
from ..engine.slo import ReferenceDecode, parse_limit, reference_decode, resolve_slo
from ..engine.token_costs import TokenCosts
from ..engine.workloads.presets import preset_workload
from ..engine.workloads.traces import load_trace
from ..engine.workloads.workload import assign_arrivals, mean_rate
from ..kernels.latency.measure import GEMM_KERNELS
from ..kernels.latency.table import LatencyTable
from ..kernels.ops.gemm_tiles import tile_edges
from ..kernels.tiles.tile_report import TileAnalysis, candidate_edges
from .config import DEFAULTS_BY_DEVICE, TuneConfig
from .devices import modelled_kernels
from .profiles import profile_staircase
from .scoring.objective import Objective, parse_share, resolve_objective
from .scoring.prediction import Prediction
from .scoring.selection import Judge
from .study.space import MIN_EDGE_RATIO, Candidate, SearchSpace, thin_edges
from .study.trial import TrialRunner
from .tiles import analyse_device

#: Largest budget tried where the settings name none.
DEFAULT_MAX_BUDGET = 8192

#: Smallest step of the layer's latency that counts as an edge, and how long measuring it here may take.
MIN_EDGE_JUMP_PCT = 10.0
STAIRCASE_TIME_LIMIT_S = 8.0

TILE_SOURCE = "multiples of the GEMM's BLOCK_M"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that the runs of one study share."""

    config: TuneConfig
    executor: Target
    workload: Workload
    engine_config: EngineConfig
    slo: SLO
    facts: DeviceFacts
    space: SearchSpace
    own_rate: bool = True

    @property
    def rate_rps(self) -> float:
        """Requests per second of ``workload``, mean over its arrivals. 1 where the requests have no rate of their own
        (``own_rate`` is False): they are all there at once, or drawn at that rate."""
        return self._rate_of(self.workload)

    def _rate_of(self, workload: Workload) -> float:
        return mean_rate(workload) if self.own_rate else 1.0

    @property
    def variance_metric(self) -> str:
        """The pipeline variance that the study minimises: the bubbles of the pipeline that runs, else those that the
        iterations would leave in one."""
        if isinstance(self.executor, PipelinedExecutor) and self.executor.num_stages > 1:
            return "bubble_fraction"
        return f"bubble_fraction_{self.config.pipeline_stages}"

    @property
    def objective(self) -> Objective:
        """What the study maximises."""
        objective = resolve_objective(self.config.objective, self.workload)[0]
        return objective if self.exact else objective.on_noisy_device()

    @property
    def objective_note(self) -> str:
        """Why that is the objective, in a sentence."""
        return resolve_objective(self.config.objective, self.workload)[1]

    @property
    def exact(self) -> bool:
        """Whether the device repeats itself to the bit."""
        return isinstance(self.executor, AnyModelled)

    @property
    def table(self) -> LatencyTable | None:
        """The latency table of a modelled device."""
        return self.executor.table if isinstance(self.executor, AnyModelled) else None

    def make_runner(
        self,
        predictions: Mapping[int, Prediction] | None = None,
        *,
        engine: AnyEngine | None = None,
        workload: Workload | None = None,
        slo: SLO | None = None,
    ) -> TrialRunner:
        """What runs the trials; ``predictions`` are the latency model's, by budget. Another ``engine``, other requests
        or another SLO take the place of the study's where they are given."""
        served = workload or self.workload
        return TrialRunner(
            engine or engine_on(self.executor),
            served,
            self.engine_config,
            slo or self.slo,
            predictions,
            self.objective,
            rate_rps=self._rate_of(served),
            own_rate=self.own_rate,
        )

    def at(self, candidate: Candidate) -> Problem:
        """The same with the budget alone to search, at the ``max_num_seqs`` and policy of ``candidate``."""
        variant = self.space.variant_of(candidate)
        size = candidate.max_num_seqs or self.config.max_num_seqs
        policy = candidate.policy or self.config.policy
        return replace(
            self,
            config=replace(self.config, search="token_budget", max_num_seqs=size, policy=policy),
            engine_config=replace(self.engine_config, token_budget=size, max_num_seqs=size, policy=policy),
            space=variant.alone(),
        )

    @property
    def judge(self) -> Judge:
        """What compares contenders of this study."""
        return Judge(
            objective=self.objective,
            variance_metric=self.variance_metric,
            exact=self.exact,
            indifference=parse_share("indifference", self.config.indifference),
        )


def load_workload(config: TuneConfig, max_position: int | None = None) -> Workload:
    """The requests that ``config`` names, with their arrivals: a trace's own times, a preset saturated, unless
    ``arrivals`` says otherwise. ``max_position`` is the longest context of the model, where it is known."""
    max_model_len = min(config.max_model_len, max_position or config.max_model_len)
    if config.trace is not None:
        workload = load_trace(
            config.trace,
            num_requests=config.num_requests,
            max_model_len=max_model_len,
            overlong=config.overlong,
        )
        default_arrivals = "trace" if workload.has_arrivals else "saturated"
    else:
        workload = preset_workload(
            config.workload,
            num_requests=config.num_requests or DEFAULTS_BY_DEVICE["modelled"]["num_requests"],
            seed=config.seed,
            max_model_len=max_model_len,
            overlong=config.overlong,
        )
        default_arrivals = "saturated"
    kind = config.arrivals or ("poisson" if config.qps is not None else default_arrivals)
    qps = config.qps
    if qps is None and kind in ("poisson", "fixed") and config.objective == "capacity":
        if not workload.has_arrivals or workload.saturated:
            return workload  # it has no rate of its own: ``unit_rate`` gives it arrivals
        qps = mean_rate(workload)
    return assign_arrivals(workload, kind=kind, qps=qps, seed=config.seed)


def unit_rate(config: TuneConfig, workload: Workload) -> Workload:
    """The same requests at 1 per second on average: a trace's own pattern, else Poisson, unless ``arrivals`` says."""
    recorded = workload.has_arrivals and not workload.saturated
    return assign_arrivals(workload, config.arrivals or ("trace" if recorded else "poisson"), qps=1.0, seed=config.seed)


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What was read off the device when the study began; a resumed study keeps it, so that all its trials are held to
    one SLO. ``edges``: token counts after which one more token costs a step, and ``edge_sources`` where each is from.
    ``token_costs`` is what the ``tile_aligned`` policy goes by; None where nothing tells.
    ``staircase`` is what they were read from; None where they were given, or come from an earlier run's file. A server
    has no ``reference`` under an SLO that needs none, and sizes its KV cache itself.
    """

    reference: ReferenceDecode | None
    num_kv_blocks: int | None
    edges: tuple[int, ...]
    edge_sources: tuple[str, ...]
    token_costs: TokenCosts | None = None
    staircase: TileAnalysis | None = None

    def to_json(self) -> dict[str, object]:
        """The object of ``profile.json``, but for the candidates."""
        reference = self.reference
        return {
            "edges": [
                {"tokens": edge, "source": source} for edge, source in zip(self.edges, self.edge_sources, strict=True)
            ],
            "num_kv_blocks": self.num_kv_blocks,
            "token_costs": None if self.token_costs is None else asdict(self.token_costs),
            "reference_decode": reference and {"duration_ms": reference.duration_s * 1e3, **asdict(reference)},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceFacts:
        """The inverse of ``to_json``. Raises KeyError or TypeError when ``data`` is something else."""
        stored = data["reference_decode"]
        reference = stored and ReferenceDecode(**{field.name: stored[field.name] for field in fields(ReferenceDecode)})
        costs = data.get("token_costs")  # absent in folders of before the policy that uses it
        return cls(
            reference=reference,
            num_kv_blocks=data["num_kv_blocks"],
            edges=tuple(edge["tokens"] for edge in data["edges"]),
            edge_sources=tuple(edge["source"] for edge in data["edges"]),
            token_costs=None if costs is None else TokenCosts(**{name: tuple(row) for name, row in costs.items()}),
        )


def read_device(
    config: TuneConfig, executor: AnyExecutor, workload: Workload, edges: Iterable[int] | None
) -> DeviceFacts:
    """Measure the reference decode iteration and settle KV size and edges."""
    _, max_budget = budget_bounds(config, workload)
    staircase = read_staircase(config) if edges is None else None
    found = dict.fromkeys(thin_edges(edges or ()), "given")
    costs = TokenCosts.from_edges(found) if found else None
    if staircase is not None:
        found = staircase_edges(staircase, max_budget)
        costs = staircase_costs(staircase)
    engine_config = make_engine_config(config, executor, config.num_kv_blocks, costs)
    num_kv_blocks = config.num_kv_blocks or executor.default_num_kv_blocks(engine_config)
    return DeviceFacts(
        reference=reference_decode(executor, engine_config),  # sized by memory, not by this study's cache
        num_kv_blocks=num_kv_blocks,
        edges=tuple(found),
        edge_sources=tuple(found.values()),
        token_costs=costs,
        staircase=staircase,
    )


def read_staircase(config: TuneConfig) -> TileAnalysis:
    """What one more token costs on the device: its tables where it is modelled, else measured here, briefly."""
    if config.from_profile:
        return profile_staircase(Path(config.device), min_jump_pct=MIN_EDGE_JUMP_PCT)
    return analyse_device(
        config.model,
        device=config.device,
        kernels=modelled_kernels(config) if config.modelled else _measured_kernel(config.kernels),
        dtype=config.dtype,
        tensor_parallel=config.tensor_parallel,
        min_jump_pct=MIN_EDGE_JUMP_PCT,
        time_limit_s=STAIRCASE_TIME_LIMIT_S,
    )


def staircase_edges(analysis: TileAnalysis, max_budget: int) -> dict[int, str]:
    """Edges up to ``max_budget`` and where each is from: the steps of the staircase, and between them the tile
    multiples, which its token counts may have missed."""
    tiles = thin_edges(tile_edges(max_budget))
    measured = thin_edges(edge for edge in candidate_edges(analysis) if edge <= max_budget)
    between = [tile for tile in tiles if all(max(tile, edge) >= MIN_EDGE_RATIO * min(tile, edge) for edge in measured)]
    sources = dict.fromkeys(measured, f"step in the measured {analysis.subject['kernels']} staircase")
    return dict(sorted((sources | dict.fromkeys(between, TILE_SOURCE)).items()))


def staircase_costs(analysis: TileAnalysis) -> TokenCosts:
    """What the linear layers of an iteration cost by its tokens, and the steps of their staircase."""
    sweep = analysis.layer().sweep
    return TokenCosts(
        tokens=tuple(sweep.tokens.tolist()),
        cost_ms=tuple((sweep.latency_ms * (analysis.num_layers or 1)).tolist()),
        edges=tuple(candidate_edges(analysis)),
    )


def _measured_kernel(kernels: str | None) -> str | None:
    return kernels if kernels in GEMM_KERNELS else None


def state_problem(config: TuneConfig, executor: Target, workload: Workload, facts: DeviceFacts) -> Problem:
    """Everything that the runs of the study share."""
    own_rate = not workload.saturated
    # Capacity asked for by name, of requests that are all there at once: they get arrivals.
    arriving = unit_rate(config, workload) if config.objective == "capacity" and not own_rate else workload
    return Problem(
        config=config,
        executor=executor,
        workload=arriving,
        own_rate=own_rate,
        engine_config=make_engine_config(config, executor, facts.num_kv_blocks, facts.token_costs),
        slo=resolve_slo(
            config.tbt_slo,
            facts.reference,
            ttft=None if config.ttft_slo is None else parse_limit("ttft_slo", config.ttft_slo),
            e2e=None if config.e2e_slo is None else parse_limit("e2e_slo", config.e2e_slo),
        ),
        facts=facts,
        space=make_space(config, workload, facts),
    )


def make_space(config: TuneConfig, workload: Workload, facts: DeviceFacts) -> SearchSpace:
    """The budgets of the study, for each combination of what else it searches; none holds fewer tokens than requests
    may run at once."""
    longest = max(request.prompt_tokens for request in workload.requests)

    def variant(size: int | None, policy: str | None, others: Sequence[SearchSpace] = ()) -> SearchSpace:
        min_budget, max_budget = budget_bounds(config, workload, size)
        whole_prompt = longest + (size or config.max_num_seqs)
        return SearchSpace(
            facts.edges,
            min_budget=min_budget,
            max_budget=max_budget,
            whole_prompt=whole_prompt if config.base_url is None else None,  # a running server keeps its budget
            costs=facts.token_costs,
            max_num_seqs=size,
            policy=policy,
            others=others,
        )

    own, *others = config.variants
    return variant(*own, [variant(*other) for other in others])


def make_engine_config(
    config: TuneConfig, executor: Target, num_kv_blocks: int | None, token_costs: TokenCosts | None
) -> EngineConfig:
    """What the runs of a study share, at the smallest budget that holds every decode."""
    return EngineConfig(
        token_budget=config.max_num_seqs,
        policy=config.policy,
        max_num_seqs=config.max_num_seqs,
        max_model_len=min(config.max_model_len, executor.max_position),
        block_size=config.block_size,
        num_kv_blocks=num_kv_blocks,
        token_costs=token_costs,
        seed=config.seed,
    )


def budget_bounds(config: TuneConfig, workload: Workload, max_num_seqs: int | None = None) -> tuple[int, int]:
    """Smallest and largest budget of the space, or of its variant with ``max_num_seqs``."""
    min_budget = config.min_budget or max_num_seqs or config.max_num_seqs
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
