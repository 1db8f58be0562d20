"""The costs of batches as the report draws them: ``cost_curves.json``, checked."""

from __future__ import annotations

from dataclasses import dataclass

from .json_object import JsonObject


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of one kind and what one iteration of it takes; ``num_tokens`` are prompt tokens or decodes."""

    batch_size: int
    num_tokens: int
    latency_ms: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class RooflinePoint:
    """The linear layers at ``num_tokens``: FLOPs for each byte they move, and the rates reached."""

    num_tokens: int
    flops_per_byte: float
    tflops_per_s: float
    gbytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A token count and the time that goes with it: an iteration, or a prompt in chunks of so many tokens."""

    tokens: int
    latency_ms: float


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """Iterations of ``num_decodes`` decodes with rising prefill tokens; the first point has none."""

    num_decodes: int
    points: tuple[Priced, ...]

    @property
    def alone_ms(self) -> float:
        """The iteration without prefill tokens."""
        return self.points[0].latency_ms

    def tokens_within(self, limit_ms: float) -> int:
        """The most prefill tokens whose iteration takes no longer than ``limit_ms``; 0 where none do."""
        return max((point.tokens for point in self.points if point.latency_ms <= limit_ms), default=0)


@dataclass(frozen=True, kw_only=True)
class ChunkedPrompt:
    """A prompt whole (``whole_ms``) and in chunks of rising size."""

    prompt_tokens: int
    whole_ms: float
    points: tuple[Priced, ...]


@dataclass(frozen=True, kw_only=True)
class CostCurves:
    """The curves of one GPU. The two peaks are its data sheet's, None where that is not known."""

    subject: str
    prompt_tokens: int
    context_tokens: int
    prefill: tuple[Batch, ...]
    decode: tuple[Batch, ...]
    roofline: tuple[RooflinePoint, ...]
    peak_tflops_per_s: float | None
    peak_gbytes_per_s: float | None
    carriers: tuple[Carrier, ...]
    prompts: tuple[ChunkedPrompt, ...]


def parse_cost_curves(json: JsonObject) -> CostCurves:
    """The curves in ``json``. Raises ValueError naming the field that is wrong."""
    roofline = json.child("roofline")
    return CostCurves(
        subject=f"{json.text('model', 'model')} in {json.text('dtype', '?')} on {json.text('device', '?')}, "
        f"TP {int(json.number('tensor_parallel') or 1)}",
        prompt_tokens=int(json.need("prompt_tokens")),
        context_tokens=int(json.need("context_tokens")),
        prefill=tuple(map(_batch, json.children("prefill"))),
        decode=tuple(map(_batch, json.children("decode"))),
        roofline=tuple(
            RooflinePoint(
                num_tokens=int(row.need("num_tokens")),
                flops_per_byte=row.need("flops_per_byte"),
                tflops_per_s=row.need("tflops_per_s"),
                gbytes_per_s=row.need("gbytes_per_s"),
            )
            for row in roofline.children("points")
        ),
        peak_tflops_per_s=roofline.number("peak_tflops_per_s"),
        peak_gbytes_per_s=roofline.number("peak_gbytes_per_s"),
        carriers=tuple(
            Carrier(num_decodes=int(row.need("num_decodes")), points=points)
            for row in json.children("free_prefill")
            if len(points := _priced(row, "prefill_tokens")) > 1
        ),
        prompts=tuple(
            ChunkedPrompt(prompt_tokens=int(row.need("prompt_tokens")), whole_ms=row.need("whole_ms"), points=points)
            for row in json.children("chunking")
            if (points := _priced(row, "chunk_tokens"))
        ),
    )


def _batch(row: JsonObject) -> Batch:
    return Batch(
        batch_size=int(row.need("batch_size")),
        num_tokens=int(row.need("num_tokens")),
        latency_ms=row.need("latency_ms"),
        tokens_per_s=row.need("tokens_per_s"),
    )


def _priced(row: JsonObject, key: str) -> tuple[Priced, ...]:
    points = [Priced(tokens=int(item.need(key)), latency_ms=item.need("latency_ms")) for item in row.children("points")]
    return tuple(sorted(points, key=lambda point: point.tokens))
