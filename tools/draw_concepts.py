"""``python -m tools.draw_concepts``: draw the documentation's drawings again, for light and for dark pages.

What they show is computed: layouts, plans, tables of schedules and simulated timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import workbench as wb
from workbench.core.boxing import plan_boxing
from workbench.core.expert_group import expert_groups
from workbench.core.layout import Layout, balanced_bounds
from workbench.core.placement import Placement
from workbench.core.ring_steps import ring_steps
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import simulate
from workbench.testing import run_ranks
from workbench.theme import PALETTES, Palette
from workbench.ui.pictures.boxing import plan_picture
from workbench.ui.pictures.matmul import draw_matrix
from workbench.ui.pictures.matmul_layouts import ShardedMatrix
from workbench.ui.pictures.svg import Box, arrow, curve, document, line, rect, text

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "concepts"
TWO = Placement.of("cpu", [0, 1])
FOUR = Placement.of("cpu", [0, 1, 2, 3])
Drawing = Callable[[Palette], str]


def layouts(colours: Palette) -> str:
    """The same 6 x 8 tensor on two ranks in four layouts."""
    names = {"S(0)": "rows are split", "S(1)": "columns are split", "B": "everybody has all", "P": "terms of a sum"}

    def parts() -> Iterator[str]:
        for rank in TWO.grid:
            yield text(16, 108 + 106 * rank, f"rank {rank}", anchor="start", bold=True)
        for column, (sbp, words) in enumerate(names.items()):
            left = 84 + 150 * column
            yield text(left + 56, 30, sbp, bold=True, code=True)
            yield text(left + 56, 48, words, fill=colours.muted)
            held = ShardedMatrix("x", (6, 8), Layout.of(TWO, sbp))
            for rank in TWO.grid:
                outline = Box(left, 62 + 106 * rank, 112, 84)
                yield from draw_matrix(held, rank, outline, colours.stages[0].shades[rank], colours)

    return document((684, 268), "One tensor of 6 x 8 in four layouts on two ranks", colours, parts())


def grid(colours: Palette) -> str:
    """(S(0), S(1)) and (S(0), B) on 2 x 2 ranks: one entry per axis."""
    ranks = Placement.of("cpu", [[0, 1], [2, 3]])

    def parts() -> Iterator[str]:
        for number, sbp in enumerate(("S(0), S(1)", "S(0), B", "B, S(1)", "S(0), P")):
            left = 24 + 182 * number
            yield text(left + 74, 30, f"({sbp})", bold=True, code=True)
            held = ShardedMatrix("x", (6, 8), Layout.of(ranks, sbp))
            for rank in ranks.grid:
                down, across = ranks.coordinates(rank)
                outline = Box(left + 78 * across, 62 + 82 * down, 70, 52)
                yield text(outline.x + 35, outline.y - 5, f"rank {rank}", size=11, fill=colours.muted)
                yield from draw_matrix(held, rank, outline, colours.stages[down].shades[across], colours)

    return document((752, 220), "One tensor on a grid of 2 x 2 ranks in four layouts", colours, parts())


def product(x_sbp: str, w_sbp: str) -> Drawing:
    """A product of two tensors on two ranks."""

    def drawing(colours: Palette) -> str:
        def draw() -> str:
            x = wb.ones(4, 6, placement=TWO, sbp=x_sbp)
            w = wb.ones(6, 8, placement=TWO, sbp=w_sbp)
            return str(wb.draw.matmul(x, w, x @ w, theme=colours.name).svg)

        return str(run_ranks(draw)[0])

    return drawing


def network(colours: Palette) -> str:
    """Two layers, the first data parallel, the second model parallel, with the boxings of gradients."""

    def draw() -> str:
        x = wb.ones(4, 5, placement=TWO, sbp="S(0)")
        w0 = wb.ones(5, 8, placement=TWO, sbp="B").requires_grad_()
        w1 = wb.ones(8, 6, placement=TWO, sbp="S(1)").requires_grad_()
        hidden = x @ w0
        gathered = hidden.to_global(sbp="B")
        return str(wb.draw.network((x, w0, hidden), (gathered, w1, gathered @ w1), theme=colours.name).svg)

    return str(run_ranks(draw)[0])


def boxing(source: Layout, destination: Layout) -> Drawing:
    """The plan of a tensor of 7 x 10, which no number of ranks here divides."""
    return lambda colours: plan_picture(plan_boxing(source, destination, (7, 10), itemsize=4), colours)


def schedule(name: str, num_stages: int, num_ranks: int) -> Drawing:
    """Eight micro-batches; a forward takes one unit in all stages of a rank together, a backward two."""

    def drawing(colours: Palette) -> str:
        part = num_ranks / num_stages
        costs = {"F": part, "B": 2 * part, "I": part, "W": part}
        table = make_table(name, num_stages, 8, num_ranks)
        return wb.draw.timeline(simulate(table, num_stages, lambda action: costs[action.kind]), theme=colours.name).svg

    return drawing


def hybrid(colours: Palette) -> str:
    """GPT-3 on 3072 GPUs: 64 stages of 6 hosts (data) x 8 GPUs (model)."""
    grids = [[[s * 48 + host * 8 + gpu for gpu in range(8)] for host in range(6)] for s in range(64)]
    stages = ((Layout.of(Placement.of("cuda", grid), "B, S(1)"), (12288, 49152)) for grid in grids)
    return wb.draw.stages(*stages, names=("host", "GPU"), theme=colours.name).svg


def zero(colours: Palette) -> str:
    """Bytes per parameter that one of four data-parallel ranks holds, in 32 bits with AdamW."""
    kinds = {"parameters": (4, 3), "gradients": (4, 2), "optimizer": (8, 1)}
    scale, height = 34.0, 24.0

    def parts() -> Iterator[str]:
        for row in range(4):
            left, top = 92.0, 20 + 40 * row
            yield text(16, top + 16, f"zero={row}", anchor="start", bold=True, code=True)
            total = 0.0
            for kind, (size, split_from) in kinds.items():
                held = size / 4 if row >= split_from else size
                yield rect(Box(left, top, held * scale, height), colours.memory[kind], colours.background)
                left, total = left + held * scale, total + held
            yield text(left + 8, top + 16, f"{total:g} bytes", anchor="start")
        left = 92.0
        for kind in kinds:
            yield rect(Box(left, 186, 12, 12), colours.memory[kind], colours.line)
            yield text(left + 18, 196, kind, anchor="start", fill=colours.muted)
            left += 110

    return document((740, 214), "What a rank of four holds per parameter under ZeRO", colours, parts())


def experts(colours: Palette) -> str:
    """Tokens of two ranks on the way to four experts, of which each rank has two, and back."""
    group = expert_groups(TWO, data=2, model=1, over_data=2, experts=4)[0]
    owner = {number: rank for rank, bounds in zip(group.ranks, group.bounds, strict=True) for number in range(*bounds)}
    chosen = (0, 2, 1, 3, 2, 0, 3, 2)  # by the tokens of rank 0, then those of rank 1

    def middle(row: int) -> float:
        return 56 + 26 * row + 22 * (row // 4)

    def level(number: int) -> float:
        return middle(4 * owner[number]) + 13 + 52 * (number % 2)

    def parts() -> Iterator[str]:
        for title, left in (("tokens", 118), ("experts", 382), ("results", 646)):
            yield text(left, 26, title, bold=True)
        for row, number in enumerate(chosen):
            shade = colours.stages[0].shades[row // 4]
            stroke = colours.boxing if owner[number] != row // 4 else colours.strong_line
            yield curve((164, middle(row)), (332, level(number)), stroke)
            yield curve((432, level(number)), (600, middle(row)), stroke)
            for left in (72, 600):
                yield rect(Box(left, middle(row) - 9, 92, 18), shade, colours.background)
        for number, rank in owner.items():
            place = Box(332, level(number) - 18, 100, 36)
            yield rect(place, colours.stages[0].shades[rank], colours.strong_line, {"rx": "6"})
            dark_on_light = rank and colours.name != "dark"  # later shades are light in both themes
            fill = colours.ink if dark_on_light else colours.background
            yield text(382, level(number) + 4, f"expert {number}", fill=fill)
        for rank in TWO.grid:
            yield text(16, middle(4 * rank) + 43, f"rank {rank}", anchor="start", bold=True)

    title = "Tokens of two ranks go to the experts that they have chosen, and come back"
    return document((720, 300), title, colours, parts())


def causal_ring(colours: Palette) -> str:
    """The blocks of scores of causal attention on four ranks: who computes which, in which step."""
    rows = balanced_bounds(16, 4)
    side, left, top = 56.0, 116.0, 44.0

    def parts() -> Iterator[str]:
        for rank in range(4):
            yield text(left + (rank + 0.5) * side, 34, f"keys of {rank}", size=11)
            yield text(left - 10, top + (rank + 0.5) * side + 4, f"queries of {rank}", anchor="end", size=11)
            yield rect(Box(380, top + 34 * rank, 22, 22), colours.stages[rank].shades[0], colours.line)
            yield text(412, top + 34 * rank + 16, f"computed by rank {rank}", anchor="start")
        for number, step in enumerate(ring_steps(rows, rows, is_causal=True)):
            for block in step:
                start, stop = (side * row / 4 for row in block.rows)
                place = Box(left + side * block.keys, top + side * block.queries + start, side, stop - start)
                yield rect(place, colours.stages[block.worker].shades[0], colours.background)
                yield text(place.middle[0], place.middle[1] + 4, f"step {number}", fill=colours.background, size=11)
        yield text(
            380, top + 168, "Each rank: half a block, one, half of one", anchor="start", fill=colours.muted, size=11
        )

    return document((640, 284), "Causal attention on four ranks, block by block", colours, parts())


def offload(colours: Palette) -> str:
    """When the state of four buckets is copied in and out, and when the buckets step; a copy takes three updates."""
    count, copy_s, step_s = 4, 3.0, 1.0
    copied, stepped = 0.0, 0.0
    spans: list[tuple[int, str, int, float, float]] = []
    arrived = [0.0] * count

    def copy(kind: str, number: int, earliest: float) -> float:
        nonlocal copied
        start = max(copied, earliest)
        copied = start + copy_s
        spans.append((1, kind, number, start, copied))
        return copied

    arrived[0] = copy("in", 0, 0.0)
    for number in range(count):
        if number + 1 < count:
            arrived[number + 1] = copy("in", number + 1, 0.0)
        start = max(stepped, arrived[number])
        stepped = start + step_s
        spans.append((0, "step", number, start, stepped))
        copy("out", number, stepped)
    scale = 560 / copied

    def parts() -> Iterator[str]:
        for row, words in enumerate(("the GPU steps", "copies")):
            yield text(16, 52 + 48 * row, words, anchor="start", bold=True)
        for row, kind, number, start, stop in spans:
            place = Box(132 + start * scale, 32 + 48 * row, (stop - start) * scale, 32)
            shades = colours.stages[number].shades
            yield rect(place, shades[0] if kind != "out" else colours.stages[number].tint, colours.strong_line)
            fill = colours.ink if kind == "out" else colours.background
            words = f"{number}" if kind == "step" else f"{kind} {number}"
            yield text(place.middle[0], place.middle[1] + 4, words, fill=fill, size=11)
        yield text(132, 132, "time", anchor="start", fill=colours.muted, size=11)
        yield from arrow((164, 128), (692, 128), colours.muted)

    return document(
        (716, 148), "The state of four buckets of parameters comes and goes while others step", colours, parts()
    )


def session(colours: Palette) -> str:
    """A notebook, its controller, its engines, and what goes between them."""

    def parts() -> Iterator[str]:
        def box(place: Box, title: str, words: str, tint: str) -> Iterator[str]:
            yield rect(place, tint, colours.strong_line, {"rx": "6"})
            x, y = place.middle
            yield text(x, y - 3, title, bold=True)
            yield text(x, y + 14, words, fill=colours.muted, size=11)

        yield from box(Box(20, 76, 150, 64), "notebook", "Session, Panel, magics", colours.sunk)
        yield from box(Box(262, 76, 130, 64), "controller", "passes requests on", colours.sunk)
        yield from arrow((170, 108), (260, 108), colours.ink)
        yield text(216, 98, "cells", size=11, fill=colours.muted)
        yield text(216, 126, "output, values", size=11, fill=colours.muted)
        for rank in range(3):
            top = 14 + 72 * rank
            yield line((392, 108), (476, top + 26), colours.ink)
            yield from box(
                Box(476, top, 150, 52), f"engine {rank}", f"rank {rank} of the world", colours.stages[0].tint
            )
        yield line((646, 30), (646, 194), colours.boxing)
        for rank in range(3):
            yield from arrow((646, 40 + 72 * rank), (630, 40 + 72 * rank), colours.boxing)
        yield text(660, 104, "boxing: shared memory,", anchor="start", fill=colours.boxing)
        yield text(660, 122, "CUDA IPC, gloo, NCCL", anchor="start", fill=colours.boxing)

    return document((816, 226), "A session: notebook, controller, engines", colours, parts())


PICTURES: dict[str, Drawing] = {
    "layouts": layouts,
    "grid": grid,
    "product-data": product("S(0)", "B"),
    "product-model": product("B", "S(1)"),
    "product-sum": product("S(1)", "S(0)"),
    "network": network,
    "all-gather": boxing(Layout.of(TWO, "S(0)"), Layout.of(TWO, "B")),
    "reduce-scatter": boxing(Layout.of(TWO, "P"), Layout.of(TWO, "S(0)")),
    "all-to-all": boxing(Layout.of(FOUR, "S(0)"), Layout.of(FOUR, "S(1)")),
    "between": boxing(Layout.of(TWO, "S(0)"), Layout.of(Placement.of("cpu", [2, 3, 4]), "S(0)")),
    "gpipe": schedule("gpipe", 4, 4),
    "1f1b": schedule("1f1b", 4, 4),
    "interleaved": schedule("interleaved", 8, 4),
    "zero-bubble": schedule("zero_bubble", 4, 4),
    "zero-bubble-v": schedule("zero_bubble_v", 8, 4),
    "dualpipe-v": schedule("dualpipe_v", 8, 4),
    "hybrid": hybrid,
    "zero": zero,
    "experts": experts,
    "causal-ring": causal_ring,
    "offload": offload,
    "session": session,
}
"""Name of the file -> what draws it."""


def files() -> Iterator[tuple[Path, str]]:
    """Every file and what belongs into it."""
    for name, draw in PICTURES.items():
        for colours in PALETTES.values():
            yield FOLDER / f"{name}{'-dark' * (colours.name == 'dark')}.svg", draw(colours)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, svg in files():
        path.write_text(svg, encoding="utf-8")
    print(f"wrote {2 * len(PICTURES)} pictures to {FOLDER}")
