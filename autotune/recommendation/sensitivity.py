"""What it would take to change the recommendation: SLO, load, prompts and outputs 20% up and down, doubled and halved.

On a modelled device the study's budgets near the recommended one, and the peaks of the staircase, are run again under
each change: load and lengths on the first ``SAMPLE_REQUESTS`` requests, with and without the change. On a real device
the trials at hand answer for the SLO, and the latency model of the warm start, if any, for load and prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...engine import Engine, Workload
from ...engine.metrics import QUANTILE_FIELDS, SLO
from ...engine.model.hf_config import resolve_model
from ...engine.modelled.executor import ModelledExecutor
from ...engine.server.engine import AnyEngine, engine_on
from ...engine.workloads.workload import clip_lengths, scale_load
from ...kernels.latency.table import LatencyTable
from ..problem import Problem
from ..scoring.selection import promising
from ..study.parallel import side_by_side
from ..study.trial import TrialRow
from .recommendation import Sensitivity

#: How much each is changed, and what that is called.
FACTORS = {0.5: "halved", 0.8: "-20%", 1.2: "+20%", 2.0: "doubled"}

#: Budgets on each side of the recommended one that are run under a change, and how often the window follows the best.
WINDOW = 2
MAX_MOVES = 2

#: Requests of the workload that changes of load and prompts are tried on, where a device is modelled.
SAMPLE_REQUESTS = 2000

#: A recommended budget that is this close to the best under a change, as a share, is still the choice.
SAME_WITHIN = 0.01


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of the setting, in words and in effect."""

    name: str
    slo: SLO
    workload: Workload
    of_slo: bool


def changes(problem: Problem) -> Iterator[Change]:
    """SLO, load (where requests arrive over time at a rate of their own), prompt and output lengths, each down and
    up."""
    slo, workload = problem.slo, problem.workload
    for factor, word in FACTORS.items():
        yield Change(name=f"SLO {word}", slo=scale_slo(slo, factor), workload=workload, of_slo=True)
    for factor, word in FACTORS.items() if problem.own_rate else ():
        yield Change(name=f"load {word}", slo=slo, workload=scale_load(workload, factor), of_slo=False)
    for noun in ("prompts", "outputs"):
        for factor, word in FACTORS.items():
            scaled = scale_lengths(workload, problem.engine_config.max_model_len, **{noun: factor})
            yield Change(name=f"{noun} {word}", slo=slo, workload=scaled, of_slo=False)


def find_sensitivity(
    problem: Problem,
    recommended: int,
    search_rows: Sequence[TrialRow],
    table: LatencyTable | None,
    on_done: Callable[[str], None] = lambda change: None,
) -> list[Sensitivity]:
    """What would be chosen under each change, by the study's own budgets; ``table`` is the warm start's model."""
    tried = {row.token_budget for row in search_rows if row.state != "failed"}
    budgets = sorted(tried | {recommended} | set(_peaks(problem)))
    model = _model(problem, table)

    def score(change: Change) -> _Answer:
        return _under(problem, change, recommended, search_rows, budgets, model)

    changed = list(changes(problem))
    # What the model would choose without a change is asked with the others.
    same = [Change(name="now", slo=problem.slo, workload=problem.workload, of_slo=False)] if model else []
    answers = iter((side_by_side if problem.judge.exact else map)(score, [*same, *changed]))
    now = _best(next(answers).scores) if same else None
    found = []
    for change, answer in zip(changed, answers, strict=True):
        found.append(_state(change.name, recommended, answer, now if answer.by_model else None))
        on_done(change.name)
    return found


def scale_slo(slo: SLO, factor: float) -> SLO:
    """The limits on TBT, TTFT and E2E times ``factor``; the limit on the queue stays."""
    ttft, e2e = (
        None if limit is None else replace(limit, limit_s=limit.limit_s * factor) for limit in (slo.ttft, slo.e2e)
    )
    return replace(slo, tbt_s=slo.tbt_s * factor, ttft=ttft, e2e=e2e)


