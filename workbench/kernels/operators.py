"""Operators of torch that only write into arguments and have no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., None])
_library = torch.library.Library("workbench", "FRAGMENT")


def writes_first(function: _Function) -> _Function:
    """Make ``workbench::<name>`` of a function that writes into its first argument, a tensor or a list of tensors.

    ``torch.library.custom_op`` makes the same of it, but each of its calls compares the memory of all tensors, which
    takes longer than to start a kernel.
    """
    name = function.__name__
    written = next(iter(function.__annotations__))

    def run(first: Any, *args: Any) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            function(first, *args)
        torch.autograd.graph.increment_version(first)  # of what kernels outside torch wrote

    _library.define(name + torch.library.infer_schema(function, mutates_args={written}))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"workbench::{name}", lambda *_: None, lib=_library)
    operator: Any = getattr(torch.ops.workbench, name).default
    return operator
