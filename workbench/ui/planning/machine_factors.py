"""Factors on a machine's numbers: the panel's sliders predict for a changed machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workbench.cost.hardware import Hardware
from workbench.ui.number_text import TIMES, three_digits
from workbench.units import format_bytes

_FLOP_UNITS = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1.0, "FLOP/s"))


@dataclass(frozen=True, slots=True)
class MachineFactors:
    """Factors on the numbers of a machine; 1 changes nothing.

    Attributes:
        links: on every bandwidth between ranks; latencies stay.
        memory: on the bytes that a rank may hold.
        flops: on every rate of products; the memory's bandwidth stays.

    >>> MachineFactors(memory=2).of(load_hardware("h200")).memory_bytes    # doctest: +SKIP
    282000000000.0
    """

    links: float = 1.0
    memory: float = 1.0
    flops: float = 1.0

    def of(self, machine: Hardware) -> Hardware:
        """The machine with these factors applied."""
        if self == MachineFactors():
            return machine
        return replace(
            machine,
            memory_bytes=machine.memory_bytes * self.memory,
            matmul_flops_per_s={name: rate * self.flops for name, rate in machine.matmul_flops_per_s.items()},
            function_flops_per_s={name: rate * self.flops for name, rate in machine.function_flops_per_s.items()},
            links=tuple(
                replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * self.links) for link in machine.links
            ),
            exchanges={
                kind: (latency_s, bandwidth * self.links) for kind, (latency_s, bandwidth) in machine.exchanges.items()
            },
        )


def machine_number(machine: Hardware, name: str, precision: str = "fp32") -> str:
    """The machine's number that a factor applies to, as text: ``"25.0\u2013300 GB/s"`` for links."""
    if name == "memory":
        return format_bytes(machine.memory_bytes)
    if name == "links":
        rates = [link.bandwidth_bytes_per_s for link in machine.links]
        slowest, fastest = f"{format_bytes(min(rates))}/s", f"{format_bytes(max(rates))}/s"
        if slowest == fastest:
            return fastest
        number, unit = slowest.split()
        return f"{number if fastest.endswith(unit) else slowest}\u2013{fastest}"
    rates_by_type = machine.matmul_flops_per_s
    rate = rates_by_type.get(precision) or max(rates_by_type.values())
    size, unit = next(pair for pair in _FLOP_UNITS if rate >= pair[0] or pair[0] == 1)
    return f"{three_digits(rate / size)} {unit}"


def factor_text(factor: float) -> str:
    """``2.0`` -> ``"\u00d72"``; nothing where it is 1."""
    return "" if factor == 1 else f"{TIMES}{factor:.3g}"
