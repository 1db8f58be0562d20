"""A saved run folder, read and checked: the only thing the report knows about a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .answer import Answer, parse_answer
from .cost_curves import CostCurves, parse_cost_curves
from .json_object import JsonObject
from .staircase import TokenStaircase, parse_staircase

REQUIRED_FILES = ("recommendation.json", "environment.json", "trials.parquet")
TEXT_COLUMNS = ("run", "role", "state", "reason", "kind", "policy", "started_at")
#: Parts of ``bubble_fraction``, by cause; like it only there where a pipeline ran.
BUBBLE_COLUMNS = tuple(
    f"bubble_{cause}"
    for cause in ("length_difference", "prefill_after_decode", "stage_imbalance", "transfer", "empty_slot")
)
METRIC_COLUMNS = (
    *(f"tbt_{level}_ms" for level in ("p50", "p90", "p99", "p999", "max")),
    "tbt_count",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "scheduling_delay_p50_ms",
    "capacity_qps",
    "capacity_at_most_qps",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "iteration_cv",
    "bubble_fraction_2",
    "bubble_fraction_4",
    "bubble_fraction_8",
    "bubble_fraction",
    *BUBBLE_COLUMNS,
)
#: What the latency model expected of a run before it started; NaN where it was not asked.
PREDICTED_COLUMNS = ("predicted_tbt_p99_ms", "predicted_total_tokens_per_s")
ITERATION_COLUMNS = ("run", "start_s", "duration_s", "num_decodes", "num_prefill_tokens")
#: Of runs that had a pipeline: lists by stage, and the idle seconds before the iteration, by cause.
STAGE_COLUMNS = ("stage_start_s", "stage_end_s", *(f"{column}_s" for column in BUBBLE_COLUMNS))
#: Levels of ``tbt_quantiles_ms``: 0, 0.01 … 1.00.
NUM_QUANTILES = 101


@dataclass(frozen=True, kw_only=True)
class TokenTimes:
    """When every token of a run came: request ``i`` owns ``times_s[offsets[i]:offsets[i + 1]]``, ascending."""

    times_s: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.int64]

    def of(self, index: int) -> npt.NDArray[np.float64]:
        """Token times (seconds) of the request in row ``index``."""
        return self.times_s[self.offsets[index] : self.offsets[index + 1]]

    def gaps_ms(self, begin_s: float, end_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Every time between two tokens of one request inside begin_s…end_s, ms, and the row of its request."""
        inside = np.flatnonzero((self.times_s >= begin_s) & (self.times_s <= end_s))
        owner = np.searchsorted(self.offsets, inside, side="right") - 1
        keep = owner[1:] == owner[:-1]
        return 1e3 * np.diff(self.times_s[inside])[keep], owner[1:][keep]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What the report draws from.

    ``trials`` has one row an engine run, with every column the report uses present (NaN where a run has none).
    ``importance`` is metric → parameter → share, empty where the study had too few trials. ``iterations`` and
    ``tokens`` hold the policy runs only, by run id; both are empty where the folder has none.
    """

    path: Path
    answer: Answer
    environment: JsonObject
    profile: JsonObject | None
    staircase: TokenStaircase | None
    curves: CostCurves | None
    disaggregation: JsonObject | None
    importance: Mapping[str, Mapping[str, float]]
    trials: pd.DataFrame
    iterations: Mapping[str, pd.DataFrame]
    tokens: Mapping[str, TokenTimes]

    @property
    def search(self) -> pd.DataFrame:
        """The trials of the study and the repeats of its contenders; policy runs left out."""
        return self.trials[self.trials["role"].isin(["search", "repeat"])]

    @property
    def policies(self) -> pd.DataFrame:
        """Complete runs of the policies on the same requests, the first of each policy."""
        rows = self.trials[(self.trials["role"] == "policy") & (self.trials["state"] == "complete")]
        return rows.drop_duplicates("policy")

    @property
    def candidates(self) -> dict[int, str]:
        """The budgets that the study could choose from, ascending, with their kinds; unlimited left out."""
        found = {}
        for item in self.profile.children("candidates") if self.profile else ():
            budget = item.number("token_budget")
            if budget is not None:
                found[int(budget)] = item.text("kind", "")
        return dict(sorted(found.items()))

    @property
    def searched_seqs(self) -> bool:
        """Whether the study searched ``max_num_seqs`` too."""
        return bool(self.trials["max_num_seqs"].notna().any())

    @property
    def has_capacity(self) -> bool:
        """Whether the study maximised capacity and any run says what a budget serves."""
        columns = self.trials[["capacity_qps", "capacity_at_most_qps"]]
        return self.answer.objective == "capacity" and bool(columns.notna().any(axis=None))

    @property
    def has_predictions(self) -> bool:
        """Whether any run carries a prediction."""
        return bool(self.trials[list(PREDICTED_COLUMNS)].notna().any(axis=None))


def read_run_folder(path: Path, *, records: bool = True) -> RunFolder:
    """The run folder at ``path``, without iterations and tokens where ``records`` is false.

    Raises ValueError naming the file that is missing or wrong.
    """
    if not path.is_dir():
        raise ValueError(f"run folder {path}: {'is a file, not a directory' if path.exists() else 'no such directory'}")
    missing = [name for name in REQUIRED_FILES if not (path / name).is_file()]
    if missing:
        raise ValueError(
            f"run folder {path}: {', '.join(missing)} missing; a run folder has {', '.join(REQUIRED_FILES)}"
        )
    trials = _read_trials(path / "trials.parquet")
    policy_rows = trials[(trials["role"] == "policy") & (trials["state"] == "complete")]
    runs = [str(run) for run in policy_rows["run"]] if records else []
    iterations = _read_iterations(path / "iterations.parquet", runs)
    profile, tiles, curves = path / "profile.json", path / "tiles.json", path / "cost_curves.json"
    disaggregation = path / "disaggregation.json"
    return RunFolder(
        path=path,
        answer=parse_answer(JsonObject.read(path / "recommendation.json")),
        environment=JsonObject.read(path / "environment.json"),
        profile=JsonObject.read(profile) if profile.is_file() else None,
        staircase=parse_staircase(JsonObject.read(tiles)) if tiles.is_file() else None,
        curves=parse_cost_curves(JsonObject.read(curves)) if curves.is_file() else None,
        disaggregation=JsonObject.read(disaggregation) if disaggregation.is_file() else None,
        importance=_read_importance(path / "importance.json"),
        trials=trials,
        iterations=iterations,
        tokens=_read_tokens(path / "requests.parquet", runs, iterations),
    )


def _read_trials(path: Path) -> pd.DataFrame:
    table = _read_table(path, required=("run", "role", "state", "token_budget", "kind"))
    columns = set(table.column_names)
    frame: pd.DataFrame = table.to_pandas()
    for name in TEXT_COLUMNS:
        values = frame[name] if name in columns else pd.Series(index=frame.index, dtype=object)
        frame[name] = values.astype(object).where(values.notna(), "")
    for name in (*METRIC_COLUMNS, *PREDICTED_COLUMNS, "token_budget", "max_num_seqs", "edge_tokens", "elapsed_s"):
        values = frame[name] if name in columns else pd.Series(np.nan, index=frame.index)
        frame[name] = pd.to_numeric(values, errors="coerce").astype(float)
    for name in ("feasible", "tbt_quantiles_ms"):
        if name not in columns:
            frame[name] = pd.Series(index=frame.index, dtype=object)
    frame["feasible"] = [_flag(value) for value in frame["feasible"].astype(object)]
    frame["feasible"] = frame["feasible"].astype(object).where(frame["feasible"].notna(), None)
    return frame.reset_index(drop=True)


def _read_importance(path: Path) -> dict[str, dict[str, float]]:
    """Metric → parameter → importance; empty without the file."""
    if not path.is_file():
        return {}
    metrics = JsonObject.read(path).child("metrics")
    return {name: {key: metrics.child(name).need(key) for key in metrics.child(name).values} for name in metrics.values}


def _flag(value: object) -> bool | None:
    return bool(value) if isinstance(value, bool | np.bool_) else None


def _read_iterations(path: Path, runs: Sequence[str]) -> dict[str, pd.DataFrame]:
    if not runs or not path.exists():
        return {}
    stored = set(_columns_of(path))
    columns = (*ITERATION_COLUMNS, *(name for name in STAGE_COLUMNS if name in stored))
    table = _read_table(path, required=ITERATION_COLUMNS, columns=columns, runs=runs)
    empty = [name for name in STAGE_COLUMNS if name in table.column_names and table[name].null_count == len(table)]
    frame: pd.DataFrame = table.drop_columns(empty).to_pandas()
    return {str(run): rows.reset_index(drop=True) for run, rows in frame.groupby("run", sort=False)}


def _read_tokens(path: Path, runs: Sequence[str], iterations: Mapping[str, pd.DataFrame]) -> dict[str, TokenTimes]:
    """Token times of ``runs``: as the file has them, or the ends of the iterations that it numbers."""
    if not runs or not path.exists():
        return {}
    stored = set(_columns_of(path))
    wanted = [name for name in ("token_iteration", "token_s") if name in stored] or ["token_s"]
    table = _read_table(path, required=("run", *wanted), columns=("run", *wanted), runs=runs)
    tokens = {}
    for run in runs:
        rows = table.filter(pc.equal(table["run"], run))
        column = next((rows[name] for name in wanted if rows[name].null_count < len(rows)), None)
        if column is None:
            continue
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        values = pc.list_flatten(column).to_numpy()
        if pa.types.is_integer(column.type.value_type):
            own = iterations.get(run)
            if own is None:
                raise ValueError(f"iterations.parquet in {path.parent}: {run} missing, whose tokens {path.name} has")
            if len(values) and not (0 <= values.min() <= values.max() < len(own)):
                raise ValueError(f"{path.name} in {path.parent}: token_iteration of {run} is not in iterations.parquet")
            values = (own["start_s"] + own["duration_s"]).to_numpy(dtype=float)[values]
        tokens[run] = TokenTimes(
            times_s=values.astype(np.float64, copy=False), offsets=np.concatenate([[0], np.cumsum(lengths)])
        )
    return tokens


def _read_table(
    path: Path, *, required: Sequence[str], columns: Sequence[str] | None = None, runs: Sequence[str] | None = None
) -> pa.Table:
    """The parquet file, only ``columns`` and ``runs`` of it where given."""
    names = _columns_of(path)
    absent = [name for name in required if name not in names]
    if absent:
        raise ValueError(f"{path.name} in {path.parent}: column {', '.join(absent)} missing")
    try:
        return pq.read_table(
            path,
            columns=list(columns) if columns else None,
            filters=[("run", "in", list(runs))] if runs is not None else None,
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error


def _columns_of(path: Path) -> list[str]:
    try:
        names: list[str] = pq.read_schema(path).names
    except (pa.ArrowInvalid, OSError) as error:
        raise _unreadable(path, error) from error
    return names


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path.name} in {path.parent}: not a readable parquet file ({error})")