def scale_lengths(workload: Workload, max_model_len: int, *, prompts: float = 1.0, outputs: float = 1.0) -> Workload:
    """Prompts ``prompts`` times and outputs ``outputs`` times as long, at least 1 token each and as far as
    ``max_model_len`` goes; the prompts' ids are drawn."""
    requests = []
    for request in workload.requests:
        prompt = max(1, round(request.prompt_tokens * prompts))
        output = max(1, round(request.output_tokens * outputs))
        if prompt + output > max_model_len >= 2:
            prompt, output = clip_lengths(prompt, min(output, max_model_len - 1), max_model_len)
        requests.append(replace(request, prompt_tokens=prompt, output_tokens=output, prompt_token_ids=None))
    note = f"prompts {prompts:g} times and outputs {outputs:g} times as long"
    return replace(workload, requests=tuple(requests), notes=(*workload.notes, note))


def meets(row: TrialRow, slo: SLO, *, saturated: bool) -> bool:
    """Whether a complete run met ``slo``, which need not be the one that it was run for."""
    # As ``Metrics.queueing_p50_s``: where a server does not tell the delay, TTFT stands in.
    delay_ms = row.metric("scheduling_delay_p50_ms" if row.metrics.get("scheduling_delay_count") else "ttft_p50_ms")
    if not saturated and slo.max_scheduling_delay_s is not None and delay_ms > slo.max_scheduling_delay_s * 1e3:
        return False
    limits = [("tbt_p99_ms", slo.tbt_s)]
    for name, limit in (("ttft", slo.ttft), ("e2e", slo.e2e)):
        if limit is not None:
            limits.append((f"{name}_{QUANTILE_FIELDS[limit.quantile]}_ms", limit.limit_s))
    return not any(row.metric(column) > limit_s * 1e3 for column, limit_s in limits)  # NaN, no data, breaks nothing


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What stands in for the study's own runs where load or prompts change, asked for the move and not for the place:
    an engine, what it is in words, and how many requests it is given (None: all)."""

    engine: AnyEngine
    source: str
    num_requests: int | None

    def sample(self, workload: Workload) -> Workload:
        """The requests of ``workload`` that are run."""
        return replace(workload, requests=workload.requests[: self.num_requests])


def _model(problem: Problem, table: LatencyTable | None) -> _Model | None:
    """The beginning of a long workload on a modelled device, the latency model of a real one; None where the whole is
    run instead, or there is no model."""
    if problem.judge.exact:
        if len(problem.workload.requests) <= SAMPLE_REQUESTS:
            return None
        source = f"by the first {SAMPLE_REQUESTS:,} requests"
        return _Model(engine=engine_on(problem.executor), source=source, num_requests=SAMPLE_REQUESTS)
    if table is None:
        return None
    engine = Engine(ModelledExecutor(table, resolve_model(problem.config.model)[0]))
    return _Model(engine=engine, source="by the latency model", num_requests=None)


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Scores of the budgets under a change, None where one breaks the SLO; ``source`` says in words what gave them, and
    ``missing`` why there are none."""

    scores: dict[int, float | None]
    source: str = ""
    by_model: bool = False
    missing: str = ""


def _under(
    problem: Problem,
    change: Change,
    recommended: int,
    search_rows: Sequence[TrialRow],
    budgets: Sequence[int],
    model: _Model | None,
) -> _Answer:
    # Under capacity no run at hand answers for another SLO, so that is asked as the rest is.
    if model is not None and (not change.of_slo or (problem.objective.name == "capacity" and problem.judge.exact)):
        changed = replace(change, workload=model.sample(change.workload))
        scores = _run_window(problem, changed, model.engine, budgets, recommended, {})
        return _Answer(scores=scores, source=model.source, by_model=True)
    known = {}
    if change.of_slo and problem.objective.name == "throughput":
        known = _judged_again(search_rows, change.slo, problem)
    if problem.judge.exact:
        return _Answer(scores=_run_window(problem, change, engine_on(problem.executor), budgets, recommended, known))
    if change.of_slo:
        return _Answer(scores=known, source="by the trials that ran to their end")
    return _Answer(scores={}, missing="not known; there is no latency model of this device to ask")


