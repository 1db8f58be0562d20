"""Workloads for every policy, and the batches that they make on the fake device."""

from __future__ import annotations

from fake_executor import TOKEN_COSTS, FakeExecutor
from hypothesis import strategies as st
from tilebudget.engine import POLICY_NAMES, Engine, EngineConfig, Request, Workload

Batches = list[tuple[list[int], dict[int, int], int]]


def serve(lengths: list[tuple[int, int]], arrivals_s: list[float] | None = None, **settings_: object) -> Batches:
    """The batches of a run over (prompt, output) requests: (decodes, {chunk: tokens}, preempted)."""
    executor = FakeExecutor()
    config = EngineConfig(**({"max_num_seqs": 8, "max_model_len": 1024} | settings_))  # type: ignore[arg-type]
    Engine(executor).run(workload(lengths, arrivals_s), config)
    return executor.batches


def workload(lengths: list[tuple[int, int]], arrivals_s: list[float] | None = None) -> Workload:
    arrivals_s = arrivals_s or [0.0] * len(lengths)
    requests = tuple(
        Request(arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)
        for (prompt, output), arrival in zip(lengths, arrivals_s, strict=True)
    )
    return Workload(name="test", requests=requests)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, EngineConfig]:
    """A workload and settings that fit it, often with too little cache."""
    count = draw(st.integers(1, 10))
    lengths = [(draw(st.integers(1, 50)), draw(st.integers(1, 12))) for _ in range(count)]
    arrivals_s = sorted(draw(st.sampled_from([0.0, 0.001, 0.004, 0.1])) for _ in range(count))
    max_num_seqs = draw(st.integers(1, 6))
    budget = draw(st.none() | st.integers(max_num_seqs, 40))
    block_size = draw(st.integers(1, 16))
    longest = max(prompt + output for prompt, output in lengths)
    config = EngineConfig(
        policy=draw(st.sampled_from(POLICY_NAMES)),
        token_budget=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=longest,
        block_size=block_size,
        num_kv_blocks=-(-longest // block_size) + draw(st.integers(0, 8)),
        token_costs=TOKEN_COSTS,
    )
    return workload(lengths, arrivals_s), config
