"""Operators of torch that only write into arguments and have no gradient, and operators whose key is a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., None])
_library = torch.library.Library("workbench", "FRAGMENT")
TABLES_ON_HOST = frozenset({"workbench::move_blocks"})
"""Operators that copy a table of addresses from the host: it is another one where their tensors have moved."""
_one_at_a_time = threading.Lock()
"""Simulated ranks are threads, and an operator is defined once."""


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


def has_key(operator: Any) -> bool:
    """Whether an operator is ours and has a ``key`` of random numbers."""
    schema = operator._schema
    return schema.name.startswith("workbench::") and any(argument.name == "key" for argument in schema.arguments)


def keyed(operator: Any) -> Any:
    """The same operator with another type of ``key``: a tensor of one integer on the CPU.

    A compiled program takes tensors as operands; an integer would become a constant of it.

    >>> keyed(torch.ops.workbench.fill_random.default)._schema.arguments[2].type
    Tensor
    """
    with _one_at_a_time:
        return _make_keyed(operator)


@cache
def _make_keyed(operator: Any) -> Any:
    name = operator._schema.name.removeprefix("workbench::") + "_keyed"
    at = [argument.name for argument in operator._schema.arguments].index("key")

    def run(*args: Any) -> Any:
        return operator(*args[:at], int(args[at]), *args[at + 1 :])

    def fake(*args: Any) -> Any:
        return operator(*args[:at], 0, *args[at + 1 :])

    _, schema = str(operator._schema).split("(", 1)
    _library.define(f"{name}({schema.replace('SymInt key', 'Tensor key')}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"workbench::{name}", fake, lib=_library)
    return getattr(torch.ops.workbench, name).default
