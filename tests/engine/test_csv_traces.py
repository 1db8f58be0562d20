"""CSV traces: Azure, BurstGPT and length files, by column name, with every fault named by file, line and column."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tilebudget.engine import Workload, load_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Callable: text to the path of a CSV file that holds it."""

    def make(text: str) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(text.encode())
        return path

    return make


def rows(workload: Workload) -> list[tuple[float, int, int]]:
    return [(request.arrival_s, request.prompt_tokens, request.output_tokens) for request in workload.requests]


SEVEN_DIGITS = (
    AZURE
    + "2023-11-16 18:15:50.9951690,396,109\n"
    + "2023-11-16 18:15:46.6805900,374,44\n"
    + "2023-11-16 18:15:50.9951690,879,55\n"
    + "2023-11-17 00:00:00,91,16\n"
)

FAILED_ROWS = (
    BURST
    + "5,ChatGPT,472,18,490,Conversation log\n"
    + "45,ChatGPT,1087,230,1317,Conversation log\n"
    + "118,GPT-4,417,0,417,API log\n"
    + "86400,GPT-4,1360,276,1636,API log\n"
).replace("\n", "\r\n")


def check_case_2(workload: Workload) -> None:
    assert rows(workload) == [(0.0, 472, 18), (40.0, 1087, 230), (86395.0, 1360, 276)]
    assert workload.num_dropped == 1
    assert workload.notes == ("1 rows dropped: no prompt or no output tokens",)


def check_case_3(workload: Workload) -> None:
    expected = [(0.0, 374, 44), (4.314579, 396, 109), (4.314579, 879, 55), (20653.31941, 91, 16)]
    assert [row[1:] for row in rows(workload)] == [row[1:] for row in expected]
    assert [row[0] for row in rows(workload)] == pytest.approx([row[0] for row in expected], abs=1e-9)
    assert workload.requests[1].arrival_s == workload.requests[2].arrival_s
    assert workload.notes == ("rows were out of order of time in 1 places: sorted",)


def test_case_2_crlf_and_failed_requests(write: Write) -> None:
    check_case_2(load_trace(write(FAILED_ROWS)))


def test_case_3_seven_digits_out_of_order_and_duplicate(write: Write) -> None:
    check_case_3(load_trace(write(SEVEN_DIGITS)))


def test_cases_2_and_3_on_the_files(shared: Callable[[str], Path]) -> None:
    check_case_2(load_trace(shared("cases/burstgpt_crlf_failed_rows.csv")))
    check_case_3(load_trace(shared("cases/azure_seven_digits.csv")))


def test_the_seventh_digit_counts(write: Write) -> None:
    workload = load_trace(write(AZURE + "2023-11-16 18:15:46.6805900,1,1\n2023-11-16 18:15:46.6805901,1,1\n"))
    assert workload.requests[1].arrival_s == pytest.approx(1e-7)


def test_azure_2024_has_a_time_zone(write: Write) -> None:
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
    assert rows(load_trace(write(text))) == [(0.0, 2162, 5), (pytest.approx(0.007405), 2399, 6)]


def test_burstgpt_with_eight_columns(write: Write) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "12.5,,3.25,ChatGPT,10,20,30,Conversation log\n"
        "13,s1,,GPT-4,11,21,32,API log\n"
    )
    assert rows(load_trace(write(text))) == [(0.0, 10, 20), (0.5, 11, 21)]


def test_lengths_without_a_clock(write: Write) -> None:
    workload = load_trace(
        write("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n100,20,120,5.0\n50,5,55,10\n")
    )
    assert rows(workload) == [(0.0, 100, 20), (0.0, 50, 5)]
    assert not workload.has_arrivals
    assert "no arrival times" in workload.notes[0]


def test_lengths_with_a_clock(write: Write) -> None:
    workload = load_trace(write("arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,100,20\n2.0,50,5\n"))
    assert rows(workload) == [(0.0, 50, 5), (0.5, 100, 20)]
    assert workload.has_arrivals


