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
        metrics={"total_tokens_per_s": speed, "tbt_p99_ms": tbt_ms, VARIANCE: bubble},
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
