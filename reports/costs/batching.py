"""What batches cost: throughput by batch size, the roofline, prefill tokens beside decodes, and prompts in chunks."""

from __future__ import annotations

from math import log10

import plotly.graph_objects as go

from ..data.answer import Answer
from ..data.cost_curves import Carrier, ChunkedPrompt, CostCurves, RooflinePoint
from ..data.run_folder import RunFolder
from ..style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, SKY, VERMILLION, Drawing, finish, log_ticks
from ..text import change, count, listing, milliseconds, percent, rate, significant

ABSENT = "This run folder holds no latency table's curves (cost_curves.json), so {what} is not shown."
#: Prefill tokens ride free while they make the iteration no more than this longer.
FREE = 0.10
_SERIES = (
    (SKY, "circle", "dot"),
    (GREEN, "square", "dash"),
    (ORANGE, "diamond", "dashdot"),
    (VERMILLION, "x", "solid"),
)
_NAMED_TOKENS = (1, 16, 64, 256, 1024, 8192)


def draw_throughput(folder: RunFolder) -> Drawing:
    """Prefill and decode throughput against batch size, both logarithmic."""
    name, title = "throughput", "Prefill and decode throughput by batch size"
    curves = folder.curves
    if curves is None or not (curves.prefill and curves.decode):
        return Drawing(name=name, title=title, finding=ABSENT.format(what="throughput by batch size"))
    figure = go.Figure()
    series = (
        (curves.prefill, f"prefill, {curves.prompt_tokens}-token prompts", BLUE, "square", "solid"),
        (curves.decode, f"decode at {curves.context_tokens} tokens of context", ORANGE, "circle", "dash"),
    )
    for batches, label, color, symbol, dash in series:
        figure.add_trace(
            go.Scatter(
                x=[batch.batch_size for batch in batches],
                y=[batch.tokens_per_s for batch in batches],
                customdata=[batch.latency_ms for batch in batches],
                name=label,
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 1.75},
                marker={"symbol": symbol, "size": 8, "color": color},
                hovertemplate=f"{label}<br>%{{x}} requests: %{{y:,.0f}} tokens/s, %{{customdata:.4~g}} ms"
                "<extra></extra>",
            )
        )
    both = (*curves.prefill, *curves.decode)
    finish(figure, 360)
    figure.update_xaxes(title_text="requests in the batch (log)", **_binary_ticks([batch.batch_size for batch in both]))
    rates = [batch.tokens_per_s for batch in both]
    figure.update_yaxes(title_text="tokens/s of one iteration (log)", **log_ticks(min(rates), max(rates)))
    return Drawing(name=name, title=title, finding=throughput_finding(curves), note=_subject(curves), figure=figure)


def throughput_finding(curves: CostCurves) -> str:
    """What more requests in a batch gain in each phase."""
    prefill, decode = curves.prefill, curves.decode
    best = max(prefill, key=lambda batch: batch.tokens_per_s)
    gain = decode[-1].tokens_per_s / decode[0].tokens_per_s
    return (
        f"One prompt of {curves.prompt_tokens:,} tokens already prefills at {rate(prefill[0].tokens_per_s)} tokens/s, "
        f"{percent(prefill[0].tokens_per_s / best.tokens_per_s)} of the best batch; decode grows "
        f"{significant(gain, 2)} times from {rate(decode[0].tokens_per_s)} tokens/s alone to "
        f"{rate(decode[-1].tokens_per_s)} in a batch of {decode[-1].batch_size}."
    )


def draw_roofline(folder: RunFolder) -> Drawing:
    """FLOPs for each byte against the rate reached, by tokens of the batch, under the device's two roofs."""
    name, title = "roofline", "Roofline of the linear layers"
    curves = folder.curves
    if curves is None or len(curves.roofline) < 2:
        return Drawing(name=name, title=title, finding=ABSENT.format(what="the roofline"))
    points = curves.roofline
    peak, memory = _roofs(curves)
    low, high = points[0].flops_per_byte, max(points[-1].flops_per_byte, 1e3 * peak / memory)
    ridge = 1e3 * peak / memory
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=[low, ridge, max(high, ridge) * 1.3],
            y=[low * memory / 1e3, peak, peak],
            name="roofs: memory, compute",
            mode="lines",
            line={"color": MUTED, "width": 2},
            hoverinfo="skip",
        )
    )
    shown = [point.num_tokens in _NAMED_TOKENS for point in points]
    figure.add_trace(
        go.Scatter(
            x=[point.flops_per_byte for point in points],
            y=[point.tflops_per_s for point in points],
            customdata=[[point.num_tokens, point.gbytes_per_s] for point in points],
            text=[f"{point.num_tokens:,}" if named else "" for point, named in zip(points, shown, strict=True)],
            textposition="bottom right",
            textfont={"size": 11, "color": INK},
            name="tokens in the batch",
            mode="lines+markers+text",
            line={"color": BLUE, "width": 1.5, "dash": "dot"},
            marker={"symbol": "circle", "size": 8, "color": BLUE},
            hovertemplate="%{customdata[0]:,} tokens: %{y:.4~g} TFLOP/s, %{customdata[1]:,.0f} GB/s<extra></extra>",
        )
    )
    finish(figure, 380)
    figure.update_xaxes(title_text="FLOPs for each byte moved (log)", **log_ticks(low, high * 1.3))
    rates = [point.tflops_per_s for point in points]
    figure.update_yaxes(title_text="TFLOP/s (log)", **log_ticks(min(rates) / 2, max(peak, *rates)))
    source = (
        "the device's data sheet"
        if curves.peak_tflops_per_s and curves.peak_gbytes_per_s
        else "the highest rates that any batch size reached here, for this device has no data sheet in the tables"
    )
    note = (
        f"{_subject(curves)} FLOPs and bytes (weights, inputs, outputs) of the four linear layers; the time is that of "
        f"all token-wise operations. The roofs are {source}."
    )
    return Drawing(name=name, title=title, finding=roofline_finding(curves), note=note, figure=figure)


