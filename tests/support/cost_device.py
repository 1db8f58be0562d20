"""A device of virtual time whose cost has every part that a latency table has, all of them known."""

from __future__ import annotations

from collections.abc import Mapping

from tilebudget.engine import Batch, BlockManager, EngineConfig, StepResult


class CostDevice:
    """Milliseconds of an iteration: ``fixed`` + ``token`` a token + for each chunk ``chunk`` and ``pair`` a causal pair
    + for each decode ``decode_kv`` a token of context + ``logit`` a row of logits. ``batches`` is what it ran.
    """

    virtual_time = True
    needs_token_ids = False
    max_position = 4096
    vocab_size = 100

    def __init__(
        self,
        *,
        fixed: float = 1.0,
        token: float = 0.02,
        chunk: float = 0.1,
        pair: float = 2e-5,
        decode_kv: float = 5e-4,
        logit: float = 0.01,
        name: str = "cost",
    ) -> None:
        self.fixed, self.token, self.chunk, self.pair = fixed, token, chunk, pair
        self.decode_kv, self.logit = decode_kv, logit
        self.name = name
        self.batches: list[tuple[int, int]] = []

    def describe(self) -> Mapping[str, str | int | float]:
        return {"device": self.name, "dtype": "fp32", "model": "tiny-llama"}

    def default_num_kv_blocks(self, config: EngineConfig) -> int:
        return config.max_num_seqs * config.max_blocks_per_seq

    def start(self, config: EngineConfig, kv: BlockManager) -> None:
        """Nothing to make ready."""

    def execute(self, batch: Batch) -> StepResult:
        self.batches.append((batch.num_tokens, len(batch.decodes)))
        ms = self.fixed + self.token * batch.num_tokens + self.logit * len(batch.decodes)
        for sequence, tokens in zip(batch.chunks, batch.chunk_tokens, strict=True):
            ms += self.chunk + self.pair * (tokens * sequence.num_computed + tokens * (tokens + 1) / 2)
            ms += self.logit * (sequence.num_computed + tokens >= sequence.num_tokens)
        ms += self.decode_kv * sum(sequence.num_tokens for sequence in batch.decodes)
        return StepResult(ms * 1e-3)
