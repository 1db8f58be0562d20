"""The recommendation of a run folder as the report shows it: schema 1 of ``recommendation.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..text import budget_label
from .json_object import JsonObject

STATUSES = ("feasible", "infeasible", "no_data")
BUBBLE_METRICS = ("bubble_fraction", "bubble_fraction_2", "bubble_fraction_4", "bubble_fraction_8")
SCHEMA_MAJOR = "1"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured value with the lowest and highest of its repeats (both None where there is no spread)."""

    value: float
    low: float | None
    high: float | None
    repeats: int

    @property
    def half_spread(self) -> float:
        """Half of high − low over the value; 0 where there is no spread."""
        if self.low is None or self.high is None or not self.value:
            return 0.0
        return (self.high - self.low) / 2 / abs(self.value)


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A budget that was considered and not taken, with ``max_num_seqs`` and policy where they were searched."""

    token_budget: int | None
    kind: str
    feasible: bool | None
    tie: bool
    reason: str
    tbt_p99_ms: float | None
    total_tokens_per_s: float | None
    bubble_fraction: float | None
    iteration_cv: float | None
    max_num_seqs: int | None = None
    policy: str = ""
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    capacity_rps: float | None = None
    capacity_at_most_rps: float | None = None

    @property
    def label(self) -> str:
        """The budget, with what else was searched: ``512 (max_num_seqs 64, policy sarathi)``."""
        found = (("max_num_seqs", self.max_num_seqs), ("policy", self.policy))
        note = ", ".join(f"{name} {value}" for name, value in found if value)
        return budget_label(self.token_budget) + (f" ({note})" if note else "")


@dataclass(frozen=True, kw_only=True)
class StatedConfidence:
    """How sure the study itself says it is: a word, and why."""

    level: str
    statement: str


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What the budget becomes when something else changes."""

    change: str
    token_budget: int | None
    statement: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The step of the rule that decided: against ``over``, by ``metric``, where the recommended budget has ``chosen``
    and the other one ``other``. ``group`` holds the budgets that counted as equal until then."""

    rule: str
    statement: str
    group: tuple[int | None, ...]
    over: int | None
    metric: str
    chosen: float | None
    other: float | None


@dataclass(frozen=True, kw_only=True)
class LoadWin:
    """The best budget at one load, and how the recommended one does there; ``load`` is a share of the best capacity."""

    load: float
    rate_rps: float
    token_budget: int | None
    ttft_p99_s: float | None
    tbt_p99_ms: float | None
    recommended_ttft_p99_s: float | None
    recommended_tbt_p99_ms: float | None
    recommended_holds: bool | None


@dataclass(frozen=True, kw_only=True)
class Slo:
    """The constraint the study held: P99 TBT in ms, median scheduling delay in s, limits on TTFT and end-to-end latency
    at a quantile (0..1), and where it comes from."""

    name: str
    tbt_p99_ms: float | None
    scheduling_delay_p50_s: float | None
    reference_decode_ms: float | None
    note: str
    ttft_ms: float | None = None
    ttft_quantile: float | None = None
    e2e_ms: float | None = None
    e2e_quantile: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What ``recommendation.json`` says; ``token_budget`` None is unlimited (or none, where status is no_data)."""

    status: str
    token_budget: int | None
    verdict: str
    rule: str
    key: Mapping[str, str]
    slo: Slo
    expected: Mapping[str, Estimate]
    alternatives: tuple[Alternative, ...]
    engine: Mapping[str, str]
    launch: Mapping[str, str]
    flags: Mapping[str, str]
    stated_confidence: StatedConfidence | None
    sensitivity: tuple[Sensitivity, ...]
    num_trials: Mapping[str, int]
    seed: str
    command: str
    created_at: str
    stated_bubble_metric: str = ""
    objective: str = ""
    objective_note: str = ""
    stated_ttft_p99_s: float | None = None
    capacity_rps: float | None = None
    own_rate_rps: float | None = None
    decision: Decision | None = None
    best_by_load: tuple[LoadWin, ...] = ()

    def value(self, metric: str) -> float | None:
        """The expected value of ``metric``; None where the file has none."""
        estimate = self.estimate(metric)
        return estimate.value if estimate else None

    def estimate(self, metric: str) -> Estimate | None:
        """What is expected of ``metric``. P99 TTFT and capacity may be stated without their spread."""
        stated = {
            "ttft_p99_ms": None if self.stated_ttft_p99_s is None else 1e3 * self.stated_ttft_p99_s,
            "capacity_qps": self.capacity_rps,
        }.get(metric)
        bare = None if stated is None else Estimate(value=stated, low=None, high=None, repeats=1)
        return self.expected.get(metric, bare)

    @property
    def marked_label(self) -> str | None:
        """The budget to mark in figures and tables; None where the study ended without one."""
        if self.token_budget is None and self.status != "feasible":
            return None
        return budget_label(self.token_budget)

    @property
    def bubble_metric(self) -> str:
        """The bubble fraction shown first: the one that the choice went by. Where the file is too old to say: of the
        pipeline that ran; without one what the iterations would leave in one of the recommendation's own stage count
        where measured, else of 4 stages."""
        if self.stated_bubble_metric:
            return self.stated_bubble_metric
        if "bubble_fraction" in self.expected:
            return "bubble_fraction"
        own = f"bubble_fraction_{self.key.get('pipeline_parallel', '')}"
        return own if own in ("bubble_fraction_2", "bubble_fraction_8") else "bubble_fraction_4"

    @property
    def bubble_stages(self) -> int:
        """The stage count of ``bubble_metric``."""
        if self.bubble_metric == "bubble_fraction":
            return int(self.key["pipeline_parallel"])
        return int(self.bubble_metric.rsplit("_", 1)[1])