def _judged_again(rows: Sequence[TrialRow], slo: SLO, problem: Problem) -> dict[int, float | None]:
    """The score of every budget that was run to its end, None where it breaks ``slo``; and None for those that were
    stopped early, where ``slo`` is no wider than the study's."""
    saturated = problem.workload.saturated
    scores: dict[int, float | None] = {}
    for row in rows:
        if row.state == "complete":
            scores[row.token_budget] = row.score if meets(row, slo, saturated=saturated) else None
        elif row.state == "pruned" and slo.tbt_s <= problem.slo.tbt_s:
            scores[row.token_budget] = None
    return scores


def _run_window(
    problem: Problem,
    change: Change,
    engine: AnyEngine,
    budgets: Sequence[int],
    recommended: int,
    known: Mapping[int, float | None],
) -> dict[int, float | None]:
    """Scores under ``change`` of the budgets around the best one, from ``recommended`` on, and of the peaks of the
    staircase, beyond whose next step the best may lie; what is ``known`` is not run again."""
    runner = problem.make_runner(engine=engine, workload=change.workload, slo=change.slo)
    by_budget = {candidate.token_budget: candidate for candidate in problem.space.candidates}
    scores = dict(known)
    centre, peaks = recommended, _peaks(problem)
    for _ in range(MAX_MOVES + 1):
        place = budgets.index(centre)
        window = {*budgets[max(0, place - WINDOW) : place + WINDOW + 1], *peaks}
        for budget in sorted(window, key=lambda budget: (budget != centre, budget)):
            if budget not in scores and budget in by_budget:
                # Under capacity, the others are asked whether they serve more than the best so far by what would count.
                top = max((score for score in scores.values() if score is not None), default=0.0)
                ask_rps = top * (1.0 + SAME_WITHIN) if problem.objective.name == "capacity" and top > 0.0 else None
                row, _ = runner.run(
                    by_budget[budget],
                    run=f"{change.name}-{budget}",
                    role="sensitivity",
                    prune=True,
                    ask_rps=ask_rps,
                )
                scores[budget] = row.score if promising(row) else None
        best = _best(scores)
        # Nothing meets the SLO in the window: TBT rises with the budget, so go down.
        following = best if best is not None else budgets[max(0, place - WINDOW)]
        if following == centre or following not in budgets:
            break
        centre = following
    return scores


def _peaks(problem: Problem) -> tuple[int, ...]:
    """The budgets at which a token costs no more than around them: few, and where a change of any size may lead."""
    return tuple(candidate.token_budget for candidate in problem.space.cheapest_around())


def _best(scores: Mapping[int, float | None]) -> int | None:
    usable = {budget: score for budget, score in scores.items() if score is not None}
    return min(usable, key=lambda budget: (-usable[budget], budget), default=None)


def _state(change: str, recommended: int, answer: _Answer, now: int | None) -> Sensitivity:
    """What would be chosen, in words; ``now`` is what the model that answered would choose without the change."""
    if answer.missing:
        return Sensitivity(change=change, token_budget=None, statement=f"{change}: {answer.missing}.")
    scores, suffix = answer.scores, f", {answer.source}" if answer.source else ""
    best, mine = _best(scores), scores.get(recommended)
    top = None if best is None else scores[best]
    # A model is asked for the move and not for the place: where its choice is the same as now, nothing moves.
    unmoved = now is not None and best == now
    if best is None or top is None:
        statement = f"{change}: no budget that was tried meets the SLO{suffix}."
    elif unmoved or (mine is not None and mine >= (1.0 - SAME_WITHIN) * top):
        best = recommended
        statement = f"{change}: {recommended} stays the choice{suffix}."
    elif mine is None and recommended in scores:
        statement = f"{change}: {best} instead of {recommended}, which breaks the SLO then{suffix}."
    else:
        gain = "" if mine is None else f" ({top / mine - 1.0:+.1%})" if mine > 0.0 else ""
        statement = f"{change}: {best} instead of {recommended}{gain}{suffix}."
    return Sensitivity(change=change, token_budget=best, statement=statement)
