"""The tensors that a call makes, and who has them afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from workbench.tensors.dispatch.read_values import READS
from workbench.tensors.dispatch.registry import fold_name
from workbench.tensors.global_tensor import GlobalTensor, local_torch


class MadeTensors(TorchFunctionMode):
    """Sees the tensors that a call makes, to tell whether it leaves some where its result does not have them.

    Attributes:
        reads_values: whether the call has read values of a tensor, and may branch on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_values = False
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._is_torch_function_enabled():
            is_read = fold_name(func).folded in READS and not isinstance(result, torch.Tensor)
            self.reads_values = self.reads_values or is_read
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._made[id(leaf)] = weakref.ref(leaf)
        return result

    @contextmanager
    def without(self, tensor: torch.Tensor) -> Iterator[None]:
        """Context without a weak reference to a tensor, as torch swaps none that has one."""
        was_made = self._made.pop(id(tensor), None) is not None
        yield
        if was_made:
            self._made[id(tensor)] = weakref.ref(tensor)

    def are_left(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the program still has one of them that is no result, nor what a result is a view of."""
        owners = [(t._memory_owner, t._history_base) for t in results if isinstance(t, GlobalTensor)]
        known = [*results, *(owner for pair in owners for owner in pair if owner is not None)]
        for tensor in known:
            self._made.pop(id(tensor), None)
        held = _held_by_history(known, inputs)
        return any(_is_held(reference, held[key]) for key, reference in self._made.items())


def _is_held(reference: weakref.ref[torch.Tensor], num_known: int) -> bool:
    """Whether Python code has a tensor, beside ``num_known`` places. What only autograd has saved is there, too."""
    tensor = reference()
    if tensor is None:
        return False
    # The variable here and the argument count as two. Owners in C++, if there are others, have one together.
    return sys.getrefcount(tensor) - 2 - num_known > (tensor._use_count() > 1)  # type: ignore[attr-defined]


def nodes_between(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Any]:
    """The nodes of the history of results, back to those that have made the inputs."""
    with local_torch():
        ends = {(tensor.grad_fn, tensor.output_nr) for tensor in inputs}
        waiting: list[Any] = [(tensor.grad_fn, tensor.output_nr) for tensor in results]
    found: dict[Any, None] = {}
    while waiting:
        edge = waiting.pop()
        if edge[0] is not None and edge not in ends and edge[0] not in found:
            found[edge[0]] = None
            waiting += edge[0].next_functions
    return list(found)


def _held_by_history(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Counter[int]:
    """How often nodes between inputs and results have each tensor, by its id: placeholders' nodes have operands."""
    found: Counter[int] = Counter()
    values = [value for node in nodes_between(results, inputs) for value in getattr(node, "__dict__", {}).values()]
    known: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] += 1
        if id(value) not in known:
            known.add(id(value))
            if isinstance(value, torch.Tensor):  # a view has what it is a view of
                values += vars(value).values()
            elif isinstance(value, FunctionType):
                values += (*(value.__closure__ or ()), *(value.__defaults__ or ()))
            elif isinstance(value, (list, tuple, dict, CellType)):
                values += gc.get_referents(value)
    return found
