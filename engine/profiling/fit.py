"""A latency table out of timed iterations: least differences first, then factors from whole engine runs.

Every iteration is taken as fixed + token-wise(tokens) + sum of attention(chunk, prefix) + attention(decodes, context)
+ logits(rows). What differences cannot tell apart (a constant may lie in one part or in another) does not matter to
the sum, as every part is priced with the same shares as it was measured with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...kernels.latency.step_curve import StepCurve
from ...kernels.latency.surface import Surface
from ...kernels.latency.sweep import SOURCES, FloatArray, IntArray, Sweep
from ...kernels.latency.table import IterationShape, LatencyTable
from ...kernels.model_shape import ModelShape
from .grid import SPLIT_CHUNK_TOKENS, ProfileGrid

#: A part that its difference says is free, or less, costs this share of the iteration that it was measured in.
LEAST_SHARE = 1e-6

#: Factors from whole runs: how far from 1.0 they are expected (one standard deviation), and the range that they and
#: their inverses stay in. Errors of iterations in a row are alike, so that this many count as one.
FACTOR_STD = 0.25
LARGEST_FACTOR = 2.0
ALIKE_ITERATIONS = 10
LEVEL_ROUNDS = 10

_MEASURED, _DERIVED = SOURCES.index("measured"), SOURCES.index("derived")

Samples = Mapping[IterationShape, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class TimedIteration:
    """One iteration of the profile's engine run number ``run``: what it held, and what it took on that engine."""

    shape: IterationShape
    duration_ms: float
    run: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a table is of, and the engine loop's own share of an iteration (milliseconds, and more a request)."""

    device: str
    model: ModelShape
    dtype: str
    origin: Mapping[str, str]
    loop_ms: float = 0.0
    loop_request_ms: float = 0.0


def fit_table(samples: Samples, grid: ProfileGrid, subject: Subject) -> LatencyTable:
    """The table of ``samples`` (milliseconds of each shape), which hold the coarse grid at least.

    The fine rows and columns of a surface are used once all of it is there. Raises KeyError for a shape of the coarse
    grid that is not there.
    """
    times = {shape: midmean(found) for shape, found in samples.items() if found}
    spreads = {shape: float(np.std(found)) for shape, found in samples.items() if found}
    chunks = _ChunkCost.of(times, grid)
    token_wise = _token_wise(times, spreads, grid, chunks, subject.model.num_layers)
    logits = _logits(times, spreads, grid)
    layers = subject.model.num_layers
    return LatencyTable(
        device=subject.device,
        model=subject.model,
        dtype=subject.dtype,
        tensor_parallel=1,
        layer_ops=(token_wise,),
        logits=logits,
        prefill=_prefill(times, spreads, grid, token_wise, chunks, layers),
        decode=_decode(times, spreads, grid, token_wise, logits, layers),
        overhead_ms=subject.loop_ms,
        overhead_source="measured",
        request_overhead_ms=subject.loop_request_ms,
        origin=subject.origin,
        notes=("an iteration's fixed cost on the device lies in its token-wise part",),
    )


def midmean(values: Sequence[float]) -> float:
    """The mean of the middle half: as deaf to outliers as the median, and steadier where a machine has two speeds."""
    ordered = np.sort(values)
    cut = ordered.size // 4
    return float(ordered[cut : ordered.size - cut].mean())


