"""The tile_aligned policy: what it trims, that nobody starves, and what it gains on a device of known steps."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from fake_executor import FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from tilebudget.engine import (
    Batch,
    BlockManager,
    Engine,
    EngineConfig,
    Request,
    Sequence,
    TokenCosts,
    Workload,
    compute_metrics,
)
from tilebudget.engine.policies import POLICIES
from tilebudget.engine.policies.sarathi import Sarathi
from tilebudget.engine.policies.tile_aligned import TileAligned
from tilebudget.engine.scheduler import SchedulerSettings

EDGES = TokenCosts.from_edges(range(16, 513, 16))


def workload(*rows: tuple[float, int, int]) -> Workload:
    requests = [Request(arrival_s=at, prompt_tokens=prompt, output_tokens=output) for at, prompt, output in rows]
    return Workload(name="test", requests=tuple(requests))


def batches(load: Workload, **changes: object) -> list[tuple[list[int], dict[int, int]]]:
    executor = FakeExecutor()
    settings_ = {"policy": "tile_aligned", "token_budget": 100, "max_num_seqs": 8, "token_costs": EDGES} | changes
    Engine(executor).run(load, EngineConfig(**settings_))  # type: ignore[arg-type]
    return [(decodes, chunks) for decodes, chunks, _ in executor.batches]


def test_a_step_that_is_dear_enough_pays_an_iteration_of_its_own() -> None:
    """50 tokens cost 3, 48 and then 2 cost 1.2 + 1."""
    costs = TokenCosts(tokens=(16, 48, 49, 64), cost_ms=(1.0, 1.2, 3.0, 3.0), edges=(48,))
    assert batches(workload((0.0, 50, 3)), token_costs=costs)[:3] == [([], {0: 48}), ([], {0: 2}), ([0], {})]


def test_deferred_tokens_ride_along_with_the_decodes() -> None:
    load = workload((0.0, 16, 9), (0.0005, 18, 3))
    assert batches(load)[:3] == [([], {0: 16}), ([0], {1: 15}), ([0], {1: 3})]


def test_whole_where_the_edge_saves_nothing() -> None:
    """50 tokens cost 64, and so do 48 and 2; 32 are on an edge."""
    assert batches(workload((0.0, 50, 3)))[0] == ([], {0: 50})
    assert batches(workload((0.0, 32, 2)))[0] == ([], {0: 32})


def test_a_full_iteration_is_not_trimmed() -> None:
    assert batches(workload((0.0, 150, 2)), token_budget=100)[0] == ([], {0: 100})


def test_a_request_is_deferred_once() -> None:
    """Beside one decode, 12 prompt tokens are trimmed to the edge at 8, unless they were left over from an iteration
    that was trimmed itself."""
    costs = TokenCosts(tokens=(8, 9, 16, 17, 32), cost_ms=(1.0, 1.9, 2.0, 4.0, 4.4), edges=(8, 16))
    fresh = batches(workload((0.0, 8, 9), (0.0005, 12, 2)), token_costs=costs)
    assert fresh[1:3] == [([0], {1: 7}), ([0], {1: 5})]
    left_over = batches(workload((0.0, 8, 9), (0.0005, 27, 2)), token_costs=costs)
    assert left_over[1:3] == [([0], {1: 15}), ([0], {1: 12})]


def test_an_iteration_of_decodes_alone_is_never_made_by_trimming() -> None:
    """16 decodes are on an edge, and 3 prompt tokens past it stay: they would be put off for nothing."""
    load = workload(*[(0.0, 1, 9)] * 16, (0.0005, 3, 2))
    assert batches(load, max_num_seqs=32)[1] == (list(range(16)), {16: 3})


def test_edges_are_needed() -> None:
    with pytest.raises(ValueError, match="token_costs=None: policy='tile_aligned' needs the costs"):
        EngineConfig(policy="tile_aligned")


class Audited(TileAligned):
    """Compares every batch with the one that Sarathi's rule would have made from the same state."""

    latest: Audited

    def __init__(self, config: SchedulerSettings, kv: BlockManager, waiting: deque[Sequence] | None = None) -> None:
        super().__init__(config, kv, waiting)
        self.put_off: set[int] = set()
        self.put_off_now: set[int] = set()
        Audited.latest = self

    def schedule(self) -> Batch:
        twin = copy.deepcopy(self)
        twin.__class__ = Sarathi  # type: ignore[assignment]
        wanted, got = twin.schedule(), super().schedule()
        assert [each.index for each in got.decodes] == [each.index for each in wanted.decodes]
        assert [each.index for each in self.running] == [each.index for each in twin.running]
        assert len(self.waiting) == len(twin.waiting)
        self.check(tokens_by_request(wanted), tokens_by_request(got), wanted)
        return got

    def check(self, wanted: dict[int, int], got: dict[int, int], batch: Batch) -> None:
        left = {each.index: each.num_uncomputed for each in self.running if not each.is_decode}
        for index in self.put_off_now:
            if index in left:
                assert got.get(index) == left[index], "a deferred request was not finished by the next iteration"
            else:
                assert batch.num_preempted, "a deferred request may only be missing because it was preempted"
        self.put_off_now.clear()
        for index, tokens in wanted.items():
            assert got.get(index, 0) <= tokens
            if got.get(index, 0) < tokens:
                assert batch.num_tokens < self.budget, "only an iteration that cannot fill the budget is trimmed"
                assert index not in self.put_off, "a request was deferred twice"
                self.put_off.add(index)
                self.put_off_now.add(index)
        assert got or not wanted, "an iteration without a chunk while prompts wait"


