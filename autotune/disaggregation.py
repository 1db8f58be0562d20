"""The yardstick of a study: prefill and decode on GPUs apart, against replicas with chunked prefill on as many GPUs.

Both sides serve the same requests at the same times, and each is judged by its capacity: the highest rate at which it
keeps the SLO. Replicas are tried at several budgets, the split ones at every split. TBT limits from tight to loose are
tried beside the study's own, for which side wins depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..engine import Engine, EngineConfig, Workload
from ..engine.disaggregated import (
    PREFILL_BATCH_TOKENS,
    KvTransfer,
    Service,
    Split,
    serve_colocated,
    serve_disaggregated,
)
from ..engine.metrics import SLO
from ..engine.modelled.executor import ModelledExecutor, kv_bytes_per_token
from ..engine.modelled.pipeline import Link
from ..engine.workloads.workload import assign_arrivals, scale_load
from ..kernels.latency.silicon import SystemSpec, system_spec
from .config import TuneConfig
from .problem import Problem, unit_rate
from .scoring.capacity import bisect_rate

#: TBT limits beside the study's, as multiples of the reference decode iteration.
SLO_MULTIPLES = {"tightest": 1.0, "tight": 2.0, "strict": 5.0, "relaxed": 25.0}

#: Budgets of the replicas, beside the study's own.
BUDGETS = (256, 512, 1024, 2048)

#: Share between the two rates that a capacity lies between, and the most requests served at each rate.
RESOLUTION = 0.03
MAX_REQUESTS = 2000

#: Told of every run: how many there were.
OnRun = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What a study is held against: as many GPUs, ``split`` into prefill and decode instances; None tries every split.
    Raises ValueError when there are fewer than two GPUs."""

    num_gpus: int = 4
    split: Split | None = None

    def __post_init__(self) -> None:
        if self.num_gpus < 2:
            raise ValueError(f"yardstick_gpus={self.num_gpus}: must be at least 2, one to prefill and one to decode")

    def num_instances(self, config: TuneConfig) -> int:
        """Instances of the model on these GPUs. Raises ValueError when the study's device or degree does not allow the
        comparison, or ``split`` has another number of them."""
        if not config.modelled or config.from_profile:
            raise ValueError(
                f"yardstick='disaggregated': needs a modelled system such as h200_sxm, whose links are known, and the "
                f"study has device={config.device!r}"
            )
        if config.pipeline_parallel != 1:
            raise ValueError(f"pipeline_parallel={config.pipeline_parallel}: must be 1 for yardstick='disaggregated'")
        instances, rest = divmod(self.num_gpus, config.tensor_parallel)
        if rest or instances < 2:
            raise ValueError(
                f"yardstick_gpus={self.num_gpus}: must be a multiple of tensor_parallel={config.tensor_parallel}, and "
                "hold two instances at least"
            )
        if self.split is not None and self.split.num_prefill + self.split.num_decode != instances:
            raise ValueError(f"yardstick_split={self.split.name!r}: must add up to {instances} instances")
        return instances


def make_yardstick(name: str, num_gpus: int, split: Split | None) -> Yardstick:
    """The yardstick of a name. Raises ValueError when there is none such."""
    if name != "disaggregated":
        raise ValueError(f"yardstick={name!r}: must be disaggregated")
    return Yardstick(num_gpus=num_gpus, split=split)


def parse_split(text: str) -> Split:
    """The split that ``P:D`` says. Raises ValueError when it is none."""
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal()):
        raise ValueError(f"yardstick_split={text!r}: must be prefill and decode instances, such as 1:3")
    return Split(num_prefill=int(prefill), num_decode=int(decode))


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """One way to use the GPUs: replicas with a budget, or a split."""

    num_instances: int
    token_budget: int | None = None
    split: Split | None = None

    @property
    def name(self) -> str:
        """In words."""
        if self.split is not None:
            return f"{self.split.num_prefill} prefill, {self.split.num_decode} decode"
        return f"{self.num_instances} replicas, budget {self.token_budget}"