def test_any_order_of_columns_a_mark_and_blank_lines(write: Write) -> None:
    header = "\ufeffGeneratedTokens, contexttokens ,TIMESTAMP\n"
    text = header + "44, 374,2023-11-16 18:15:46\n\n  \n9,7,2023-11-16 18:15:47\n\n"
    assert rows(load_trace(write(text))) == [(0.0, 374, 44), (1.0, 7, 9)]


def test_whole_numbers_written_as_floats(write: Write) -> None:
    assert rows(load_trace(write("num_prefill_tokens,num_decode_tokens\n100.0,20.\n"))) == [(0.0, 100, 20)]


def test_the_clock_starts_at_the_first_request_that_is_served(write: Write) -> None:
    assert rows(load_trace(write(BURST + "5,x,10,0,10,l\n7,x,10,3,13,l\n9,x,1,1,2,l\n"))) == [(0.0, 10, 3), (2.0, 1, 1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:15:47,12.5,3", "ContextTokens='12.5': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,-1,3", "ContextTokens='-1': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,12,many", "GeneratedTokens='many': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,12,274 61", "GeneratedTokens='274 61': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,12,", "GeneratedTokens='': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,1_000,3", "ContextTokens='1_000': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,1e3,3", "ContextTokens='1e3': must be a whole number, 0 or more"),
        ("2023-11-16 18:15:47,nan,3", "ContextTokens='nan': must be a whole number, 0 or more"),
        ("yesterday,12,3", "TIMESTAMP='yesterday': must be a date and time"),
        ("now,12,3", "TIMESTAMP='now': must be a date and time"),
        (",12,3", "TIMESTAMP='': must be a date and time"),
        ("2023-11-31 18:15:47,12,3", "TIMESTAMP='2023-11-31 18:15:47': must be a date and time"),
        ("2023-11-16 18:15:47,12", "has 2 fields, the header has 3"),
        ("2023-11-16 18:15:47,12,3,4", "has 4 fields, the header has 3"),
    ],
)
def test_a_bad_field_is_named_with_its_line(write: Write, line: str, message: str) -> None:
    path = write(AZURE + "2023-11-16 18:15:46,374,44\n\n" + line + "\n2023-11-16 18:15:48,1,1\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 4: {message}")):
        load_trace(path)


@pytest.mark.parametrize("stamp", ["soon", "", "nan", "inf"])
def test_a_bad_number_of_seconds(write: Write, stamp: str) -> None:
    path = write(BURST + f"5,x,1,1,2,l\n{stamp},x,1,1,2,l\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 3: Timestamp={stamp!r}: must be a")):
        load_trace(path)


def test_unknown_columns_list_what_is_there_and_what_is_needed(write: Write) -> None:
    with pytest.raises(ValueError, match=r"line 1: found the columns a, b; .*azure: TIMESTAMP, ContextTokens, Gen"):
        load_trace(write("a,b\n1,2\n"))


def test_a_missing_column_of_the_format_asked_for(write: Write) -> None:
    with pytest.raises(ValueError, match="missing GeneratedTokens, found TIMESTAMP, ContextTokens"):
        load_trace(write("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n"), format="azure")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("\n \n", "is empty"), (AZURE, "has a header and no rows")],
)
def test_empty_files(write: Write, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_trace(write(text))


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe,1,1\n")
    with pytest.raises(ValueError, match=r"trace\.csv: not a CSV file in UTF-8"):
        load_trace(path)


@pytest.mark.parametrize(
    ("name", "num_rows", "prompt_tokens", "output_tokens", "last_s"),
    [
        # Sums by an independent awk over the files; the last stamp minus the first.
        ("azure_llm_2023_conv.csv", 19366, 22361870, 4088665, 3501.721937),
        ("azure_llm_2023_code.csv", 8819, 18059974, 245896, 3435.948056),
    ],
)
def test_the_real_traces(
    shared: Callable[[str], Path], name: str, num_rows: int, prompt_tokens: int, output_tokens: int, last_s: float
) -> None:
    workload = load_trace(shared(f"data/{name}"))
    assert (len(workload.requests), workload.num_dropped, workload.num_clipped) == (num_rows, 0, 0)
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (prompt_tokens, output_tokens)
    assert workload.requests[-1].arrival_s == pytest.approx(last_s, abs=1e-6)
