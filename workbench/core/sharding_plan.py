"""The plan of a strategy for a model: the layouts of every layer's parameters, input and output, and the boxings.

The layout hooks of ``wb.parallelize`` execute it, the panel draws it, ``print(model.plan)`` shows it. ``layer_layouts``
decides, on the model axis, and the cost model prices what it decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

from workbench.core.boxing import LinkCost
from workbench.core.expert_group import expert_layout, layouts_of_travel, owner_layout
from workbench.core.expert_inputs import ExpertInputs
from workbench.core.layer_extents import LayerExtents, ObservedCalls
from workbench.core.layer_layouts import (
    Activation,
    Entry,
    boxed_output_entry,
    context_entry,
    following_of,
    has_output_hook,
    input_entry,
    output_entry,
    sbp_of,
)
from workbench.core.layer_plan import LayerEdge, LayerPlan
from workbench.core.layout import Layout, Shape
from workbench.core.model_costs import Extent
from workbench.core.placement import Placement
from workbench.core.plan_text import plan_text
from workbench.core.recompute_kinds import runs_again
from workbench.core.rows import Layer
from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.core.weight_splits import TABLE, share_input, split_dim

_UNKNOWN = Extent((1,))
"""An unknown extent: its layout is that of a matrix, and its bytes are not counted."""


class ShardingPlan:
    """A strategy on a model's layers and on ranks.

    Args:
        layers: of the model.
        resolved: the choice of each.
        device_type: of the placements.
        cost: the link over which boxings find their paths; None: direct boxings.

    Attributes:
        axes: by stage, the names of the axes of its placement: "data", "context", "model". One of size one is left out:
            boxing along it would do nothing, at a price.
        placements: by stage, its ranks.
        calls: the calls of layers in the first call of the model, which its layout hooks have seen.
        chosen: by layer of fused experts that has been called, how many of them a token chooses.

    >>> from workbench.core.strategy import Strategy
    >>> layers = [Layer("fc1", "Linear", {"weight": (8, 4)}), Layer("fc2", "Linear", {"weight": (2, 8)})]
    >>> plan = ShardingPlan(layers, Strategy("fc1: data; fc2: model").resolve(layers, num_ranks=2))
    >>> first, second = plan.layers_of()
    >>> second.parameters["weight"].sbp, second.input_layout.sbp, [boxing.kind for boxing in second.boxes_input.plans]
    ((S(0),), (B,), ['all-gather'])
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        resolved: ResolvedStrategy,
        device_type: str = "cpu",
        cost: LinkCost | None = None,
    ) -> None:
        self.layers, self.resolved, self.cost = tuple(layers), resolved, cost
        stages = range(resolved.num_stages)
        self.axes = [list(resolved.stage_axes(stage)) for stage in stages]
        self.placements = tuple(self._placement(stage, device_type) for stage in stages)
        self.calls, self._is_settled = ObservedCalls(), False
        self.chosen = dict[str, int]()
        self._stage_of = {choice.name: choice.stage for choice in resolved.layers}
        self._followings: dict[bool, dict[str, ResolvedLayer | None]] = {}
        self._input_layouts: dict[tuple[str, int, int | None, int], Layout] = {}

    def _placement(self, stage: int, device_type: str) -> Placement:
        ranks = tuple(self.resolved.stage_ranks(stage))
        return Placement(device_type, ranks, tuple(self.resolved.stage_axes(stage).values()))

    def on(self, placements: Sequence[Placement]) -> ShardingPlan:
        """The same plan where other ranks are the stages' ranks, in grids of the same shapes."""
        plan = copy(self)
        plan.placements, plan._input_layouts = tuple(placements), {}
        return plan

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingPlan:
        """A copied module has the plan of the module."""
        return self

    def axes_of(self, index: int) -> list[str]:
        """The names of the axes on which a layer lies."""
        return self.axes[self.resolved.layers[index].stage]

    def layout(self, stage: int, data: Sbp, model: Sbp, context: Sbp = broadcast) -> Layout:
        """A layout on a stage from one entry for each of the axes."""
        entries = {"data": data, "context": context, "model": model}
        return Layout(self.placements[stage], tuple(entries[axis] for axis in self.axes[stage]))

    def parameter_layout(self, choice: ResolvedLayer, num_dims: int) -> Layout:
        """The layout of a parameter of a layer."""
        if choice.expert is not None or choice.split == "expert":
            placement, width = self.placements[choice.stage], self.resolved.stage_width(choice.stage)
            if choice.expert is not None:
                return owner_layout(placement, *width, choice.over_data, choice.expert)
            return expert_layout(placement, *width, choice.over_data)
        dim = split_dim(choice.kind, choice.split, num_dims)
        return self.layout(choice.stage, broadcast, broadcast if dim is None else Split(dim))

    def input_layout(
        self, choice: ResolvedLayer, num_dims: int, batch_dim: int | None = 0, num_samples: int = 0
    ) -> Layout:
        """The layout of a layer's input; B for a scalar. ``batch_dim`` counts samples: ``num_samples`` of them."""
        key = choice.name, num_dims, batch_dim, num_samples
        known = self._input_layouts.get(key)
        if known is None:
            taken = self._taken(choice, num_dims, num_samples)
            known = self._layout_of(taken, choice.kind, num_dims, batch_dim)
            if choice.expert is not None:
                owners = self.parameter_layout(choice, num_dims).placement
                is_split = owners.num_ranks > 1 and num_dims > 0
                known = Layout(owners, (Split(batch_dim or 0) if is_split else broadcast,))
            self._input_layouts[key] = known
        return known

    def equal_input_layout(self, choice: ResolvedLayer, shape: Shape) -> Layout:
        """The layout of an input that is equal for all samples: positions, masks, or a batch of one sample."""
        if choice.expert is not None:
            return self.parameter_layout(choice, len(shape))
        return self._layout_of(self._equal(choice, shape), choice.kind, len(shape), None)

    def is_equal_for_all(self, layout: Layout, shape: Shape) -> bool:
        """Whether an activation counts no samples: it is B, or one for all, of which only the context has slices."""
        if layout.is_broadcast or shape[0] != 1 or layout.placement not in self.placements:
            return layout.is_broadcast
        axes = self.axes[self.placements.index(layout.placement)]
        return all(entry == broadcast for axis, entry in zip(axes, layout.sbp, strict=True) if axis != "context")

    def boxed_output_layout(
        self, choice: ResolvedLayer, num_dims: int, batch_dim: int | None = 0, *, in_order_of_calls: bool
    ) -> Layout:
        """The layout of a layer's output behind the output hook: that of the layer called next, or listed next."""
        following = self._following(choice.name, in_order_of_calls)
        model = boxed_output_entry(choice, following, num_dims, self.resolved.options.sequence)
        context = context_entry(choice, num_dims)  # the hook changes the model axis only
        return self._layout_of(Activation(choice.stage, "samples", context, model), choice.kind, num_dims, batch_dim)

    def batch_layouts(self) -> tuple[Layout, Layout]:
        """The layouts of a batch and of its targets: those of the first input, and of the samples of the output."""
        first = min(self.resolved.layers, key=lambda layer: layer.stage)
        last = max(reversed(self.resolved.layers), key=lambda layer: layer.stage)
        model = broadcast if output_entry(last, 1, False) == "features" else Split(0)
        taken = sbp_of(input_entry(first, 1, False), first.kind, 1)
        return self.layout(first.stage, Split(0), taken), self.layout(last.stage, Split(0), model)

    def gradient_bytes(self, planned: LayerPlan) -> int:
        """Bytes on the wire in a step, all ranks together, of a layer's gradients, and under ZeRO of its weights."""
        groups, options = self.resolved.shard_groups(self._stage_of[planned.layer.name]), self.resolved.options
        return planned.gradient_bytes(groups, options.num_micro_batches, options.zero)

    def settle(self) -> bool:
        """Between two calls of the model, or two steps: from now on, output hooks go by the order of calls.

        True if the order is known and not that of the list.
        """
        if self.calls.found and not self._is_settled:
            names = [choice.name for choice in self.resolved.layers if has_output_hook(choice)]
            differs = any(self._following(name, False) != self._following(name, True) for name in names)
            self._is_settled, self.calls.are_followed = True, differs
        return self.calls.are_followed

    def forget_calls(self) -> None:
        """As if the model had not been called: the next call shows the order of its layers."""
        self.calls.forget()
        self._is_settled = False
        self._followings.clear()

    def _following(self, name: str, in_order_of_calls: bool) -> ResolvedLayer | None:
        """The layer called, or listed, behind one, if it is on the same stage."""
        by_calls = in_order_of_calls and bool(self.calls.found)
        if by_calls not in self._followings:
            order = self._in_order_of_calls() if by_calls else range(len(self.layers))
            choices = [self.resolved.layers[index] for index in order]
            self._followings[by_calls] = {each.name: following_of(choices, at) for at, each in enumerate(choices)}
        return self._followings[by_calls][name]

    def layers_of(
        self, extents: Sequence[LayerExtents] | None = None, micro_batch: int = 1, itemsize: int = 4
    ) -> list[LayerPlan]:
        """The plans of all layers.

        The model is a chain: the output of each layer is the input of the next, unless calls have taken one tensor. A
        residual has the layout of the tensor to which it is added; queries, keys and values have one input.

        Args:
            extents: of the layers' inputs and outputs, in the order of calls; None: those of all ``calls``. Where one
                is unknown, layouts are those of matrices.
            micro_batch: samples of a micro-batch, all ranks together.
            itemsize: bytes of an element of an activation.
        """
        chain, everything = _Chain(self, micro_batch, itemsize), range(len(self.layers))
        if extents is not None or not self.calls.found:
            chain.add_all([(i, LayerExtents() if extents is None else extents[i]) for i in everything])
            return list(chain.plans.values())
        index_of = {layer.name: index for index, layer in enumerate(self.layers)}
        chain.add_all([(index_of[name], extent) for name, extent in self.calls.found])
        for index in set(everything) - chain.plans.keys():
            chain.add(index, LayerExtents(), is_called=False)
        return [chain.plans[index] for index in self._in_order_of_calls()]

    def _in_order_of_calls(self) -> list[int]:
        """The layers by their first calls; one that is not called stays behind its predecessor."""
        place, last, places = dict[str, int](), -1, list[int]()
        for name, _ in self.calls.found:
            place.setdefault(name, len(place))
        for layer in self.layers:
            last = place.get(layer.name, last)
            places.append(last)
        return sorted(range(len(places)), key=places.__getitem__)

    def __str__(self) -> str:
        planned = self.layers_of()
        return plan_text(planned, self.resolved, [self.gradient_bytes(layer) for layer in planned])

    def _equal(self, choice: ResolvedLayer, shape: Shape) -> Activation:
        is_sequence = shape[:1] == (1,) and context_entry(choice, len(shape)) == "sequence"
        return Activation(choice.stage, "B", "sequence" if is_sequence else "B", "B")

    def _taken(self, choice: ResolvedLayer, num_dims: int, num_samples: int) -> Activation:
        if num_dims == 0:
            return Activation(choice.stage, "B", "B", "B")
        is_last = choice is self.resolved.layers[-1]
        has_samples = is_last and num_samples > 0 and num_samples % self.resolved.stage_width(choice.stage)[0] == 0
        context = context_entry(choice, num_dims, has_samples)
        model = input_entry(choice, num_dims, self.resolved.options.sequence)
        return Activation(choice.stage, "samples", context, model)

    def _layout_of(self, activation: Activation, kind: str, num_dims: int, batch_dim: int | None) -> Layout:
        """The layout of an activation as a layer of class ``kind`` takes or gives it: samples stay samples, features
        stay features.
        """
        entries = activation.data, activation.model, activation.context
        data, model, context = (sbp_of(entry, kind, num_dims, batch_dim) for entry in entries)
        return self.layout(activation.stage, data, model, context)


