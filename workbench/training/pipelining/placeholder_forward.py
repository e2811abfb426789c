"""Forward caches of blocks of other stages: the first call is recorded, later ones add one node.

A rank runs the whole program, and each block of another stage costs it twenty calls without data. The call of such a
block has few effects on this rank: placeholders of known layouts, linked to some of its inputs and
parameters, the boxings of inputs, and advanced counters of exchanges and random keys. They are the same for every call
with the same layouts and values. A block with other effects runs unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.core.boxing import plan_boxing
from workbench.tensors.dispatch.placeholder_calls import OutputInfo, placeholder_outputs
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, wrap
from workbench.tensors.random import draw_key
from workbench.tensors.tensor_state import memory_owner
from workbench.training.pipelining.forward_cache import (
    CallObserver,
    CallRecord,
    ForwardCache,
    distinct_tensors,
)


class ResultNumber(int):
    """Stands for a tensor among the leaves of a result."""


@dataclass
class PlaceholderRecord:
    """The effects of a call. Links count inputs first, then results of boxings, then ``parameters``.

    Attributes:
        leaves: of the call's result, each tensor as its number among the results: a tensor may be returned twice.
    """

    call: CallRecord
    parameters: list[GlobalTensor]
    infos: list[OutputInfo]
    specs: list[Spec]
    structure: Any
    leaves: list[Any | ResultNumber]


class PlaceholderForward(ForwardCache):
    """The forward of a module whose parameters lie on other stages."""

    def may_skip(self, tensor: GlobalTensor, target: Spec, function: str) -> bool:
        """Boxings between placeholders, and those that send nothing and have no gradient."""
        source = tensor._spec
        if source.is_placeholder and target.is_placeholder:
            return True
        with local_torch():
            learns = tensor.requires_grad
        plan = plan_boxing(source.layout, target.layout, source.shape, 1)
        return target.is_placeholder and plan.is_local and not learns

    def replay(self, record: PlaceholderRecord, inputs: list[GlobalTensor], args: Any, kwargs: Any) -> Any:
        """Make placeholders with the links of the recorded ones."""
        world = self.world
        boxed = self.box_inputs(record.call, inputs)
        for _ in range(record.call.num_keys):
            draw_key(world)
        operands = [*inputs, *boxed, *record.parameters]
        placeholders = placeholder_outputs(record.infos, operands, world.device)
        if record.structure.is_leaf() and len(placeholders) == 1:
            return wrap(placeholders[0], record.specs[0])
        made = [wrap(placeholder, spec) for placeholder, spec in zip(placeholders, record.specs, strict=True)]
        leaves = [made[leaf] if type(leaf) is ResultNumber else leaf for leaf in record.leaves]
        return tree_unflatten(leaves, record.structure)

    def record(self, result: Any, call: CallRecord, observer: CallObserver) -> PlaceholderRecord | None:
        """The record of a call; None if a result is not a new placeholder, or has links to other tensors."""
        leaves, structure = tree_flatten(result)
        tensors = distinct_tensors(leaves)
        if not all(_is_fresh_placeholder(tensor, observer.inputs) for tensor in tensors):
            return None
        links = _HistoryLinks(observer)
        with local_torch():
            infos: list[OutputInfo] = [(t._spec.shape, t.dtype, t.requires_grad and links.of(t)) for t in tensors]
        if not links.are_known:
            return None
        specs = [tensor._spec for tensor in tensors]
        number_of = {id(tensor): ResultNumber(number) for number, tensor in enumerate(tensors)}
        numbered = [number_of.get(id(leaf), leaf) for leaf in leaves]
        return PlaceholderRecord(call, links.parameters, infos, specs, structure, numbered)


def _is_fresh_placeholder(tensor: torch.Tensor, inputs: list[GlobalTensor]) -> bool:
    """Whether it is a new placeholder: no input, no view (whose base would see writes to it), and no detached input,
    which shares the count of writes.
    """
    if type(tensor) is not GlobalTensor or not tensor._spec.is_placeholder or tensor._history_base is not None:
        return False
    owner = memory_owner(tensor)
    return all(memory_owner(known) is not owner for known in inputs)


class _HistoryLinks:
    """Which inputs, boxed inputs and parameters the history of a result reaches."""

    def __init__(self, observer: CallObserver) -> None:
        inputs = observer.inputs
        self.parameters: list[GlobalTensor] = []
        self.are_known = True
        self._tags, self._first_form = observer.tags, len(inputs)
        self._first_parameter = len(inputs) + len(observer.boxings)
        self._edges: dict[Any, int] = {}
        with local_torch():
            for number, tensor in enumerate(inputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    self._edges[tensor.grad_fn, tensor.output_nr] = number
        self._leaves = {id(tensor): number for number, tensor in enumerate(inputs)}

    def of(self, result: torch.Tensor) -> tuple[int, ...]:
        found, seen, waiting = set(), set(), [(result.grad_fn, result.output_nr)]
        while waiting:
            edge = waiting.pop()
            node: Any = edge[0]
            if node is None:
                continue
            if edge in self._edges:
                found.add(self._edges[edge])
            elif hasattr(node, "variable"):
                found.add(self._leaf(node.variable))
            elif node not in seen:
                seen.add(node)
                form = self._tags.get(node.boxing[2]) if hasattr(node, "boxing") else None
                if form is not None:
                    found.add(self._first_form + form)
                else:
                    # A boxing, made outside of the call, of a tensor that this rank holds: its gradient comes back
                    holds_data = hasattr(node, "boxing") and not all(spec.is_placeholder for spec in node.boxing[:2])
                    self.are_known = self.are_known and not holds_data
                    waiting += node.next_functions
        return tuple(sorted(found))

    def _leaf(self, leaf: Any) -> int:
        if id(leaf) in self._leaves:
            return self._leaves[id(leaf)]
        self.are_known = self.are_known and isinstance(leaf, GlobalTensor) and leaf._spec.is_placeholder
        self._leaves[id(leaf)] = self._first_parameter + len(self.parameters)
        self.parameters.append(leaf)
        return self._leaves[id(leaf)]
