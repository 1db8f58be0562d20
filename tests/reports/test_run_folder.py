"""A folder that is no run folder is refused by the name of the file that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sample_study import Folder, make_folder
from tilebudget.reports import build_report
from tilebudget.reports.data.run_folder import read_run_folder


@pytest.fixture
def folder() -> Folder:
    return make_folder(policies=False)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: no such directory"):
        build_report(tmp_path / "absent")


@pytest.mark.parametrize("name", ["recommendation.json", "environment.json", "trials.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, folder: Folder, name: str) -> None:
    (folder.write(tmp_path) / name).unlink()
    with pytest.raises(ValueError, match=f"{name} missing"):
        build_report(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("recommendation.json", "environment.json", "trials.parquet"),
        *("profile.json", "iterations.parquet", "requests.parquet"),
    ],
)
def test_a_broken_file_is_named_and_no_page_is_left(tmp_path: Path, name: str) -> None:
    (make_folder(search=False).write(tmp_path) / name).write_bytes(b"\x00 not this")
    with pytest.raises(ValueError, match=f"{name} in .*not "):
        build_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def set_status(folder: Folder) -> None:
    folder.recommendation["status"] = "splendid"


def set_version(folder: Folder) -> None:
    folder.recommendation["schema_version"] = "2.0"


def set_slo(folder: Folder) -> None:
    folder.recommendation["slo"] = {"tbt_p99_ms": "fast"}


def drop_column(folder: Folder) -> None:
    for row in folder.trials:
        del row["state"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_status, "recommendation.json: status must be one of feasible, infeasible, no_data, found 'splendid'"),
        (set_version, "recommendation.json: schema_version must be 1.x, found '2.0'"),
        (set_slo, "recommendation.json: slo.tbt_p99_ms must be a number or null, found 'fast'"),
        (drop_column, "trials.parquet in .*: column state missing"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(
    tmp_path: Path, folder: Folder, change: Callable[[Folder], None], message: str
) -> None:
    change(folder)
    with pytest.raises(ValueError, match=message):
        build_report(folder.write(tmp_path))


def test_iterations_and_requests_may_be_absent(tmp_path: Path) -> None:
    folder = make_folder()
    folder.iterations, folder.requests = [], []
    assert "no timeline" in build_report(folder.write(tmp_path)).read_text(encoding="utf-8")


def test_tokens_without_their_iterations_name_the_file_that_is_missing(tmp_path: Path) -> None:
    make_folder(search=False).write(tmp_path)
    requests = pd.read_parquet(tmp_path / "requests.parquet").rename(columns={"token_s": "token_iteration"})
    requests["token_iteration"] = [[0] for _ in range(len(requests))]
    requests.to_parquet(tmp_path / "requests.parquet")
    (tmp_path / "iterations.parquet").unlink()
    with pytest.raises(ValueError, match=r"iterations.parquet in .*: .* missing, whose tokens requests.parquet has"):
        build_report(tmp_path)


def test_token_times_are_those_of_each_request(tmp_path: Path) -> None:
    folder = make_folder(search=False)
    silent = folder.requests[0]["request"] == 3
    times_s = [
        np.empty(0) if gone else times for gone, times in zip(silent, folder.requests[0]["token_s"], strict=True)
    ]
    folder.requests[0]["token_s"] = pd.Series(times_s, dtype=object)
    read = read_run_folder(folder.write(tmp_path))
    tokens = read.tokens["policy-faster_transformer"]
    for index, times in enumerate(folder.requests[0]["token_s"]):
        np.testing.assert_array_equal(tokens.of(index), times)
    gaps_ms, owners = tokens.gaps_ms(0.0, np.inf)
    expected = [1e3 * np.diff(times) for times in folder.requests[0]["token_s"]]
    np.testing.assert_allclose(gaps_ms, np.concatenate(expected))
    np.testing.assert_array_equal(owners, np.repeat(np.arange(len(expected)), [len(gaps) for gaps in expected]))


def test_only_policy_runs_are_read_from_the_large_files(tmp_path: Path) -> None:
    folder = make_folder()
    folder.iterations.append(folder.iterations[0].assign(run="repeat-128-1"))
    read = read_run_folder(folder.write(tmp_path))
    assert set(read.iterations) == set(read.tokens) == set(read.policies["run"])
    assert isinstance(read.trials, pd.DataFrame)


def test_row_groups_of_other_runs_are_not_read(tmp_path: Path) -> None:
    """Their bytes may be anything: a repeat over a whole trace must cost the report nothing."""
    folder = make_folder()
    path = folder.write(tmp_path)
    whole = read_run_folder(path)
    repeat = folder.requests[0].assign(run="repeat-128-1")
    for name, frames in (("requests", [repeat, *folder.requests]), ("iterations", folder.iterations)):
        file = path / f"{name}.parquet"
        schema = pa.Schema.from_pandas(frames[0], preserve_index=False)
        with pq.ParquetWriter(file, schema) as writer:
            for frame in frames:
                writer.write_table(pa.Table.from_pandas(frame, schema=schema, preserve_index=False))
    file = path / "requests.parquet"
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    column = next(column for column in columns if column.path_in_schema.startswith("token_s"))
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    file.write_bytes(content)
    with pytest.raises(OSError, match="deserialize"):
        pq.read_table(file, columns=["token_s"])
    tokens = read_run_folder(path).tokens
    assert set(tokens) == set(whole.tokens)
    for run, own in tokens.items():
        np.testing.assert_array_equal(own.times_s, whole.tokens[run].times_s)
