"""The recommendation: what to run, for what it holds, how sure it is. Its fields make ``recommendation.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TypeVar

from ...engine.model.config import preset_name
from ...engine.model.hf_config import launch_name
from ...kernels.errors import TileBudgetError, did_you_mean
from . import exports
from .exports import Argument
from .schema import SCHEMA_VERSION, decode, migrate

STATUSES = ("feasible", "infeasible", "no_data")
BUBBLE_METRICS = ("bubble_fraction", "bubble_fraction_2", "bubble_fraction_4", "bubble_fraction_8")
SERVERS = ("vllm", "sglang", "trtllm", "sarathi")
FORMATS = (*SERVERS, "env", "vllm-yaml", "kubernetes", "json")
#: The container that a Kubernetes patch is for, where the caller names none.
CONTAINER = "vllm"

Target = TypeVar("Target")


class RecommendationMismatchError(TileBudgetError):
    """The recommendation was tuned for something else than what is about to run."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a recommendation holds for."""

    model: str
    device: str
    dtype: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def check_format(format_name: str) -> None:
    """Raises ValueError, with the nearest name, for what is none of ``FORMATS``."""
    if format_name not in FORMATS:
        near = did_you_mean(format_name, FORMATS)
        raise ValueError(f"format={format_name!r}: must be one of {', '.join(FORMATS)}{near}")


def model_key(model: str | Path) -> str:
    """The model's name in a key: a folder's own name, a preset's for its hub ids, anything else as it is."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else preset_name(str(model)) or str(model)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured figure: the median over ``repeats`` runs with the lowest and the highest."""

    value: float
    low: float
    high: float
    repeats: int


