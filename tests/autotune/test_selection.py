from __future__ import annotations

from tilebudget.autotune.scoring.objective import OBJECTIVES
from tilebudget.autotune.scoring.selection import Contender, Judge, chunking_buys_nothing, shortlist
from tilebudget.autotune.study.space import Candidate
from tilebudget.autotune.study.trial import TrialRow

VARIANCE = "bubble_fraction_4"
JUDGE = Judge(objective=OBJECTIVES["throughput"], variance_metric=VARIANCE)


def row(
    budget: int,
    speed: float,
    *,
    tbt_ms: float | None = 10.0,
    bubble: float = 0.1,
    feasible: bool | None = True,
    state: str = "complete",
    excess: float = -0.5,
    ttft_ms: float | None = None,
) -> TrialRow:
    return TrialRow(
        run=f"trial-{budget}",
        role="search",
        state=state,
        reason=None,
        token_budget=budget,
        kind="aligned",
        edge_tokens=budget,
        policy="sarathi",
        feasible=feasible,
        started_at="2026-01-01T00:00:00+00:00",
        elapsed_s=1.0,
        violations=(excess, 0.0, 0.0, 0.0),
        score=speed,
        metrics={"total_tokens_per_s": speed, "tbt_p99_ms": tbt_ms, "ttft_p99_ms": ttft_ms, VARIANCE: bubble},
    )


def contender(budget: int, *rows: TrialRow, kind: str = "aligned") -> Contender:
    return Contender(candidate=Candidate(token_budget=budget, kind=kind, edge_tokens=budget), rows=rows)


def test_throughput_outside_the_noise_decides() -> None:
    slow = contender(256, row(256, 100), row(256, 101), row(256, 102))
    fast = contender(512, row(512, 110, bubble=0.4), row(512, 111, bubble=0.4), row(512, 112, bubble=0.4))
    choice = JUDGE.choose([slow, fast])
    assert (choice.status, choice.best, choice.ties) == ("feasible", fast, ())


def test_differences_inside_the_noise_are_a_tie_and_the_smallest_budget_wins() -> None:
    """Case 15: 512, 513 and 516 differ by less than their spread."""
    contenders = [
        contender(budget, *(row(budget, speed + drift, bubble=0.1 + drift / 1000) for drift in (-2, 0, 2)))
        for budget, speed in ((516, 100.9), (512, 100.0), (513, 100.5))
    ]
    choice = JUDGE.choose(contenders)
    assert choice.best is not None
    assert choice.best.candidate.token_budget == 512
    assert [tie.token_budget for tie in choice.ties] == [513, 516]


def test_among_ties_the_steadier_budget_wins() -> None:
    uneven = contender(256, row(256, 100, bubble=0.30), row(256, 104, bubble=0.31))
    steady = contender(512, row(512, 101, bubble=0.10), row(512, 105, bubble=0.11))
    choice = JUDGE.choose([uneven, steady])
    assert choice.best is steady
    assert [tie.token_budget for tie in choice.ties] == [256]


def test_one_broken_repeat_makes_a_contender_infeasible() -> None:
    shaky = contender(512, row(512, 200), row(512, 200, feasible=False, excess=0.1))
    safe = contender(256, row(256, 100), row(256, 100))
    assert JUDGE.choose([shaky, safe]).best is safe


def test_nothing_feasible_gives_the_closest() -> None:
    near = contender(128, row(128, 10, feasible=False, excess=0.2), row(128, 10, feasible=False, excess=0.3))
    far = contender(256, row(256, 99, feasible=False, excess=2.0))
    choice = JUDGE.choose([far, near])
    assert (choice.status, choice.best) == ("infeasible", near)


def test_no_tbt_is_no_data_not_met() -> None:
    """Case 9."""
    choice = JUDGE.choose([contender(512, row(512, 100, tbt_ms=None, feasible=None))])
    assert choice.status == "no_data"


def test_nothing_ran() -> None:
    assert JUDGE.choose([contender(512)]).best is None


def test_shortlist_prefers_feasible_then_fast_and_never_a_failure() -> None:
    rows = [
        row(128, 50),
        row(256, 90),
        row(512, 100, feasible=False, excess=0.5),
        row(1024, 0, state="failed", feasible=None),
    ]
    assert [row.token_budget for row in shortlist(rows, 3)] == [256, 128]
    assert [row.token_budget for row in shortlist(rows[2:], 3)] == [512]
    assert shortlist(rows[3:], 3) == []


def test_chunking_buys_nothing_only_when_whole_prompts_are_as_fast() -> None:
    best = contender(512, row(512, 100), row(512, 102))
    whole = contender(1040, row(1040, 101), row(1040, 103), kind="whole_prompt")
    slower = contender(1040, row(1040, 90), row(1040, 92), kind="whole_prompt")
    assert chunking_buys_nothing(JUDGE, [best, whole], best, 1040) is whole
    assert chunking_buys_nothing(JUDGE, [best, slower], best, 1040) is None
    assert chunking_buys_nothing(JUDGE, [best, whole], best, 2048) is None


INDIFFERENT = Judge(objective=OBJECTIVES["throughput"], variance_metric=VARIANCE, exact=True, indifference=0.01)


def decide(*rows: TrialRow) -> tuple[int, str, int | None]:
    """The budget chosen among single runs on a device that repeats itself, the rule that decided, and over which."""
    choice = INDIFFERENT.choose([contender(one.token_budget, one) for one in rows])
    assert choice.best is not None
    assert choice.decision is not None
    return choice.best.candidate.token_budget, choice.decision.rule, choice.decision.over


def test_more_than_the_indifference_is_decided_by_the_objective() -> None:
    assert decide(row(512, 100.0, ttft_ms=50), row(1024, 101.1, ttft_ms=500)) == (1024, "objective", 512)


def test_within_the_indifference_p99_ttft_decides_then_p99_tbt_then_bubbles_then_size() -> None:
    slow_start = row(1024, 100.9, ttft_ms=106.0, tbt_ms=5.0, bubble=0.0)
    assert decide(row(512, 100.0, ttft_ms=100.0), slow_start) == (512, "ttft_p99", 1024)
    # 4% of TTFT tells nothing, so P99 TBT decides, of which 6% does.
    assert decide(
        row(512, 100.0, ttft_ms=100.0, tbt_ms=10.0, bubble=0.0), row(1024, 100.0, ttft_ms=104.0, tbt_ms=9.4)
    ) == (1024, "tbt_p99", 512)
    assert decide(
        row(512, 100.0, ttft_ms=100.0, tbt_ms=10.0, bubble=0.2), row(1024, 100.0, ttft_ms=104.0, tbt_ms=9.6, bubble=0.1)
    ) == (1024, "bubble_fraction", 512)
    assert decide(row(512, 100.0, ttft_ms=100.0, bubble=0.1), row(1024, 100.5, ttft_ms=100.0, bubble=0.1)) == (
        512,
        "smaller_budget",
        1024,
    )


def test_a_budget_without_company_is_said_to_be_alone() -> None:
    assert decide(row(512, 100.0), row(1024, 200.0, feasible=False)) == (512, "only_one", None)


def test_the_decision_has_the_figures_of_both_sides() -> None:
    choice = INDIFFERENT.choose(
        [contender(512, row(512, 100.0, ttft_ms=50.0)), contender(768, row(768, 100, ttft_ms=60.0))]
    )
    made = choice.decision
    assert made is not None
    assert (made.metric, made.chosen, made.other, made.group) == ("ttft_p99_ms", 50.0, 60.0, (512, 768))
