"""What a staircase means for the token budget: the layer's edges, budgets worth trying, the price of one more token.

A pure function of sweeps: `analyse` takes them from a file, a table or a measurement alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..latency.sweep import FOUR_GEMMS, Sweep, layer_sweep
from ..ops.gemm_tiles import GEMM_CONFIGS, MIN_EDGE_BLOCK_M, waves
from .config_map import ConfigUse, config_lines
from .staircase import Edge, Staircase, find_edges

MINOR_JUMP_PCT = 3.0
"""Steps from here up to ``min_jump_pct`` are listed apart, as minor."""

COMMON_BUDGETS = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
WORTH_SHARE = 0.98
ONE_MORE_TOKENS = 32
"""How far off the next measured count may be for its price to be called that of one more token."""

MAX_EDGE_GAP_TOKENS = 64
PLUS_ONE_RULE = (
    "between a measured m+1 and the next measured multiple the step is taken as real: latency runs from the one to "
    "the other (tokens_per_ms). The other reading, that m+1 is slow for being odd and unpadded, runs from m to the "
    "next multiple instead (tokens_per_ms_if_padded, where it differs by more than 3%)"
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One token count as a budget. Latencies are of one layer's ``layer_ops`` on one GPU.

    ``place`` is "edge" (the last cheap count), "past_edge" (the next measured one), "mid" (between two edges),
    "common" (a customary budget on no edge) or "past_common". ``one_more_pct`` and ``one_more_ms`` are what one
    more token costs, up to ``next_tokens``; None where nothing was measured within ONE_MORE_TOKENS.
    ``worth_trying``: no smaller budget has clearly more tokens per ms. ``edge_of`` names the operations with a step
    there.
    """

    tensor_parallel: int
    tokens: int
    place: str
    layer_ms: float
    tokens_per_ms: float
    tokens_per_ms_if_padded: float | None
    next_tokens: int | None
    one_more_pct: float | None
    one_more_ms: float | None
    worth_trying: bool
    edge_of: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """The budget as a flat dictionary."""
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in self.__dict__.items()}


@dataclass(frozen=True, kw_only=True)
class WaveContext:
    """What tile arithmetic needs to label an edge: SMs of the device, and each operation's output columns."""

    num_sms: int
    columns: Mapping[str, int]

    def crossings(self, edge: Edge) -> list[str]:
        """Tile shapes whose wave count rises exactly at this edge, e.g. "128x256: 3 -> 4 waves"."""
        n = self.columns.get(edge.op)
        if n is None or edge.kind != "step":
            return []
        found = []
        for config in sorted({(c.block_m, c.block_n): c for c in GEMM_CONFIGS}.items()):
            cfg = config[1]
            if cfg.block_m < MIN_EDGE_BLOCK_M or edge.tokens % cfg.block_m:
                continue
            before, after = waves(edge.tokens, n, cfg, self.num_sms), waves(edge.next_tokens, n, cfg, self.num_sms)
            if after > before:
                found.append(f"{cfg.block_m}x{cfg.block_n}: {before} -> {after} waves")
        return found


