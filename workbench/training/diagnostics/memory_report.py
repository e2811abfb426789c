"""``wb.debug.memory_report``: the memory of every rank by kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current
from workbench.training.diagnostics.memory import (
    ActivationMeter,
    gradients,
    offloaded_bytes,
    optimizer_state,
    storage_bytes,
)
from workbench.units import format_bytes

KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "transport")
OFFLOADED = "offloaded"
"""Beside the kinds, and no part of the total: bytes in host memory, or on CPUs in files."""


class MemoryReport:
    """Bytes by rank and kind; ``print`` it, or call ``to_dict()``. See ``memory_report``.

    As a context it also counts activations: the most that autograd has kept for backward at any moment inside.
    """

    def __init__(self, modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self._activations: ActivationMeter | None = None
        self._measured: Any = None
        self._ranks: list[dict[str, int]] = []
        self.refresh()

    def refresh(self) -> None:
        """Count again. All ranks call it."""
        world = current()
        self._ranks = all_gather_object(self._count(world), world, "memory_report()")

    def to_dict(self) -> dict[int, dict[str, int]]:
        """rank -> kind -> bytes; "total" is their sum, each storage counted once, without what is ``offloaded``."""
        totals = [sum(size for kind, size in kinds.items() if kind in KINDS) for kinds in self._ranks]
        return {
            rank: {**kinds, "total": total} for rank, (kinds, total) in enumerate(zip(self._ranks, totals, strict=True))
        }

    def __getitem__(self, rank: int) -> dict[str, int]:
        return self.to_dict()[rank]

    def __str__(self) -> str:
        table = self.to_dict()
        kinds = [kind for kind in (*KINDS, "total", OFFLOADED) if any(kind in row for row in table.values())]
        lines = [["rank", *kinds]]
        lines += [[str(rank), *(format_bytes(row.get(kind, 0)) for kind in kinds)] for rank, row in table.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)) for line in lines)

    __repr__ = __str__

    def __enter__(self) -> MemoryReport:
        self._activations = ActivationMeter(*self._modules)
        self._measured = self._activations.measure()
        self._measured.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._measured.__exit__(*exc)
        if exc[0] is None:
            self.refresh()

    def _count(self, world: World) -> dict[str, int]:
        seen: set[int] = set()
        held = {
            "parameters": storage_bytes((p for m in self._modules for p in m.parameters()), seen),
            "buffers": storage_bytes((b for m in self._modules for b in m.buffers()), seen),
            "gradients": storage_bytes((g for m in self._modules for g in gradients(m)), seen),
            "optimizer": storage_bytes((t for o in self._optimizers for t in optimizer_state(o)), seen),
        }
        if self._activations is not None:
            held["activations"] = self._activations.size_bytes
        held["transport"] = world.transport.idle_bytes
        offloaded = sum(offloaded_bytes(optimizer) for optimizer in self._optimizers)
        offloaded += 0 if self._activations is None else self._activations.offloaded_bytes
        return {kind: held[kind] for kind in KINDS if kind in held} | ({OFFLOADED: offloaded} if offloaded else {})


def memory_report(*things: nn.Module | torch.optim.Optimizer) -> MemoryReport:
    """The bytes of storage of modules and optimizers on every rank. All ranks of the world call it.

    A storage counts once, as the first of: parameters, buffers, gradients, optimizer. Placeholders hold nothing.
    ``transport`` is the shared memory that a rank has made for exchanges, used or not, without the tensors in it
    (results of boxings may lie there). ``offloaded``, where there is any, is beside the total: state of optimizers
    and, in a context, activations that ``offload=`` keeps in host memory, or on CPUs in files.

    Args:
        things: modules and optimizers.

    Raises:
        TypeError: any other object.

    As a context around a step it also counts activations: the most that autograd kept for backward::

        with wb.debug.memory_report(model, optimizer) as report:
            loss(model(inputs)).backward()
        print(report)

        rank  parameters  gradients  optimizer  buffers  activations  transport   total
           0      532 kB     532 kB    1.06 MB      0 B      1.31 MB    8.39 MB  11.8 MB
           1      532 kB     532 kB    1.06 MB      0 B      1.31 MB    8.39 MB  11.8 MB
    """
    for thing in things:
        if not isinstance(thing, (nn.Module, torch.optim.Optimizer)):
            raise TypeError(
                f"memory_report({type(thing).__name__}): modules and optimizers have memory by kind. Give these, e.g. "
                "wb.debug.memory_report(model, optimizer)."
            )
    return MemoryReport(
        [thing for thing in things if isinstance(thing, nn.Module)],
        [thing for thing in things if isinstance(thing, torch.optim.Optimizer)],
    )
