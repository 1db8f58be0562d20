"""The section on disaggregation: absent without its file, and each limit's winner by name and margin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_study import make_folder
from tilebudget.reports import build_report
from tilebudget.reports.data.run_folder import RunFolder, read_run_folder
from tilebudget.reports.disaggregation import disaggregation_finding, disaggregation_tables, draw_disaggregation

Row = dict[str, object]


def arrangement(name: str, qps: float, *, split: bool) -> Row:
    sides = (1, 3) if split else (None, None)
    row: Row = {"name": name, "num_prefill": sides[0], "num_decode": sides[1], "capacity_qps": qps}
    busy = {"prefill": 0.9, "decode": 0.5} if split else {"both": 0.75}
    figures = {"tbt_p99_ms": 12.5, "ttft_p50_ms": 40.0, "ttft_p99_ms": 90.0, "busy_fractions": busy}
    return row | figures if qps else row


def limit(name: str, tbt_ms: float, replicas_qps: float, split_qps: float) -> Row:
    rows = [
        arrangement("4 replicas, budget 512", replicas_qps, split=False),
        arrangement("4 replicas, budget 1024", replicas_qps / 2, split=False),
        arrangement("1 prefill, 3 decode", split_qps, split=True),
    ]
    return {"name": name, "tbt_p99_ms": tbt_ms, "arrangements": rows}


def read(path: Path, *limits: Row) -> RunFolder:
    folder = make_folder(policies=False).write(path)
    document = {"num_gpus": 4, "num_requests": 2000, "resolution": 0.03, "link": {"bytes_per_s": 3e11}}
    (folder / "disaggregation.json").write_text(json.dumps({**document, "limits": limits}))
    return read_run_folder(folder)


def test_the_winner_of_each_limit(tmp_path: Path) -> None:
    folder = read(
        tmp_path,
        limit("tight", 10.0, 20.0, 25.0),
        limit("strict", 25.0, 30.0, 29.5),
        limit("loose", 50.0, 33.0, 0.0),
        limit("relaxed", 125.0, 60.0, 40.0),
        limit("none", 1.0, 0.0, 0.0),
    )
    assert disaggregation_finding(folder) == (
        "On 4 GPUs: "
        "under 10.0 ms 1 prefill, 3 decode serves 25% more than 4 replicas, budget 512 (25.0 against 20.0 requests/s); "
        "under 25.0 ms 4 replicas, budget 512 and 1 prefill, 3 decode tie (30.0 against 29.5 requests/s); "
        "under 50.0 ms only 4 replicas, budget 512 keeps the limit (33.0 requests/s); "
        "under 125 ms 4 replicas, budget 512 serves 50% more than 1 prefill, 3 decode (60.0 against 40.0 requests/s); "
        "under 1.00 ms neither keeps the limit at any rate."
    )


def test_tables_and_figure_hold_every_arrangement(tmp_path: Path) -> None:
    folder = read(tmp_path, limit("tight", 10.0, 20.0, 25.0), limit("loose", 50.0, 33.0, 0.0))
    tight, loose = disaggregation_tables(folder)
    assert tight.rows[0] == ("4 replicas, budget 512", "20.0", "12.5 ms", "40.0 ms", "90.0 ms", "75%")
    assert tight.rows[2][-1] == "prefill 90%, decode 50%"
    assert tight.marked == 2
    assert loose.rows[2] == ("1 prefill, 3 decode", "none", "–", "–", "–", "–")
    drawing = draw_disaggregation(folder)
    assert drawing is not None
    assert drawing.figure is not None
    assert [list(trace.y) for trace in drawing.figure.data] == [[20.0, 33.0], [25.0, 0.0]]
    assert "300 GB/s" in drawing.note


def test_the_page_has_the_section_only_with_the_file(tmp_path: Path) -> None:
    folder = read(tmp_path, limit("tight", 10.0, 20.0, 25.0))
    title = "Chunked prefill against prefill and decode apart"
    assert title in build_report(folder.path).read_text()
    (folder.path / "disaggregation.json").unlink()
    assert title not in build_report(folder.path).read_text()
    assert draw_disaggregation(read_run_folder(folder.path)) is None


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disaggregation\.json: limits\[0\]\.tbt_p99_ms must be a number or null"):
        disaggregation_finding(read(tmp_path, {"name": "tight", "tbt_p99_ms": "fast", "arrangements": []}))