class _Chain:
    """The plans of layers, by index, from their calls one after the other."""

    def __init__(self, plan: ShardingPlan, micro_batch: int, itemsize: int) -> None:
        self.plan, self.micro_batch, self.itemsize = plan, micro_batch, itemsize
        self.plans: dict[int, LayerPlan] = {}
        self._latest: LayerPlan | None = None
        self._outputs: dict[bool, Activation] = {}  # by whether the tensor is equal for all samples, like positions
        self._arriving: Activation | None = None
        self._inputs: dict[int, Activation | None] = {}  # by the number of the tensor
        self._boxed_to: set[tuple[int | None, Layout]] = set()
        self._experts = ExpertInputs()

    def add_all(self, calls: Sequence[tuple[int, LayerExtents]]) -> None:
        """Plan calls of layers, by index."""
        experts = [None, *(self.plan.resolved.layers[index].expert for index, _ in calls), None]
        for (index, extent), before, own, behind in zip(calls, experts, experts[1:], experts[2:], strict=False):
            self.add(index, extent, ends=(own != before, own != behind))

    def add(
        self, index: int, extent: LayerExtents, is_called: bool = True, ends: tuple[bool, bool] = (False, False)
    ) -> None:
        """Plan the next call. A layer that is not called boxes nothing: others use its weight.

        ``ends``: whether it is the first layer of its expert in a list of experts, and whether it is the last.
        """
        plan, layer, choice = self.plan, self.plan.layers[index], self.plan.resolved.layers[index]
        if choice.expert is not None:
            extent = self._experts.take(layer.kind, extent, is_first=ends[0])
        taken = extent.input or _UNKNOWN
        given = extent.output or taken
        latest = self._latest
        shares = latest is not None and share_input(latest.layer, layer)
        number = extent.source
        if number in self._inputs:
            self._arriving = self._inputs[number]
        elif not shares:  # a table takes ids
            self._arriving = self._outputs.get(taken.is_batchless) if layer.kind != TABLE else None
        takes = self._input(choice, taken)
        gives = self._result(choice, takes, given)
        leaves = self._boxed(index, gives, given)
        layouts = (
            self._layout(takes, taken, layer.kind),
            self._layout(gives, given, layer.kind),
            self._layout(leaves, given, layer.kind),
        )
        before = behind = LayerEdge(cost=plan.cost)
        if is_called and choice.expert is None:
            self._experts.pass_by(layer.kind, given, is_output=extent.output is not None)
        if is_called and not (choice.expert is not None and self._experts.is_picked):
            self._outputs[given.is_batchless] = leaves
            is_there = (number, layouts[0]) in self._boxed_to or (
                shares and latest and layouts[0] == latest.input_layout
            )
            if number is not None:
                self._inputs[number] = self._arriving
                self._boxed_to.add((number, layouts[0]))
            if self._arriving is not None and not is_there:
                arriving = self._layout(self._arriving, taken, layer.kind)
                before = self._edge(arriving, layouts[0], self._shape(extent.input), extent.input_itemsize)
            behind = self._edge(layouts[1], layouts[2], self._shape(extent.output), extent.output_itemsize)
        if choice.expert is not None:
            layouts, before, behind = self._of_expert(choice, extent, layouts[2], ends)
        elif choice.over_data > 1 and is_called:
            there = self._travel(layer, choice, extent)
            before, behind = before + there, there + behind
        if runs_again(layer.block, plan.resolved.options.recompute):
            before, behind = before.run_again(), behind.run_again()
        parameters = {name: plan.parameter_layout(choice, len(shape)) for name, shape in layer.shapes.items()}
        shapes = self._shape(extent.input), self._shape(extent.output)
        itemsize = extent.input_itemsize or self.itemsize
        self._latest = LayerPlan(layer, parameters, *layouts, before, behind, *shapes, itemsize)
        known = self.plans.setdefault(index, self._latest)
        if known is not self._latest:
            edges = known.boxes_input + before, known.boxes_output + behind
            self.plans[index] = replace(known, boxes_input=edges[0], boxes_output=edges[1])

    def _layout(self, activation: Activation, extent: Extent, kind: str) -> Layout:
        return self.plan._layout_of(activation, kind, extent.num_dims, extent.batch_dim)

    def _shape(self, extent: Extent | None) -> Shape | None:
        return None if extent is None else extent.whole(self.micro_batch)

    def _edge(self, source: Layout, target: Layout, shape: Shape | None, itemsize: int | None) -> LayerEdge:
        return LayerEdge.between(source, target, shape, itemsize or self.itemsize, self.plan.cost)

    def _of_expert(
        self, choice: ResolvedLayer, extent: LayerExtents, on_stage: Layout, ends: tuple[bool, bool]
    ) -> tuple[tuple[Layout, Layout, Layout], LayerEdge, LayerEdge]:
        """The layouts and boxings of a layer of a listed expert.

        Its first layer brings rows to the expert's ranks, unless the expert before has them there; its last one gives
        terms back to all of the stage, of an unknown size as many as its first layer takes. Rows that values picked are
        not counted.
        """
        plan, taken = self.plan, extent.input or _UNKNOWN
        given = extent.output or taken
        takes, gives = (plan.input_layout(choice, each.num_dims, each.batch_dim) for each in (taken, given))
        before, behind, leaves = LayerEdge((), not self._experts.is_picked, plan.cost), LayerEdge(cost=plan.cost), gives
        is_there = self._latest and self._latest.layer.expert is not None and self._latest.input_layout == takes
        if ends[0] and self._arriving is not None and before.is_known and not is_there:
            arriving = self._layout(self._arriving, taken, choice.kind)
            before = self._edge(arriving, takes, self._shape(extent.input), extent.input_itemsize)
        if ends[1]:
            gives, leaves = plan.layout(choice.stage, partial_sum, partial_sum, partial_sum), on_stage
            if not self._experts.is_picked:
                result = extent.output or self._experts.first.input
                behind = self._edge(gives, leaves, self._shape(result), extent.output_itemsize or extent.input_itemsize)
        return (takes, gives, leaves), before, behind

    def _travel(self, layer: Layer, choice: ResolvedLayer, extent: LayerExtents) -> LayerEdge:
        """Tokens that go to their experts, or results that come back. The boxing of rows for features counts them."""
        whole, (data, model) = self._shape(extent.input), self.plan.resolved.stage_width(choice.stage)
        chosen = extent.chosen or self.plan.chosen.get(layer.name, 0)
        rows = prod(whole[:-1]) * chosen // model if whole else None
        layouts = layouts_of_travel(self.plan.placements[choice.stage], data, model, choice.over_data)
        shape = (rows, whole[-1]) if rows and whole else None
        return self._edge(*layouts, shape, extent.input_itemsize)

    def _input(self, choice: ResolvedLayer, taken: Extent) -> Activation:
        arriving = self._arriving
        if taken.is_batchless and (arriving is None or (arriving.data, arriving.model) == ("B", "B")):
            return self.plan._equal(choice, taken.sizes)
        num_samples = 0 if taken.is_batchless else taken.whole(self.micro_batch)[taken.batch_dim or 0]
        return self.plan._taken(choice, taken.num_dims, num_samples)

    def _result(self, choice: ResolvedLayer, takes: Activation, given: Extent) -> Activation:
        if choice.split is None:
            return takes
        data: Entry = "B" if given.is_batchless else "samples"
        entry = output_entry(choice, given.num_dims, self.plan.resolved.options.sequence)
        return Activation(choice.stage, data, takes.context, entry)

    def _boxed(self, index: int, gives: Activation, given: Extent) -> Activation:
        choice, options = self.plan.resolved.layers[index], self.plan.resolved.options
        if not has_output_hook(choice):
            return gives
        following = self.plan._following(choice.name, in_order_of_calls=True)
        return replace(gives, model=boxed_output_entry(choice, following, given.num_dims, options.sequence))