def _roofs(curves: CostCurves) -> tuple[float, float]:
    """TFLOP/s and GB/s that bound the device: of its data sheet, else the highest reached."""
    peak = curves.peak_tflops_per_s or max(point.tflops_per_s for point in curves.roofline)
    return peak, curves.peak_gbytes_per_s or max(point.gbytes_per_s for point in curves.roofline)


def roofline_finding(curves: CostCurves) -> str:
    """From how many tokens on compute is the limit, and how much of the roof is reached on either side."""
    peak, memory = _roofs(curves)
    first, best = curves.roofline[0], max(curves.roofline, key=lambda point: point.tflops_per_s)
    bound = [point for point in curves.roofline if point.flops_per_byte >= 1e3 * peak / memory]
    sheet = curves.peak_tflops_per_s is not None and curves.peak_gbytes_per_s is not None
    roof = "its data sheet" if sheet else "the highest rates seen"
    turn = (
        f"The roofs of {roof} meet between {_before(curves, bound[0])} and {bound[0].num_tokens:,} tokens: below, an "
        "iteration waits for weights and more tokens cost little"
        if bound
        else f"By {roof} every batch up to {curves.roofline[-1].num_tokens:,} tokens waits for memory"
    )
    return (
        f"{turn}. One token moves {rate(first.gbytes_per_s)} GB/s ({percent(first.gbytes_per_s / memory)} of the "
        f"memory roof); the most reached is {significant(best.tflops_per_s)} TFLOP/s at {best.num_tokens:,} tokens "
        f"({percent(best.tflops_per_s / peak)} of the compute roof)."
    )


def _before(curves: CostCurves, point: RooflinePoint) -> str:
    place = curves.roofline.index(point)
    return f"{curves.roofline[max(place - 1, 0)].num_tokens:,}"


def draw_free_prefill(folder: RunFolder) -> Drawing:
    """How much longer an iteration of N decodes gets with prefill tokens in it."""
    name, title = "free_prefill", "Prefill tokens that ride with decodes"
    curves = folder.curves
    if curves is None or not curves.carriers:
        return Drawing(name=name, title=title, finding=ABSENT.format(what="what prefill tokens add to decodes"))
    figure = go.Figure()
    for carrier, (color, symbol, dash) in zip(curves.carriers, _SERIES, strict=False):
        _add_carrier(figure, carrier, color, symbol, dash)
    finish(figure, 380)
    tokens = [point.tokens for carrier in curves.carriers for point in carrier.points[1:]]
    largest = max(point.latency_ms / carrier.alone_ms for carrier in curves.carriers for point in carrier.points)
    figure.update_xaxes(title_text="prefill tokens in the iteration (log)", **_binary_ticks(tokens))
    figure.update_yaxes(title_text="times the decodes alone (log)", **log_ticks(0.9, largest))
    figure.add_hline(y=1 + FREE, line={"color": INK, "dash": "dash", "width": 1.25}, name="free")
    figure.add_annotation(
        text=f"+{percent(FREE, 0)}",
        x=0,
        xref="x domain",
        y=log10(1 + FREE),
        yref="y",
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11.5, "color": INK},
        name="free",
    )
    note = (
        f"{_subject(curves)} Each decode has {curves.context_tokens:,} tokens of context, the chunk no prefix. Large "
        f"markers: the most tokens that make the iteration at most {percent(FREE, 0)} longer."
    )
    finding = free_prefill_finding(curves, folder.answer)
    return Drawing(name=name, title=title, finding=finding, note=note, figure=figure)


def _add_carrier(figure: go.Figure, carrier: Carrier, color: str, symbol: str, dash: str) -> None:
    points = carrier.points[1:]
    label = count(carrier.num_decodes, "decode")
    free = carrier.tokens_within((1 + FREE) * carrier.alone_ms)
    figure.add_trace(
        go.Scatter(
            x=[point.tokens for point in points],
            y=[point.latency_ms / carrier.alone_ms for point in points],
            customdata=[point.latency_ms for point in points],
            name=f"{label} ({significant(carrier.alone_ms)} ms)",
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 1.5},
            marker={
                "symbol": symbol,
                "size": [13 if free and point.tokens == free else 3 for point in points],
                "color": color,
            },
            hovertemplate=f"{label} + %{{x}} prefill tokens: %{{customdata:.4~g}} ms, %{{y:.3~g}} times<extra></extra>",
        )
    )


