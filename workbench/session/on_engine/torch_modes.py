"""Restores the modes of torch after an interrupt.

``torch.no_grad``, ``torch.autocast`` and similar contexts set a mode and restore it in Python code. An interrupt inside
that code leaves the mode set, and every later cell would compute without gradients. So an interrupted cell ends with
the modes that held before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workbench.session.on_engine.deferred_interrupts import was_interrupted

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """The modes of this thread: gradients, autocast per device, and the depths of torch's stacks of modes."""

    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_depth: int
    num_function_modes: int
    num_dispatch_modes: int
    saved_tensor_hooks: Any

    @classmethod
    def now(cls) -> Modes:
        return cls(
            torch.is_grad_enabled(),
            tuple(
                (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES
            ),
            torch.is_autocast_cache_enabled(),
            _autocast_depth(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            _top_hooks(),
        )

    def restore(self) -> None:
        """Set these modes again."""
        while torch._C._len_torch_dispatch_stack() > self.num_dispatch_modes:
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack() > self.num_function_modes:
            torch._C._pop_torch_function_stack()
        while _top_hooks() not in (None, self.saved_tensor_hooks):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, self.autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        while _autocast_depth() > self.autocast_depth:
            torch.autocast_decrement_nesting()
        if self.autocast_depth == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch._C._set_grad_enabled(self.grad)


def install(here: Any) -> None:
    """Restore the modes after interrupted cells of an engine's shell."""
    before = [Modes.now()]

    def take(info: Any) -> None:
        before[0] = Modes.now()

    def give_back(result: Any) -> None:
        if was_interrupted(result.error_in_exec):
            before[0].restore()

    here.events.register("pre_run_cell", take)
    here.events.register("post_run_cell", give_back)


@contextmanager
def restored_after_interrupt() -> Iterator[None]:
    """Restore the modes if an interrupt ends a call."""
    before = Modes.now()
    try:
        yield
    except BaseException as error:
        if was_interrupted(error):
            before.restore()
        raise


def _autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
