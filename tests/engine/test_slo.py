"""SLO words, the reference decode iteration, and stopping a run that has lost its SLO."""

from __future__ import annotations

import numpy as np
import pytest
from fake_executor import FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import (
    SLO,
    Engine,
    EngineConfig,
    Progress,
    ReferenceDecode,
    Request,
    Workload,
    preset_workload,
    reference_decode,
    resolve_slo,
    sound_stop,
    tbt_gaps,
)

REFERENCE = ReferenceDecode(duration_s=0.02, spread_s=0.001, num_seqs=32, context_tokens=4096, note="")


@pytest.mark.parametrize(
    ("text", "name", "tbt_s"),
    [
        ("strict", "strict", 0.1),
        ("Relaxed", "relaxed", 0.5),
        ("20ms", "20ms", 0.02),
        ("0.1s", "0.1s", 0.1),
        ("100us", "100us", 1e-4),
        (" 1.5 ms ", "1.5ms", 1.5e-3),
        (".5s", ".5s", 0.5),
    ],
)
def test_slo_words(text: str, name: str, tbt_s: float) -> None:
    slo = resolve_slo(text, REFERENCE)
    assert slo.name == name
    assert slo.tbt_s == pytest.approx(tbt_s)
    assert (slo.quantile, slo.max_scheduling_delay_s) == (0.99, 2.0)


@pytest.mark.parametrize("text", ["", "fast", "20", "-5ms", "0ms", "5min", "nan ms", "1e3ms", "strict5", "٣ms"])
def test_bad_slo_text_names_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match="must be strict, relaxed, or a positive duration such as 20ms"):
        resolve_slo(text, REFERENCE)


def test_a_multiple_needs_the_reference() -> None:
    with pytest.raises(ValueError, match="tbt_slo='strict': is a multiple of the reference decode iteration"):
        resolve_slo("strict")
    assert resolve_slo("20ms").tbt_s == 0.02


def test_the_reference_is_32_decodes_at_4096() -> None:
    executor = FakeExecutor(lambda iteration, batch: 0.01 if iteration >= 3 else 5.0, default_blocks=1 << 20)
    reference = reference_decode(executor, EngineConfig(max_model_len=8192, max_num_seqs=4))
    assert (reference.num_seqs, reference.context_tokens) == (32, 4096)
    assert reference.duration_s == 0.01, "the warm-up iterations are left out"
    assert reference.spread_s == 0.0
    assert executor.batches == [(list(range(32)), {}, 0)] * 12
    assert executor.kv.num_blocks == 32 * 256, "no more cache than it needs"
    assert "nearest" not in reference.note


def test_the_reference_is_a_median_with_its_spread() -> None:
    executor = FakeExecutor(lambda iteration, batch: [1.0, 3.0, 2.0, 9.0, 2.5][iteration])
    reference = reference_decode(executor, EngineConfig(max_model_len=64), num_repeats=5, num_warmup=0)
    assert (reference.duration_s, reference.spread_s) == (2.5, 8.0)


@pytest.mark.parametrize(
    ("max_position", "max_model_len", "num_kv_blocks", "expected", "reason"),
    [
        (1024, 8192, None, (32, 1024), "the model takes at most 1024"),
        (8192, 2048, None, (32, 2048), "max_model_len is 2048"),
        (8192, 8192, 320, (32, 160), "the KV cache has 320 blocks of 16"),
        (8192, 8192, 350, (32, 160), "the KV cache has 350 blocks of 16"),
        (8192, 8192, 5, (5, 16), "the KV cache has 5 blocks of 16"),
        (8192, 100, 300, (32, 100), "max_model_len is 100"),
    ],
)
def test_the_nearest_reference_that_fits(
    max_position: int, max_model_len: int, num_kv_blocks: int | None, expected: tuple[int, int], reason: str
) -> None:
    executor = FakeExecutor(max_position=max_position, default_blocks=1 << 20)
    config = EngineConfig(max_model_len=max_model_len, num_kv_blocks=num_kv_blocks)
    reference = reference_decode(executor, config)
    assert (reference.num_seqs, reference.context_tokens) == expected
    assert reason in reference.note
    assert "the nearest to 32 decodes at 4096 tokens of context that fits" in reference.note


def test_the_reference_shrinks_to_the_memory_that_there_is() -> None:
    executor = FakeExecutor(default_blocks=640)
    reference = reference_decode(executor, EngineConfig(max_model_len=4096))
    assert (reference.num_seqs, reference.context_tokens) == (32, 320)


def test_blocks_of_one_token() -> None:
    config = EngineConfig(block_size=1, num_kv_blocks=9, max_model_len=64)
    reference = reference_decode(FakeExecutor(), config)
    assert (reference.num_seqs, reference.context_tokens) == (4, 2)
    with pytest.raises(ValueError, match="num_kv_blocks=1: cannot hold one decode"):
        reference_decode(FakeExecutor(), EngineConfig(block_size=1, num_kv_blocks=1, max_model_len=64))


