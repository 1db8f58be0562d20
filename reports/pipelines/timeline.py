"""The stages of a pipeline over a few micro-batches: what each stage computes, and where it waits (bubbles)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from ..data.run_folder import RunFolder
from ..policies.lanes import Lane
from ..policies.timeline import COMPOSITIONS, composition
from ..style import INK, PAPER, VERMILLION, Drawing, finish
from ..text import count, percent
from .bubble_causes import CAUSES

NUM_DRAWN = 28
ABSENT = "This study ran no policy comparison, so no pipeline is drawn."
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Start and end of every iteration in every stage, seconds, ``[iterations, stages]``; ``replayed`` from the run's
    own iterations, or as a real pipeline had them, with the main cause of the bubbles before each iteration."""

    start_s: FloatArray
    end_s: FloatArray
    replayed: bool
    causes: tuple[str, ...] = ()

    def bubble_fraction(self, begin: int, end: int) -> float:
        """Idle share of all stages between the first start and the last end of iterations ``begin:end``."""
        start_s, end_s = self.start_s[begin:end], self.end_s[begin:end]
        span_s = float(end_s.max() - start_s.min())
        return 1.0 - float((end_s - start_s).sum()) / (int(self.start_s.shape[1]) * span_s)


def replay_stages(durations_s: FloatArray, num_stages: int) -> Stages:
    """Iterations as micro-batches of a pipeline: each takes its share of the layers in every stage, enters a stage
    once it has left the one before and the stage is free, and enters the first once the ``num_stages``-th before it has
    left the last. It is the schedule that the bubble fractions of ``trials.parquet`` are from."""
    share_s = (durations_s / num_stages).tolist()
    free = [0.0] * num_stages
    starts = np.empty((len(share_s), num_stages))
    left: list[float] = []
    for number, stage_time in enumerate(share_s):
        now = left[number - num_stages] if number >= num_stages else 0.0
        for stage in range(num_stages):
            now = max(now, free[stage])
            starts[number, stage] = now
            now += stage_time
            free[stage] = now
        left.append(now)
    return Stages(start_s=starts, end_s=starts + np.array(share_s)[:, None], replayed=True)


def draw_pipeline_timeline(folder: RunFolder, lanes: list[Lane]) -> Drawing:
    """The stages under the recommended policy and under the one with the most bubbles, over the same few iterations'
    worth of a stretch where prefills and decodes meet."""
    name, title = "stages", "A pipeline at work, with its bubbles"
    chosen = _two(folder, lanes)
    num_stages = folder.answer.bubble_stages
    if not chosen:
        return Drawing(name=name, title=title, finding=ABSENT)
    figure = go.Figure()
    labels: dict[float, str] = {}
    facts: list[tuple[str, float]] = []
    last_s = 0.0
    replayed = True
    for place, lane in enumerate(chosen):
        begin, end = _stretch(lane.iterations)
        stages = _stages(lane.iterations, begin, end, num_stages)
        replayed &= stages.replayed
        zero_s = float(stages.start_s.min())
        base = float((len(chosen) - 1 - place) * (stages.start_s.shape[1] + 1))
        kinds = composition(lane.iterations.iloc[begin:end])
        _add_stages(figure, stages, kinds, lane, base, 1e3 * zero_s, legend=place == 0)
        top, policy = base + stages.start_s.shape[1] - 1, lane.name.replace("FasterT", "Faster<br>T")
        labels |= {
            top - stage: f"{policy}, {stage + 1}" if not stage else f"{stage + 1}"
            for stage in range(stages.start_s.shape[1])
        }
        facts.append((lane.name, stages.bubble_fraction(0, end - begin)))
        last_s = max(last_s, float(stages.end_s.max()) - zero_s)
    finish(figure, 120 + 30 * len(labels))
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_xaxes(title_text="time in the stretch drawn, ms", range=[0, 1e3 * last_s])
    figure.update_yaxes(
        tickmode="array",
        tickvals=list(labels),
        ticktext=list(labels.values()),
        range=[-0.7, max(labels) + 0.7],
        showgrid=False,
        fixedrange=True,
        tickfont={"color": INK, "size": 12},
    )
    how = (
        "Each iteration of the run is replayed as a micro-batch that takes its share of the layers in every stage"
        if replayed
        else "Stages as the pipeline ran them"
    )
    note = (
        f"{how}; rows are stages, {NUM_DRAWN} micro-batches where prefills and decodes meet. Red: the stage "
        "waits (bubble)."
    )
    return Drawing(
        name=name, title=title, finding=_finding(folder, facts, num_stages, chosen), note=note, figure=figure
    )


def _two(folder: RunFolder, lanes: list[Lane]) -> list[Lane]:
    """The recommended policy's lane, and that of the policy with the most bubbles if it is another."""
    metric = folder.answer.bubble_metric
    bubbles = {str(row["policy"]): float(row[metric]) for _, row in folder.policies.iterrows()}
    known = [lane for lane in lanes if np.isfinite(bubbles.get(lane.policy, np.nan))]
    own = next((lane for lane in lanes if lane.policy == folder.answer.engine.get("policy")), None)
    worst = max(known, key=lambda lane: bubbles[lane.policy], default=None)
    chosen = [lane for lane in (worst, own) if lane is not None]
    return chosen[:1] if len(chosen) == 2 and chosen[0] is chosen[1] else chosen or lanes[:1]