def parse_answer(json: JsonObject) -> Answer:
    """The answer in ``json``. Raises ValueError naming the field where it does not follow schema 1."""
    version = json.text("schema_version")
    if version.split(".")[0] != SCHEMA_MAJOR:
        raise ValueError(f"{json.file}: schema_version must be {SCHEMA_MAJOR}.x, found {version!r}")
    status = json.text("status")
    if status not in STATUSES:
        raise ValueError(f"{json.file}: status must be one of {', '.join(STATUSES)}, found {status!r}")
    bubbles = json.text("bubble_metric", "")
    if bubbles and bubbles not in BUBBLE_METRICS:
        raise ValueError(f"{json.file}: bubble_metric must be one of {', '.join(BUBBLE_METRICS)}, found {bubbles!r}")
    slo = json.child("slo")
    trials = json.child("num_trials")
    return Answer(
        status=status,
        token_budget=_integer(json, "token_budget"),
        verdict=json.text("verdict", ""),
        rule=json.text("rule", ""),
        key=json.child("key").flat(),
        slo=Slo(
            name=slo.text("name", "custom"),
            tbt_p99_ms=slo.number("tbt_p99_ms"),
            scheduling_delay_p50_s=slo.number("scheduling_delay_p50_s"),
            reference_decode_ms=slo.number("reference_decode_ms"),
            note=slo.text("note", ""),
            **{name: slo.number(name) for name in ("ttft_ms", "ttft_quantile", "e2e_ms", "e2e_quantile")},
        ),
        expected=_estimates(json.child("expected")),
        alternatives=tuple(_alternative(item) for item in json.children("alternatives")),
        engine=json.child("engine").flat(),
        launch={name: json.child("launch").text(name) for name in json.child("launch").values},
        flags={name: json.child("flags").text(name) for name in json.child("flags").values},
        stated_confidence=_confidence(json.child("confidence")),
        sensitivity=tuple(
            Sensitivity(
                change=item.text("change", ""),
                token_budget=_integer(item, "token_budget"),
                statement=item.text("statement", ""),
            )
            for item in json.children("sensitivity")
        ),
        num_trials={state: int(trials.number(state) or 0) for state in ("complete", "pruned", "failed")},
        seed=json.flat().get("seed", ""),
        command=json.text("command", ""),
        created_at=json.text("created_at", ""),
        stated_bubble_metric=bubbles,
        objective=json.text("objective", ""),
        objective_note=json.text("objective_note", ""),
        stated_ttft_p99_s=json.number("ttft_p99_s"),
        capacity_rps=json.number("capacity_rps"),
        own_rate_rps=json.number("own_rate_rps"),
        decision=_decision(json.child("decision")),
        best_by_load=tuple(_load_win(item) for item in json.children("best_by_load")),
    )


def _decision(json: JsonObject) -> Decision | None:
    if not json.values:
        return None
    return Decision(
        rule=json.text("rule"),
        statement=json.text("statement", ""),
        group=json.integers("group"),
        over=_integer(json, "over"),
        metric=json.text("metric", ""),
        chosen=json.number("chosen"),
        other=json.number("other"),
    )


def _load_win(json: JsonObject) -> LoadWin:
    return LoadWin(
        load=json.need("load"),
        rate_rps=json.need("rate_rps"),
        token_budget=_integer(json, "token_budget"),
        ttft_p99_s=json.number("ttft_p99_s"),
        tbt_p99_ms=json.number("tbt_p99_ms"),
        recommended_ttft_p99_s=json.number("recommended_ttft_p99_s"),
        recommended_tbt_p99_ms=json.number("recommended_tbt_p99_ms"),
        recommended_holds=json.flag("recommended_holds"),
    )


def _confidence(json: JsonObject) -> StatedConfidence | None:
    if not json.values:
        return None
    return StatedConfidence(level=json.text("level", ""), statement=json.text("statement", ""))


def _estimates(json: JsonObject) -> dict[str, Estimate]:
    estimates = {}
    for metric in json.values:
        item = json.child(metric)
        value = item.number("value")
        if value is not None:
            estimates[metric] = Estimate(
                value=value,
                low=item.number("low"),
                high=item.number("high"),
                repeats=int(item.number("repeats") or 1),
            )
    return estimates


def _alternative(json: JsonObject) -> Alternative:
    return Alternative(
        token_budget=_integer(json, "token_budget"),
        kind=json.text("kind", ""),
        feasible=json.flag("feasible"),
        tie=bool(json.flag("tie")),
        reason=json.text("reason", ""),
        tbt_p99_ms=json.number("tbt_p99_ms"),
        total_tokens_per_s=json.number("total_tokens_per_s"),
        bubble_fraction=json.number("bubble_fraction" if "bubble_fraction" in json.values else "bubble_fraction_4"),
        iteration_cv=json.number("iteration_cv"),
        max_num_seqs=_integer(json, "max_num_seqs"),
        policy=json.text("policy", ""),
        ttft_p50_s=json.number("ttft_p50_s"),
        ttft_p99_s=json.number("ttft_p99_s"),
        capacity_rps=json.number("capacity_rps"),
        capacity_at_most_rps=json.number("capacity_at_most_rps"),
    )


def _integer(json: JsonObject, key: str) -> int | None:
    value = json.number(key)
    return None if value is None else int(value)
