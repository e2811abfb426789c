"""Hooks of layers and modules. Input and output layout hooks box a layer's inputs and results, so layers need not know
their neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.layer_extents import WholeExtent
from workbench.core.layer_layouts import has_output_hook
from workbench.core.layout import Layout
from workbench.core.sbp import NdSbp, Partial, Split, split
from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import TABLE, feature_dim
from workbench.errors import StrategyError
from workbench.tensors.agreement import fingerprint
from workbench.tensors.boxing.box import box, box_implicitly
from workbench.tensors.conversion import from_local, refuse_nested
from workbench.tensors.copy_to_device import copy_to_device
from workbench.tensors.dispatch.sparse_operands import is_sparse
from workbench.tensors.execution_context import ModuleCall
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, wrap
from workbench.tensors.world import current
from workbench.training.sample_rows import batch_leaves, count_samples
from workbench.training.strategies.layouts import LayoutsInUse
from workbench.training.strategies.state import state_of


class PrepareInput:
    """The input hook of a layer."""

    def __init__(self, in_use: LayoutsInUse, choice: ResolvedLayer) -> None:
        self._in_use, self._choice = in_use, choice
        self._is_first_operand = True

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> tuple[Any, Any]:
        """The arguments, with every tensor in the layout that the layer expects."""
        if kwargs is None:
            raise StrategyError(
                f"layer {self._choice.name!r}: this {type(module).__name__} has a copy of the hook of the layer that "
                "was there, as torch.ao.quantization.prepare_qat makes it. Call that before wb.parallelize."
            )
        self._is_first_operand = True
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):  # nearly always
            return (self._prepare(args[0]),), kwargs
        prepared: dict[int, Any] = {}  # one tensor stays one: queries, keys and values
        args, kwargs = tree_map(lambda value: self._prepare_once(value, prepared), (args, kwargs))
        return args, kwargs

    def _prepare_once(self, value: Any, prepared: dict[int, Any]) -> Any:
        if id(value) not in prepared:
            prepared[id(value)] = self._prepare(value)
        return prepared[id(value)]

    def _prepare(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or is_sparse(value):
            if isinstance(value, torch.Tensor):
                refuse_nested(value, f"layer {self._choice.name!r}: an input")
            return value
        layouts, choice, given = self._in_use.layouts, self._choice, value
        world = layouts.world
        if not isinstance(value, GlobalTensor):
            origin = f"layer {choice.name!r}: an input"
            layout = layouts.plan.input_layout(choice, value.dim())
            value = from_local(value, world, layout, lambda: origin, stays=True)
        shape = value._spec.shape
        num_samples = world.context.call.num_samples or (shape[0] if shape else 0)
        batch_dim: int | None = _batch_dim(value._spec, choice.kind, num_samples)
        layout = layouts.plan.input_layout(choice, len(shape), batch_dim, num_samples)
        is_batchless = shape and (shape[0] == 1 or shape[0] != num_samples)
        if is_batchless and layouts.plan.is_equal_for_all(value._spec.layout, shape):
            layout, batch_dim = layouts.plan.equal_input_layout(choice, shape), None  # such as positions and masks
        if self._is_first_operand:
            self._is_first_operand = False
            if choice.expert is not None and shape and shape[batch_dim or 0] != num_samples:
                batch_dim = None  # its rows are no samples
            layouts.plan.calls.add_input(choice.name, WholeExtent(shape, batch_dim), value.dtype.itemsize, given)
        return _on_device(box_implicitly(value, layout, choice.name))


def _on_device(value: GlobalTensor) -> GlobalTensor:
    """A batch is boxed where it is, so that only this rank's samples are copied to its GPU."""
    spec = value._spec
    with local_torch():
        if spec.is_placeholder or value.device == spec.world.device:
            return value
        return wrap(copy_to_device(value.detach(), spec.world.device), spec)


