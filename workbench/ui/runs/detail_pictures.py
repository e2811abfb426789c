"""Pictures below the table of runs: predictions against measurements, memory of every rank, and time of every layer.

Pure functions, rows or records -> HTML with SVG in the page's colours.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from workbench.core.metrics import MEMORY_KINDS, MEMORY_LABELS, RunRecord, live_bytes
from workbench.ui.assets import element
from workbench.ui.number_text import short_number
from workbench.ui.pictures import panel_svg
from workbench.ui.runs.scatter_picture import place_labels
from workbench.ui.runs.table_rows import Row, key_of
from workbench.ui.short_names import short_name, short_names
from workbench.units import counted, format_bytes, format_seconds

_WIDTH, _HEIGHT = 346.0, 236.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 338.0, 24.0, 200.0
_MOST_LAYERS = 10
_MOST_RUNS = 8
_ROOT = "(root)"
"""The name of a model that has weights of its own."""
_NUMBER_WIDTH = 56
_MEMORY_LEFT, _MEMORY_ROW, _MOST_RANKS = 48.0, 16.0, 16


# ---- prediction against measurement ----------------------------------------------------------------------------------


def prediction_picture(rows: Sequence[Row], selected: str = "") -> str:
    """Measured step times over predicted ones, with the line on which both are equal; empty without predictions."""
    pairs = [(row, row.values["predicted_s"], row.values["step_s"]) for row in rows]
    known = [(row, float(predicted), float(step)) for row, predicted, step in pairs if predicted and step]
    if not known:
        return ""
    seconds = [second for _, *pair in known for second in pair]
    size, unit = panel_svg.scale_of(max(seconds), panel_svg.SECONDS)
    scaled = [second / size for second in seconds]
    across, up = panel_svg.Axis.over(scaled, _LEFT, _RIGHT), panel_svg.Axis.over(scaled, _BOTTOM, _TOP)
    points = [(across.at(predicted / size), up.at(step / size)) for _, predicted, step in known]
    axes = f"predicted step, {unit}", f"measured step, {unit}"
    parts = panel_svg.frame(across, up, axes, short_number, short_number)
    parts.append(panel_svg.line(_LEFT, _BOTTOM, _RIGHT, _TOP, "even"))
    parts.append(panel_svg.text(_RIGHT, _BOTTOM - 8, "faster than predicted", "quiet end"))
    parts += [_point(row, point, row.key == selected) for (row, *_), point in zip(known, points, strict=True)]
    names = zip(short_names([row.name for row, *_ in known]), points, strict=True)
    for x, y, anchor, name in place_labels([*names], points, (_LEFT, _WIDTH), 6.5):
        parts.append(panel_svg.text(x, y, name, anchor))
    description = ", ".join(f"{row.name} {row.texts['error']}" for row, *_ in known)
    picture = panel_svg.svg(_WIDTH, _HEIGHT, f"error of predicted step times: {description}", *parts)
    return panel_svg.section("Prediction against measurement", "", picture, css="predicted")


def _point(row: Row, point: tuple[float, float], is_selected: bool) -> str:
    x, y = (f"{place:.1f}" for place in point)
    tip = (
        f"{row.name}: predicted {row.texts['predicted_s']}, measured {row.texts['step_s']} "
        f"(predicted is {row.texts['error']} off)"
    )
    ring = element("circle", css="wb-ring", cx=x, cy=y, r="9") if is_selected else ""
    dot = element("circle", element("title", text=tip), css="hollow", cx=x, cy=y, r="5")
    return f'<g data-key="{escape(row.key, quote=True)}">{ring}{dot}</g>'


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_picture(runs: Sequence[RunRecord], names: Mapping[str, str], selected: str = "") -> str:
    """A bar per rank, live memory by kind and the peak; of many ranks the fullest one of each run. Empty where no run
    has measured its memory.
    """
    drawn = [run for run in runs if run.error is None and (run.peak_memory_bytes or run.memory_by_kind)][:_MOST_RUNS]
    if not drawn:
        return ""
    memory = {key_of(run): _memory_of(run) for run in drawn}
    largest = max(max(peak, live_bytes(kinds)) for ranks in memory.values() for _, kinds, peak in ranks) or 1.0
    if sum(map(len, memory.values())) > _MOST_RANKS:
        memory = {key: [max(ranks, key=lambda rank: rank[2])] for key, ranks in memory.items()}
    scale = (_WIDTH - _MEMORY_LEFT - _NUMBER_WIDTH - 8) / largest
    parts, y = list[str](), 0.0
    for run in drawn:
        key = key_of(run)
        name = names.get(key, run.name)
        rows = [panel_svg.text(0, y + 12, short_name(name, 44), "strong" if key == selected else "")]
        for rank, kinds, peak in memory[key]:
            rows += _memory_bar(f"{name}, rank {rank}", rank, kinds, peak, y + _MEMORY_ROW + 1, scale)
            y += _MEMORY_ROW
        parts.append(f'<g data-key="{escape(key, quote=True)}">{"".join(rows)}</g>')
        y += _MEMORY_ROW + 6
    fullest = max(drawn, key=lambda run: max(peak for *_, peak in memory[key_of(run)]))
    description = f"memory per rank of {len(drawn)} runs; most in {fullest.name}, {format_bytes(largest)}"
    present = [kind for kind in MEMORY_KINDS if any(of.get(kind) for ranks in memory.values() for _, of, _ in ranks)]
    legend = "".join(panel_svg.swatch(f"var(--wb-memory-{kind})", MEMORY_LABELS[kind]) for kind in present)
    legend += panel_svg.swatch("var(--wb-idle)", "other, up to the peak")
    picture = panel_svg.svg(_WIDTH, y, description, *parts)
    is_each = any(len(ranks) > 1 for ranks in memory.values())
    detail = "at the end of a step" if is_each else "on the fullest rank"
    return panel_svg.section("Memory per rank", detail, picture, panel_svg.legend(legend), css="memory")


def _memory_of(run: RunRecord) -> list[tuple[int, Mapping[str, int], int]]:
    """Number, memory by kind and peak of every rank."""
    kinds = run.memory_by_kind or ({},) * len(run.peak_memory_bytes)
    peaks = run.peak_memory_bytes or map(live_bytes, kinds)
    return [(rank, *pair) for rank, pair in enumerate(zip(kinds, peaks, strict=False))]


def _memory_bar(description: str, rank: int, kinds: Mapping[str, int], peak: int, y: float, scale: float) -> list[str]:
    """The bars of one rank. The tip has all numbers."""
    sizes = {kind: kinds[kind] for kind in MEMORY_KINDS if kinds.get(kind)}
    sizes |= {"other": max(peak - sum(sizes.values()), 0)}
    parts, x = [panel_svg.text(0, y + 10, f"rank {rank}", "quiet")], _MEMORY_LEFT
    for kind, size in sizes.items():
        colour = f"var(--wb-memory-{kind})" if kind in MEMORY_LABELS else "var(--wb-idle)"
        parts.append(panel_svg.bar(x, y, size * scale, _MEMORY_ROW - 4, colour))
        x += size * scale
    parts.append(panel_svg.text(x + 5, y + 10, format_bytes(peak)))
    tip = ", ".join(f"{MEMORY_LABELS.get(kind, kind)} {format_bytes(size)}" for kind, size in sizes.items())
    return [element("g", element("title", text=f"{description}: {tip}, peak {format_bytes(peak)}"), *parts)]


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a step in forward and backward of a layer, or of the same layer in all equal blocks."""

    name: str
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


