"""What must hold for a replay: the strategies and modes of the modules that a step calls, what they consist of, and the
kinds of its inputs. ``read_numbers`` has the numbers that the step reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from workbench.errors import CaptureError
from workbench.tensors.dispatch.hooks import hooks_of
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain, wrap
from workbench.tensors.program_state import numbers_drawn
from workbench.tensors.reached_objects import OF_ALL_MODULES
from workbench.training.capture.read_numbers import Key, change_of, is_number, named_by, numbers_of, objects_of
from workbench.training.strategies.state import STATE


@contextmanager
def called_modules() -> Iterator[Callable[[], list[nn.Module]]]:
    """Context that gives a function, which returns the modules that this thread has called in it, each once. A module
    that the step makes, such as a loss, is none when the step has ended: the next call makes another one.
    """
    thread, found = threading.get_ident(), dict[int, weakref.ref[nn.Module]]()

    def note(module: nn.Module, _args: Any) -> None:
        if threading.get_ident() == thread:  # simulated ranks are threads
            known = found.get(id(module))
            if known is None or known() is not module:
                found[id(module)] = weakref.ref(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield lambda: [module for known in found.values() if (module := known()) is not None]
    finally:
        handle.remove()


def _is_own(hook: Any) -> bool:
    """Whether it is one of ``called_modules``, which simulated ranks register and remove at different times."""
    return getattr(hook, "__module__", None) == __name__


class Guards:
    """The guards of the modules that a step has called so far, with all modules in them."""

    def __init__(self) -> None:
        self._roots: list[nn.Module] = []
        self._look()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Add modules that the step has called. One that contains others comes before them, as it is called first."""
        for module in modules:
            if id(module) not in self._parts:
                self._roots.append(module)
                self._look()

    def have_changed(self) -> bool:
        """Whether a module has got another strategy, or other layers, parameters or buffers, so that no recording is
        right any more.
        """
        return self._held_now() != self._held or self._states_now() != self._states

    def now(self) -> Any:
        """The present modes, frozen parameters and hooks. While they are the same, a replay is allowed."""
        with local_torch():
            return (
                tuple([part.training for part in self._parts.values()]),
                tuple([parameter.requires_grad for parameter in self._parameters]),
                tuple(chain.from_iterable(self._hooks)),  # their numbers, which torch gives once
                tuple([number for held in OF_ALL_MODULES for number, hook in [*held.items()] if not _is_own(hook)]),
                # on their gradients, and behind their accumulation
                tuple([(*(p._backward_hooks or ()), *(p._post_accumulate_grad_hooks or ())) for p in self._parameters]),
            )

    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients. A rank may leave some a gradient of zeros and read them nowhere: it
        adds no bias to terms of which another rank has added it to its own.
        """
        with local_torch():
            return [parameter for parameter in self._parameters if parameter.requires_grad]

    def tensors(self) -> list[torch.Tensor]:
        """The parameters, also frozen ones, and the buffers."""
        buffers = (buffer for part in self._parts.values() for buffer in part._buffers.values())
        return [*self._parameters, *(buffer for buffer in buffers if buffer is not None)]

    def objects(self, others: Iterable[Any]) -> list[Any]:
        """The objects that the modules and ``others`` have now, and those that hooks of modules and parameters name."""
        hooks = chain(*(held.values() for held in self._hooks), *map(hooks_of, self._parameters))
        return objects_of(self._parts.values(), chain(others, *map(named_by, hooks)))

    def numbers_drawn(self, objects: Iterable[Any]) -> list[Any]:
        """What changes when the step draws numbers of Python or numpy, also of generators that modules have."""
        return numbers_drawn((*self._parts.values(), *objects))

    def numbers(self, objects: Iterable[Any]) -> dict[Key, Any]:
        """What programs have set on the modules and on these objects."""
        return numbers_of((*self._parts.values(), *objects))

    def changes_since(self, before: Mapping[Key, Any], objects: Iterable[Any]) -> list[str]:
        """The numbers that have another value than ``before``, a text for each."""
        now, parts = self.numbers(objects), self._parts | {id(each): each for each in objects}
        return [
            change_of(parts[part], name, value, now[part, name])
            for (part, name), value in before.items()
            if is_number(value) and is_number(now.get((part, name))) and value != now[part, name]
        ]

    def _look(self) -> None:
        """Look which modules, parameters and buffers there are."""
        self._parts = {id(part): part for root in self._roots for part in root.modules()}
        self._parallelized = [part for part in self._parts.values() if STATE in part.__dict__]
        self._states = self._states_now()
        self._places: list[dict[str, Any]] = [
            held for p in self._parts.values() for held in (p._parameters, p._buffers, p._modules)
        ]
        self._hooks: list[dict[int, Any]] = [
            held
            for p in self._parts.values()
            for held in (p._forward_pre_hooks, p._forward_hooks, p._backward_pre_hooks, p._backward_hooks)
        ]
        parameters = (parameter for part in self._parts.values() for parameter in part._parameters.values())
        self._parameters = [parameter for parameter in parameters if parameter is not None]
        self._held = self._held_now()

    def _held_now(self) -> tuple[int, ...]:
        return tuple(map(id, chain.from_iterable(map(dict.values, self._places))))

    def _states_now(self) -> list[Any]:
        return [part.__dict__.get(STATE) for part in self._parallelized]


def kind_of(leaf: Any) -> Any:
    """What an argument must have in common with a recording's: everything but the values of a tensor."""
    if isinstance(leaf, GlobalTensor):
        with local_torch():
            return leaf._spec, leaf.dtype, leaf.requires_grad
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"capture: an argument of type {type(leaf).__name__} is neither a tensor nor hashable. A recording is made "
            "for the values of such arguments, so they must be comparable. Hand in tensors, numbers or strings."
        ) from None
    return type(leaf), leaf


def own_input(leaf: Any) -> Any:
    """An input as a tensor of its own, which remembers no boxings of earlier steps, and of which no element occurs
    twice: a recording from an expanded tensor would take one for many.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.requires_grad:
        raise CaptureError(
            f"capture: an input of shape {tuple(leaf.shape)} requires a gradient. Inputs change from call to call, and "
            "the gradient would be left on the one that was recorded. Hand in x.detach(), and return gradients with "
            "torch.autograd.grad."
        )
    local = _without_repeats(plain(leaf))
    return wrap(local, leaf._spec) if isinstance(leaf, GlobalTensor) else local.view_as(local)


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """This rank's part of an input, with these strides: recorded views depend on them. None takes it as it lies."""
    local = plain(tensor)
    if strides is None or local.stride() == strides:
        return local
    return torch.empty_strided(local.shape, strides, dtype=local.dtype, device=local.device).copy_(local)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if is_expanded else tensor