class PrepareOutput:
    """The output hook of a layer: boxes sums, and columns of a table, to the layout of the next layer: the one called
    next, or in the first call of the model the one listed next.

    Without it, every use of the result behind a residual would box it again.
    """

    def __init__(self, in_use: LayoutsInUse, choice: ResolvedLayer) -> None:
        self._in_use, self._choice = in_use, choice

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The output in the layout of the next layer."""
        if not isinstance(output, GlobalTensor):
            return output
        spec = output._spec
        extent = WholeExtent(spec.shape, self._batch_dim(spec))
        self._in_use.layouts.plan.calls.add_output(self.name, extent, output.dtype.itemsize)
        return box_implicitly(output, self.target_of(spec), self.name)

    @property
    def name(self) -> str:
        """The layer's path."""
        return self._choice.name

    def target_of(self, spec: Spec) -> Layout:
        """The layout to which the hook boxes an output."""
        choice, layout, last = self._choice, spec.layout, split(len(spec.shape) - 1)
        layouts = self._in_use.layouts
        wanted = layouts.plan.boxed_output_layout(
            choice,
            len(spec.shape),
            self._batch_dim(spec),
            in_order_of_calls=layouts.world.context.call.in_order_of_calls,
        )
        target: NdSbp = tuple(
            b if isinstance(a, Partial) or (choice.kind == TABLE and a == last) else a
            for a, b in zip(layout.sbp, wanted.sbp, strict=True)
        )
        return layout.with_sbp(target)

    def _batch_dim(self, spec: Spec) -> int:
        num_samples = self._in_use.layouts.world.context.call.num_samples
        return _batch_dim(spec, self._choice.kind, num_samples) if num_samples else 0


class PrepareAttention(PrepareOutput):
    """The output hook of the output projection of torch's attention, whose module uses its weight without a call."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The results of attention, the first in the layout of the next layer."""
        result, *others = output
        if isinstance(result, GlobalTensor):
            extent = WholeExtent(result._spec.shape, self._batch_dim(result._spec))
            self._in_use.layouts.plan.calls.add_input(self.name, extent, result.dtype.itemsize, result)
        return super().__call__(module, args, result), *others


def hook_projections(layers: Iterable[nn.Module], in_use: LayoutsInUse) -> list[Any]:
    """Box the results of torch's attention where calls of its output projection would. ``layers`` are all layers."""
    handles, choices = list[Any](), dict(zip(layers, in_use.layouts.plan.resolved.layers, strict=True))
    for layer, own in choices.items():
        if isinstance(layer, nn.MultiheadAttention) and type(layer).forward is nn.MultiheadAttention.forward:
            projection = choices.get(layer.out_proj)
            if projection is not None and projection.stage == own.stage and has_output_hook(projection):
                handles.append(layer.register_forward_hook(PrepareAttention(in_use, projection)))
    return handles


def hook_layer(
    layer: nn.Module,
    in_use: LayoutsInUse,
    choice: ResolvedLayer,
    foreign: list[str],
    on_interrupt: list[Callable[[], None]],
) -> list[Any]:
    """Box a layer's inputs. Behind a row-split layer, box its partial sums to the layout of the next layer.

    ``foreign`` names the layer's parameters that are on another stage. ``on_interrupt`` gets the functions that clean
    up after an interrupted call.
    """
    handles = [layer.register_forward_pre_hook(PrepareInput(in_use, choice), with_kwargs=True)]
    if foreign:
        handles += _hook_tied(layer, foreign, in_use, choice, on_interrupt)
    if has_output_hook(choice):
        handles.append(layer.register_forward_hook(PrepareOutput(in_use, choice)))
    return handles


def _batch_dim(spec: Spec, kind: str, num_samples: int) -> int:
    """The dim that counts samples: the first one, or another of the same size by which the tensor is split, as in
    (sequence, batch, features). Features of that number do not count as samples.
    """
    shape = spec.shape
    if not shape or shape[0] == num_samples:
        return 0
    features = feature_dim(kind, len(shape))
    dims = (entry.dim for entry in spec.layout.sbp if isinstance(entry, Split))
    return next((dim for dim in dims if dim != features and shape[dim] == num_samples), 0)