class Cluster:
    """The instances of a study's model on a yardstick's GPUs, and what they served at each rate that was asked for."""

    def __init__(self, problem: Problem, num_instances: int, on_run: OnRun) -> None:
        executor = problem.executor
        if not isinstance(executor, ModelledExecutor):
            raise ValueError(f"yardstick='disaggregated': needs a modelled device, not {type(executor).__name__}")
        self.engine = Engine(executor)
        self.num_instances = num_instances
        # Each side takes what its own memory holds, not what the study's settings need.
        self.base = replace(
            problem.engine_config, policy="sarathi", num_kv_blocks=problem.config.num_kv_blocks, token_costs=None
        )
        requests = problem.workload.requests[:MAX_REQUESTS]
        self.workload = unit_rate(problem.config, replace(problem.workload, requests=requests))
        spec = system_spec(str(problem.config.device))
        self.link = system_link(spec, num_instances * problem.config.tensor_parallel)
        self.transfer = KvTransfer(bytes_per_token=kv_bytes_per_token(executor.table), link=self.link)
        self._served: dict[tuple[str, float | None], Service] = {}
        self._on_run = on_run

    def capacity(self, arrangement: Arrangement, slo: SLO) -> tuple[float, Service | None]:
        """The highest rate that keeps ``slo``, requests/s, and what was served at it; 0 and None where none does."""
        flood = self.serve(arrangement, None)
        qps, _ = bisect_rate(
            lambda rate: self.serve(arrangement, rate).meets(slo), flood.requests_per_s, resolution=RESOLUTION
        )
        return qps, self.serve(arrangement, qps) if qps else None

    def serve(self, arrangement: Arrangement, qps: float | None) -> Service:
        """The workload at a rate, None: everything at once."""
        key = arrangement.name, None if qps is None else round(qps, 6)
        if key not in self._served:
            load = assign_arrivals(self.workload, "saturated") if qps is None else scale_load(self.workload, qps)
            self._served[key] = self._serve(arrangement, load)
            self._on_run(len(self._served))
        return self._served[key]

    @property
    def rates(self) -> list[tuple[str, float]]:
        """The rates that were asked for so far, by name of the arrangement."""
        return [(name, qps) for name, qps in self._served if qps is not None]

    def _serve(self, arrangement: Arrangement, load: Workload) -> Service:
        split = arrangement.split
        if split is None:
            config = replace(self.base, token_budget=arrangement.token_budget)
            return serve_colocated(self.engine, load, num_replicas=self.num_instances, config=config)
        return serve_disaggregated(
            self.engine,
            load,
            split=split,
            prefill=self.prefill_config(),
            decode=self.decode_config(split),
            transfer=self.transfer,
        )

    def prefill_config(self) -> EngineConfig:
        """Whole prompts first come, first served, batched as Splitwise does."""
        return replace(self.base, policy="vllm_v0", token_budget=max(PREFILL_BATCH_TOKENS, self.base.max_num_seqs))

    def decode_config(self, split: Split) -> EngineConfig:
        """As many requests in all as the replicas may run, on fewer instances."""
        max_num_seqs = -(-self.base.max_num_seqs * self.num_instances // split.num_decode)
        return replace(self.base, max_num_seqs=max_num_seqs, token_budget=max(PREFILL_BATCH_TOKENS, max_num_seqs))


def system_link(spec: SystemSpec, num_gpus: int) -> Link:
    """What lies between two GPUs of a system: a node's own links where all fit one, else those between nodes."""
    within = num_gpus <= spec.num_gpus_per_node
    return Link(
        bytes_per_s=spec.link_bytes_per_s if within else spec.inter_node_bytes_per_s, latency_s=spec.link_latency_s
    )


def compare_disaggregated(
    problem: Problem, token_budget: int, yardstick: Yardstick, on_run: OnRun | None = None
) -> dict[str, object]:
    """The object of ``disaggregation.json``; ``token_budget`` is the one that the study recommends. ``on_run`` is told
    after each run how many there were. Raises ValueError as ``Yardstick.num_instances``."""
    instances = yardstick.num_instances(problem.config)
    cluster = Cluster(problem, instances, on_run or (lambda done: None))
    splits = (
        [Split(num_prefill=count, num_decode=instances - count) for count in range(1, instances)]
        if yardstick.split is None
        else [yardstick.split]
    )
    budgets = sorted({budget for budget in (*BUDGETS, token_budget) if budget >= cluster.base.max_num_seqs})
    arrangements = [
        *(Arrangement(num_instances=instances, token_budget=budget) for budget in budgets),
        *(Arrangement(num_instances=instances, split=split) for split in splits),
    ]
    return {
        "num_gpus": yardstick.num_gpus,
        "tensor_parallel": problem.config.tensor_parallel,
        "num_instances": instances,
        "token_budget": token_budget,
        "link": {"bytes_per_s": cluster.link.bytes_per_s, "latency_s": cluster.link.latency_s},
        "kv_bytes_per_token": cluster.transfer.bytes_per_token,
        "prefill_batch_tokens": cluster.prefill_config().token_budget,
        "num_requests": len(cluster.workload.requests),
        "resolution": RESOLUTION,
        "limits": [_limit_row(cluster, slo, arrangements) for slo in _limits(problem)],
    }


def _limits(problem: Problem) -> Iterator[SLO]:
    """The study's SLO, and the same with other limits on TBT, tight ones first."""
    reference = problem.facts.reference
    assert reference is not None, "only a server may lack one, and it is not modelled"
    reference_s = reference.duration_s
    slos = [replace(problem.slo, name=name, tbt_s=multiple * reference_s) for name, multiple in SLO_MULTIPLES.items()]
    if problem.slo.name not in SLO_MULTIPLES:
        slos.append(problem.slo)
    yield from sorted(slos, key=lambda slo: slo.tbt_s)


def _limit_row(cluster: Cluster, slo: SLO, arrangements: list[Arrangement]) -> dict[str, object]:
    rows = [_arrangement_row(cluster, slo, arrangement) for arrangement in arrangements]
    return {
        "name": slo.name,
        "tbt_p99_ms": slo.tbt_s * 1e3,
        "scheduling_delay_p50_s": slo.max_scheduling_delay_s,
        "arrangements": rows,
    }


def _arrangement_row(cluster: Cluster, slo: SLO, arrangement: Arrangement) -> dict[str, object]:
    qps, service = cluster.capacity(arrangement, slo)
    split = arrangement.split
    row: dict[str, object] = {
        "name": arrangement.name,
        "token_budget": arrangement.token_budget,
        "num_prefill": None if split is None else split.num_prefill,
        "num_decode": None if split is None else split.num_decode,
        "capacity_qps": qps,
    }
    if service is None:
        return row
    transfer_s = None if service.transfer is None else service.transfer.p99
    return row | {
        "tbt_p50_ms": _ms(service.tbt.p50),
        "tbt_p99_ms": _ms(service.tbt.p99),
        "ttft_p50_ms": _ms(service.ttft.p50),
        "ttft_p99_ms": _ms(service.ttft.p99),
        "delay_p50_ms": _ms(service.delay.p50),
        "transfer_p99_ms": _ms(transfer_s),
        "busy_fractions": service.busy_fractions,
    }


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3