def calibrate(table: LatencyTable, runs: Sequence[TimedIteration]) -> tuple[LatencyTable, dict[str, float]]:
    """The table scaled to whole engine runs, where pages are scattered and caches cold: its fixed and token-wise part,
    prefill attention, and what decode attention takes beyond the shortest context, which is the reading of the KV cache
    (the rest of it goes with the fixed part); and the three factors.

    Least squares of measured ÷ predicted, weighted by what is predicted, against a prior around 1.0 that is as strong
    as these ratios are noisy; iterations three times off the table are left out. A machine may have been slow during
    one run and quick during another, whose batches are others: the factors are told apart by what differs within runs,
    and only their level by all runs together, so that the sum of the durations comes out right in the median run.
    """
    rows, ratios, weights, owners = [], [], [], []
    names = ("token_wise", "prefill_attention", "decode_attention")
    for run in runs:
        parts = table.iteration(run.shape).parts_ms
        prefill_ms, reading_ms = parts.get("prefill_attention", 0.0), 0.0
        if decodes := run.shape.num_decodes:
            shortest_ms = float(table.decode.at(decodes, table.decode.columns[0])) * table.model.num_layers
            reading_ms = max(0.0, parts["decode_attention"] - shortest_ms)
        total_ms = sum(parts.values())
        ratio = run.duration_ms / total_ms
        if 1 / 3 < ratio < 3:
            rows.append(np.array([total_ms - prefill_ms - reading_ms, prefill_ms, reading_ms]) / total_ms)
            ratios.append(ratio)
            weights.append(total_ms)
            owners.append(run.run)
    if not rows:
        return table, dict.fromkeys(names, 1.0)
    factors = _factors(np.array(rows), np.array(ratios), np.array(weights), np.array(owners))
    fixed, prefill, decode = factors.tolist()
    # Where noise has made a longer context cheaper than the shortest, nothing of it is reading.
    rest_ms = np.minimum(table.decode.latency_ms, table.decode.latency_ms[:, :1])
    return replace(
        table,
        layer_ops=tuple(_scaled_curve(curve, fixed) for curve in table.layer_ops),
        logits=_scaled_curve(table.logits, fixed),
        overhead_ms=table.overhead_ms * fixed,
        request_overhead_ms=table.request_overhead_ms * fixed,
        prefill=_scaled_surface(table.prefill, prefill),
        decode=replace(
            table.decode,
            latency_ms=rest_ms * fixed + (table.decode.latency_ms - rest_ms) * decode,
            std_ms=table.decode.std_ms * max(fixed, decode),
        ),
    ), dict(zip(names, factors.tolist(), strict=True))


def _factors(shares: FloatArray, ratios: FloatArray, weights: FloatArray, owners: IntArray) -> FloatArray:
    """Factors of the columns of ``shares`` ``[iterations, parts]`` by which rows add up to ``ratios``, up to a level
    of each owner's own; then times the median of these levels, each owner weighing as much as its rows."""
    _, owners = np.unique(owners, return_inverse=True)
    sizes = np.asarray(np.bincount(owners, weights), dtype=np.float64)
    root = np.sqrt(weights / weights.mean())
    factors = np.ones(shares.shape[1])
    level = 1.0
    for _ in range(LEVEL_ROUNDS):
        expected = shares @ factors
        of_runs = np.bincount(owners, weights * ratios) / np.bincount(owners, weights * expected)
        level = _weighted_median(of_runs, sizes)
        left, right = shares * root[:, None], ratios / of_runs[owners] * root
        noise = max(0.02, float(np.median(np.abs(left @ factors - right))))
        factors = _drawn_to_one(left, right, pull=noise * np.sqrt(ALIKE_ITERATIONS) / FACTOR_STD)
    found: FloatArray = np.clip(factors * level, 1 / LARGEST_FACTOR, LARGEST_FACTOR)
    return found


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    order = np.argsort(values)
    upto = np.cumsum(weights[order])
    return float(np.interp(0.5, (upto - weights[order] / 2) / upto[-1], values[order]))


def _drawn_to_one(left: FloatArray, right: FloatArray, *, pull: float) -> FloatArray:
    """The least squares solution, each unknown drawn to 1.0 as if by a row of ``pull``."""
    num_parts = left.shape[1]
    matrix = np.vstack([left, pull * np.eye(num_parts)])
    solution, *_ = np.linalg.lstsq(matrix, np.concatenate([right, np.full(num_parts, pull)]), rcond=None)
    factors: FloatArray = np.clip(solution, 1 / LARGEST_FACTOR, LARGEST_FACTOR)
    return factors