def layer_times(run: RunRecord) -> dict[str, LayerTime]:
    """By name, in the order of the model; names that differ in numbers only are one, with how many there are. A layer
    that has others inside, as a module with weights of its own may, has its time without theirs.

    >>> run = RunRecord("data", "*: data", 2, 8, layer_forward_s={"h.0.fc": 0.1, "h.1.fc": 0.1, "head": 0.3})
    >>> [(layer.name, layer.forward_s) for layer in layer_times(run).values()]
    [('h.*.fc \u00d72', 0.2), ('head', 0.3)]
    """
    alike: dict[str, list[str]] = {}
    for name in run.layer_forward_s:
        alike.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    own = [_without_inner(times) for times in (run.layer_forward_s, run.layer_backward_s)]
    found = {}
    for pattern, names in alike.items():
        description = names[0] if len(names) == 1 else f"{pattern} \u00d7{len(names)}"
        forward, backward = (sum(times.get(name, 0.0) for name in names) for times in own)
        found[description] = LayerTime(description, forward, backward)
    return found


def _without_inner(times: Mapping[str, float]) -> dict[str, float]:
    """The seconds of every layer without those of the layers inside it."""
    found = dict(times)
    for name, seconds in times.items():
        outer = _outer(name, times)
        if outer is not None:
            found[outer] -= seconds
    return {name: max(seconds, 0.0) for name, seconds in found.items()}