@dataclass(frozen=True, kw_only=True)
class TileAnalysis:
    """Staircases of every operation and degree, and the budgets of one layer at each degree."""

    subject: Mapping[str, str | int]
    tensor_parallel: int
    layer_ops: tuple[str, ...]
    min_jump_pct: float
    staircases: tuple[Staircase, ...]
    layers: Mapping[int, Staircase]
    budgets: Mapping[int, tuple[Budget, ...]]
    num_layers: int | None = None
    waves: WaveContext | None = None
    configs: tuple[ConfigUse, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def layer(self) -> Staircase:
        """The layer's staircase at the chosen degree, with steps down to MINOR_JUMP_PCT."""
        return self.layers[self.tensor_parallel]

    def to_json(self) -> dict[str, object]:
        """The analysis as a JSON document.

        ``edges`` holds the sustained steps of at least ``min_jump_pct`` of every operation and degree and nothing
        else; smaller, unconfirmed and falling ones are in ``minor_edges``, ``unconfirmed_edges`` and ``drops``.
        ``configs`` holds the tile configurations of our own GEMM where it was measured; else it is empty.
        ``budgets`` is about ``tensor_parallel``, ``budgets_by_tensor_parallel`` about every degree.
        """
        rows: dict[str, list[dict[str, object]]] = {
            key: [] for key in ("edges", "minor_edges", "unconfirmed_edges", "drops")
        }
        for stairs in self.staircases:
            for edge in stairs.edges:
                rows[self._section(edge)].append(self._edge_row(edge))
        layer_rows = [self._edge_row(edge) for stairs in self.layers.values() for edge in stairs.edges]
        return {
            **self.subject,
            "tensor_parallel": self.tensor_parallel,
            "num_layers": self.num_layers,
            "layer_ops": list(self.layer_ops),
            "min_jump_pct": self.min_jump_pct,
            "operations": [
                {
                    "op": stairs.sweep.op,
                    "tensor_parallel": stairs.sweep.tensor_parallel,
                    "num_points": int(stairs.sweep.tokens.size),
                    "noise_pct": round(stairs.noise * 100, 3),
                    "source": stairs.sweep.source,
                    "note": stairs.sweep.note,
                }
                for stairs in self.staircases
            ],
            **rows,
            "layer_edges": layer_rows,
            "layer_staircase": self._layer_rows(),
            "budgets": [budget.to_json() for budget in self.budgets[self.tensor_parallel]],
            "budgets_by_tensor_parallel": {
                str(degree): [budget.to_json() for budget in budgets] for degree, budgets in self.budgets.items()
            },
            "configs": [row.to_json() for row in self.configs],
            "notes": list(self.notes),
        }

    def _section(self, edge: Edge) -> str:
        if edge.kind == "drop":
            return "drops"
        if not edge.sustained:
            return "unconfirmed_edges"
        return "edges" if edge.jump_pct >= self.min_jump_pct else "minor_edges"

    def _edge_row(self, edge: Edge) -> dict[str, object]:
        row: dict[str, object] = dict(edge.to_json())
        if self.waves is not None:
            row["waves"] = self.waves.crossings(edge)
        return row

    def _layer_rows(self) -> list[dict[str, object]]:
        sweep = self.layer().sweep
        rows: list[dict[str, object]] = []
        for tokens, layer_ms in zip(sweep.tokens.tolist(), sweep.latency_ms.tolist(), strict=True):
            row: dict[str, object] = {"tokens": tokens, "layer_ms": round(layer_ms, 6)}
            if self.num_layers is not None:
                row["iteration_ms"] = round(layer_ms * self.num_layers, 6)
            rows.append(row)
        return rows

    def to_text(self, max_rows: int = 40) -> str:
        """Tables for people: operations, the layer's edges, and budgets (the common ones first if there are many)."""
        return "\n".join(_text(self, max_rows))


def analyse(
    sweeps: Sequence[Sweep],
    *,
    tensor_parallel: int | None = None,
    ops: Sequence[str] | None = None,
    num_layers: int | None = None,
    min_jump_pct: float = 10.0,
    subject: Mapping[str, str | int] | None = None,
    wave_context: WaveContext | None = None,
) -> TileAnalysis:
    """The tile analysis of sweeps of any number of operations and tensor-parallel degrees.

    ``tensor_parallel`` chooses the degree that ``budgets`` is about (default: the smallest there is). ``ops`` are
    the operations that make a layer: the four GEMMs where a degree has them all, else everything it has.
    ValueError when there is no sweep, or none of that degree.
    """
    degrees = sorted({sweep.tensor_parallel for sweep in sweeps})
    if not degrees:
        raise ValueError("sweeps is empty: an analysis needs one at least")
    chosen = degrees[0] if tensor_parallel is None else tensor_parallel
    if chosen not in degrees:
        raise ValueError(f"tensor_parallel is {chosen}: the sweeps have {degrees}")
    if ops is None:
        present = {sweep.op for sweep in sweeps if sweep.tensor_parallel == chosen}
        ops = FOUR_GEMMS if present.issuperset(FOUR_GEMMS) else sorted(present)
    minor_pct = min(MINOR_JUMP_PCT, min_jump_pct)
    staircases = tuple(find_edges(sweep, min_jump_pct=minor_pct) for sweep in sweeps)
    layers, budgets = {}, {}
    for degree in degrees:
        parts = [stairs for stairs in staircases if stairs.sweep.tensor_parallel == degree]
        if not {stairs.sweep.op for stairs in parts}.issuperset(ops):
            continue
        layers[degree] = find_edges(layer_sweep([stairs.sweep for stairs in parts], ops), min_jump_pct=minor_pct)
        budgets[degree] = _budgets(layers[degree], [s for s in parts if s.sweep.op in ops], min_jump_pct)
    if chosen not in layers:
        raise ValueError(f"ops {list(ops)} are not all measured at tensor_parallel={chosen}")
    return TileAnalysis(
        subject=dict(subject or {}),
        tensor_parallel=chosen,
        layer_ops=tuple(ops),
        min_jump_pct=min_jump_pct,
        staircases=staircases,
        layers=layers,
        budgets=budgets,
        num_layers=num_layers,
        waves=wave_context,
        notes=_notes(staircases, layers[chosen]),
    )


def candidate_edges(analysis: TileAnalysis) -> list[int]:
    """Token counts that a budget search should sit on: the layer's steps at the chosen degree, ascending.

    A step somewhere in a gap of more than MAX_EDGE_GAP_TOKENS is left out unless there are no others.
    """
    steps = [edge for edge in analysis.layer().edges if edge.kind == "step"]
    sharp = [edge for edge in steps if edge.next_tokens - edge.tokens <= MAX_EDGE_GAP_TOKENS]
    return sorted({edge.tokens for edge in sharp or steps})


def _budgets(layer: Staircase, parts: Sequence[Staircase], min_jump_pct: float) -> tuple[Budget, ...]:
    sweep = layer.sweep
    places: dict[int, str] = {}
    steps = [edge for edge in layer.edges if edge.kind == "step"]
    for before, after in pairwise(steps):
        inside = sweep.tokens[(sweep.tokens > before.next_tokens) & (sweep.tokens < after.tokens)]
        if inside.size:
            places[int(inside[inside.size // 2])] = "mid"
    measured = set(sweep.tokens.tolist())
    for tokens in COMMON_BUDGETS:
        if tokens in measured:
            places[tokens] = "common"
            following = sweep.tokens[np.searchsorted(sweep.tokens, tokens) + 1 :][:1]
            if following.size:
                places.setdefault(int(following[0]), "past_common")
    for edge in steps:
        places[edge.next_tokens] = "past_edge"
    for edge in steps:
        places[edge.tokens] = "edge"
    rate = sweep.tokens / sweep.latency_ms
    best = np.maximum.accumulate(rate)
    edges_of: dict[int, list[str]] = {}
    for stairs in parts:
        for edge in stairs.steps(min_jump_pct):
            edges_of.setdefault(edge.tokens, []).append(stairs.sweep.op)
    rows = []
    for tokens in sorted(places):
        index = int(np.searchsorted(sweep.tokens, tokens))
        here_ms = float(sweep.latency_ms[index])
        following = sweep.tokens[index + 1 :][:1]
        near = following.size > 0 and int(following[0]) - tokens <= ONE_MORE_TOKENS
        next_ms = float(sweep.latency_ms[index + 1]) if near else None
        rows.append(
            Budget(
                tensor_parallel=sweep.tensor_parallel,
                tokens=tokens,
                place=places[tokens],
                layer_ms=here_ms,
                tokens_per_ms=float(rate[index]),
                tokens_per_ms_if_padded=_padded_rate(sweep, index),
                next_tokens=int(following[0]) if following.size else None,
                one_more_pct=None if next_ms is None else (next_ms / here_ms - 1) * 100,
                one_more_ms=None if next_ms is None else next_ms - here_ms,
                worth_trying=bool(rate[index] >= WORTH_SHARE * best[index]),
                edge_of=tuple(edges_of.get(tokens, ())),
            )
        )
    return tuple(rows)


def _padded_rate(sweep: Sweep, index: int) -> float | None:
    """Tokens per ms at an m+1 point if it were padded: on the line from m to the next multiple; None where equal."""
    if not 0 < index < sweep.tokens.size - 1:
        return None
    low, here, high = (int(t) for t in sweep.tokens[index - 1 : index + 2])
    if here - low != 1 or high - here < 8:
        return None
    low_ms, here_ms, high_ms = (float(v) for v in sweep.latency_ms[index - 1 : index + 2])
    padded_ms = low_ms + (high_ms - low_ms) / (high - low)
    return here / padded_ms if abs(padded_ms / here_ms - 1) > 0.03 else None


def _notes(staircases: Sequence[Staircase], layer: Staircase) -> tuple[str, ...]:
    notes = []
    transferred = [s.sweep for s in staircases if s.sweep.source == "transferred"]
    for sweep in transferred:
        notes.append(f"{sweep.op} (tensor_parallel={sweep.tensor_parallel}) is transferred: {sweep.note}")
    gaps = np.diff(layer.sweep.tokens)
    if np.any((gaps[:-1] == 1) & (gaps[1:] >= 8)):
        notes.append(f"this sweep has m+1 points: {PLUS_ONE_RULE}")
    wide = int(np.median(gaps)) if gaps.size else 0
    if wide > 1:
        notes.append(f"counts were measured about {wide} apart: an edge lies between tokens and next_tokens")
    return tuple(notes)


def _text(analysis: TileAnalysis, max_rows: int) -> list[str]:
    subject = ", ".join(f"{key} {value}" for key, value in analysis.subject.items())
    lines = [f"Tile analysis: {subject or 'one sweep'}", ""]
    lines.append(f"{'operation':<26}{'TP':>3}{'points':>8}{'noise':>8}{'steps':>7}{'drops':>7}  source")
    for stairs in analysis.staircases:
        sweep = stairs.sweep
        steps = len(stairs.steps(analysis.min_jump_pct))
        lines.append(
            f"{sweep.op:<26}{sweep.tensor_parallel:>3}{sweep.tokens.size:>8}{stairs.noise * 100:>7.1f}%{steps:>7}"
            f"{len(stairs.drops()):>7}  {sweep.source}"
        )
    lines += ["", f"One layer ({' + '.join(analysis.layer_ops)}) at TP{analysis.tensor_parallel}; one more token:"]
    lines.append(f"{'after':>7}{'to':>7}{'ms':>10}{'jump':>18}{'us/token':>18}  where")
    edges = list(analysis.layer().edges)
    shown = sorted(sorted(edges, key=lambda e: -abs(e.jump_pct))[:max_rows], key=lambda e: e.tokens)
    for edge in shown:
        jump = f"{edge.jump_pct:+.1f}% +-{edge.jump_uncertainty_pct:.1f}"
        lines.append(
            f"{edge.tokens:>7}{edge.next_tokens:>7}{edge.latency_ms:>10.4f}{jump:>18}"
            f"{edge.us_per_token_before:>9.3f}>{edge.us_per_token_after:<8.3f}  {edge.explanation}"
        )
    if len(edges) > len(shown):
        lines.append(f"  ({len(edges) - len(shown)} smaller ones are in --json)")
    lines += ["", f"Budgets at TP{analysis.tensor_parallel} (* worth trying: no smaller one has more tokens per ms):"]
    iteration = analysis.num_layers is not None
    heading = f"{'iteration ms' if iteration else '':>14}{'one more':>16}  place"
    lines.append(f"{'tokens':>8}{'tokens/ms':>11}{'layer ms':>10}{heading}")
    for budget in _shown(analysis.budgets[analysis.tensor_parallel], max_rows):
        more = "" if budget.one_more_pct is None else f"{budget.one_more_pct:+.1f}% to {budget.next_tokens}"
        layers_ms = f"{budget.layer_ms * (analysis.num_layers or 0):.3f}" if iteration else ""
        padded = budget.tokens_per_ms_if_padded
        lines.append(
            f"{'*' if budget.worth_trying else ' '}{budget.tokens:>7}{budget.tokens_per_ms:>11.1f}"
            f"{budget.layer_ms:>10.4f}{layers_ms:>14}{more:>16}  {budget.place}"
            + (f" ({padded:.1f} tokens/ms if padded)" if padded else "")
        )
    if analysis.configs:
        lines += ["", *config_lines(analysis.configs)]
    return [*lines, *(["", *(f"Note: {note}" for note in analysis.notes)] if analysis.notes else [])]


def _shown(budgets: Sequence[Budget], max_rows: int) -> list[Budget]:
    """All budgets if they are few; else the common ones with their next counts, and the best of the others."""
    if len(budgets) <= max_rows:
        return list(budgets)
    after = {budget.next_tokens for budget in budgets if budget.tokens in COMMON_BUDGETS}
    first = [budget for budget in budgets if budget.tokens in COMMON_BUDGETS or budget.tokens in after]
    others = [budget for budget in budgets if budget not in first and budget.place == "edge"]
    others.sort(key=lambda budget: (not budget.worth_trying, -len(budget.edge_of), budget.tokens))
    return sorted(first + others[: max(0, max_rows - len(first))], key=lambda budget: budget.tokens)
