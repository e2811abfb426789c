"""What the sweep runs: entries of torch's op_db, their sample inputs, and what is exempt."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

UNINITIALISED = "its values are whatever lies in memory"
STORAGE = "reads or writes by storage offset; a shard has no storage of the whole"
SPARSE = "makes or takes a sparse layout; global tensors are strided"
DEVICE = "needs another device than a CPU"
EXEMPT: dict[str, str] = {
    "empty_strided": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "resize_": STORAGE,
    "resize_as_": STORAGE,
    "to_sparse": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "sparse.sampled_addmm": SPARSE,
}
"""Entries that are not run, each with the reason. A closed list: a new entry needs an argument, not a failing run."""
SHARED = "draws from torch's own generator, which simulated ranks share; processes have one each, in the same state"
SHAPES_ONLY: dict[str, str] = {
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "new_empty": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "svd_lowrank": SHARED,
    "pca_lowrank": SHARED,
}
"""Entries of which shapes and dtypes are compared, but no values."""

_DTYPES = (
    torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64, torch.bfloat16, torch.float16, torch.int32,
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One entry of op_db, under the dtype it is run with."""

    name: str
    op: Any
    dtype: torch.dtype
    differentiable: bool
    call: Callable[..., Any]


@lru_cache(maxsize=3)
def entries(form: str = "function") -> tuple[Entry, ...]:
    """All of op_db that has this form, in its order: "function", "method", "in_place" or "keywords"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
    # op_db seeds torch's generator around random functions; here they are to draw from the world's keys.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    calls = ((op, _call_of(op, form)) for op in invocations.op_db)
    return tuple(_entry(op, call) for op, call in calls if call is not None)


def _call_of(op: Any, form: str) -> Callable[..., Any] | None:
    if form == "keywords":
        return by_keywords(op.op)
    if form != "in_place":
        return op.op if form == "function" else op.method_variant
    written = op.inplace_variant
    if written in (None, torch.Tensor.as_strided_):  # the second is refused: it gives a shard other strides
        return None
    return lambda first, *args, **kwargs: _in_place(written, first, args, kwargs)


def by_keywords(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Call ``function`` with as many arguments by keyword as torch takes, in order, in reverse order, and once more.

    None for a function whose names torch does not list. Plain tensors come first, and say which form torch takes.
    """
    listed = torch.overrides.get_testing_overrides().get(function)
    if listed is None or function.__name__.startswith("__"):
        return None
    names = list(inspect.signature(listed).parameters)
    first_keyword: dict[Any, int] = {}

    def call_from(start: int, args: Any, kwargs: Any) -> Any:
        named = dict(zip(names[start:], args[start:], strict=False)) | kwargs
        function(*args[:start], **named)
        function(*args[:start], **dict(reversed(named.items())))
        return function(*args[:start], **named)

    def call(*args: Any, **kwargs: Any) -> Any:
        key = (*map(type_of, args), *((name, type_of(value)) for name, value in kwargs.items()))
        if key in first_keyword:
            return call_from(first_keyword[key], args, kwargs)
        for start in range(len(args) + 1):
            try:
                result = call_from(start, args, kwargs)
            except (TypeError, RuntimeError):
                if start == len(args):
                    raise
            else:
                first_keyword[key] = start
                return result
        raise AssertionError

    return call


def type_of(value: Any) -> Any:
    """Tensors of any kind are one type."""
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _in_place(written: Callable[..., Any], first: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """On a copy, as a leaf that requires a gradient is not written to; a few functions resize, which no layout can."""
    result = written(first.clone(), *args, **kwargs)
    if result.shape != first.shape:
        raise ValueError(f"in place, the shape became {tuple(result.shape)}")
    return result


def _entry(op: Any, call: Callable[..., Any]) -> Entry:
    dtype = next((d for d in _DTYPES if d in op.dtypes), next(iter(op.dtypes), torch.float32))
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    return Entry(name, op, dtype, op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"), call)


def samples(entry: Entry, count: int, seed: int) -> list[Any]:
    """``count`` sample inputs chosen by ``seed`` among the first ones; those with sparse tensors are left out."""
    torch.manual_seed(seed)
    found: list[Any] = []
    at_most = 6 + 8 * count  # some entries make hundreds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # op_db makes some samples with functions that torch has since deprecated
        for sample in _iterate(entry):
            if all(leaf.layout is torch.strided for leaf in tensors_of(sample)):
                found.append(sample)
            if len(found) == at_most:
                break
    random.Random(f"{entry.name} {seed}").shuffle(found)
    return found[:count]


def _iterate(entry: Entry) -> Iterator[Any]:
    yield from entry.op.sample_inputs("cpu", entry.dtype, requires_grad=entry.differentiable)


def tensors_of(sample: Any) -> list[torch.Tensor]:
    """The tensors among a sample's arguments."""
    leaves, _ = tree_flatten((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
