"""Parameters that are whole only while a layer uses them: gathered before its forward, and again for its backward.

The gathering is a boxing, so the gradient comes back as a reduce-scatter to the shards. What autograd would save of the
gathered values is replaced by a note of where it lay; the layer's first node in backward gathers again, under a tag
that all ranks drew in forward, and the gathered values are let go as the gradients of the layer's parameters are there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.runtime.boxing import box, run_plan
from workbench.runtime.tensor import GlobalTensor, Spec, local_torch, plain, spec_of


@dataclass
class _Gathered:
    """One parameter, gathered for one call of a layer."""

    parameter: GlobalTensor
    source: Spec
    target: Spec
    tag: int
    again: torch.Tensor | None = None

    def gather(self) -> torch.Tensor:
        """The values once more, for backward."""
        if self.again is None:
            with torch.no_grad():
                local = plain(self.parameter)
                plan = plan_boxing(self.source.layout, self.target.layout, self.source.shape, local.element_size())
                self.again = run_plan(plan, local, self.source.world, self.target, self.tag)
        return self.again

    def let_go(self, *_: Any) -> None:
        """The gradient is there."""
        self.again = None


@dataclass
class _Call:
    """One call of a layer: what stood in the module, what was gathered, and where its values lie now."""

    kept: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    gathered: list[_Gathered] = field(default_factory=list)
    places: dict[int, _Gathered] = field(default_factory=dict)
    saving: Any = None


@dataclass(frozen=True)
class _Note:
    """A view of a gathered parameter, instead of the view."""

    of: _Gathered
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any
    dtype: torch.dtype


class Unshard:
    """Hooks of one layer whose parameters are sharded.

    Args:
        layer: the module; for ``nn.MultiheadAttention``, parameters of its parts are gathered with its own.
        whole: layouts in which parameters are used, by id.
    """

    def __init__(self, layer: nn.Module, whole: dict[int, Layout]) -> None:
        self.layer = layer
        self.owners = list(layer.modules()) if isinstance(layer, nn.MultiheadAttention) else [layer]
        self.whole = {
            (number, name): whole[id(parameter)]
            for number, owner in enumerate(self.owners)
            for name, parameter in owner.named_parameters(recurse=False)
            if id(parameter) in whole
        }
        self._calls: list[_Call] = []
        self._handles: list[Any] = []

    def install(self) -> Unshard:
        """Hook the layer."""
        self._handles = [
            self.layer.register_forward_pre_hook(self._enter),
            self.layer.register_forward_hook(self._leave, always_call=True),
        ]
        return self

    def remove(self) -> None:
        """Unhook the layer; its parameters stay shards."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        call = _Call()
        self._calls.append(call)
        records = torch.is_grad_enabled() and not _is_recomputed()
        for number, owner in enumerate(self.owners):
            for name, parameter in list(owner.named_parameters(recurse=False)):
                layout = self.whole.get((number, name))
                if layout is None or not isinstance(parameter, GlobalTensor) or not parameter._is_param:
                    continue  # on its own stage only: elsewhere it has been brought here whole
                call.kept.append((owner, name, parameter))
                owner._parameters[name] = self._gather(parameter, layout, call, records)
        if call.gathered:
            call.saving = _saving(call)
            call.saving.__enter__()

    def _gather(self, parameter: GlobalTensor, layout: Layout, call: _Call, records: bool) -> Any:
        whole = box(parameter, layout, "gathering of parameters")
        if records:
            source = parameter._spec
            found = _Gathered(parameter, source, spec_of(source.world, whole._spec.layout, source.shape),
                              source.world.next_tag())  # fmt: skip
            call.gathered.append(found)
            with local_torch():
                if whole.numel() and not whole._spec.is_ghost:
                    call.places[whole.untyped_storage().data_ptr()] = found
                if whole.grad_fn is not None:
                    whole.grad_fn.register_prehook(found.let_go)
        return whole

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        if call.saving is not None:
            call.saving.__exit__(None, None, None)
            _gather_at_the_end(output, call.gathered)
        for owner, name, parameter in call.kept:
            owner._parameters[name] = parameter
        call.kept.clear()
        call.places.clear()


def _is_recomputed() -> bool:
    """Inside a checkpoint, which saves nothing and gathers as it runs the layer again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _saving(call: _Call) -> Any:
    """Context in which notes are saved instead of gathered values; other tensors go to the hooks that are in force."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    places = dict(call.places)

    def pack(tensor: torch.Tensor) -> Any:
        with local_torch():
            found = places.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if found is not None and tensor.dtype == found.parameter.dtype:
                return _Note(found, tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return outer[0](tensor) if outer is not None else tensor

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, _Note):
            return saved.of.gather().as_strided(saved.size, saved.stride, saved.offset)
        found: torch.Tensor = outer[1](saved) if outer is not None else saved
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _gather_at_the_end(output: Any, gathered: list[_Gathered]) -> None:
    """Gather before the first node of a result runs, so that all ranks do it at the same point of the backward."""

    def gather(grads: Any) -> None:
        for one in gathered:
            if not one.source.is_ghost or not one.target.is_ghost:
                one.gather()

    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            with local_torch():
                if leaf.grad_fn is not None:
                    leaf.grad_fn.register_prehook(gather)
