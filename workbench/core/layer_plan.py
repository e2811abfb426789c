"""The plan of one layer: the layouts of its parameters, input and output, and its boxings. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from workbench.core.boxing import BoxingPlan, LinkCost, plan_boxing
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout, Shape
from workbench.core.rows import Layer
from workbench.core.sbp import Split, dual
from workbench.core.shard_groups import exchanged_copies


@dataclass(frozen=True)
class LayerEdge:
    """Boxings of one micro-batch, in order.

    Attributes:
        is_known: whether these are all, and their shapes are known; else their bytes are 0.
        cost: the link for which they have found their boxing paths; None: direct boxings.
        again: those that run a second time, in backward, where recomputation runs their layer again.
    """

    plans: tuple[BoxingPlan | BoxingPath, ...] = ()
    is_known: bool = True
    cost: LinkCost | None = None
    again: tuple[BoxingPlan | BoxingPath, ...] = ()

    @classmethod
    def between(
        cls, source: Layout, target: Layout, shape: Shape | None, itemsize: int, cost: LinkCost | None
    ) -> LayerEdge:
        """The boxing from one layout to the other, if anything changes. ``shape`` is None if it is unknown."""
        if source == target:
            return cls(cost=cost)
        plan = _boxing(source, target, shape or (1,) * _least_dims(source, target), itemsize, cost)
        return cls(cost=cost) if plan.kind in ("none", "relabel") else cls((plan,), shape is not None, cost)

    def __add__(self, other: LayerEdge) -> LayerEdge:
        is_known = self.is_known and other.is_known
        return LayerEdge(self.plans + other.plans, is_known, self.cost, self.again + other.again)

    def run_again(self) -> LayerEdge:
        """The same under recomputation of the layer. What comes from another stage has come, and is an operand."""
        kept = (plan for plan in self.plans if plan.source.placement == plan.destination.placement)
        return replace(self, again=tuple(kept))

    @cached_property
    def backward_plans(self) -> tuple[BoxingPlan | BoxingPath, ...]:
        """Those that run again, and the boxings of the gradient: reversed, between the dual layouts."""
        of_gradient = (
            _boxing(_dual(plan.destination), _dual(plan.source), plan.shape, plan.itemsize, self.cost)
            for plan in reversed(self.plans)
        )
        return (*self.again, *of_gradient)

    @property
    def forward_bytes(self) -> int:
        """Bytes on the wire, summed over ranks."""
        return sum(map(wire_bytes, self.plans)) if self.is_known else 0

    @property
    def backward_bytes(self) -> int:
        """Bytes on the wire in backward, summed over ranks."""
        return sum(map(wire_bytes, self.backward_plans)) if self.is_known else 0

    def sent_bytes(self, rank: int) -> tuple[int, int]:
        """Bytes that a rank sends in forward and in backward."""
        forward, backward = (
            sum(plan.bytes_sent.get(rank, 0) for plan in plans) if self.is_known else 0
            for plans in (self.plans, self.backward_plans)
        )
        return forward, backward


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer, for one micro-batch.

    The boxings are those of all its calls, one after the other; layouts and shapes are those of the first.

    Attributes:
        parameters: layouts by short name. Those of their gradients are the dual ones.
        input_layout: of its input.
        output_layout: of the result of its function: P for a row-split layer.
        boxed_layout: of its output behind the output hook.
        boxes_input: the boxing from the output of the layer before to ``input_layout``.
        boxes_output: the boxing from ``output_layout`` to ``boxed_layout``.
        input_shape, output_shape: logical shapes; None if unknown.
        itemsize: bytes of an element of the input.
    """

    layer: Layer
    parameters: Mapping[str, Layout]
    input_layout: Layout
    output_layout: Layout
    boxed_layout: Layout
    boxes_input: LayerEdge
    boxes_output: LayerEdge
    input_shape: Shape | None
    output_shape: Shape | None
    itemsize: int

    def gradient_bytes(self, groups: int, num_micro_batches: int, zero: int) -> int:
        """Bytes on the wire of the gradients in a step: p - 1 times what p ranks have copies of, for each scatter or
        gather inside one of the ``groups`` that hold all shards.

        The gradient of a copy is a term, on the model axis too: norms, and biases after row-split weights, are summed
        over both axes. A frozen parameter has no gradient. What layers share counts at the first of them.

        A scatter of gradients and a gather of weights are a whole sum. ZeRO 2 scatters after every micro-batch and
        gathers after the step. ZeRO 3 gathers in every forward and backward, frozen parameters too. Groups of shards
        are summed with each scatter, under ZeRO 3 once in a step.
        """
        m, layer, total = num_micro_batches, self.layer, 0
        halves, sums, gathers = {2: m + 1, 3: 3 * m}.get(zero, 2), m if zero == 2 else 1, 2 * m if zero == 3 else 0
        for name, layout in self.parameters.items():
            if layer.holds(name):
                inside, between = exchanged_copies(layout.num_replicas, groups)
                times = gathers * inside if name in layer.frozen else halves * inside + sums * between
                total += times * prod(layer.shapes[name]) * layer.itemsize_of(name)
        return total


def _least_dims(*layouts: Layout) -> int:
    return max((entry.dim + 1 for layout in layouts for entry in layout.sbp if isinstance(entry, Split)), default=1)


def _boxing(
    source: Layout, target: Layout, shape: Shape, itemsize: int, cost: LinkCost | None
) -> BoxingPlan | BoxingPath:
    if cost is None:
        return plan_boxing(source, target, shape, itemsize)
    return find_boxing_path(source, target, shape, itemsize, cost)


def _dual(layout: Layout) -> Layout:
    """The layout of the gradient; axes of one rank keep their entries."""
    axes_sbp = zip(layout.sbp, layout.placement.shape, strict=True)
    return layout.with_sbp(tuple(dual(entry) if size > 1 else entry for entry, size in axes_sbp))


@lru_cache(maxsize=4096)
def wire_bytes(plan: BoxingPlan | BoxingPath) -> int:
    """Bytes that ranks receive from each other, counted without a list of moves."""
    return sum(plan.bytes_received.values())
