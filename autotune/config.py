"""What ``tilebudget tune`` is asked: model, device, traffic, SLO, and how far to search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch

from ..engine import POLICY_NAMES
from ..engine.config import KERNELS
from ..engine.model.config import PRESETS, hub_id, preset_name
from ..engine.model.hf_config import launch_name
from ..engine.server.command import served_model
from ..engine.slo import parse_limit, parse_tbt
from ..kernels.errors import did_you_mean
from ..kernels.latency.silicon import FRAMEWORKS
from .scoring.objective import AUTO, OBJECTIVES, parse_share
from .words import DTYPES, HOST_DEVICES, PROFILE_SUFFIX, device_word, dtype_word

#: What ``search`` may name, and how many powers of two below ``max_num_seqs`` are tried where it names that.
SEARCHABLE = ("token_budget", "max_num_seqs", "policy")
NUM_LOWER_SEQS = 3
#: The policies that are tried where ``search`` names the policy, besides the study's own: those of the paper's that
#: heed a token budget.
BUDGETED_POLICIES = ("sarathi", "vllm_v0")

#: What a CPU, a CUDA device, a server and a modelled device get where the settings say None. A CPU's study is to end in
#: about two minutes. A server is started anew for every run. A modelled run takes seconds for hours of traffic, so it
#: serves the whole trace at the sizes of a server.
DEFAULTS_BY_DEVICE = {
    "cpu": {"num_requests": 24, "max_num_seqs": 8, "max_model_len": 1024, "num_trials": 12, "max_concurrent": 1},
    "cuda": {"num_requests": 128, "max_num_seqs": 64, "max_model_len": 4096, "num_trials": 16, "max_concurrent": 1},
    "server": {"num_requests": 200, "max_num_seqs": 128, "max_model_len": 8192, "num_trials": 8, "max_concurrent": 1},
    "modelled": {
        "num_requests": 2000,
        "max_num_seqs": 128,
        "max_model_len": 16384,
        "num_trials": 60,
        "max_concurrent": 4,
    },
}
_BY_DEVICE: Any = None
#: What a setting of each type takes.
ACCEPTED: dict[type, tuple[type, ...]] = {
    str: (str, PathLike),
    Path: (str, PathLike),
    int: (Integral,),
    float: (Real,),
    bool: (bool,),
}
DEFAULT_MODEL = "tiny-llama"
ENGINES = ("builtin", "server")
#: Servers whose command line is known here.
SERVERS = ("vllm", "sglang", "trtllm")
ARRIVALS = ("trace", "poisson", "fixed", "saturated")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Settings of one tuning; the command line's defaults are these.

    model: preset name, the Hugging Face hub id of one, or a folder; a hub id is kept as the preset's name, and as
    ``model_name``, which is what launch lines call the model (None: ``launch_model`` says). device, dtype: in any of
    the words that ``words`` knows. device: ``auto`` (CUDA if there is one), ``cpu`` or ``cuda``, or a
    profile's file (``.json``), or a system of the silicon tables (``h200_sxm``), whose ``kernels`` (vllm, sglang,
    trtllm; None takes the first that was measured) and ``tensor_parallel`` degree then are modelled, not run. On a
    device here ``kernels`` is torch, triton or auto, which None means: the faster of the two, operation by operation
    (torch on a CPU); and the model runs in ``tensor_parallel`` times ``pipeline_parallel`` processes, where that is
    more than one: ``pipeline_parallel`` stages, each of ``tensor_parallel`` ranks. A modelled device takes stages too.
    pipeline_split: layers of each stage, such as ``20,20,20,20``; None splits evenly. pipeline_link: Gbit/s between the
    stages of a modelled pipeline; None takes the system's own links, and between stages of a profile's device none.
    num_requests, max_num_seqs, max_model_len, num_trials, max_concurrent: None takes DEFAULTS_BY_DEVICE; a modelled
    device then serves a ``trace`` whole.
    workload: preset name, used when there is no ``trace`` file. ``num_requests`` of it, arriving as
    ``arrivals`` says (``qps`` requests/s for Poisson and fixed); None keeps a trace's own times and
    saturates a preset. tbt_slo: ``strict``, ``relaxed`` or a duration such as ``20ms``; ttft_slo, e2e_slo: a duration
    at P99, or at another percentile as in ``p90:2s``; None is no limit.
    objective: ``throughput``, ``goodput``, ``capacity`` (the highest rate, as a multiple of the given traffic, that
    meets the SLO), or ``auto``: capacity for requests that arrive over time, throughput for those that are all there at
    once. indifference: budgets whose objective is within this share of the best (``1%``) count as equal.
    search: what is searched: ``token_budget``, and after commas ``max_num_seqs`` (the one given and powers of two below
    it) and ``policy`` (the one given and ``BUDGETED_POLICIES``), every combination of them with budgets of its own.
    min_budget, max_budget: tokens; None takes ``max_num_seqs`` and what the workload can fill.
    pipeline_stages: the stage count whose bubble fraction is the second objective where there is no pipeline; where
    there is one, its own bubble fraction is.
    num_trials: budgets that the search may run. max_concurrent: how many of them are open at a time, after the first
    few: so many workers the search keeps busy, and its outcome depends on this, not on how many there are.
    repeats: extra runs of each contender, interleaved. A modelled device gives the same figures every time, so it runs
    each contender once more whatever ``repeats`` says.
    time_limit: seconds after which no further trial of the search, and no further round of repeats, is begun.
    engine: ``builtin`` is ours; ``server`` starts a server for every run with the command line of ``server_command`` (a
    template) or of ``server`` (vllm, sglang or trtllm, with ``server_args`` appended), or measures the one that runs at
    ``base_url``. None means server when any of the three is given. ``model`` is then what the command names, unless
    given; ``device`` and ``dtype`` only name what the recommendation holds for. ``port``: None takes a free one.
    start_timeout, stall_timeout: seconds to wait for a server's health, and for any token while requests wait.
    warm_start: on a device here, profile it first, and begin with the budgets that the latency model expects most of.

    Raises ValueError that names the field, its value and the rule.
    """

    model: str = DEFAULT_MODEL
    model_name: str | None = None
    device: str = "auto"
    kernels: str | None = None
    dtype: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    pipeline_split: str | None = None
    pipeline_link: float | None = None
    trace: Path | None = None
    workload: str = "azure-conv"
    num_requests: int | None = None
    arrivals: str | None = None
    qps: float | None = None
    overlong: str = "clip"
    objective: str = "auto"
    indifference: str = "1%"
    tbt_slo: str = "strict"
    ttft_slo: str | None = None
    e2e_slo: str | None = None
    search: str = "token_budget"
    policy: str = "sarathi"
    min_budget: int | None = None
    max_budget: int | None = None
    max_num_seqs: int = _BY_DEVICE
    max_model_len: int = _BY_DEVICE
    block_size: int = 16
    num_kv_blocks: int | None = None
    pipeline_stages: int = 4
    num_trials: int = _BY_DEVICE
    max_concurrent: int = _BY_DEVICE
    num_contenders: int = 3
    repeats: int = 3
    seed: int = 0
    num_threads: int | None = None
    time_limit: float | None = None
    warm_start: bool = True
    engine: str | None = None
    server: str | None = None
    server_command: str | None = None
    server_args: str = ""
    base_url: str | None = None
    port: int | None = None
    start_timeout: float = 600.0
    stall_timeout: float = 30.0

    @property
    def launch_model(self) -> str:
        """The model's name for a server: ``model_name``, else a preset's hub id, else what ``model`` says."""
        return self.model_name or launch_name(self.model)

    @property
    def modelled(self) -> bool:
        """Whether the device's time comes from tables."""
        return self.engine != "server" and self.device not in HOST_DEVICES

    @property
    def from_profile(self) -> bool:
        """Whether these tables are a profile's, which ``device`` then is the file of."""
        return self.modelled and self.device.endswith(PROFILE_SUFFIX)

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """Layers of each pipeline stage; None splits evenly."""
        if self.pipeline_split is None:
            return None
        try:
            return tuple(int(layers) for layers in self.pipeline_split.split(","))
        except ValueError:
            raise ValueError(
                f"pipeline_split={self.pipeline_split!r}: must be whole numbers of layers, such as 20,20,20,20"
            ) from None

    @property
    def searched(self) -> tuple[str, ...]:
        """The parameters that ``search`` names."""
        return tuple(name.strip() for name in self.search.split(","))

    @property
    def variants(self) -> tuple[tuple[int | None, str | None], ...]:
        """Each combination of ``max_num_seqs`` and policy that is searched, the study's own first; None where one is
        not searched."""
        sizes: list[int | None] = [None]
        if "max_num_seqs" in self.searched:
            exponent = (self.max_num_seqs - 1).bit_length() - 1  # of the largest power of two below it
            sizes = [self.max_num_seqs, *(1 << power for power in range(exponent, -1, -1)[:NUM_LOWER_SEQS])]
        policies: list[str | None] = [None]
        if "policy" in self.searched:
            policies = list(dict.fromkeys((self.policy, *BUDGETED_POLICIES)))
        return tuple((size, policy) for size in sizes for policy in policies)

    def __post_init__(self) -> None:
        self._check_types()
        self._settle_engine()
        self._settle_words()
        kind = self._device_kind()
        for name, value in DEFAULTS_BY_DEVICE[kind].items():
            if getattr(self, name) is None and not (name == "num_requests" and kind == "modelled" and self.trace):
                object.__setattr__(self, name, value)
        for name, choices in (
            ("dtype", DTYPES),
            ("policy", POLICY_NAMES),
            ("objective", (AUTO, *OBJECTIVES)),
            ("overlong", ("clip", "drop")),
            ("arrivals", (None, *ARRIVALS)),
            ("pipeline_stages", (2, 4, 8)),
        ):
            value = getattr(self, name)
            if value not in choices:
                words = [str(choice) for choice in choices]
                near = did_you_mean(str(value), words)
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(words)}{near}")
        if self.objective == "capacity" and self.arrivals == "saturated":
            raise ValueError("arrivals='saturated': objective=capacity needs poisson, fixed or trace arrivals")
        parse_share("indifference", self.indifference)
        parse_tbt(self.tbt_slo)
        for name in ("ttft_slo", "e2e_slo"):
            if getattr(self, name) is not None:
                parse_limit(name, getattr(self, name))
        if self.time_limit is not None and not self.time_limit > 0.0:
            raise ValueError(f"time_limit={self.time_limit}: must be above 0 seconds")
        if self.from_profile and (self.kernels is not None or self.tensor_parallel != 1):
            raise ValueError(
                f"device={self.device!r}: is a profile of one GPU with its own kernels; neither kernels nor "
                "tensor_parallel can be set for it"
            )
        kernels = FRAMEWORKS if self.modelled else KERNELS
        if self.kernels is not None and self.kernels not in kernels:
            near = did_you_mean(self.kernels, kernels)
            raise ValueError(
                f"kernels={self.kernels!r}: must be one of {', '.join(kernels)} on device={self.device!r}{near}"
            )
        if self.pipeline_split is not None and len(self.stage_layers or ()) != self.pipeline_parallel:
            raise ValueError(
                f"pipeline_split={self.pipeline_split!r}: must name the layers of pipeline_parallel="
                f"{self.pipeline_parallel} stages"
            )
        if self.pipeline_link is not None and not (self.pipeline_link > 0.0 and self.modelled):
            raise ValueError(
                f"pipeline_link={self.pipeline_link}: must be above 0 Gbit/s, between the stages of a modelled device"
            )
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "max_num_seqs",
            "max_model_len",
            "block_size",
            "num_trials",
            "max_concurrent",
            "num_contenders",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("num_requests", "num_kv_blocks", "num_threads", "min_budget", "max_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.repeats < 2:
            raise ValueError(f"repeats={self.repeats}: must be at least 2, or no figure has a spread")
        if self.min_budget is not None and self.min_budget < self.max_num_seqs:
            raise ValueError(
                f"min_budget={self.min_budget}: must be at least max_num_seqs={self.max_num_seqs}, "
                "or an iteration cannot hold every decode"
            )
        if self.max_budget is not None and self.max_budget < (self.min_budget or self.max_num_seqs):
            raise ValueError(
                f"max_budget={self.max_budget}: must be at least min_budget={self.min_budget or self.max_num_seqs}"
            )

        self._check_search()

    def _check_types(self) -> None:
        """The command line's values have their types; those of a caller of ``tune`` may not."""
        for name, kind in _setting_types().items():
            value = getattr(self, name)
            if value is None and getattr(TuneConfig, name) is None:
                continue
            if not isinstance(value, ACCEPTED[kind]) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"{name}={value!r}: must be of type {kind.__name__}, not {type(value).__name__}")

    def _check_search(self) -> None:
        names, setting = self.searched, f"search={self.search!r}"
        if "token_budget" not in names or len(set(names)) < len(names) or not set(names) <= set(SEARCHABLE):
            raise ValueError(
                f"{setting}: must name 'token_budget' and, on request, 'max_num_seqs' and 'policy', each once, such "
                f"as '{','.join(SEARCHABLE)}'"
            )
        if "policy" in names and self.policy in ("faster_transformer", "orca"):
            raise ValueError(f"{setting}: policy={self.policy!r} heeds no token budget, so there is none to search")
        if self.engine == "server" and "policy" in names:
            raise ValueError(f"{setting}: a server has its own policy and no other")
        if "max_num_seqs" in names and (
            self.base_url is not None or (self.server_command and "{max_num_seqs}" not in self.server_command)
        ):
            raise ValueError(f"{setting}: needs a server that is started with {{max_num_seqs}} in its command")

    def _settle_engine(self) -> None:
        sources = {"server": self.server, "command": self.server_command, "base_url": self.base_url}
        given = [name for name, value in sources.items() if value is not None]
        if self.engine is None:
            object.__setattr__(self, "engine", "server" if given else "builtin")
        if self.engine not in ENGINES:
            near = did_you_mean(str(self.engine), ENGINES)
            raise ValueError(f"engine={self.engine!r}: must be one of {', '.join(ENGINES)}{near}")
        if self.engine == "builtin":
            if given:
                raise ValueError(f"{given[0]}={sources[given[0]]!r}: is for engine='server' alone")
            return
        if len(given) != 1:
            raise ValueError("engine='server': needs exactly one of server=NAME, command=TEMPLATE and base_url=URL")
        if self.server is not None and self.server not in SERVERS:
            near = did_you_mean(self.server, SERVERS)
            raise ValueError(f"server={self.server!r}: must be one of {', '.join(SERVERS)}{near}")
        if self.server_args and self.server is None:
            raise ValueError(f"server_args={self.server_args!r}: needs server=NAME, to whose command it is appended")
        if self.kernels is not None:
            raise ValueError(f"kernels={self.kernels!r}: a server has its own")
        if self.model == DEFAULT_MODEL and self.base_url is None:
            model = served_model(self.server_command or "")
            if model is None:
                raise ValueError(f"model={self.model!r}: name the model that the server serves")
            object.__setattr__(self, "model", model)

    def _settle_words(self) -> None:
        given = str(self.model)
        if given not in PRESETS and not Path(given).is_dir() and (preset := preset_name(given)) is not None:
            object.__setattr__(self, "model", preset)
            object.__setattr__(self, "model_name", self.model_name or hub_id(given))
        object.__setattr__(self, "device", device_word(self.device))
        object.__setattr__(self, "dtype", dtype_word(self.dtype))

    def _device_kind(self) -> str:
        """Whose defaults apply. A profile was measured at the sizes of a study on its device, a CPU as a rule."""
        if self.engine == "server":
            return "server"
        if self.modelled and not self.from_profile:
            return "modelled"
        cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return "cuda" if cuda else "cpu"

    def to_json(self) -> dict[str, Any]:
        """A JSON object of all settings."""
        return {**asdict(self), "trace": None if self.trace is None else str(self.trace)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TuneConfig:
        """The inverse of ``to_json``."""
        return cls(**{**data, "trace": None if data["trace"] is None else Path(data["trace"])})

    def identity(self) -> dict[str, str | int | float | None]:
        """The settings that a resumed study must share; how far to search may differ."""
        settings = asdict(self)
        # How far to search, and how a server is reached, change no figure.
        search = ("num_trials", "repeats", "num_contenders", "time_limit", "warm_start")
        for name in (*search, "port", "start_timeout", "stall_timeout", "model_name"):
            settings.pop(name)
        if self.engine == "server":
            settings["model"] = self.launch_model  # a checkpoint, not only a shape
        settings["trace"] = None if self.trace is None else self.trace.name
        # The default is what a study of before this setting had.
        settings["search"] = None if self.searched == ("token_budget",) else ",".join(sorted(self.searched))
        return settings


@cache
def _setting_types() -> dict[str, type]:
    """The type of every setting; that it may be None aside."""
    hints = get_type_hints(TuneConfig)
    return {
        field.name: next(kind for kind in get_args(hints[field.name]) or (hints[field.name],) if kind is not NoneType)
        for field in fields(TuneConfig)
    }