def _outer(name: str, names: Container[str]) -> str | None:
    """The nearest layer that contains this one; None if there is none."""
    parts = name.split(".")
    around = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    own = () if name == _ROOT else (_ROOT,)
    return next((each for each in (*around, *own) if each in names), None)


def layers_picture(runs: Sequence[RunRecord], names: Mapping[str, str], selected: str = "") -> str:
    """A column per run, a row per layer in the model's order, only the slowest where there are many; empty where no run
    has measured its layers.
    """
    drawn = [(run, layer_times(run)) for run in runs if run.layer_forward_s][:_MOST_RUNS]
    if not drawn:
        return ""
    slowest: dict[str, float] = {}
    for _, layers in drawn:
        for layer in layers.values():
            slowest[layer.name] = max(slowest.get(layer.name, 0.0), layer.total_s)
    most = sorted(slowest, key=lambda name: -slowest[name])[:_MOST_LAYERS]
    shown = [name for name in slowest if name in most]
    longest_s = max(slowest.values()) or 1.0
    cells = [element("span")]
    for run, _ in drawn:
        css = "strong" if key_of(run) == selected else "quiet"
        name = names.get(key_of(run), run.name)
        cells.append(element("span", text=name, css=css, title=name))
    for name in shown:
        cells.append(element("span", text=name, css="row layer", title=name))
        cells += [_layer_cell(layers.get(name), longest_s) for _, layers in drawn]
    description = f"time by layer of {len(drawn)} runs; slowest {most[0]}, {format_seconds(slowest[most[0]])}"
    legend = panel_svg.swatch("var(--wb-forward)", "forward") + panel_svg.swatch("var(--wb-backward)", "backward")
    left_out = len(slowest) - len(shown)
    rest = f" \u00b7 {counted(left_out, 'faster layer')} not shown" if left_out else ""
    note = f"computing in a step, slowest rank{rest}"
    columns = f"grid-template-columns: fit-content(45%) repeat({len(drawn)}, minmax(0, 1fr))"
    picture = element("div", *cells, css="wb-layers", style=columns, role="img", aria_label=description)
    return panel_svg.section("Time by layer", note, picture, panel_svg.legend(legend), css="layers")


def _layer_cell(layer: LayerTime | None, longest_s: float) -> str:
    """Two bars for the times of forward and backward, with their sum as text."""
    if layer is None:
        return element("span", element("span", text="\u2013", css="quiet"), css="row")
    tip = f"{layer.name}: forward {format_seconds(layer.forward_s)}, backward {format_seconds(layer.backward_s)}"
    length = f"width: calc((100% - {_NUMBER_WIDTH}px) * {layer.total_s / longest_s:.4f})"
    total_s = layer.total_s or 1.0
    kinds = (("forward", layer.forward_s), ("backward", layer.backward_s))
    bars = [
        element("i", style=f"width: {seconds / total_s:.2%}; background: var(--wb-{kind})") for kind, seconds in kinds
    ]
    number = element("span", text=format_seconds(layer.total_s), css="quiet")
    return element("span", element("span", *bars, css="bars", style=length), number, css="row", data_tip=tip)
