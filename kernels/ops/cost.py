"""What one call of an operation computes and moves, independent of the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OpCost:
    """Floating-point operations and the bytes that must cross device memory at least once."""

    flops: int
    bytes: int

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise ValueError(f"flops={self.flops}, bytes={self.bytes}: both must be at least 0")

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity; 0.0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: OpCost) -> OpCost:
        return OpCost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)
