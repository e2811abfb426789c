"""An interruption (Ctrl-C in a notebook) inside a module's call: torch calls no hooks then, not even those for errors.

What hooks have begun would last: autocast would be on in every later cell, gathered parameters would stand where shards
belong. So the call of a parallelized module ends what is open, and only then hands the interruption on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


class Interruptible:
    """Runs the calls of a module.

    It stands where ``nn.Module.compile`` puts a compiled call; copies of the module leave it behind.

    Args:
        module: the parallelized module.
        on_interrupt: what ends things that are open.
    """

    def __init__(self, module: nn.Module, on_interrupt: Sequence[Callable[[], None]]) -> None:
        self.module, self.on_interrupt = module, on_interrupt
        if module._compiled_call_impl is None:
            module._compiled_call_impl = self

    def remove(self) -> None:
        """Calls run as torch has them."""
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