def test_repeats_are_checked() -> None:
    with pytest.raises(ValueError, match="num_repeats=0: must be at least 1"):
        reference_decode(FakeExecutor(), EngineConfig(), num_repeats=0)


def test_a_measured_reference_takes_the_host_clock() -> None:
    executor = FakeExecutor(lambda iteration, batch: 0.0, virtual_time=False)
    reference = reference_decode(executor, EngineConfig(max_model_len=64))
    assert reference.duration_s > 0.0


def workload_of(num_gaps: int) -> Workload:
    request = Request(arrival_s=0.0, prompt_tokens=1, output_tokens=num_gaps + 1)
    return Workload(name="gaps", requests=(request,))


@given(
    st.lists(st.floats(0.001, 0.1), min_size=1, max_size=300),
    st.floats(0.001, 0.1),
    st.sampled_from([0.5, 0.9, 0.99, 0.999, 1.0]),
    st.integers(1, 7),
)
@settings(max_examples=300, deadline=None)
def test_never_stops_a_run_that_meets_its_slo(gaps_s: list[float], limit_s: float, quantile: float, chunk: int) -> None:
    """And stops every run whose quantile lies at a gap over the limit, not between two."""
    slo = SLO(name="random", tbt_s=limit_s, quantile=quantile)
    monitor = sound_stop(slo, workload_of(len(gaps_s)), EngineConfig())
    stopped = None
    for start in range(0, len(gaps_s), chunk):
        stopped = monitor(Progress(now_s=0.0, num_finished=0, num_requests=1, gaps_s=gaps_s[start : start + chunk]))
        if stopped:
            break
    lost = np.quantile(gaps_s, quantile) > limit_s
    assert not stopped or lost
    if np.quantile(gaps_s, quantile, method="lower") > limit_s:
        assert stopped


def test_it_stops_as_soon_as_it_is_certain() -> None:
    """1,000 gaps: position 989.01, so 11 gaps over the limit are needed, and 10 are not enough."""
    monitor = sound_stop(SLO(name="strict", tbt_s=0.02), workload_of(1000), EngineConfig())

    def tell(*gaps_s: float) -> str | None:
        return monitor(Progress(now_s=0.0, num_finished=0, num_requests=1, gaps_s=list(gaps_s)))

    assert tell(*[0.03] * 10, *[0.02] * 50) is None
    assert tell(0.021) == "P99 TBT is over 20 ms: 11 of 1,000 gaps are"


def test_requests_that_are_rejected_have_no_gaps() -> None:
    requests = tuple(Request(arrival_s=0.0, prompt_tokens=prompt, output_tokens=11) for prompt in (10, 10_000, 10))
    monitor = sound_stop(
        SLO(name="half", tbt_s=0.01, quantile=0.5), Workload(name="w", requests=requests), EngineConfig()
    )
    reason = monitor(Progress(now_s=0.0, num_finished=0, num_requests=3, gaps_s=[0.02] * 12))
    assert reason is not None
    assert reason.endswith("12 of 20 gaps are")


def test_no_gaps_no_stop() -> None:
    load = preset_workload("fixed:64:1", 4)
    config = EngineConfig(max_num_seqs=4)
    record = Engine(FakeExecutor()).run(load, config, monitor=sound_stop(SLO(name="a", tbt_s=1e-9), load, config))
    assert record.stopped is None


@pytest.mark.parametrize("budget", [8, 32, 256])
def test_on_the_engine_the_whole_run_agrees(budget: int) -> None:
    load = preset_workload("azure-conv", 40, max_model_len=400)
    config = EngineConfig(max_num_seqs=8, token_budget=budget, max_model_len=400)
    whole_s = tbt_gaps(Engine(FakeExecutor()).run(load, config))
    for limit_s in (1.0e-3, 1.15e-3, 1.3e-3, 2e-3, 4e-3):
        slo = SLO(name="x", tbt_s=limit_s)
        stopped = Engine(FakeExecutor()).run(load, config, monitor=sound_stop(slo, load, config)).stopped
        if stopped is not None:
            assert np.quantile(whole_s, 0.99) > limit_s
    tight = SLO(name="tight", tbt_s=1e-4)
    record = Engine(FakeExecutor()).run(load, config, monitor=sound_stop(tight, load, config))
    assert record.stopped is not None
    assert len(record.token_s) < load.num_output_tokens / 2


def test_a_queue_that_has_lost_its_median_stops_the_run() -> None:
    """Two of three requests have waited 3 s where 2 s are allowed: the median is over, whatever the third does."""
    requests = tuple(Request(arrival_s=float(second), prompt_tokens=8, output_tokens=2) for second in range(3))
    monitor = sound_stop(
        SLO(name="test", tbt_s=1.0), Workload(name="three", requests=requests), EngineConfig(token_budget=32)
    )

    def told(delays_s: list[float]) -> str | None:
        return monitor(Progress(now_s=9.0, num_finished=0, num_requests=3, gaps_s=[], delays_s=delays_s))

    assert told([3.0]) is None
    reason = told([3.0])
    assert reason is not None
    assert "P50 scheduling delay is over 2000 ms: 2 of 3 scheduling delays are" in reason
