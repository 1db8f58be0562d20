"""Synthetic workloads against the figures that they are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tilebudget.engine import PRESETS, Workload, load_trace, preset_workload
from tilebudget.engine.workloads.presets import QUANTILE_LEVELS, Quantiles


def columns(workload: Workload) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array([(request.prompt_tokens, request.output_tokens) for request in workload.requests]).T


@pytest.mark.parametrize(
    ("name", "prompt", "output", "limit"),
    [
        # Sarathi-Serve (OSDI'24), section 5: median and P90. Dropping the long ones moves the prompt's P90 down.
        ("sharegpt", (1730, 5696), (415, 834), 8192),
        ("arxiv", (7059, 12985), (208, 371), 16384),
    ],
)
def test_the_papers_workloads(name: str, prompt: tuple[int, int], output: tuple[int, int], limit: int) -> None:
    drawn = columns(preset_workload(name, 20_000))
    assert np.quantile(drawn[0], 0.5) == pytest.approx(prompt[0], rel=0.08)
    assert prompt[1] * 0.75 < np.quantile(drawn[0], 0.9) <= prompt[1] * 1.02
    assert np.quantile(drawn[1], [0.5, 0.9]) == pytest.approx(output, rel=0.03)
    assert drawn.sum(axis=0).max() <= limit
    assert drawn.min() >= 1


@pytest.mark.parametrize("name", ["azure-conv", "azure-code", "mooncake-conv"])
def test_drawn_quantiles_are_those_of_the_table(name: str) -> None:
    drawn = columns(preset_workload(name, 30_000, seed=2))
    for side, table in zip(drawn, (PRESETS[name].prompt, PRESETS[name].output), strict=True):
        assert isinstance(table, Quantiles)
        shares = [(side <= value).mean() for value in table.values]
        # A value that holds a step of the distribution has more below or at it than its level says.
        assert all(share >= level - 0.012 for share, level in zip(shares, QUANTILE_LEVELS, strict=True))
        below = [(side < value).mean() for value in table.values]
        assert all(share <= level + 0.012 for share, level in zip(below, QUANTILE_LEVELS, strict=True))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-conv", "azure_llm_2023_conv.csv"),
        ("azure-code", "azure_llm_2023_code.csv"),
        ("mooncake-conv", "mooncake_conversation_1000.jsonl"),
    ],
)
def test_the_tables_are_the_quantiles_of_the_files(shared: Callable[[str], Path], name: str, file: str) -> None:
    real = columns(load_trace(shared(f"data/{file}")))
    for side, table in zip(real, (PRESETS[name].prompt, PRESETS[name].output), strict=True):
        assert isinstance(table, Quantiles)
        assert table.values == tuple(np.rint(np.quantile(side, QUANTILE_LEVELS)).astype(int).tolist())


def test_drawn_by_seed_and_a_longer_one_begins_with_the_shorter() -> None:
    for name in PRESETS:
        short, long = preset_workload(name, 40, seed=7), preset_workload(name, 3000, seed=7)
        assert long.requests[:40] == short.requests
        assert preset_workload(name, 40, seed=8).requests != short.requests


def test_a_preset_has_no_clock_and_names_its_source() -> None:
    workload = preset_workload("azure-code", 10, seed=3)
    assert workload.saturated
    assert not workload.has_arrivals
    assert "Azure LLM inference trace 2023, code, 8,819 rows" in workload.source
    assert workload.source.endswith("seed 3")
    assert workload.notes == ()


def test_case_11_equal_requests() -> None:
    workload = preset_workload("fixed:1024:1", 16)
    assert columns(workload).tolist() == [[1024] * 16, [1] * 16]
    assert workload.name == "fixed:1024:1"


def test_long_draws_are_clipped_or_drawn_again() -> None:
    clipped = preset_workload("sharegpt", 200, max_model_len=1024)
    assert columns(clipped).sum(axis=0).max() == 1024
    assert clipped.num_clipped > 100
    redrawn = preset_workload("sharegpt", 200, max_model_len=1024, overlong="drop")
    assert len(redrawn.requests) == 200
    assert columns(redrawn).sum(axis=0).max() <= 1024
    assert redrawn.num_dropped > 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sharegpt4", "workload='sharegpt4': must be one of sharegpt, arxiv, azure-conv"),
        ("fixed:10", "or fixed:PROMPT:OUTPUT"),
        ("fixed:0:5", "workload='fixed:0:5': prompt and output must be at least 1 token"),
        ("fixed:-1:5", "or fixed:PROMPT:OUTPUT"),
    ],
)
def test_bad_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset_workload(name, 3)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="num_requests=0: must be at least 1"):
        preset_workload("arxiv", 0)
    with pytest.raises(ValueError, match=r"max_model_len=3: none of \d+ draws is that short"):
        preset_workload("mooncake-conv", 1, max_model_len=3, overlong="drop")
    with pytest.raises(ValueError, match="no request left of 5 rows"):
        preset_workload("fixed:100:10", 5, max_model_len=64, overlong="drop")
