"""What every part of an iteration costs on a device: a latency table for one model, dtype and parallel degree.

Token-wise operations are step curves over the tokens of the batch, attention is a surface over (chunk, prefix) for
prefill and over (requests, KV tokens of each) for decode; collectives are token-wise too. Each point has a spread
and a source (measured, table, transferred, derived). No lookup fails: what lies outside the table is extrapolated by
the rule of its curve or surface, and marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..model_shape import ModelShape
from .step_curve import StepCurve
from .surface import Surface
from .sweep import SOURCES, FloatArray, Sweep


@dataclass(frozen=True, kw_only=True)
class IterationShape:
    """The batch of one iteration: prefill ``chunks`` as (tokens, prefix), and decodes with their KV tokens in all.

    ``decode_kv_tokens`` counts what the decodes attend to, the new tokens among it. ``num_logits`` rows go through the
    vocabulary projection: one for each decode, and one for each chunk that ends its prompt.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    num_decodes: int = 0
    decode_kv_tokens: int = 0
    num_logits: int = 0

    def __post_init__(self) -> None:
        for name in ("num_decodes", "decode_kv_tokens", "num_logits"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        if any(chunk < 1 or prefix < 0 for chunk, prefix in self.chunks):
            raise ValueError(f"chunks is {self.chunks}: each needs 1 token or more and a prefix of 0 or more")
        if self.decode_kv_tokens < self.num_decodes:
            raise ValueError(
                f"decode_kv_tokens is {self.decode_kv_tokens}: {self.num_decodes} decodes attend to themselves at least"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch: what the token-wise operations see."""
        return self.num_decodes + sum(chunk for chunk, _ in self.chunks)


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A latency with its parts (ms), its spread, the least direct source, and the parts that are extrapolated."""

    latency_ms: float
    std_ms: float
    source: str
    parts_ms: Mapping[str, float]
    extrapolated: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class LatencyTable:
    """Latencies of one GPU of ``tensor_parallel`` of them.

    ``layer_ops`` and ``prefill`` and ``decode`` are for one layer, ``once_ops`` (embedding, last norm) for the whole
    iteration, all ``..._ops`` by tokens of the batch; ``logits`` by rows. ``overhead_ms`` is what an iteration takes
    besides, with ``request_overhead_ms`` for each of its sequences. ``origin`` says what made the table: framework,
    version, tool.
    """

    device: str
    model: ModelShape
    dtype: str
    tensor_parallel: int
    layer_ops: tuple[StepCurve, ...]
    logits: StepCurve
    prefill: Surface
    decode: Surface
    once_ops: tuple[StepCurve, ...] = ()
    overhead_ms: float = 0.0
    overhead_std_ms: float = 0.0
    overhead_source: str = "derived"
    request_overhead_ms: float = 0.0
    origin: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}: it must be 1 or more")
        if not self.layer_ops:
            raise ValueError("layer_ops is empty: a table needs the operations of a layer")
        names = [curve.op for curve in (*self.layer_ops, *self.once_ops, self.logits)]
        if len(set(names)) < len(names):
            raise ValueError(f"operations are named {names}: no name may occur twice")
        for name in ("overhead_ms", "overhead_std_ms", "request_overhead_ms"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        if self.overhead_source not in SOURCES:
            raise ValueError(f"overhead_source is {self.overhead_source!r}: it must be one of {', '.join(SOURCES)}")

    def with_sweeps(self, sweeps: Sequence[Sweep], once: Sequence[str] = ("emb",)) -> LatencyTable:
        """The table with its token-wise operations taken from sweeps, such as those of a Vidur file.

        Sweeps of this degree replace all ``layer_ops`` but collectives (operations called ..._all_reduce), which stay;
        those named in ``once`` replace ``once_ops``. ValueError when no sweep has this degree.
        """
        mine = [sweep for sweep in sweeps if sweep.tensor_parallel == self.tensor_parallel]
        layer = [StepCurve.of(sweep) for sweep in mine if sweep.op not in once]
        if not layer:
            raise ValueError(f"no sweep has tensor_parallel={self.tensor_parallel}")
        collectives = [curve for curve in self.layer_ops if curve.op.endswith("_all_reduce")]
        return replace(
            self,
            layer_ops=(*layer, *collectives),
            once_ops=tuple(StepCurve.of(sweep) for sweep in mine if sweep.op in once),
            origin={**self.origin, "token_wise": "sweeps"},
        )

    def stage(self, num_layers: int, *, is_first: bool, is_last: bool) -> LatencyTable:
        """The table of a pipeline stage of ``num_layers`` layers.

        The embedding and what the iteration takes besides its operations are the first stage's, the last norm is the
        last one's, and so is the vocabulary projection: other stages must be asked with no logits.
        """
        return replace(
            self,
            model=replace(self.model, num_layers=num_layers),
            once_ops=tuple(curve for curve in self.once_ops if (is_first if curve.op.startswith("emb") else is_last)),
            overhead_ms=self.overhead_ms if is_first else 0.0,
            overhead_std_ms=self.overhead_std_ms if is_first else 0.0,
            request_overhead_ms=self.request_overhead_ms if is_first else 0.0,
        )

    def tokens_ms(self, num_tokens: npt.ArrayLike) -> FloatArray:
        """Token-wise operations of all layers, and those of the iteration, by tokens of the batch."""
        layer = sum((curve.at(num_tokens) for curve in self.layer_ops), start=np.zeros(1))
        once = sum((curve.at(num_tokens) for curve in self.once_ops), start=np.zeros(1))
        return np.asarray(layer * self.model.num_layers + once, dtype=np.float64)

    def logits_ms(self, num_logits: npt.ArrayLike) -> FloatArray:
        """The vocabulary projection, by rows."""
        return self.logits.at(num_logits)

    def prefill_ms(self, chunk: npt.ArrayLike, prefix: npt.ArrayLike) -> FloatArray:
        """Attention of one chunk after a prefix, all layers."""
        return self.prefill.at(chunk, prefix) * self.model.num_layers

    def decode_ms(self, num_decodes: npt.ArrayLike, kv_tokens: npt.ArrayLike) -> FloatArray:
        """Attention of decodes that attend to ``kv_tokens`` in all, all layers."""
        requests = np.asarray(num_decodes, dtype=np.float64)
        mean = np.asarray(kv_tokens, dtype=np.float64) / np.maximum(requests, 1.0)
        return self.decode.at(requests, mean) * self.model.num_layers

    def shared_launch_ms(self) -> float:
        """What each further chunk of a batch saves, all layers: the least cost of the one kernel that runs them."""
        return float(self.prefill.latency_ms[0, 0]) * self.model.num_layers

    def iteration(self, shape: IterationShape) -> Lookup:
        """The iteration's latency on one GPU, in parts. The spreads of parts add up as independent ones."""
        layers = self.model.num_layers
        parts, variance, sources, beyond = {}, 0.0, [self.overhead_source], []
        for curve, times, count in (
            *((curve, layers, shape.num_tokens) for curve in self.layer_ops),
            *((curve, 1, shape.num_tokens) for curve in self.once_ops),
            (self.logits, 1, shape.num_logits),
        ):
            if count == 0:
                continue
            parts[curve.op] = float(curve.at(count)[0]) * times
            variance += (float(curve.spread_at(count)[0]) * times) ** 2
            sources.append(curve.source_at(count))
            if curve.extrapolated(count)[0]:
                beyond.append(curve.op)
        pairs = [("prefill_attention", self.prefill, float(chunk), float(prefix)) for chunk, prefix in shape.chunks]
        if shape.num_decodes:
            mean = shape.decode_kv_tokens / shape.num_decodes
            pairs.append(("decode_attention", self.decode, float(shape.num_decodes), mean))
        for name, surface, row, column in pairs:
            parts[name] = parts.get(name, 0.0) + float(surface.at(row, column)) * layers
            variance += (float(surface.spread_at(row, column)) * layers) ** 2
            sources.append(surface.source_at(row, column))
            if surface.extrapolated(row, column) and name not in beyond:
                beyond.append(name)
        if len(shape.chunks) > 1:
            parts["prefill_attention"] -= (len(shape.chunks) - 1) * self.shared_launch_ms()
        num_requests = shape.num_decodes + len(shape.chunks)
        parts["overhead"] = self.overhead_ms + self.request_overhead_ms * num_requests
        return Lookup(
            latency_ms=sum(parts.values()),
            std_ms=float(np.sqrt(variance + self.overhead_std_ms**2)),
            source=max(sources, key=SOURCES.index),
            parts_ms=parts,
            extrapolated=tuple(beyond),
        )

    def provenance(self) -> list[dict[str, str | int]]:
        """A row for each part: its number of points by source, and its note."""
        rows: list[dict[str, str | int]] = []
        named: Sequence[tuple[str, npt.NDArray[np.int8], str]] = [
            *((curve.op, curve.sources, curve.note) for curve in (*self.layer_ops, *self.once_ops, self.logits)),
            ("prefill_attention", self.prefill.sources, self.prefill.note),
            ("decode_attention", self.decode.sources, self.decode.note),
        ]
        for name, sources, note in named:
            counts = np.bincount(sources.ravel(), minlength=len(SOURCES))
            by_source = {source: int(count) for source, count in zip(SOURCES, counts, strict=True) if count}
            rows.append({"part": name, **by_source, "note": note})
        return rows
