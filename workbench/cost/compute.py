"""Seconds of functions: a roofline of matrix products and memory, and the start of a function.

product   max(flops / (rate k / (k + k0)), moved bytes / memory bandwidth) + weights / their bandwidth + start
others    moved bytes / memory bandwidth + start

In a compiled step the others of one program share what they read and write, and what they compute remains.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.model_costs import OpCost
from workbench.cost.hardware import Hardware
from workbench.errors import StrategyError

_BACKWARD_MOVES = 1.5
"""Bytes that the backward of an elementwise function moves, per byte of its forward: it reads two tensors and writes
one. Used if they have not been counted.
"""
FLASH = "scaled_dot_product_attention"
WRITES = 2
"""A written line of memory is first read into the cache, so written bytes move twice."""
_FLASH_BACKWARD = 1.5
"""Flash attention has two products in forward and five in backward. The first half of backward, which computes the
scores again, counts 1.5.
"""


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine at one precision.

    Attributes:
        hardware: the machine.
        flops_per_s: of large products with weights.
        attention_flops_per_s: of products of activations, which stay in 16 bits if weights have 8.
        usual_flops_per_s: the rate for which the hardware's ``matmul_half_size`` holds: in 16 bits if there is such a
            rate. The fixed part of a product is the same at every precision, so the half size grows with the rate.
        casts: whether operands of products are written again in 8 bits, plain and transposed.
        fuses: whether functions between two products are one program.
        has_first_flash: whether flash attention takes as long as other products; else the machine's own rate holds.
        scale: bytes of an element at this precision, over those at which the works were counted.
    """

    hardware: Hardware
    flops_per_s: float
    attention_flops_per_s: float
    usual_flops_per_s: float
    scale: float = 1.0
    casts: bool = False
    fuses: bool = False
    has_first_flash: bool = False

    @classmethod
    def of(
        cls, hardware: Hardware, precision: str, scale: float, fuses: bool = False, has_first_flash: bool = False
    ) -> Rates:
        """Rates of a precision.

        Raises:
            StrategyError: the hardware has no rate for it.
        """
        rate = hardware.matmul_flops_per_s.get(precision)
        if rate is None:
            known = ", ".join(hardware.matmul_flops_per_s)
            raise StrategyError(
                f"precision {precision}: hardware {hardware.name!r} has matmul_flops_per_s of {known} only. Add the "
                f"rate, or use one of these."
            )
        rates = hardware.matmul_flops_per_s
        usual = rates.get("bf16", rates.get("fp16", rate))
        attention = usual if precision == "fp8" else rate
        return cls(hardware, rate, attention, usual, scale, precision == "fp8", fuses, has_first_flash)

    def product_s(self, flops: float, inner: float, moved_bytes: float, name: str = "linear") -> float:
        """Seconds of a matrix product that sums over ``inner``. A product that was measured by its name has its own
        rate: that in fp32, times the ratio of the rates of large products.
        """
        large = self.flops_per_s if name == "linear" else self.attention_flops_per_s
        is_measured = name != FLASH or not self.has_first_flash
        rate = self.hardware.function_flops_per_s.get(name, 0.0) if is_measured else 0.0
        if rate:
            rate *= large / self.hardware.matmul_flops_per_s.get("fp32", large)
        else:
            rate = large * inner / (inner + self.hardware.matmul_half_size * large / self.usual_flops_per_s)
        cast_s = self.memory_s(moved_bytes) if self.casts and name == "linear" else 0.0
        return max(flops / rate, self.memory_s(moved_bytes)) + cast_s + self.hardware.op_s

    def operands_s(self, weight_bytes: float, moved_bytes: float, name: str) -> float:
        """Additional seconds of a product to read its weight and activations, which no cache holds.

        The rate of a product that was measured by name includes them.
        """
        rate = 0.0 if name in self.hardware.function_flops_per_s else self.hardware.weight_bytes_per_s
        return (weight_bytes + moved_bytes * self.scale) / rate if rate else 0.0

    def memory_s(self, moved_bytes: float, name: str = "") -> float:
        """Seconds to read and write ``moved_bytes``, as counted. A function that was measured has its own rate."""
        hardware = self.hardware
        rate = hardware.function_bytes_per_s.get(name, hardware.memory_bandwidth_bytes_per_s)
        return moved_bytes * self.scale / rate


def forward_s(
    work: OpCost, samples: float, rates: Rates, parts: float = 1, inner_parts: float = 1, weight_bytes: float = 0
) -> float:
    """Seconds of one function's forward on ``samples`` samples: 1/``parts`` of its work, with 1/``inner_parts`` of the
    summed dim.

    ``weight_bytes`` are those of this rank's part of the weight.
    """
    share = samples / parts
    if work.is_matmul:
        moved = work.moved_bytes * share
        product_s = rates.product_s(work.flops * share, work.inner / inner_parts, moved, work.name)
        return product_s + rates.operands_s(weight_bytes, moved, work.name)
    return _moving_s(work, work.moved_bytes, rates, share, 0)


def backward_s(
    work: OpCost,
    samples: float,
    rates: Rates,
    parts: float = 1,
    inner_parts: float = 1,
    outputs: float = 0,
    rows: float = 0,
    weight_bytes: float = 0,
) -> tuple[float, float]:
    """Seconds of one function's backward: (the part for which earlier layers wait, the rest).

    A product has two products in backward: one for its input, which sums over the ``outputs``, and one for its weight,
    which sums over the ``rows`` of all samples. If these are unknown (0), both sum over the inner dim. Other moves,
    such as the sum over rows for a bias's gradient, belong to the second.
    """
    share = samples / parts
    if not work.is_matmul:
        moved = _BACKWARD_MOVES * work.moved_bytes if work.backward_bytes is None else work.backward_bytes
        return _moving_s(work, moved, rates, share, 1), 0.0
    flops, moved = work.flops * share, work.moved_bytes * share
    inner = work.inner / inner_parts
    first = flops * (_FLASH_BACKWARD if work.name == FLASH else 1.0)
    return (
        rates.product_s(first, outputs or inner, moved, work.name) + rates.operands_s(weight_bytes, moved, work.name),
        rates.product_s(flops, rows or inner, moved if work.name != "linear" else 0.0, work.name)
        + rates.operands_s(WRITES * weight_bytes, moved, work.name)
        + rates.memory_s((work.backward_bytes or 0.0) * share),
    )


def _moving_s(work: OpCost, moved_bytes: float, rates: Rates, share: float, way: int) -> float:
    """Seconds of a function that is not a product, in forward (0) or backward (1). A view moves nothing and starts
    nothing.
    """
    alone_s = rates.memory_s(moved_bytes * share, work.name)
    if not rates.fuses or work.fused_bytes is None:
        return alone_s + rates.hardware.op_s if moved_bytes else 0.0
    fused = work.fused_bytes[way]
    computed_s = max(0.0, alone_s - rates.memory_s(moved_bytes * share))  # what it takes longer than a copy
    return computed_s + rates.memory_s(fused * share) + (rates.hardware.op_s if fused else 0.0)