def predict_runs(table: LatencyTable, runs: Sequence[TimedIteration]) -> tuple[FloatArray, FloatArray, IntArray]:
    """Of each iteration: milliseconds that the table says, those that it took, and its run's number."""
    predicted_ms = np.array([table.iteration(run.shape).latency_ms for run in runs])
    return predicted_ms, np.array([run.duration_ms for run in runs]), np.array([run.run for run in runs])


@dataclass(frozen=True, kw_only=True)
class _ChunkCost:
    """Attention of a chunk without a prefix: ``fixed_ms`` for the chunk and, by the slope in the prefix, half of its
    own tokens for each of them (causal pairs). ``knots`` are the rows of the surface that will hold it."""

    fixed_ms: float
    rows: FloatArray
    pair_ms: FloatArray
    knots: tuple[int, ...]

    @classmethod
    def of(cls, times: Mapping[IterationShape, float], grid: ProfileGrid) -> _ChunkCost:
        rows, pair_ms = [], []
        for row in grid.chunk_rows(True):
            points = [
                (prefix, times[shape])
                for prefix in grid.prefixes(True)
                if prefix and (shape := grid.chunk_shape(row, prefix)) is not None and shape in times
            ]
            if len(points) > 1:
                longer, latency_ms = np.array(points, dtype=np.float64).T
                slope, _ = np.polyfit(longer, latency_ms, 1)
                rows.append(float(row))
                pair_ms.append(max(0.0, float(slope)) / row)
        cost = cls(
            fixed_ms=0.0,
            rows=np.array(rows or [1.0]),
            pair_ms=np.array(pair_ms or [0.0]),
            knots=tuple(_dense_rows(grid.chunk_rows(_has_fine_chunks(times, grid)))),
        )
        pair = grid.split_pair()
        if pair is None:
            return cost
        many, one, count = pair
        own_pairs_ms = cost.at(count * SPLIT_CHUNK_TOKENS) - count * cost.at(SPLIT_CHUNK_TOKENS)
        fixed_ms = (times[many] - times[one] + own_pairs_ms) / (count - 1)
        return replace(cost, fixed_ms=max(0.0, fixed_ms))

    def at(self, chunk: int) -> float:
        """Milliseconds, all layers."""
        pair_ms = float(np.interp(np.log(chunk), np.log(self.rows), self.pair_ms))
        return self.fixed_ms + pair_ms * chunk * (chunk + 1) / 2

    def between_knots(self, chunk: int) -> float:
        """The same as the surface gives it, along lines between its rows: so that the sum with the token-wise part is
        what was measured."""
        return float(np.interp(chunk, self.knots, [self.at(knot) for knot in self.knots]))


def _token_wise(
    times: Mapping[IterationShape, float],
    spreads: Mapping[IterationShape, float],
    grid: ProfileGrid,
    chunks: _ChunkCost,
    num_layers: int,
) -> StepCurve:
    tokens, latency_ms, std_ms = [], [], []
    for count in grid.token_candidates():
        shape = grid.tokens_shape(count)
        if shape in times:
            rest = times[shape] - sum(chunks.between_knots(chunk) for chunk, _ in shape.chunks)
            tokens.append(count)
            latency_ms.append(max(rest, 0.05 * times[shape]) / num_layers)
            std_ms.append(spreads[shape] / num_layers)
    sweep = Sweep(
        op="token_wise",
        tokens=np.array(tokens),
        latency_ms=np.array(latency_ms),
        std_ms=np.array(std_ms),
        note="iterations of chunks without a prefix, less their attention",
    )
    return StepCurve.of(sweep, kind=_better_kind(sweep))