def _hook_tied(
    layer: nn.Module,
    names: list[str],
    in_use: LayoutsInUse,
    choice: ResolvedLayer,
    on_interrupt: list[Callable[[], None]],
) -> list[Any]:
    """Box a parameter of another stage to this one around each use. The backward boxes its gradient to its stage."""
    kept: dict[str, Any] = {}

    def bring(module: nn.Module, args: Any) -> None:
        for name in names:
            kept[name] = module._parameters[name]
            layout = in_use.layouts.plan.parameter_layout(choice, kept[name].dim())
            module._parameters[name] = box(kept[name], layout)  # type: ignore[assignment]

    def put_back(module: nn.Module = layer, args: Any = None, output: Any = None) -> None:
        module._parameters.update(kept)
        kept.clear()

    on_interrupt.append(put_back)
    return [layer.register_forward_pre_hook(bring), layer.register_forward_hook(put_back, always_call=True)]


def _is_first_forward() -> bool:
    """Whether a backward will follow: no evaluation, and no recomputation inside a backward."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0


class RootHooks:
    """The hooks of the parallelized module: inside its call, the rows of its inputs are the samples, and operands on
    different stages meet on the latest of them.

    The call may be inside one of another parallelized module, such as a teacher's in a student's forward, which goes on
    afterwards as before.
    """

    def __init__(self, in_use: LayoutsInUse) -> None:
        self._in_use = in_use
        self._around: list[ModuleCall] = []

    def register(self, module: nn.Module, on_interrupt: list[Callable[[], None]]) -> list[Any]:
        """The handles. ``on_interrupt`` gets the function that cleans up after an interrupted call."""
        on_interrupt.append(self.end)
        return [
            module.register_forward_pre_hook(self.begin, with_kwargs=True),
            module.register_forward_hook(self.end, always_call=True),
        ]

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a call."""
        layouts = self._in_use.layouts
        context = layouts.world.context
        self._around.append(context.call)
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        leaves = args if is_one else batch_leaves((args, kwargs))
        calls = layouts.plan.calls
        if current().context.running is None:  # a scheduled step does both before its ranks go their own ways
            trains = module.training and torch.is_grad_enabled()
            named = {**{f"argument {number}": value for number, value in enumerate(args, 1)}, **kwargs}
            state_of(module).compare_first_batch(named, type(module).__name__, None if trains else leaves)
            layouts.plan.settle()
        calls.begin()
        batch = "" if context.running is not None else fingerprint(leaves)
        if _is_first_forward():  # recomputation passes them again
            context.batch = batch if context.running is None else context.running.batch
            context.begin_action("F", layouts.own_stage)
        context.call = ModuleCall(layouts.stage_order, count_samples(leaves), calls.are_followed, batch)

    def end(self, module: nn.Module | None = None, args: Any = None, output: Any = None) -> None:
        """After a call, also after one that has failed."""
        context = self._in_use.layouts.world.context
        if self._around:  # else it has failed before it began
            context.call = self._around.pop()
        self._in_use.layouts.plan.calls.end(has_returned=output is not None)
        if _is_first_forward():
            context.end_action("F")


class Interruptible:
    """Runs the calls of a module, and cleans up after an interrupt (Ctrl-C in a notebook) inside one: torch calls no
    hooks then. Without it, autocast would stay on in every later cell, and gathered parameters in place of shards.

    It is stored where ``nn.Module.compile`` puts a compiled call, which torch leaves out of copies of a module. A copy
    of this object, in the copied state of the model, puts itself there.

    Args:
        module: the parallelized module.
        on_interrupt: functions that undo what hooks have begun.
    """

    def __init__(self, module: nn.Module, on_interrupt: Sequence[Callable[[], None]]) -> None:
        self.module, self.on_interrupt = module, on_interrupt
        if module._compiled_call_impl is None:
            module._compiled_call_impl = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Interruptible:
        return Interruptible(copy.deepcopy(self.module, memo), copy.deepcopy(self.on_interrupt, memo))

    def remove(self) -> None:
        """Let torch run the module's calls again."""
        if self.module._compiled_call_impl is self:
            self.module._compiled_call_impl = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.module._call_impl(*args, **kwargs)
        except Exception:  # hooks have run
            raise
        except BaseException:
            for end in self.on_interrupt:
                end()
            raise
