"""Prefill and decode apart: by hand on a device of known cost, and what must hold on any workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from fake_executor import FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import Batch, BlockManager, Engine, EngineConfig, Request, StepResult, Workload
from tilebudget.engine.disaggregated import KvTransfer, Split, deal, serve_colocated, serve_disaggregated
from tilebudget.engine.metrics import SLO, Limit
from tilebudget.engine.modelled.pipeline import Link

PREFILL = EngineConfig(policy="vllm_v0", token_budget=64, max_num_seqs=8, max_model_len=256)
DECODE = EngineConfig(policy="sarathi", token_budget=64, max_num_seqs=8, max_model_len=256)
#: A prompt token takes 1 ms to send.
TRANSFER = KvTransfer(bytes_per_token=1, link=Link(bytes_per_s=1000.0))


class Device:
    """Modelled: 1 s an iteration, and 10 ms for each prompt token in it."""

    virtual_time = True
    needs_token_ids = False
    max_position = 4096
    vocab_size = 100

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []

    def describe(self) -> Mapping[str, str | int | float]:
        return {"device": "known"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return 4096

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        return

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append((len(batch.decodes), batch.num_prefill_tokens))
        return StepResult(1.0 + 0.01 * batch.num_prefill_tokens)


def workload(*rows: tuple[float, int, int]) -> Workload:
    requests = [Request(arrival_s=at, prompt_tokens=prompt, output_tokens=output) for at, prompt, output in rows]
    return Workload(name="test", requests=tuple(requests))


def test_one_request_by_hand() -> None:
    """Prefill of 50 tokens ends at 1.5 s, its cache arrives at 1.55 s, and two more tokens come in two decodes."""
    device = Device()
    load = workload((0.0, 50, 3))
    split = Split(num_prefill=1, num_decode=1)
    service = serve_disaggregated(Engine(device), load, split=split, prefill=PREFILL, decode=DECODE, transfer=TRANSFER)
    assert device.batches == [(0, 50), (1, 0), (1, 0)]
    assert service.ttft.max == pytest.approx(1.5)
    assert service.tbt_gaps_s.tolist() == pytest.approx([1.0, 1.05])
    assert service.e2e.max == pytest.approx(3.55)
    assert service.transfer is not None
    assert service.transfer.max == pytest.approx(0.05)
    # Not waited for its prefill, and 1.05 s between its first and second token.
    assert service.delay.max == pytest.approx(1.05)
    assert service.busy_fractions == pytest.approx({"prefill": 1.5 / 3.55, "decode": 2.0 / 3.55})
    assert service.total_tokens_per_s == pytest.approx(53 / 3.55)
    within = SLO(name="within", tbt_s=1.1, max_scheduling_delay_s=1.1, ttft=Limit(limit_s=1.6), e2e=Limit(limit_s=3.6))
    assert service.meets(within)
    for broken in (
        {"tbt_s": 1.04},
        {"max_scheduling_delay_s": 1.04},
        {"ttft": Limit(limit_s=1.4)},
        {"e2e": Limit(limit_s=3.5)},
    ):
        assert not service.meets(replace(within, **broken))


def test_decodes_do_not_wait_for_prompts() -> None:
    """The point of it: a prompt that arrives in the middle of a decode stalls it on one replica, and not here."""
    load = workload((0.0, 10, 8), (2.0, 60, 2))
    split = Split(num_prefill=1, num_decode=1)
    apart = serve_disaggregated(Engine(Device()), load, split=split, prefill=PREFILL, decode=DECODE, transfer=TRANSFER)
    together = serve_colocated(Engine(Device()), load, num_replicas=1, config=DECODE)
    assert together.tbt.max == pytest.approx(1.6)
    # The largest gap is the second request's own: its cache arrives in the middle of an iteration.
    assert apart.tbt_gaps_s.tolist() == pytest.approx([1.0] * 6 + [1.01, 1.51])


def test_caches_are_sent_one_after_the_other() -> None:
    ready_s, tokens = np.array([1.0, 1.0, 5.0]), np.array([1000, 2000, 500])
    transfer = KvTransfer(bytes_per_token=1, link=Link(bytes_per_s=1000.0, latency_s=0.25))
    assert transfer.arrivals_s(ready_s, tokens).tolist() == pytest.approx([2.25, 4.5, 5.75])


def test_requests_go_where_the_fewest_prompt_tokens_went() -> None:
    requests = workload((0.0, 90, 1), (0.1, 40, 1), (0.2, 40, 1), (0.3, 30, 1)).requests
    assert deal(requests, 2) == [[0], [1, 2, 3]]


def test_a_request_of_one_token_never_reaches_a_decode_instance() -> None:
    device = Device()
    split = Split(num_prefill=1, num_decode=1)
    service = serve_disaggregated(
        Engine(device), workload((0.0, 50, 1)), split=split, prefill=PREFILL, decode=DECODE, transfer=TRANSFER
    )
    assert device.batches == [(0, 50)]
    assert (service.num_finished, service.tbt.count, service.transfer) == (1, 0, None)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12).map(
        sorted
    ),
    num_prefill=st.integers(1, 3),
    num_decode=st.integers(1, 3),
    spare_blocks=st.integers(0, 8),
)
def test_whatever_the_workload(
    rows: list[tuple[float, int, int]], num_prefill: int, num_decode: int, spare_blocks: int
) -> None:
    """Everybody gets all tokens, in order, also where decodes lose their blocks and prefill again."""
    load = workload(*rows)
    tight = EngineConfig(
        policy="sarathi",
        token_budget=64,
        max_num_seqs=8,
        max_model_len=80,
        block_size=4,
        num_kv_blocks=20 + spare_blocks,
    )
    split = Split(num_prefill=num_prefill, num_decode=num_decode)
    service = serve_disaggregated(Engine(Device()), load, split=split, prefill=PREFILL, decode=tight, transfer=TRANSFER)
    assert service.num_finished == len(rows)
    assert service.tbt.count == load.num_output_tokens - len(rows)
    assert service.ttft.count == service.delay.count == len(rows)
    assert len(service.tbt_gaps_s) == 0 or service.tbt_gaps_s[0] > 0.99


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="num_decode=0: must be at least 1"):
        Split(num_prefill=1, num_decode=0)
    with pytest.raises(ValueError, match="bytes_per_token=0: must be at least 1"):
        KvTransfer(bytes_per_token=0, link=Link(bytes_per_s=1.0))
    with pytest.raises(ValueError, match="num_replicas=0: must be at least 1"):
        serve_colocated(Engine(Device()), workload((0.0, 5, 5)), num_replicas=0, config=DECODE)
    with pytest.raises(ValueError, match="policy='orca': must be sarathi on decode instances"):
        serve_disaggregated(
            Engine(Device()),
            workload((0.0, 5, 5)),
            split=Split(num_prefill=1, num_decode=1),
            prefill=PREFILL,
            decode=EngineConfig(policy="orca"),
            transfer=TRANSFER,
        )
    with pytest.raises(ValueError, match="1 of 1 requests are longer than max_model_len=256"):
        serve_colocated(Engine(Device()), workload((0.0, 300, 5)), num_replicas=1, config=DECODE)


def test_cached_tokens_are_for_modelled_devices() -> None:
    with pytest.raises(ValueError, match="cached_tokens=4: must be 0 or more, and below prompt_tokens=4"):
        Request(arrival_s=0.0, prompt_tokens=4, output_tokens=1, cached_tokens=4)
    load = Workload(
        name="cached", requests=(Request(arrival_s=0.0, prompt_tokens=4, output_tokens=1, cached_tokens=2),)
    )
    with pytest.raises(ValueError, match="cached_tokens=2: must be 0 in request 0, on a real device"):
        Engine(FakeExecutor()).run(load, DECODE)