def _stretch(iterations: pd.DataFrame) -> tuple[int, int]:
    """NUM_DRAWN neighbouring iterations in which prefills and decodes alternate most, by the variation of their time
    over the mean, past the first filling of the pipeline."""
    durations = iterations["duration_s"].to_numpy(dtype=float)
    if len(durations) <= NUM_DRAWN:
        return 0, len(durations)
    sums = np.concatenate([[0.0], np.cumsum(durations)])
    squares = np.concatenate([[0.0], np.cumsum(durations**2)])
    mean = (sums[NUM_DRAWN:] - sums[:-NUM_DRAWN]) / NUM_DRAWN
    variance = np.maximum((squares[NUM_DRAWN:] - squares[:-NUM_DRAWN]) / NUM_DRAWN - mean**2, 0.0)
    variation = np.sqrt(variance) / mean
    # The typical stretch that varies: extremes may be one odd iteration.
    wanted = np.quantile(variation, 0.9)
    begin = int(np.argmin(np.abs(variation - wanted)))
    return begin, begin + NUM_DRAWN


def _stages(iterations: pd.DataFrame, begin: int, end: int, num_stages: int) -> Stages:
    """The stages of iterations ``begin:end``: as recorded, else replayed after a filling of as many before them."""
    drawn = iterations.iloc[begin:end]
    if "stage_start_s" in drawn and drawn["stage_start_s"].notna().all():
        recorded = (np.stack(list(drawn[name])) for name in ("stage_start_s", "stage_end_s"))
        return Stages(start_s=next(recorded), end_s=next(recorded), replayed=False, causes=_causes(drawn))
    before = min(begin, 4 * num_stages)
    stages = replay_stages(iterations["duration_s"].to_numpy(dtype=float)[begin - before : end], num_stages)
    return Stages(start_s=stages.start_s[before:], end_s=stages.end_s[before:], replayed=True)


def _causes(iterations: pd.DataFrame) -> tuple[str, ...]:
    """The largest cause of the bubbles before each iteration; empty where the run has none recorded."""
    columns = [f"{column}_s" for column in CAUSES]
    if any(column not in iterations for column in columns):
        return ()
    largest = iterations[columns].to_numpy(dtype=float).argmax(axis=1)
    names = [cause for cause, *_ in CAUSES.values()]
    return tuple(f" for {names[place]}" for place in largest)


def _add_stages(
    figure: go.Figure,
    stages: Stages,
    kinds: npt.NDArray[np.str_],
    lane: Lane,
    base: float,
    zero_ms: float,
    *,
    legend: bool,
) -> None:
    num_stages = stages.start_s.shape[1]
    places = base + num_stages - 1 - np.arange(num_stages)
    for kind, (color, pattern) in COMPOSITIONS.items():
        rows = np.flatnonzero(kinds == kind)
        figure.add_trace(
            go.Bar(
                orientation="h",
                base=(1e3 * stages.start_s[rows] - zero_ms).ravel(),
                x=1e3 * (stages.end_s - stages.start_s)[rows].ravel(),
                y=np.tile(places, len(rows)),
                width=0.8,
                name=kind,
                legendgroup=kind,
                showlegend=legend,
                marker={
                    "color": color,
                    "line": {"width": 0.75, "color": PAPER},
                    "pattern": {"shape": pattern, "fillmode": "overlay", "size": 5, "solidity": 0.25,
                                "fgcolor": "#000000", "fgopacity": 0.35},
                },
                hovertemplate=f"{lane.name}: {kind}, %{{x:.4~g}} ms<extra></extra>",
            )
        )  # fmt: skip
    waits_ms = 1e3 * (stages.start_s[1:] - stages.end_s[:-1])
    rows, columns = np.nonzero(waits_ms > 1e-6)
    figure.add_trace(
        go.Bar(
            orientation="h",
            base=1e3 * stages.end_s[rows, columns] - zero_ms,
            x=waits_ms[rows, columns],
            y=places[columns],
            width=0.28,
            name="bubble",
            legendgroup="bubble",
            showlegend=legend,
            marker={"color": VERMILLION, "opacity": 0.85, "line": {"width": 0}},
            text=[stages.causes[row + 1] if stages.causes else "" for row in rows],
            textposition="none",
            hovertemplate=f"{lane.name}: the stage waits %{{x:.4~g}} ms%{{text}}<extra></extra>",
        )
    )


def _finding(folder: RunFolder, facts: list[tuple[str, float]], num_stages: int, chosen: list[Lane]) -> str:
    metric = folder.answer.bubble_metric
    whole = {str(row["policy"]): float(row[metric]) for _, row in folder.policies.iterrows()}
    parts = [
        f"{percent(here)} of the {count(num_stages, 'stage')} under {name}"
        + (
            f" ({percent(whole[lane.policy])} over the whole run)"
            if np.isfinite(whole.get(lane.policy, np.nan))
            else ""
        )
        for (name, here), lane in zip(facts, chosen, strict=True)
    ]
    return f"In the stretch drawn, bubbles take {' and '.join(parts)}."
