"""Cleans up after an interrupt (Ctrl-C in a notebook) inside a module's call. torch calls no hooks then.

Without it, autocast would stay on in every later cell, and gathered parameters would stay in place of shards. So the
call of a parallelized module first undoes what its hooks have begun. Then it raises the interrupt again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


class Interruptible:
    """Runs the calls of a module.

    It is stored where ``nn.Module.compile`` puts a compiled call. Copies of the module do not have it.

    Args:
        module: the parallelized module.
        on_interrupt: functions that undo what hooks have begun.
    """

    def __init__(self, module: nn.Module, on_interrupt: Sequence[Callable[[], None]]) -> None:
        self.module, self.on_interrupt = module, on_interrupt
        if module._compiled_call_impl is None:
            module._compiled_call_impl = self

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
