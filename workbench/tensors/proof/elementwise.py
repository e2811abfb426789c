"""Whether a function works element by element: run it on pieces of small random operands, and compare with the whole.

All ranks draw the same operands, so all come to the same answer without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from workbench.core.layout import Shape
from workbench.core.sbp import Sbp, Split, broadcast, dual
from workbench.tensors.proof.cut import cut, mismatch

Run = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""A function of its operands alone, and its results."""
_LARGE = 8
_DRAWS = ((1.0, 1.0, False), (30.0, 1e6, True), (0.01, 1e-6, False), (1.0, 0.01, True))
"""Scale of the values, scale of the gradients (a bound on a norm, for example, shows at one of them), and whether all
values are positive.
"""


def small_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """The same shapes with large sizes made small; equal sizes stay equal, others stay different.

    >>> small_shapes([(4, 512, 64), (64,)])
    [(4, 9, 8), (8,)]
    """
    large = sorted({size for shape in shapes for size in shape if size > _LARGE})
    small = {size: _LARGE + number for number, size in enumerate(large)}
    return [tuple(small.get(size, size) for size in shape) for shape in shapes]


def draw_operands(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], device: torch.device
) -> Iterator[tuple[float, list[torch.Tensor]]]:
    """Random operands, with the scale that gradients are to have."""
    generator = torch.Generator().manual_seed(0)
    for scale, grad_scale, is_positive in _DRAWS:
        pairs = zip(shapes, dtypes, strict=True)
        drawn = [_draw(shape, dtype, scale, is_positive, generator) for shape, dtype in pairs]
        yield grad_scale, [tensor.to(device) for tensor in drawn]


def _draw(
    shape: Shape, dtype: torch.dtype, scale: float, is_positive: bool, generator: torch.Generator
) -> torch.Tensor:
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return (values.abs() if is_positive else values).to(dtype)


def is_elementwise(run: Run, scale: float, operands: list[torch.Tensor]) -> bool | None:
    """Whether ``run`` gives on pieces what it gives on the whole, results and gradients, along every dim.

    None where these operands do not tell: the results are no numbers, or all alike.
    """
    shape = torch.broadcast_shapes(*(tuple(operand.shape) for operand in operands))
    generator = torch.Generator().manual_seed(1)
    values, gradients, seeds = _differentiate(run, operands, None, scale, generator)
    if not values or any(tuple(value.shape) != tuple(shape) for value in values):
        return False
    if not all(_has_distinct_values(value) for value in values):
        return None
    for dim in range(len(shape)):
        num_ranks = 3 if scale <= 1 and shape[dim] > 2 else 2
        if shape[dim] > 1 and not _holds(
            run, operands, (dim - len(shape), shape[dim]), num_ranks, (values, gradients, seeds)
        ):
            return False
    return any(size > 1 for size in shape)


def is_linear_backward(run: Run, scale: float, operands: list[torch.Tensor]) -> bool | None:
    """Whether the gradients of the operands are linear in those of the results, as terms of a sum need it.

    None where these operands do not tell: a gradient is infinite or no number.
    """
    generator = torch.Generator().manual_seed(3)
    _, first, seeds = _differentiate(run, operands, None, scale, generator)
    _, second, others = _differentiate(run, operands, None, scale, generator)
    mixed = [None if a is None or b is None else 0.5 * a - 3.0 * b for a, b in zip(seeds, others, strict=True)]
    _, found, _ = _differentiate(run, operands, mixed)
    triples = [
        (a, b, mix)
        for a, b, mix in zip(first, second, found, strict=True)
        if a is not None and b is not None and mix is not None
    ]
    if not all(gradient.isfinite().all() for triple in triples for gradient in triple):
        return None
    return not any(_differs([mix], broadcast, 0.5 * a - 3.0 * b) for a, b, mix in triples)


def _holds(
    run: Run, operands: list[torch.Tensor], dim: tuple[int, int], num_ranks: int, expected: tuple[list, list, list]
) -> bool:
    """``dim``: the dim that is split, counted from the end, and its size."""
    values, gradients, seeds = expected
    entries = [_entry(operand, *dim) for operand in operands]
    generator = torch.Generator().manual_seed(2)
    pieces = [cut(operand, entry, num_ranks, generator) for operand, entry in zip(operands, entries, strict=True)]
    split = Split(dim[0] + values[0].dim())
    cut_seeds = [None if seed is None else cut(seed, split, num_ranks, generator) for seed in seeds]
    found = [
        _differentiate(
            run, [of_ranks[rank] for of_ranks in pieces], [None if s is None else s[rank] for s in cut_seeds]
        )
        for rank in range(num_ranks)
    ]
    if any(len(results) != len(values) for results, _, _ in found):
        return False
    for number, value in enumerate(values):
        if _differs([results[number] for results, _, _ in found], split, value):
            return False
    for number, gradient in enumerate(gradients):
        of_ranks = [part for _, of_rank, _ in found if (part := of_rank[number]) is not None]
        if len(of_ranks) != (0 if gradient is None else num_ranks):
            return False
        if gradient is not None and _differs(of_ranks, dual(entries[number]), gradient):
            return False
    return True


def _entry(operand: torch.Tensor, dim: int, size: int) -> Sbp:
    return Split(dim + operand.dim()) if operand.dim() >= -dim and operand.shape[dim] == size else broadcast


def _differs(parts: list[torch.Tensor], entry: Sbp, whole: torch.Tensor) -> bool:
    """Relative to the largest value, and in single precision, which is what functions may compute in inside."""
    largest = float(whole.abs().max()) if whole.is_floating_point() and whole.numel() else 0.0
    if largest and math.isfinite(largest):
        whole, parts = whole / largest, [part / largest for part in parts]
    if whole.dtype == torch.float64:
        whole, parts = whole.float(), [part.float() for part in parts]
    return mismatch(parts, entry, whole) is not None


def _has_distinct_values(value: torch.Tensor) -> bool:
    if value.numel() < 2:
        return bool(value.numel())
    return bool(value.isfinite().all() and (value != value.reshape(-1)[0]).any())


def _differentiate(
    run: Run,
    operands: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor | None] | None,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Results, gradients of the operands, and the gradients of the results that were used (drawn where not given)."""
    leaves = [
        operand.clone().requires_grad_(operand.is_floating_point() or operand.is_complex()) for operand in operands
    ]
    values = run([leaf.clone() for leaf in leaves])
    if seeds is None:
        seeds = [
            (torch.randn(value.shape, generator=generator, dtype=torch.float64) * scale).to(value.device, value.dtype)
            if value.requires_grad
            else None
            for value in values
        ]
    pairs = [(v, s) for v, s in zip(values, seeds, strict=False) if s is not None and v.requires_grad]
    if pairs:
        torch.autograd.backward([v for v, _ in pairs], [s for _, s in pairs])
    return [value.detach() for value in values], [leaf.grad for leaf in leaves], list(seeds)
