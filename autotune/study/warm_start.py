"""What the latency model expects of every budget, asked before a study on a real device begins.

A short profile of the device gives a latency table; the same engine over that table predicts each budget's run. The
best predictions are run first, and every trial keeps its prediction beside what it measured. It never replaces a run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from time import perf_counter

from ...engine import Engine, Executor, PipelinedExecutor
from ...engine.model.config import ModelConfig
from ...engine.model.hf_config import resolve_model
from ...engine.profiling.profile import Profile, measure_profile, modelled_as
from ...engine.server.engine import ServerEngine
from ...kernels.latency.file import table_from_json, table_to_json
from ...kernels.latency.table import LatencyTable
from ..problem import Problem
from ..run_folder.run_folder import RunFolder
from ..scoring.objective import THROUGHPUT
from ..scoring.prediction import Prediction
from ..scoring.selection import promising
from .space import KINDS, WHOLE_PROMPT, Candidate

_log = logging.getLogger(__name__)

LATENCY_FILE = "latency.json"

#: The profile takes this share of the time that the study is expected to take, within these bounds.
PROFILE_SHARE = 0.15
PROFILE_BOUNDS_S = (1.0, 10.0)

#: Predicting stops after this long; budgets that are left then have no prediction.
PREDICT_LIMIT_S = 30.0

NUM_SUGGESTIONS = 3


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Predictions by budget, the latency table that they are from, the budgets to run first, and what is to be said of
    how they came about."""

    predictions: Mapping[int, Prediction]
    table: LatencyTable | None = None
    suggestions: tuple[int, ...] = ()
    note: str = ""


def warm_start(problem: Problem, folder: RunFolder, *, resumed: bool) -> WarmStart:
    """Ask the model, or read what it said when this study began; a study that began without stays without.

    A profile that fails is logged and noted, and the study goes on without predictions.
    """
    if resumed:
        return _stored(folder)
    executor = problem.executor
    if isinstance(executor, ServerEngine):
        return WarmStart(predictions={}, note="no predictions: a server's iterations are not ours to profile")
    if isinstance(executor, PipelinedExecutor):
        return WarmStart(predictions={}, note="no predictions: the iterations of a pipeline are not profiled")
    began = perf_counter()
    try:
        profile = quick_profile(problem, executor)
        table, predictions = profile.table, predict(profile, problem)
    except Exception as error:  # whatever it is, the study itself needs none of this
        note = f"no predictions: the profile failed ({type(error).__name__}: {error})"
        _log.warning("warm start: %s", note)
        return WarmStart(predictions={}, note=note)
    note = f"{len(predictions)} of {len(problem.space.candidates)} budgets predicted in {perf_counter() - began:.1f} s"
    rows = [asdict(prediction) for prediction in predictions.values()]
    folder.write_json(LATENCY_FILE, {**table_to_json(table), "predictions": rows, "predictions_note": note})
    suggestions = suggest(predictions.values())
    return WarmStart(predictions=predictions, table=table, suggestions=suggestions, note=note)


def quick_profile(problem: Problem, executor: Executor) -> Profile:
    """A profile of the study's device for the study's batches, measured in a small share of its time."""
    base, space = problem.engine_config, problem.space
    largest = max(candidate.token_budget for candidate in space.candidates)
    limits = replace(base, token_budget=max(base.max_num_seqs, min(largest, 2 * base.max_model_len)))
    shortest_s, longest_s = PROFILE_BOUNDS_S
    time_limit_s = min(longest_s, max(shortest_s, PROFILE_SHARE * _expected_study_s(problem)))
    return measure_profile(executor, _model(problem), limits, time_limit_s=time_limit_s)


def predict(profile: Profile, problem: Problem) -> dict[int, Prediction]:
    """The modelled run of every candidate, by budget; aligned ones first, as far as ``PREDICT_LIMIT_S`` goes."""
    engine = Engine(modelled_as(profile, _model(problem), seed=problem.config.seed))
    runner = problem.make_runner(engine=engine)
    until_s = perf_counter() + PREDICT_LIMIT_S
    found: dict[int, Prediction] = {}
    for candidate in sorted(problem.space.candidates, key=_precedence):
        if found and perf_counter() > until_s:
            break
        row, _ = runner.run(candidate, run=f"predicted-{candidate.token_budget}", role="predicted")
        if row.state != "complete":
            raise RuntimeError(f"budget {candidate.token_budget}: {row.reason}")
        tbt = row.metrics["tbt_p99_ms"]
        found[candidate.token_budget] = Prediction(
            token_budget=candidate.token_budget,
            tbt_p99_ms=None if tbt is None else float(tbt),
            total_tokens_per_s=row.metric(THROUGHPUT),
            feasible=promising(row),
            score=row.score,
        )
    return found


def suggest(predictions: Iterable[Prediction]) -> tuple[int, ...]:
    """The budgets to run first: the fastest that are expected to hold the SLO; where these are too few, then those that
    miss it by least."""
    order = sorted(
        predictions,
        key=lambda one: (not one.feasible, -one.score if one.feasible else one.tbt_p99_ms or 0.0),
    )
    return tuple(prediction.token_budget for prediction in order[:NUM_SUGGESTIONS])


def _stored(folder: RunFolder) -> WarmStart:
    file = folder.path / LATENCY_FILE
    if not file.exists():
        return WarmStart(predictions={}, note="the study began without predictions")
    try:
        document = json.loads(file.read_text())
        found = [Prediction(**row) for row in document["predictions"]]
        table = table_from_json(document)
        note = str(document["predictions_note"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged ({type(error).__name__}: {error}); use another run folder") from None
    predictions = {one.token_budget: one for one in found}
    return WarmStart(predictions=predictions, table=table, suggestions=suggest(found), note=note)


def _model(problem: Problem) -> ModelConfig:
    return resolve_model(problem.config.model)[0]


def _expected_study_s(problem: Problem) -> float:
    """A guess before anything has run: every output token in a full batch of reference decodes, and prefill as long
    again, for each run of the study."""
    config, reference = problem.config, problem.facts.reference
    assert reference is not None, "only a server's study may have none"
    num_runs = config.num_trials + config.num_contenders * config.repeats
    iterations = 2 * problem.workload.num_output_tokens / config.max_num_seqs
    return num_runs * iterations * reference.duration_s


def _precedence(candidate: Candidate) -> tuple[int, int]:
    kinds = (KINDS[0], WHOLE_PROMPT, *KINDS[1:])
    return kinds.index(candidate.kind), candidate.token_budget
