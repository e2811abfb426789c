"""Other values for the operands of an example: what holds by luck for one set of numbers fails for the next."""

from __future__ import annotations

import torch


def redrawn(operand: torch.Tensor, special: float | None, generator: torch.Generator) -> torch.Tensor:
    """An operand of the same shape; floats in double precision, so that nothing small passes for rounding.

    Floats are normally distributed; with ``special``, they are positive and one has that value: a term that is zero
    must not meet an infinity, nor be divided by zero. Integers are given in another order, as most are indices, and
    with ``special`` all but one are equal.
    """
    if operand.numel() == 0:
        return operand
    place = int(torch.randint(0, operand.numel(), (), generator=generator))
    if operand.is_floating_point() or operand.is_complex():
        fresh = torch.randn(operand.shape, generator=generator, dtype=torch.float64)
        if special is not None:
            fresh = fresh.abs()
            fresh.reshape(-1)[place] = special
        return fresh if operand.is_floating_point() else fresh.to(operand.dtype)
    flat = operand.reshape(-1)
    if special is None:
        return flat[torch.randperm(operand.numel(), generator=generator)].reshape(operand.shape)
    lowest, highest = (flat.amin(), flat.amax()) if operand.dtype != torch.bool else torch.tensor([False, True])
    few, many = (highest, lowest) if special == 0 else (lowest, highest)
    fresh = many.expand_as(flat).clone()
    fresh[place] = few
    return fresh.reshape(operand.shape)
