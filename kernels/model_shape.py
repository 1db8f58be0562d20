"""The integers of a decoder that its latency depends on, and the GEMM shapes of one tensor-parallel shard."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a Llama-like decoder. ``gated`` says whether the MLP has a gate beside the up projection."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    gated: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("gated", "name") and value < 1:
                raise ValueError(f"{field.name} is {value}: it must be 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}: it must be a multiple of num_kv_heads={self.num_kv_heads}"
            )

    def check_degree(self, tensor_parallel: int) -> None:
        """ValueError where this degree does not divide the heads, or neither divides nor is divided by the KV heads."""
        if tensor_parallel < 1 or self.num_heads % tensor_parallel or self.intermediate % tensor_parallel:
            raise ValueError(
                f"tensor_parallel={tensor_parallel}: must divide the {self.num_heads} heads and the MLP's width of "
                f"{self.intermediate}"
            )
        if self.num_kv_heads % tensor_parallel and tensor_parallel % self.num_kv_heads:
            raise ValueError(
                f"tensor_parallel={tensor_parallel}: must divide the {self.num_kv_heads} KV heads, or be a multiple of "
                "their number (they are then replicated)"
            )

    def kv_heads_per_gpu(self, tensor_parallel: int) -> int:
        """KV heads on each GPU; at least one, for they are replicated beyond their number."""
        return max(1, self.num_kv_heads // tensor_parallel)

    def gemms(self, tensor_parallel: int) -> dict[str, tuple[int, int]]:
        """(n, k) of each of the four linear layers on one GPU, by operation (x of m rows: m x k times k x n).

        Column-parallel: attn_pre_proj (Q, K and V) and mlp_up_proj (gate and up fused); row-parallel:
        attn_post_proj and mlp_down_proj.
        """
        self.check_degree(tensor_parallel)
        heads = self.num_heads // tensor_parallel
        intermediate = self.intermediate // tensor_parallel
        return {
            "attn_pre_proj": ((heads + 2 * self.kv_heads_per_gpu(tensor_parallel)) * self.head_dim, self.hidden),
            "attn_post_proj": (self.hidden, heads * self.head_dim),
            "mlp_up_proj": (intermediate * (2 if self.gated else 1), self.hidden),
            "mlp_down_proj": (self.hidden, intermediate),
        }

    def logits_gemm(self, tensor_parallel: int) -> tuple[int, int]:
        """(n, k) of the vocabulary projection on one GPU."""
        return -(-self.vocab_size // tensor_parallel), self.hidden