def free_prefill_finding(curves: CostCurves, answer: Answer) -> str:
    """How many prefill tokens are free beside each number of decodes, and how many the SLO holds."""
    free = [
        f"{carrier.tokens_within((1 + FREE) * carrier.alone_ms):,} beside {carrier.num_decodes}"
        for carrier in curves.carriers
    ]
    sentence = f"Prefill tokens that make an iteration at most {percent(FREE, 0)} longer: {listing(free)} decodes."
    limit_ms = answer.slo.tbt_p99_ms
    if not limit_ms:
        return sentence
    held = [f"{carrier.tokens_within(limit_ms):,} beside {carrier.num_decodes}" for carrier in curves.carriers]
    return f"{sentence} An iteration within the SLO of {milliseconds(limit_ms)} holds {listing(held)}."


def draw_chunking(folder: RunFolder) -> Drawing:
    """The time of a prompt in chunks over its time whole, by chunk size."""
    name, title = "chunking", "What chunking costs a prompt"
    curves = folder.curves
    if curves is None or not curves.prompts:
        return Drawing(name=name, title=title, finding=ABSENT.format(what="the overhead of chunks"))
    figure = go.Figure()
    for prompt, (color, symbol, dash) in zip(curves.prompts, _SERIES, strict=False):
        figure.add_trace(
            go.Scatter(
                x=[point.tokens for point in prompt.points],
                y=[point.latency_ms / prompt.whole_ms for point in prompt.points],
                customdata=[point.latency_ms for point in prompt.points],
                name=f"{prompt.prompt_tokens:,} tokens ({milliseconds(prompt.whole_ms)} whole)",
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 1.75},
                marker={"symbol": symbol, "size": 8, "color": color},
                hovertemplate=(
                    f"{prompt.prompt_tokens:,} tokens in chunks of %{{x}}: %{{customdata:.4~g}} ms, "
                    "%{y:.3f} times whole<extra></extra>"
                ),
            )
        )
    ratios = [point.latency_ms / prompt.whole_ms for prompt in curves.prompts for point in prompt.points]
    finish(figure, 360)
    chunks = [point.tokens for prompt in curves.prompts for point in prompt.points]
    figure.update_xaxes(title_text="tokens in a chunk (log)", **_binary_ticks(chunks))
    figure.update_yaxes(title_text="times the whole prompt (log)", **log_ticks(min(0.95, *ratios), max(ratios)))
    budget = folder.answer.token_budget
    if budget and min(chunks) <= budget <= max(chunks):
        figure.add_vline(x=budget, line={"color": PURPLE, "dash": "dot", "width": 1.5}, name="recommended")
    note = (
        f"{_subject(curves)} One prompt alone: the sum of its iterations, each reading the keys and values of the "
        "chunks before it, over one iteration with all of it. Dotted: the token budget."
    )
    return Drawing(name=name, title=title, finding=chunking_finding(curves.prompts, budget), note=note, figure=figure)


def chunking_finding(prompts: tuple[ChunkedPrompt, ...], budget: int | None) -> str:
    """What chunks of the budget cost the longest prompt, and where chunking costs little."""
    longest = max(prompts, key=lambda prompt: prompt.prompt_tokens)
    own = next((point for point in longest.points if point.tokens == budget), None)
    low, high = longest.points[0], longest.points[-1]
    parts = [
        f"in chunks of {point.tokens:,} it takes {_longer(point.latency_ms / longest.whole_ms - 1)}"
        for point in ([low] if own in (None, low) else [low, own])
        if point
    ]
    if high not in (low, own):
        parts.append(f"of {high.tokens:,} {_longer(high.latency_ms / longest.whole_ms - 1)}")
    word = f" ({budget:,} is the budget)" if own is not None else ""
    return f"Of a prompt of {longest.prompt_tokens:,} tokens, alone: {listing(parts)}{word}."


def _longer(fraction: float) -> str:
    if not change(fraction):
        return "no longer"
    return f"{percent(abs(fraction))} {'longer' if fraction > 0 else 'less'}"


def _subject(curves: CostCurves) -> str:
    return f"From the latency table of {curves.subject}, one GPU."


def _binary_ticks(values: list[int]) -> dict[str, object]:
    """A logarithmic axis with ticks at powers of two, every second where they are many."""
    low, high = max(min(values), 1), max(values)
    powers = [2**power for power in range(20) if low <= 2**power <= high]
    ticks = powers[:: 2 if len(powers) > 9 else 1]
    return {
        "type": "log",
        "range": [log10(low / 1.15), log10(high * 1.15)],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:,}" for tick in ticks],
    }