def _better_kind(sweep: Sweep) -> str:
    """Steps or lines: whichever misses the points less when every other one is left out."""
    if sweep.tokens.size < 5:
        return "lines"
    kept = np.unique([*range(0, sweep.tokens.size, 2), sweep.tokens.size - 1])
    half = Sweep(op=sweep.op, tokens=sweep.tokens[kept], latency_ms=sweep.latency_ms[kept])
    misses = {
        kind: float(np.abs(np.log(StepCurve.of(half, kind=kind).at(sweep.tokens) / sweep.latency_ms)).sum())
        for kind in ("lines", "steps")
    }
    return min(misses, key=lambda kind: misses[kind])


def _logits(
    times: Mapping[IterationShape, float], spreads: Mapping[IterationShape, float], grid: ProfileGrid
) -> StepCurve:
    rows, latency_ms, std_ms = [], [], []
    for count in grid.logits_rows(True):
        ending, others = grid.logits_pair(count)
        if ending in times and others in times:
            rows.append(count)
            latency_ms.append(max(times[ending] - times[others], LEAST_SHARE * times[others]))
            std_ms.append(float(np.hypot(spreads[ending], spreads[others])))
    sweep = Sweep(
        op="logits",
        tokens=np.array(rows),
        latency_ms=np.maximum.accumulate(latency_ms),
        std_ms=np.array(std_ms),
        note="chunks that end their prompts, less the same chunks that do not",
    )
    return StepCurve.of(sweep, kind="lines")


def _prefill(
    times: Mapping[IterationShape, float],
    spreads: Mapping[IterationShape, float],
    grid: ProfileGrid,
    token_wise: StepCurve,
    chunks: _ChunkCost,
    num_layers: int,
) -> Surface:
    fine = _has_fine_chunks(times, grid)
    rows, columns = grid.chunk_rows(fine), grid.prefixes(fine)
    shapes = [[grid.chunk_shape(row, prefix) for prefix in columns] for row in rows]
    fixed_ms = token_wise.at(rows) * num_layers
    surface = _densified(_surface(shapes, times, spreads, fixed_ms, rows, columns, num_layers), chunks, num_layers)
    # No chunk has 0 tokens; a row of next to nothing says that further chunks of a batch save nothing by themselves.
    return replace(
        surface,
        rows=np.concatenate([[0], surface.rows]),
        latency_ms=np.vstack([np.full(len(columns), 1e-9), surface.latency_ms]),
        std_ms=np.vstack([np.zeros(len(columns)), surface.std_ms]),
        sources=np.vstack([np.full(len(columns), _DERIVED, dtype=np.int8), surface.sources]),
    )


