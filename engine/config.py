"""How the engine is run: budget, policy, and the limits of batch, context and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from .policies import POLICIES, POLICY_NAMES
from .token_costs import TokenCosts

#: What runs the model on a device here; see ``engine.kernel_choice``.
KERNELS = ("auto", "torch", "triton")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine run.

    token_budget: most tokens in one iteration; None is unlimited. At least ``max_num_seqs``, so that an
        iteration can hold every decode.
    policy: one of ``POLICY_NAMES``.
    max_num_seqs: most requests that run at once.
    max_model_len: most tokens (prompt and output) of one request; longer ones are rejected.
    block_size: tokens per KV block.
    num_kv_blocks: KV blocks; None takes what the executor's memory holds.
    token_costs: what an iteration costs by its tokens, and its edges; a policy that trims to them needs it, the
        others do not look at it.
    seed: draws the prompt token ids of requests that carry none.

    Raises ValueError that names the field, its value and the rule.
    """

    token_budget: int | None = 512
    policy: str = "sarathi"
    max_num_seqs: int = 32
    max_model_len: int = 4096
    block_size: int = 16
    num_kv_blocks: int | None = None
    token_costs: TokenCosts | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 1:
            raise ValueError(f"num_kv_blocks={self.num_kv_blocks}: must be at least 1")
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"policy={self.policy!r}: must be one of {', '.join(POLICY_NAMES)}")
        if POLICIES[self.policy].needs_token_costs and self.token_costs is None:
            raise ValueError(f"token_costs=None: policy={self.policy!r} needs the costs whose edges it trims to")
        if self.token_budget is not None:
            if self.token_budget < 1:
                raise ValueError(f"token_budget={self.token_budget}: must be at least 1")
            if self.token_budget < self.max_num_seqs:
                raise ValueError(
                    f"token_budget={self.token_budget}: must be at least max_num_seqs={self.max_num_seqs}, "
                    "or an iteration cannot hold every decode"
                )

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that a request of ``max_model_len`` tokens needs."""
        return -(-self.max_model_len // self.block_size)
