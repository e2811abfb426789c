"""How fast the panel answers: its first view, a toggle, and a slider of the machine, until grid, text, predictions and
the planner's answer are sent to the page.

A GPT of 100 layers on 2 to 64 ranks, without engines and without a browser: what is timed is the kernel's part, from
the grid's message to the last changed widget. Layers are toggled in turn, so that boxings of new layouts are planned.

    python -m benchmarks.panel
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median

from torch import nn

from benchmarks.reporting import Comparison, Target, publish, table
from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.ui.panel import Panel
from workbench.units import format_seconds

FIRST = Target(1.0, unit="s")
TOGGLE = Target(0.1, unit="s")
_WIDTH, _LENGTH, _WORDS = 768, 256, 50304
_BLOCK = (("ln_1", 1, 0), ("attn.qkv", 3, 1), ("attn.proj", 1, 1), ("ln_2", 1, 0), ("mlp.fc1", 4, 1), ("mlp.fc2", 1, 4))
"""Layers of a block: outputs and inputs as multiples of the width; no inputs for a norm."""
STRATEGIES = {
    2: "hybrid",
    8: "*: model | 1x2x4",
    64: "*: model | 1x8x8",
}


def make_costs(num_blocks: int) -> ModelCosts:
    """A GPT whose layers cost what their products do."""
    found = [_layer("tok_emb", "Embedding", (_WORDS, _WIDTH)), _layer("pos_emb", "Embedding", (_LENGTH, _WIDTH))]
    for number in range(num_blocks):
        for name, outputs, inputs in _BLOCK:
            shape = (outputs * _WIDTH, inputs * _WIDTH) if inputs else (_WIDTH,)
            found.append(_layer(f"blocks.{number}.{name}", "Linear" if inputs else "LayerNorm", shape))
    found += [_layer("ln_f", "LayerNorm", (_WIDTH,)), _layer("lm_head", "Linear", (_WORDS, _WIDTH))]
    return ModelCosts(tuple(map(_cost, found)), (_LENGTH,))


def _layer(name: str, kind: str, shape: tuple[int, ...]) -> Layer:
    return Layer(name, kind, {"weight": shape}, shape[0] * (shape[1] if len(shape) > 1 else 1))


def _cost(layer: Layer) -> LayerCost:
    shape = layer.shapes["weight"]
    outputs, inputs = shape if layer.kind == "Linear" else (_WIDTH, 0)
    moved = 4.0 * _LENGTH * (outputs + inputs)
    work = OpCost("linear", 2.0 * _LENGTH * outputs * inputs, moved, inner=inputs, saved_bytes=4.0 * _LENGTH * outputs)
    return LayerCost(layer, (work,), (), Extent((_LENGTH, outputs)), 4)


def make_model() -> nn.Module:
    """Only its name is shown."""
    return nn.Module()


def open_panel(costs: ModelCosts, num_ranks: int) -> Panel:
    """A panel that predicts for a machine with a file."""
    return Panel(
        make_model,
        (256, _LENGTH),
        strategy=STRATEGIES[num_ranks],
        batch_size=256,
        hardware="v100-dgx2",
        num_ranks=num_ranks,
        costs=costs,
    )


def toggles(panel: Panel, unfolded: bool) -> Iterator[float]:
    """Seconds of toggles of every shown row, to the other choice and back."""
    grid = panel._editor.grid
    if unfolded:
        for row in grid.view["rows"]:
            if row["open"] is False:
                grid._receive(grid, {"event": "fold", "rows": [row["pattern"]]}, [])
    patterns = [row["pattern"] for row in grid.view["rows"]]
    for pattern in patterns:
        for choice in ("data", "model"):
            started = time.perf_counter()
            grid._receive(grid, {"event": "choice", "rows": [pattern], "value": choice}, [])
            yield time.perf_counter() - started


def slides(panel: Panel) -> Iterator[float]:
    """Seconds of moves of every slider; the planner's answer is priced for the new machine, too."""
    bar = panel._editor.machine
    moves = [(slider, factor) for slider in bar.sliders.values() for factor in (0.5, 1.0, 2.0, 4.0, 1.0)]
    moves += [(bar.ranks, number) for number in (bar.ranks.value * 2, bar.ranks.value)]
    for slider, value in moves:
        started = time.perf_counter()
        slider.value = value
        yield time.perf_counter() - started


def plan(panel: Panel) -> None:
    """Have the planner's choice searched for and shown, then go back to the rows that were there."""
    upper = panel._editor
    upper.plan()
    while upper.planner.is_searching or not upper.planner.box.value:
        time.sleep(0.05)
    assert upper.planner.plan is not None, upper.planner.problem
    upper.edit(type(upper.state).undo)


def measure(num_ranks: int, num_blocks: int) -> tuple[int, float, dict[str, list[float]]]:
    """(layers, seconds until the first view, seconds of what the user does by its name)."""
    costs = make_costs(num_blocks)
    started = time.perf_counter()
    panel = open_panel(costs, num_ranks)
    first_s = time.perf_counter() - started
    times = {"toggle": [*toggles(panel, unfolded=False), *toggles(panel, unfolded=True)]}
    plan(panel)
    times["toggle beside the planner's choice"] = list(toggles(panel, unfolded=True))
    times["slider beside the planner's choice"] = list(slides(panel))
    return len(costs.rows), first_s, times


def main() -> int:
    """Print the table, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16, help="blocks of 6 layers (default: 16, 100 layers in all)")
    arguments = parser.parse_args()
    rows, judged = [], []
    measure(2, 2)  # modules are imported, widgets made once
    for num_ranks in STRATEGIES:
        num_layers, first_s, by_action = measure(num_ranks, arguments.blocks)
        rows.append((f"{num_layers}", f"{num_ranks}", "first view", format_seconds(first_s), "", "1"))
        judged.append(Comparison(f"first view on {num_ranks} ranks", first_s, FIRST))
        for action, times in by_action.items():
            figures = (action, format_seconds(median(times)), format_seconds(max(times)), f"{len(times)}")
            rows.append((f"{num_layers}", f"{num_ranks}", *figures))
            judged.append(Comparison(f"median {action} on {num_ranks} ranks", median(times), TOGGLE))
    header = ("layers", "ranks", "what", "median", "slowest", "times")
    body = f"A GPT, without engines and without a browser.\n\n{table(header, rows)}"
    publish("panel", "What the panel's answers take in the kernel", body, judged)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
