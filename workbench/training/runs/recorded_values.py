"""Records the results of all functions in a model's forward, their gradients and those of parameters, on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from workbench.core.layout import Layout
from workbench.core.strategy import Strategy
from workbench.tensors import default_generator
from workbench.tensors.agreement import content_hash
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.simulated import Simulated, world_of_one
from workbench.tensors.world import current
from workbench.training.batches import Batch, LossFunction
from workbench.training.parallel import parallelize
from workbench.training.pipelining.step import train_micro_batches
from workbench.training.precision import compute_in
from workbench.training.runs.exact_dtypes import exact_sums

LOSS = "the loss"
_NO_RESULTS = {"__get__", "__set__", "detach", "requires_grad_", "register_hook", "backward"}


@dataclass(frozen=True, slots=True)
class ValueName:
    """A value of a step: of which layer, of which function in its forward, in which call, and what it is.

    ``function`` is empty for the gradient of a parameter, which is then ``what``.
    """

    layer: str
    function: str
    call: int
    what: str


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """This rank's part of a value. ``layout`` is None for a plain tensor; ``operands`` are those of the function."""

    local: torch.Tensor
    layout: Layout | None
    shape: tuple[int, ...]
    operands: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, operands: tuple[str, ...] = ()) -> RecordedValue:
        """A copy of a tensor as it is now."""
        spec = tensor._spec if isinstance(tensor, GlobalTensor) else None
        with torch.no_grad(), torch._C.DisableTorchFunction():  # of the recorder too
            local = tensor.detach().to("cpu", copy=True).as_subclass(torch.Tensor)
        layout, shape = (None, local.shape) if spec is None else (spec.layout, spec.shape)
        return cls(local, layout, tuple(shape), operands)

    @property
    def hash(self) -> int:
        """Of its bytes."""
        return content_hash(self.local)


class ValueRecorder(TorchFunctionMode):
    """Records under ``watch``; ``values`` has them in the order in which they came."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.values: dict[ValueName, RecordedValue] = {}
        self._model = model
        self._is_parallel = any(isinstance(parameter, GlobalTensor) for parameter in model.parameters())
        self._layers: list[str] = []
        self._calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context around the forward and backward of a step; afterwards the gradients of parameters are there too."""
        handles = []
        for name, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enters(name)))
            handles.append(module.register_forward_hook(self._leaves, always_call=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                layer, _, own = name.rpartition(".")
                self._keep(ValueName(layer, "", 0, f"gradient of {own!r}"), parameter.grad, ())

    def _enters(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._layers.append(name)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        self._layers.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and record its results if they are numbers of the model."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if torch._C._current_graph_task_id() != -1:  # backward runs functions of its own
            return result
        found = [leaf for leaf in tree_leaves(result) if self._is_value(leaf)] if name not in _NO_RESULTS else []
        if found:
            layer = self._layers[-1] if self._layers else LOSS
            call, operands = self._calls[layer, name], _layouts((args, kwargs))
            self._calls[layer, name] += 1
            for number, value in enumerate(found):
                which = f" {number}" if len(found) > 1 else ""
                self._keep(ValueName(layer, name, call, f"result{which}"), value, operands)
                if value.requires_grad:
                    value.register_hook(self._keeps(ValueName(layer, name, call, f"gradient of the result{which}")))
        return result

    def _is_value(self, leaf: Any) -> bool:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, GlobalTensor) != self._is_parallel:
            return False
        return (leaf.is_floating_point() or leaf.is_complex()) and not isinstance(leaf, nn.Parameter)

    def _keeps(self, name: ValueName) -> Callable[[torch.Tensor], None]:
        return lambda grad: self._keep(name, grad, ())

    def _keep(self, name: ValueName, value: torch.Tensor, operands: tuple[str, ...]) -> None:
        if isinstance(value, GlobalTensor) != self._is_parallel or getattr(value, "is_placeholder", False):
            return
        self.values[name] = RecordedValue.of(value, operands)


def _layouts(arguments: Any) -> tuple[str, ...]:
    """The layouts of the global tensors among a function's arguments."""
    return tuple(str(leaf._spec.layout) for leaf in tree_leaves(arguments) if isinstance(leaf, GlobalTensor))


Values = dict[ValueName, RecordedValue]


def values_under(strategy: Strategy, model: nn.Module, parts: Sequence[Batch], loss_fn: LossFunction | None) -> Values:
    """This rank's values of a step of micro-batches under a strategy. The model is parallelized."""
    with default_generator.seeded(0):  # of plain tensors
        pass
    with exact_sums(), current().context.temporarily(generator=torch.Generator().manual_seed(0)):
        model = parallelize(model, strategy)
        recorder = ValueRecorder(model)
        with recorder.watch():
            train_micro_batches(model, loss_fn, parts)
    return recorder.values


def values_in_plain_torch(
    model: nn.Module, parts: Sequence[Batch], loss_fn: LossFunction | None, precision: str
) -> tuple[Values, bool]:
    """The values of the step on this rank's device, and whether the model drew random numbers."""
    world = current()
    model = model.to(world.device)
    compute_in(model, precision, world.device, world.autocast_type)
    recorder = ValueRecorder(model)
    with exact_sums(), default_generator.watched(world.device) as has_drawn, recorder.watch():
        for part in parts:
            (part.on_device(world.device).loss(model, loss_fn) * part.share).backward()
        return recorder.values, has_drawn()


def values_on_one_rank(
    strategy: Strategy, model: nn.Module, parts: Sequence[Batch], loss_fn: LossFunction | None
) -> Values:
    """The values of the step in a world of one rank, as those of one device: plain torch draws other numbers."""
    with Simulated(world_of_one(current().device)):
        values = values_under(strategy, model, parts, loss_fn)
    return {name: replace(value, layout=None, operands=()) for name, value in values.items()}
