"""A batch cut into micro-batches, each with its weight in the step's loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from workbench.errors import StrategyError
from workbench.runtime.ops.reading import everywhere
from workbench.runtime.tensor import GlobalTensor

Count = Callable[[Any, Any], Any]
"""(inputs, targets) of a micro-batch -> how many terms its mean loss is a mean of: a number or a tensor of one."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a step's batch; ``share`` is its weight in the step's loss, 0 to 1."""

    inputs: Any
    targets: Any
    share: float


def cut(inputs: Any, targets: Any, num_micro_batches: int, count: Count | None = None) -> list[MicroBatch]:
    """A batch cut along dim 0; the parts differ by one sample at most, and there are never more parts than samples.

    Args:
        inputs, targets: tensors, or dicts, lists and tuples of them. What is no tensor, has no dims, or one row where
            the batch has more (positions, masks) goes to every micro-batch whole.
        num_micro_batches: how many parts are wanted.
        count: how many terms a micro-batch's loss is the mean of; its samples, if None.

    Raises:
        StrategyError: tensors of unlike numbers of rows, or no row at all.

    >>> [part.inputs.shape[0] for part in cut(torch.ones(5, 2), torch.ones(5), 2)]
    [3, 2]
    """
    num_samples = _num_samples(inputs, targets)
    parts = min(num_micro_batches, num_samples)

    def parts_of(value: Any) -> Sequence[Any]:
        is_cut = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == num_samples
        return value.tensor_split(parts) if is_cut and parts > 1 else [value] * parts

    leaves, structure = tree_flatten((inputs, targets))
    pairs = [tree_unflatten(list(row), structure) for row in zip(*map(parts_of, leaves), strict=True)]
    if count is None:
        terms = [float(num_samples // parts + (i < num_samples % parts)) for i in range(parts)]
    else:
        terms = [_as_number(count(*pair)) for pair in pairs]
    total = sum(terms) or 1.0
    return [MicroBatch(pair[0], pair[1], n / total) for pair, n in zip(pairs, terms, strict=True)]


def _num_samples(inputs: Any, targets: Any) -> int:
    rows = [leaf.shape[0] for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    several = sorted(set(rows) - {1})
    if len(several) > 1:
        raise StrategyError(
            f"micro-batches: the tensors of the batch have {' and '.join(map(str, several))} rows. All are cut along "
            f"dim 0 and must have the same number there, or 1 to go whole to each micro-batch: add a dim of 1."
        )
    if not rows or several == [0]:
        raise StrategyError(
            "micro-batches: the batch has 0 samples. A step needs at least 1: pass tensors with samples along dim 0."
        )
    return several[0] if several else 1


def _as_number(value: Any) -> float:
    if isinstance(value, GlobalTensor):
        value = everywhere(value)
    return float(value)


def call(module: nn.Module, inputs: Any) -> Any:
    """``module`` on its inputs: a dict gives keywords, a list or tuple positions, anything else one argument."""
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, (list, tuple)):
        return module(*inputs)
    return module(inputs)


def join(outputs: list[Any], shares: list[float]) -> Any:
    """The outputs of micro-batches as one: tensors joined along dim 0, scalars as means weighted by ``shares``.

    >>> join([(torch.ones(2, 3), torch.tensor(1.0)), (torch.ones(1, 3), torch.tensor(4.0))], [2 / 3, 1 / 3])[1]
    tensor(2.)
    """
    leaves = [tree_flatten(output)[0] for output in outputs]
    structure = tree_flatten(outputs[0])[1]
    return tree_unflatten([_join_leaf(list(parts), shares) for parts in zip(*leaves, strict=True)], structure)


def _join_leaf(parts: list[Any], shares: list[float]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], torch.Tensor):
        return parts[0] if all(type(part) is type(parts[0]) and part == parts[0] for part in parts[1:]) else parts
    if parts[0].dim() == 0:
        return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum()
    return torch.cat(parts)
