"""Describes matrix products of live tensors as data: the layouts of factors and result, and the boxings they need.

It reads the tensors' layouts. It computes nothing and moves no data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout, Region, Shape, format_sbp
from workbench.core.rules import Operand, choose, signatures
from workbench.errors import LayoutError

Plan = BoxingPlan | BoxingPath
NAMES = ("x", "w", "out")
_LETTERS = {
    "m": "data parallel",
    "#1": "data parallel",
    "n": "model parallel",
    "k": "split sum",
    "": "the same product",
}


@dataclass(frozen=True, slots=True)
class ShardedMatrix:
    """A drawn matrix: its name, logical shape and layout (None on one device).

    ``is_turned``: the stored tensor has the shape (columns, rows) of the drawing, like the weight of a linear layer.
    Words name the stored tensor and its slices, with ``.T``, as the equation is written in torch.
    """

    name: str
    shape: Shape
    layout: Layout | None
    is_turned: bool = False

    @property
    def factor(self) -> str:
        """What is drawn: ``"w"``, or ``"w.T"`` of a stored ``w``."""
        return self.name + ".T" * self.is_turned

    @property
    def stored(self) -> Shape:
        """The shape of the stored tensor."""
        return self.shape[::-1] if self.is_turned else self.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the matrix, in the placement's order; rank 0 on one device."""
        return self.layout.placement.grid if self.layout else (0,)

    @property
    def sbp(self) -> str:
        """The sbp as text, ``"S(0)"``. Empty on one device."""
        return format_sbp(self.layout.sbp) if self.layout else ""

    @property
    def is_term(self) -> bool:
        """Whether each rank holds one term of a sum."""
        return self.layout is not None and self.layout.has_partial

    def region(self, rank: int) -> Region | None:
        """Rows and columns of the drawing that ``rank`` holds; None if it holds nothing."""
        if self.layout is None:
            return tuple((0, size) for size in self.shape)
        if rank not in self.layout.placement:
            return None
        region = self.layout.region(self.stored, rank)
        return region[::-1] if self.is_turned else region

    def words(self, rank: int) -> str:
        """The slice of the stored tensor on ``rank``, in torch's notation: ``"x[0:2, :]"``, ``"w[0:2, :].T"``."""
        region = self.region(rank)
        if region is None or any(start == stop for start, stop in region):
            return "nothing"
        whole = tuple((0, size) for size in self.shape)
        stored = list(zip(region, whole, strict=True))[:: -1 if self.is_turned else 1]
        index = ", ".join(":" if part == every else f"{part[0]}:{part[1]}" for part, every in stored)
        name = self.factor if region == whole else f"{self.name}[{index}]" + ".T" * self.is_turned
        return f"a term of {name}" if self.is_term else f"all of {name}" if region == whole else name