@dataclass(frozen=True, kw_only=True)
class SLOInfo:
    """The SLO as it was resolved. ``note`` says where its figure comes from. ``ttft_ms`` and ``e2e_ms`` are limits at
    the quantiles beside them (0..1), None where there is none."""

    name: str
    tbt_p99_ms: float
    scheduling_delay_p50_s: float | None
    reference_decode_ms: float | None
    note: str
    ttft_ms: float | None = None
    ttft_quantile: float | None = None
    e2e_ms: float | None = None
    e2e_quantile: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine settings under which the budget was found; they belong to the recommendation.

    ``model`` is a preset's name, or what was given: a name or a folder's path (the key holds the folder's name alone).
    ``num_kv_blocks`` is None where a server sized its cache itself; ``kv_blocks_fixed`` says that the number was asked
    for, not read off free memory. ``model_name`` is the name for a launch line; None is that of ``launch_name``.
    """

    model: str
    policy: str
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int | None
    kv_blocks_fixed: bool = False
    model_name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another budget that was measured, and why it was not chosen. ``max_num_seqs`` and ``policy`` are what it ran with
    where the study searched these too; ``bubble_fraction`` is the recommendation's ``bubble_metric``."""

    token_budget: int
    kind: str
    feasible: bool | None
    tie: bool
    reason: str
    tbt_p99_ms: float | None
    total_tokens_per_s: float | None
    bubble_fraction_4: float | None
    iteration_cv: float | None
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    capacity_rps: float | None = None
    capacity_at_most_rps: float | None = None
    max_num_seqs: int | None = None
    policy: str | None = None
    bubble_fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class Confidence:
    """How sure the choice is: ``level`` (``high``, ``medium``, ``low``), why, how far the device drifted over the study
    in percent (None where it is not known), and how many rounds of repeats the contenders were compared in."""

    level: str
    statement: str
    drift_pct: float | None
    num_rounds: int


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What the choice would be after one ``change`` of the setting: ``token_budget``, None where none meets the SLO
    then, or where it is not known; ``statement`` says which."""

    change: str
    token_budget: int | None
    statement: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The rule that decided among the budgets, in words (``statement``) and with the figures of both sides where the
    rule compares a ``metric``: ``scoring.selection.Decision`` says what its fields mean."""

    rule: str
    statement: str
    group: Sequence[int]
    over: int | None = None
    metric: str | None = None
    chosen: float | None = None
    other: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoadWin:
    """At ``load``, a share of the best capacity, which is ``rate_rps``: the budget that is best there (None where none
    holds every limit), its P99 TTFT and P99 TBT, those of the recommended budget, and whether that holds every limit
    (None without data)."""

    load: float
    rate_rps: float
    token_budget: int | None
    ttft_p99_s: float | None
    tbt_p99_ms: float | None
    recommended_ttft_p99_s: float | None
    recommended_tbt_p99_ms: float | None
    recommended_holds: bool | None


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The token budget to run and everything needed to judge it.

    >>> rec = Recommendation.load(example)
    >>> rec.token_budget
    512
    >>> rec.vllm_args()["max_num_batched_tokens"]
    512
    >>> print(rec.export("sglang", page_size=64))
    --chunked-prefill-size 384 --enable-mixed-chunk --page-size 64 --max-running-requests 128 --context-length 8192 \
--dtype bfloat16 --tp-size 2 --pp-size 1 --disable-radix-cache
    >>> rec.apply_to({"model": "my-llama", "tensor_parallel_size": 2})["max_num_seqs"]
    128
    >>> rec.assert_matches(tensor_parallel=4)
    Traceback (most recent call last):
    tilebudget.autotune.recommendation.recommendation.RecommendationMismatchError: this recommendation does not fit ...

    ``status``: ``feasible``; ``infeasible`` (``token_budget`` is the closest to the SLO); ``no_data`` (no request
    generates a second token, so the SLO has nothing to say). ``expected`` maps metric names to figures in the unit
    that the name ends with. ``bubble_metric`` is the bubble fraction that the choice went by: ``bubble_fraction`` is
    that of the pipeline that ran, the others are of 2, 4 or 8 stages that did not. ``objective_note`` says why the
    objective is what it is. ``own_rate_rps`` is the rate of the given traffic, None where it has none; ``ttft_p99_s``
    is at that rate, and ``capacity_rps`` the highest rate at which every limit holds, None where it was not asked for.
    ``best_by_load`` says which budget is best at lower rates, on a modelled device whose capacity was asked for.
    """

    status: str
    token_budget: int | None
    verdict: str
    rule: str
    key: Key
    slo: SLOInfo
    expected: Mapping[str, Figure]
    alternatives: Sequence[Alternative]
    engine: EngineSettings
    workload: Mapping[str, object]
    num_trials: Mapping[str, int]
    seed: int
    command: str
    created_at: str
    schema_version: str = SCHEMA_VERSION
    objective: str = "throughput"
    confidence: Confidence | None = None
    sensitivity: Sequence[Sensitivity] = field(default_factory=list)
    bubble_metric: str = "bubble_fraction_4"
    objective_note: str = ""
    own_rate_rps: float | None = None
    ttft_p99_s: float | None = None
    capacity_rps: float | None = None
    decision: Decision | None = None
    best_by_load: Sequence[LoadWin] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status={self.status!r}: must be one of {', '.join(STATUSES)}")
        if self.bubble_metric not in BUBBLE_METRICS:
            raise ValueError(f"bubble_metric={self.bubble_metric!r}: must be one of {', '.join(BUBBLE_METRICS)}")

    @property
    def launch_model(self) -> str:
        """The model in the launch lines: a hub id, a folder's path, or another name that was given."""
        return self.engine.model_name or launch_name(self.engine.model)

    @property
    def launch_notice(self) -> str | None:
        """Why no server can load ``launch_model``, where it is a preset that is on no hub; else None."""
        if self.launch_model != preset_name(self.launch_model):
            return None
        return (
            f"{self.launch_model} is a model of tilebudget's own, which no server can load; --model-name names another"
        )

    @property
    def bubble_stages(self) -> int:
        """The pipeline stages that ``bubble_metric`` is about."""
        stages = self.bubble_metric.removeprefix("bubble_fraction").removeprefix("_")
        return int(stages) if stages else self.key.pipeline_parallel

    def vllm_args(self) -> dict[str, Argument]:
        """vLLM engine arguments, e.g. ``{"max_num_batched_tokens": 2048, ...}``."""
        return self._arguments(exports.vllm_args)

    def sglang_args(self, *, page_size: int = 1) -> dict[str, Argument]:
        """SGLang server arguments; ``chunked_prefill_size`` is a multiple of ``page_size``."""
        return self._arguments(lambda settings: exports.sglang_args(settings, page_size=page_size))

    def trtllm_args(self) -> dict[str, Argument]:
        """``trtllm-serve`` options."""
        return self._arguments(exports.trtllm_args)

    def sarathi_args(self) -> dict[str, Argument]:
        """Sarathi-Serve API server options."""
        return self._arguments(exports.sarathi_args)

    def apply_to(self, engine_args: Target) -> Target:
        """Set the recommended arguments on vLLM's ``EngineArgs`` (or a namespace, or a dict) and return it.

        Budget, sequences and chunked prefill are set; model length and prefix caching only where unset. Parallel
        sizes, dtype and quantization are what it was tuned for: RecommendationMismatchError, and no change, where
        ``engine_args`` says something else. The model's name is not compared, for a checkpoint has many: that is
        ``assert_matches``.
        """
        differing = exports.apply_arguments(engine_args, self.vllm_args())
        if differing:
            raise RecommendationMismatchError(f"these engine arguments are not what was tuned: {'; '.join(differing)}")
        return engine_args

    def export(self, format_name: str, *, page_size: int = 1, container: str = CONTAINER) -> str:
        """The recommendation in one of ``FORMATS``.

        ``vllm``, ``sglang``, ``trtllm``, ``sarathi``: that server's command-line flags. ``env``: vLLM's arguments as an
        environment file. ``vllm-yaml``: the file of ``vllm serve --config``. ``kubernetes``: a patch that has
        ``container`` of a deployment run vLLM so. ``json``: all of it. ``page_size`` is SGLang's. Raises ValueError for
        an unknown format, and for a server that does not have the policy.
        """
        check_format(format_name)
        if format_name == "sglang":
            return exports.server_flags("sglang", self.sglang_args(page_size=page_size))
        if format_name in exports.SERVER_ARGS:
            return exports.server_flags(format_name, self._arguments(exports.SERVER_ARGS[format_name]))
        if format_name == "env":
            return exports.to_environment(self.vllm_args())
        if format_name == "vllm-yaml":
            return exports.to_vllm_yaml(self.launch_model, self.vllm_args())
        if format_name == "kubernetes":
            words = [self.launch_model, *exports.to_words(self.vllm_args())]
            return exports.to_kubernetes_patch(["vllm", "serve"], words, container=container)
        return json.dumps(self.to_json(), indent=2)

    def launch_commands(self) -> dict[str, str]:
        """The whole launch line of each server that has the policy; empty when there is no budget."""
        return {
            server: exports.launch_line(server, self.launch_model, self._arguments(exports.SERVER_ARGS[server]))
            for server in self._servers()
        }

    def server_flags(self) -> dict[str, str]:
        """What ``export`` gives for each server that has the policy; empty when there is no budget."""
        return {name: self.export(name) for name in self._servers()}

    def _servers(self) -> list[str]:
        return [name for name in SERVERS if self.token_budget is not None and exports.has(name, self.engine.policy)]

    def assert_matches(
        self,
        *,
        model: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        tensor_parallel: int | None = None,
        pipeline_parallel: int | None = None,
    ) -> None:
        """Raise RecommendationMismatchError, with both keys, when tuned for something else than what is given."""
        wanted = {
            "model": None if model is None else model_key(model),
            "device": device,
            "dtype": dtype,
            "tensor_parallel": tensor_parallel,
            "pipeline_parallel": pipeline_parallel,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        differing = [name for name, value in given.items() if getattr(self.key, name) != value]
        if differing:
            asked = ", ".join(f"{name}={value}" for name, value in given.items())
            raise RecommendationMismatchError(
                f"this recommendation does not fit ({', '.join(differing)} differ): tuned for {self.key}; "
                f"asked for {asked}"
            )

    def to_json(self) -> dict[str, object]:
        """The object of ``recommendation.json``, schema ``SCHEMA_VERSION``."""
        # Only there where the study searched them, or went by a bubble fraction that it knew.
        optional = ("max_num_seqs", "policy", "bubble_fraction")
        alternatives = [
            {name: value for name, value in asdict(one).items() if value is not None or name not in optional}
            for one in self.alternatives
        ]
        added = {"alternatives": alternatives, "launch": self.launch_commands(), "flags": self.server_flags()}
        return {**asdict(self), **added}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Recommendation:
        """The inverse of ``to_json``, for files of older schemas too. Raises ValueError that names what is missing,
        what has a wrong type, or the schema that this release cannot read."""
        return decode(cls, migrate(data))

    @classmethod
    def load(cls, path: Path) -> Recommendation:
        """Read a ``recommendation.json``, or that of a run folder. Raises ValueError naming the file."""
        file = path / "recommendation.json" if path.is_dir() else path
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError:
            raise ValueError(f"{file}: no recommendation there; `tilebudget tune` writes one") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{file}: must hold a JSON object, holds {type(data).__name__}")
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None

    def _arguments(self, export: Callable[[exports.ServerSettings], dict[str, Argument]]) -> dict[str, Argument]:
        if self.token_budget is None:
            raise ValueError("token_budget=None: this study found no budget to export")
        settings = exports.ServerSettings(
            token_budget=self.token_budget,
            max_num_seqs=self.engine.max_num_seqs,
            max_model_len=self.engine.max_model_len,
            policy=self.engine.policy,
            dtype=self.key.dtype,
            tensor_parallel=self.key.tensor_parallel,
            pipeline_parallel=self.key.pipeline_parallel,
            block_size=self.engine.block_size,
            num_kv_blocks=self.engine.num_kv_blocks if self.engine.kv_blocks_fixed else None,
        )
        return export(settings)
