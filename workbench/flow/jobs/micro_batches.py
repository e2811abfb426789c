"""Micro-batches in job functions: ``unpack`` cuts a batch, the code after it runs once for each part, ``pack`` joins.

    parts = flow.unpack(images, 4)           # 4 micro-batches of a quarter of the rows
    logits = flow.pack(lenet(parts), 4)      # the rows again

``repeat`` gives every micro-batch the same value, ``acc`` sums a value over them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.errors import JobError


class MicroBatches:
    """A tensor in parts. Functions of ``flow`` and operators run on each part.

    ``shape`` and ``dtype`` are those of one part.
    """

    __array_ufunc__ = None  # operators of numpy's numbers and arrays are those below

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.parts[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.parts[0].dtype
        return found

    def __len__(self) -> int:
        return len(self.parts)

    def __repr__(self) -> str:
        return f"MicroBatches({len(self)} of {tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return map_micro_batches(func, args, kwargs or {})


def _operator(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    function = getattr(operator, f"__{name}__")

    def apply(self: MicroBatches, *others: Any) -> Any:
        operands = (*others, self) if is_reflected else (self, *others)
        return map_micro_batches(function, operands, {})

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "and", "or"):
    setattr(MicroBatches, f"__{_name}__", _operator(_name))
    setattr(MicroBatches, f"__r{_name}__", _operator(_name, is_reflected=True))
for _name in ("neg", "abs", "invert", "getitem", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(MicroBatches, f"__{_name}__", _operator(_name))


def counts_of_micro_batches(data: Any) -> set[int]:
    """The numbers of micro-batches of the tensors in parts that ``data`` holds, also in containers."""
    return {len(leaf) for leaf in tree_leaves(data) if isinstance(leaf, MicroBatches)}


def map_micro_batches(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call ``function`` once for each micro-batch. Other arguments are the same in every call.

    Arguments may be containers of micro-batches. Containers that the function returns hold micro-batches.
    """
    counts = counts_of_micro_batches((args, kwargs))
    if len(counts) > 1:
        raise JobError(
            f"{getattr(function, '__name__', function)}: its operands have {' and '.join(map(str, sorted(counts)))} "
            "micro-batches. Operands that meet have as many: unpack them by the same number."
        )

    def call(index: int) -> Any:
        those, named = tree_map(lambda v: v.parts[index] if isinstance(v, MicroBatches) else v, (tuple(args), kwargs))
        return function(*those, **named)

    return tree_map(lambda *parts: MicroBatches(parts), *map(call, range(counts.pop())))


def unpack(x: Any, unpack_num: int) -> MicroBatches:
    """Cut a batch into ``unpack_num`` micro-batches along dim 0.

    Raises:
        JobError: the number of rows is not a multiple of ``unpack_num``.
    """
    num_rows = x.shape[0]
    if unpack_num < 1 or num_rows % unpack_num:
        raise JobError(
            f"unpack: {num_rows} rows in {unpack_num} micro-batches. Micro-batches have equally many rows: take a "
            f"number that divides {num_rows}."
        )
    size = num_rows // unpack_num
    return MicroBatches(x[start : start + size] for start in range(0, num_rows, size))


def pack(x: MicroBatches, pack_num: int) -> Any:
    """Join ``pack_num`` micro-batches along dim 0."""
    return torch.cat(_parts(x, pack_num, "pack"))


def repeat(x: Any, repeat_num: int) -> MicroBatches:
    """The same value for each of ``repeat_num`` micro-batches, for example that of a variable."""
    return MicroBatches([x] * repeat_num)


def acc(x: MicroBatches, max_acc_num: int) -> Any:
    """The sum over ``max_acc_num`` micro-batches."""
    return reduce(operator.add, _parts(x, max_acc_num, "acc"))


def _parts(x: Any, number: int, what: str) -> list[Any]:
    if not isinstance(x, MicroBatches) or len(x) != number:
        have = f"{len(x)} micro-batches" if isinstance(x, MicroBatches) else "a tensor that was not unpacked"
        raise JobError(
            f"{what}(x, {number}): x is {have}. The two numbers are the same: {what} by the number of its unpack or "
            "repeat."
        )
    return x.parts
