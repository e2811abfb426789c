"""The plan of a strategy as a table of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from workbench.core.float8_layers import MULTIPLE, left_in_16_bits
from workbench.core.layer_plan import LayerEdge, LayerPlan
from workbench.core.layout import Layout, format_sbp
from workbench.core.model_costs import find_repeats
from workbench.core.strategy import ResolvedStrategy
from workbench.units import format_bytes, format_ranks

_HEAD = ("layer", "ranks", "weight", "input", "result", "a rank sends", "gradients")


def plan_text(layers: Sequence[LayerPlan], resolved: ResolvedStrategy, gradients: Sequence[int]) -> str:
    """The table of ``print(model.plan)``.

    Columns: the layer and its ranks; layout and shape of its largest parameter; layouts of its input and of its result,
    with the boxings to them; bytes that the busiest rank sends for these boxings in a micro-batch, forward + backward;
    bytes that the layer's ranks send in a step, all together, to sum its gradients (``gradients``).
    """
    rows = list(map(_row, layers, gradients))
    widths = [max(len(row[column]) for row in (_HEAD, *rows)) for column in range(len(_HEAD))]
    shown = [row if isinstance(row, str) else "  ".join(map(str.ljust, row, widths)).rstrip() for row in _folded(rows)]
    lines = ["  ".join(map(str.ljust, _HEAD, widths)).rstrip(), *shown, _total(layers, resolved, sum(gradients))]
    picked = [each.layer.name for each in layers if _is_picked(each)]
    if picked:
        lines.append(f"not counted: rows that the model picks for experts of a list ({picked[0]} to {picked[-1]})")
    wide = left_in_16_bits([planned.layer for planned in layers]) if resolved.options.precision == "fp8" else []
    if wide:
        sizes = ", ".join(f"{layer.name} ({' x '.join(map(str, layer.shapes['weight']))})" for layer in wide)
        lines.append(f"fp8: linear layers of sizes that are no multiples of {MULTIPLE} stay in bf16: {sizes}")
    return "\n".join(lines)


def _is_picked(planned: LayerPlan) -> bool:
    """Whether values decide which rows the layer takes."""
    return planned.layer.expert is not None and planned.input_shape is not None and not planned.boxes_input.is_known


def _row(planned: LayerPlan, gradients: int) -> tuple[str, ...]:
    layer = planned.layer
    name, shape = max(layer.shapes.items(), key=lambda item: prod(item[1]), default=("", ()))
    weight = f"{_sbp(planned.parameters[name])} of {' x '.join(map(str, shape))}" if name else ""
    edge = planned.boxes_input + planned.boxes_output
    return (
        layer.name,
        format_ranks(planned.input_layout.placement.grid),
        weight,
        _boxed(planned.boxes_input, planned.input_layout),
        _boxed(planned.boxes_output, planned.output_layout),
        _both_ways(_busiest([edge])) if edge.is_known else "?" * bool(edge.plans),
        format_bytes(gradients) if gradients else "",
    )


def _boxed(edge: LayerEdge, layout: Layout) -> str:
    """The layout, or the boxing from it or to it: ``"S(0) -> B, all-gather"``."""
    if not edge.plans:
        return _sbp(layout)
    kinds = Counter(plan.kind for plan in edge.plans)
    listed = " + ".join(f"{number} x {kind}" if number > 1 else kind for kind, number in kinds.items())
    return f"{_sbp(edge.plans[0].source)} -> {_sbp(edge.plans[-1].destination)}, {listed}"


def _sbp(layout: Layout) -> str:
    return format_sbp(layout.sbp) if layout.placement.num_ranks > 1 else "B"


def _busiest(edges: Sequence[LayerEdge]) -> tuple[int, int]:
    """Bytes that the rank that sends most sends in forward and in backward."""
    ranks = {rank for edge in edges for plan in (*edge.plans, *edge.backward_plans) for rank in plan.bytes_sent}
    sent = ([edge.sent_bytes(rank) for edge in edges] for rank in sorted(ranks))
    return max(((sum(f for f, _ in each), sum(b for _, b in each)) for each in sent), key=sum, default=(0, 0))


def _both_ways(sent: tuple[int, int]) -> str:
    return " + ".join(map(format_bytes, sent)) if any(sent) else ""


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...] | str]:
    """Rows without those of a block that equals the one before it but for its name."""
    repeats = {start: (length, times) for start, length, times in find_repeats([row[1:] for row in rows]) if times > 2}
    found: list[tuple[str, ...] | str] = []
    at = 0
    while at < len(rows):
        length, times = repeats.get(at, (1, 1))
        found += rows[at : at + length]
        at += length * times
        if times > 1:
            found.append(f"  ... the same {times - 1} times more, to {rows[at - 1][0]}")
    return found


def _total(layers: Sequence[LayerPlan], resolved: ResolvedStrategy, num_bytes: int) -> str:
    edges = [edge for layer in layers for edge in (layer.boxes_input, layer.boxes_output)]
    gradients = format_bytes(num_bytes)
    what = "gradients and weights" if resolved.options.zero else "gradients"
    picks = any(map(_is_picked, layers))
    if not picks and not all(edge.is_known for edge in edges):
        return f"{gradients} of {what} in a step; the first batch shows the shapes of activations"
    sent = _both_ways(_busiest(edges))
    if picks and not sent:
        return f"{gradients} of {what} in a step"
    sent = f"at least {sent}" if picks else sent or "nothing"
    times = f", {resolved.num_micro_batches} times a step" if resolved.num_micro_batches > 1 else ""
    return f"between layers the busiest rank sends {sent} (forward + backward){times}; {gradients} of {what} in a step"