def tokens_by_request(batch: Batch) -> dict[int, int]:
    return {each.index: tokens for each, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True)}


COSTS = st.builds(
    lambda edges, costs: TokenCosts(
        tokens=tuple(sorted(edges)), cost_ms=tuple(costs[: len(edges)]), edges=tuple(sorted(edges))
    ),
    st.sets(st.integers(1, 70), min_size=1, max_size=8),
    st.lists(st.floats(0.1, 10.0), min_size=8, max_size=8),
) | st.sets(st.integers(1, 70), min_size=1, max_size=8).map(TokenCosts.from_edges)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0.0, 0.02), st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=9),
    costs=COSTS,
    budget=st.none() | st.integers(5, 70),
    max_num_seqs=st.integers(1, 5),
    spare_blocks=st.integers(0, 40),
)
def test_deferral_is_bounded(
    rows: list[tuple[float, int, int]], costs: TokenCosts, budget: int | None, max_num_seqs: int, spare_blocks: int
) -> None:
    """Whatever the costs: at most once a request, by one iteration, and else what Sarathi's rule gives."""
    load = workload(*sorted(rows))
    config = EngineConfig(
        policy="tile_aligned",
        token_budget=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=80,
        block_size=4,
        num_kv_blocks=20 + spare_blocks,
        token_costs=costs,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "tile_aligned", Audited)
        record = Engine(FakeExecutor()).run(load, config)
    assert set(record.requests.status) == {"finished"}
    assert (np.diff(record.requests.first_scheduled_s) >= 0.0).all(), "first come, first served"


def test_the_audit_sees_deferrals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The property above is not empty: a plain workload has many."""
    monkeypatch.setitem(POLICIES, "tile_aligned", Audited)
    rng = np.random.default_rng(0)
    rows = zip(np.cumsum(rng.exponential(0.004, 60)).tolist(), rng.integers(1, 90, 60).tolist(), [8] * 60, strict=True)
    batches(workload(*rows))
    assert len(Audited.latest.put_off) > 20


def stair_duration(iteration: int, batch: Batch) -> float:
    """1 ms, and 1 ms for each begun tile of 16."""
    return 1e-3 * (1 + -(-batch.num_tokens // 16))


def test_on_a_staircase_it_serves_more_and_nobody_waits_longer_than_an_iteration() -> None:
    rng = np.random.default_rng(1)
    lengths = zip(rng.integers(5, 70, 80).tolist(), rng.integers(4, 20, 80).tolist(), strict=True)
    load = workload(*[(0.0, prompt, output) for prompt, output in lengths])
    config = EngineConfig(token_budget=128, max_num_seqs=6, token_costs=EDGES)
    sarathi, ours = (
        Engine(FakeExecutor(stair_duration)).run(load, replace(config, policy=policy))
        for policy in ("sarathi", "tile_aligned")
    )
    rates = [compute_metrics(record).total_tokens_per_s or 0.0 for record in (sarathi, ours)]
    assert rates[1] > 1.02 * rates[0]
    assert ours.outputs == sarathi.outputs
    first_s = [[times[0] for times in record.request_frame()["token_s"]] for record in (sarathi, ours)]
    assert np.diff(first_s, axis=0).max() <= ours.iterations.duration_s.max()