def _dense_rows(rows: Sequence[int]) -> list[int]:
    """The rows and enough between them for lines to follow the square of the chunk."""
    step = max(64, rows[-1] // 64)
    return sorted({*rows, *range(step, rows[-1], step)})


def _densified(surface: Surface, chunks: _ChunkCost, num_layers: int) -> Surface:
    """The surface with rows in between: a chunk's own pairs as their square, the rest along lines."""
    rows = np.array(_dense_rows(surface.rows.tolist()), dtype=np.int64)
    own_ms = {int(row): chunks.at(int(row)) / num_layers for row in rows}
    own_at_rows = np.array([own_ms[row] for row in surface.rows.tolist()])

    def along(values: FloatArray) -> FloatArray:
        return np.stack([np.interp(rows, surface.rows, column) for column in values.T], axis=1)

    rest_ms = along(surface.latency_ms - own_at_rows[:, None])
    latency_ms = rest_ms + np.array([own_ms[row] for row in rows.tolist()])[:, None]
    least_ms = LEAST_SHARE * surface.latency_ms.max()
    above = np.searchsorted(surface.rows, rows)
    below = np.where(surface.rows[above] == rows, above, above - 1)
    return replace(
        surface,
        rows=rows,
        latency_ms=np.maximum(latency_ms, least_ms),
        std_ms=along(surface.std_ms),
        sources=np.maximum(surface.sources[above], surface.sources[below]),
    )


def _has_fine_chunks(times: Mapping[IterationShape, float], grid: ProfileGrid) -> bool:
    wanted = [grid.chunk_shape(row, prefix) for row in grid.chunk_rows(True) for prefix in grid.prefixes(True)]
    return all(shape is None or shape in times for shape in wanted)


def _decode(
    times: Mapping[IterationShape, float],
    spreads: Mapping[IterationShape, float],
    grid: ProfileGrid,
    token_wise: StepCurve,
    logits: StepCurve,
    num_layers: int,
) -> Surface:
    wanted = [grid.decode_shape(row, context) for row in grid.decode_rows(True) for context in grid.contexts(True)]
    fine = all(shape is None or shape in times for shape in wanted)
    rows, columns = grid.decode_rows(fine), grid.contexts(fine)
    if len(rows) == 1:
        rows = [*rows, 2 * rows[0]]  # a surface has two rows at least; the second is derived
    shapes = [
        [grid.decode_shape(row, context) if row <= grid.most_seqs else None for context in columns] for row in rows
    ]
    fixed_ms = token_wise.at(rows) * num_layers + logits.at(rows)
    return _surface(shapes, times, spreads, fixed_ms, rows, columns, num_layers)


def _surface(
    shapes: Sequence[Sequence[IterationShape | None]],
    times: Mapping[IterationShape, float],
    spreads: Mapping[IterationShape, float],
    fixed_ms: FloatArray,
    rows: Sequence[int],
    columns: Sequence[int],
    num_layers: int,
) -> Surface:
    """Iterations less what is fixed in their rows; where there was no room for one, along the last slope of its row, or
    in proportion to the row above it where its own has none yet."""
    latency_ms = np.full((len(rows), len(columns)), np.nan)
    std_ms = np.zeros(latency_ms.shape)
    for row, line in enumerate(shapes):
        for column, shape in enumerate(line):
            if shape is not None:
                left_ms = times[shape] - fixed_ms[row]
                latency_ms[row, column] = max(left_ms, LEAST_SHARE * times[shape]) / num_layers
                std_ms[row, column] = spreads[shape] / num_layers
    sources = np.where(np.isnan(latency_ms), _DERIVED, _MEASURED).astype(np.int8)
    for row, column in zip(*np.nonzero(np.isnan(latency_ms)), strict=True):
        latency_ms[row, column] = _extrapolated(latency_ms, rows, columns, row, column)
    return Surface(
        rows=np.array(rows, dtype=np.int64),
        columns=np.array(columns, dtype=np.int64),
        latency_ms=latency_ms,
        std_ms=std_ms,
        sources=sources,
        note="iterations less their token-wise part",
    )


def _extrapolated(latency_ms: FloatArray, rows: Sequence[int], columns: Sequence[int], row: int, column: int) -> float:
    """A cell that was not timed, from those on its left and above it: on along its row where that reaches far enough to
    have a slope, else with the rise of the row above. That row may be another kernel's, with a slope of its own."""
    left, above, ratio = latency_ms[row], latency_ms[row - 1], rows[row] / rows[row - 1]
    if not column:
        return float(above[0] * ratio)
    width = columns[column] - columns[column - 1]
    if (measured := columns[column - 1] - columns[0]) >= width / 2:
        return float(left[column - 1] + max(0.0, left[column - 1] - left[0]) * width / measured)
    rise_ms = max(0.0, above[column] - above[column - 1]) * ratio if row else 0.0
    return float(left[column - 1] + rise_ms)


def _scaled_curve(curve: StepCurve, factor: float) -> StepCurve:
    return replace(curve, latency_ms=curve.latency_ms * factor, std_ms=curve.std_ms * factor)


def _scaled_surface(surface: Surface, factor: float) -> Surface:
    return replace(surface, latency_ms=surface.latency_ms * factor, std_ms=surface.std_ms * factor)