@dataclass(frozen=True, slots=True)
class Product:
    """``x @ w = out``: the matrices in the layouts of the local products, and the boxings before these, by name."""

    x: ShardedMatrix
    w: ShardedMatrix
    out: ShardedMatrix
    boxings: tuple[tuple[str, Plan], ...]
    letters: tuple[str, ...]
    learns: bool
    given: Any
    result: Any
    weight: Any

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that compute the product."""
        return self.out.ranks

    @property
    def kind(self) -> str:
        """The kind of parallelism, per axis of the placement: ``"data parallel on 2 ranks"``."""
        if self.out.layout is None:
            return "one device"
        sizes = self.out.layout.placement.shape
        if self.out.layout.placement.num_ranks == 1:
            return f"on rank {self.ranks[0]}"
        kinds = [f"{_LETTERS[letter]} on {size}" for letter, size in zip(self.letters, sizes, strict=True) if size > 1]
        return " × ".join(kinds) + " ranks"


def layout_of(tensor: Any) -> Layout | None:
    """The layout of a global tensor; None for a plain one."""
    return getattr(tensor, "layout_on_ranks", None)


def product(x: Any, w: Any, out: Any, names: Sequence[str] = NAMES, where: str = "wb.draw.matmul") -> Product:
    """The description of ``out``, the product of ``x`` and ``w`` or, in a linear layer, of ``x`` and ``w.T``.

    Raises:
        ValueError: the shapes are not those of a product, or only some of the tensors are global.
        LayoutError: the layout of ``out`` cannot come from those of ``x`` and ``w``.
    """
    shapes = [tuple(tensor.shape) for tensor in (x, w, out)]
    ways = _ways(shapes, where)
    layouts = [layout_of(tensor) for tensor in (x, w, out)]
    out_layout = layouts[2]
    drawn = shapes[0][1], shapes[2][1]
    if out_layout is None or None in layouts:
        if any(layouts):
            description = ", ".join(f"{name} {layout or 'plain'}" for name, layout in zip(names, layouts, strict=True))
            raise ValueError(f"{where}: {description}. Draw three global tensors, or three plain ones.")
        parts = (
            ShardedMatrix(names[0], shapes[0], None),
            ShardedMatrix(names[1], drawn, None, ways[0]),
            ShardedMatrix(names[2], shapes[2], None),
        )
        return Product(*parts, (), (), bool(w.requires_grad), x, out, w)
    (x_goal, w_goal), letters, is_turned = _consumed(x, w, out_layout, ways, where)
    goals = zip(names, (x, w), (x_goal, w_goal), strict=False)
    plans = [(name, tensor.boxing_plan(goal.placement, goal.sbp)) for name, tensor, goal in goals]
    return Product(
        ShardedMatrix(names[0], shapes[0], x_goal),
        ShardedMatrix(names[1], drawn, w_goal, is_turned),
        ShardedMatrix(names[2], shapes[2], out_layout),
        tuple((name, plan) for name, plan in plans if plan.kind != "none"),
        letters,
        bool(w.requires_grad),
        x,
        out,
        w,
    )


def _ways(shapes: list[Shape], where: str) -> list[bool]:
    """Whether w is turned; both, of a square one, which shapes do not tell."""
    x, w, out = shapes
    are_matrices = all(len(shape) == 2 for shape in shapes) and x[0] == out[0]
    sizes = {False: (x[1], out[1]), True: (out[1], x[1])} if are_matrices else {}
    if ways := [turned for turned, size in sizes.items() if size == w]:
        return ways
    description = f"x {x}, w {w}, out {out}"
    raise ValueError(
        f"{where}: {description} are no matrix product. Drawn is (n, k) @ (k, m) = (n, m), or a linear layer, "
        "whose w is (m, k); flatten other dims first."
    )


def _consumed(
    x: Any, w: Any, out: Layout, ways: list[bool], where: str
) -> tuple[tuple[Layout, Layout], tuple[str, ...], bool]:
    """The layouts of the local products, for each axis the dim of the equation that it splits, and whether w is turned:
    the first of the ways that gives ``out``.
    """
    tensors = (x, w)
    cost = x.boxing_plan().steps[0].cost
    operands = [
        Operand(tensor.layout_on_ranks, tuple(tensor.shape), tensor.element_size(), tensor._is_param)
        for tensor in tensors
    ]
    for is_turned in ways if all(operand.layout.placement == out.placement for operand in operands) else ():
        equation = "...k, nk -> ...n" if is_turned else "mk, kn -> mn"  # as in the rules: ties go to the first letter
        known = signatures(equation, [tuple(tensor.shape) for tensor in tensors], (2,))
        choice = choose(known, operands, out.placement, cost)
        if choice is not None and choice.outputs[0] == out.sbp:
            x_sbp, w_sbp = choice.inputs
            return (out.with_sbp(x_sbp), out.with_sbp(w_sbp)), choice.letters, is_turned
    description = ", ".join(
        f"{name} {layout}" for name, layout in zip(NAMES, [*(o.layout for o in operands), out], strict=True)
    )
    raise LayoutError(
        f"{where}: {description}. A product of this x and w does not lie like this out, or they are on different "
        "placements. Draw what belongs together, on one placement: x.to_global(placement=out.placement, sbp=...)."
    )


def joint(before: Any, after: Product) -> tuple[Plan, ...]:
    """The boxings between a layer's result and the next layer's local products. Those of the user's code come first."""
    start, given = layout_of(before), layout_of(after.given)
    goal = after.x.layout
    if start is None or given is None or goal is None:
        return ()
    shape, size, cost = tuple(after.given.shape), after.given.element_size(), before.boxing_plan().steps[0].cost
    plans = [find_boxing_path(a, b, shape, size, cost) for a, b in ((start, given), (given, goal))]
    return tuple(plan for plan in plans if plan.kind != "none")


def backward_of(plan: Plan) -> Plan | None:
    """The boxing of the gradient; None if the gradient needs no boxing."""
    cost = plan.steps[0].cost
    if cost is None:
        return None
    return find_boxing_path(plan.destination.dual(), plan.source.dual(), plan.shape, plan.itemsize, cost)


def gradient_sum(one: Product) -> Plan | None:
    """The boxing of the weight's gradient to the weight's layout, before an optimizer's step. None on one device."""
    layout = layout_of(one.weight)
    cost = one.weight.boxing_plan().steps[0].cost if layout else None
    if layout is None or cost is None:
        return None
    lies = layout_of(one.weight.grad) or layout.dual()
    return find_boxing_path(lies, layout, tuple(one.weight.shape), one.weight.element_size(), cost)
