"""How sure a recommendation is: what the rounds of repeats showed, and whether the device held still meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.metrics import SLO
from ..scoring.comparison import PAIRED_TEST
from ..scoring.selection import Choice, Contender, Judge
from .recommendation import Confidence

#: Drift over the study, in percent, above which the confidence is no longer high, and above which it is low.
DRIFT_PCT = (5.0, 15.0)


def state_confidence(
    judge: Judge, choice: Choice, contenders: Sequence[Contender], slo: SLO, drift_pct: float | None, note: str = ""
) -> Confidence:
    """The confidence of ``choice``; ``note`` is what else there is to say, such as that time ran out."""
    num_rounds = max((len(contender.rows) for contender in contenders), default=0)
    best = choice.best
    if best is None:
        return Confidence(level="low", statement="Every run failed.", drift_pct=drift_pct, num_rounds=0)
    sentences = [_margin(best, slo)]
    if judge.exact:
        level = "medium"
        sentences.append(
            "The device is modelled: a repeat gives the same again, so the order of the budgets is certain on these "
            "tables, and how well they stand for the device is not measured here."
        )
    else:
        contested = judge.contested(contenders) if choice.status != "infeasible" else []
        sentences.append(_rivals(judge, choice, contenders, num_rounds))
        drift = abs(drift_pct or 0.0)
        doubts = [drift > DRIFT_PCT[0], bool(contested), num_rounds < 2 or drift_pct is None]
        level = "low" if sum(doubts) > 1 or drift > DRIFT_PCT[1] else "medium" if any(doubts) else "high"
        if drift_pct is not None:
            sentences.append(
                f"The first budget of the search, run again at the end, did {drift_pct:+.1f}%: the device's drift."
            )
    statement = " ".join(sentence for sentence in (*sentences, note) if sentence)
    return Confidence(level=level, statement=statement, drift_pct=drift_pct, num_rounds=num_rounds)


def _margin(best: Contender, slo: SLO) -> str:
    tbt = best.spread("tbt_p99_ms")
    if tbt is None:
        return ""
    share = tbt.high / (slo.tbt_s * 1e3) - 1.0
    worst = "P99 TBT" if tbt.repeats < 2 else "P99 TBT at its worst round"
    return f"{worst} is {abs(share):.0%} {'over' if share > 0.0 else 'under'} the SLO."


def _rivals(judge: Judge, choice: Choice, contenders: Sequence[Contender], num_rounds: int) -> str:
    """What the test says of the best other contender that meets the SLO."""
    best = choice.best
    others = [one for one in contenders if one is not best and one.rows and one.feasible is not False]
    rival = judge.leader(others)
    if best is None or rival is None:
        return f"No other contender met the SLO in {num_rounds} interleaved rounds."
    found = judge.compare(best, rival)
    budget = rival.candidate
    words = {
        "higher": f"better than {budget}",
        "lower": f"behind {budget}, which is less steady,",
        "tie": f"a tie with {budget}",
        "open": f"not told apart from {budget}",
    }[found.outcome]
    return (
        f"Over {found.num_pairs} interleaved rounds its {judge.objective.noun} is {words}: {found.difference:+.1%}, "
        f"95% confidence {found.low:+.1%} to {found.high:+.1%} ({PAIRED_TEST})."
    )
