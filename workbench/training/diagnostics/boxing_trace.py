"""Counts boxings by the line of code that caused them: ``with wb.debug.trace() as t: ...; print(t)``."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from workbench.core.boxing import BoxingPlan, describe_sbp_change
from workbench.core.boxing_path import BoxingPath
from workbench.core.rank_numbers import on_ranks, sent_by_number
from workbench.tensors.dispatch.registry import fold_name
from workbench.tensors.world import World, current
from workbench.transport.user_code import user_frame
from workbench.units import format_bytes


class Site(NamedTuple):
    """Where a boxing comes from: the function that asked for it, and the line of the user's code that called it."""

    function: str
    file: str
    line_number: int

    @property
    def line(self) -> str:
        """``"model.py:12"``, or "" where no user's code was running."""
        return f"{Path(self.file).name}:{self.line_number}" if self.file else ""

    @property
    def code(self) -> str:
        """The text of the line; empty if its file cannot be read."""
        return linecache.getline(self.file, self.line_number).strip() if self.file else ""


@dataclass
class BoxingRecord:
    """All boxings of one kind that one line has caused.

    Attributes:
        function: folded name of the torch function that needed the boxing, ``to_global`` where the code wrote it, or
            the name of the layer whose layout hook boxed.
        site: the line of user code; for ``backward`` the line of the forward boxing that it belongs to.
        direction: "forward", "backward", or "step" for the gradients that an optimizer's step sums.
        change: e.g. ``"S(0) -> B"``.
        kind: the plan's: all-gather, slice, ...
        shape, dtype: of the logical tensor.
        num_boxings: how often it happened.
        sent_bytes: bytes this rank put on the wire, over all times.
        wire_bytes: bytes that all ranks together put on the wire; of tokens on their way to experts, this rank's.
    """

    function: str
    site: Site
    direction: str
    change: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_boxings: int = 0
    sent_bytes: int = 0
    wire_bytes: int = 0


class Totals(NamedTuple):
    """Number of boxings and bytes of one function."""

    num_boxings: int
    sent_bytes: int
    wire_bytes: int


class BoxingTrace:
    """The boxings that ran in a ``wb.debug.trace()`` context. ``print`` it for a table.

    Attributes:
        rank: the rank whose boxings these are. Counts and ``wire_bytes`` are equal on all ranks, but for tokens that
            travel to experts.
    """

    def __init__(self, world: World, outer: BoxingTrace | None = None) -> None:
        self.rank, self._world, self._outer = world.rank, world, outer
        self._records: dict[Any, BoxingRecord] = {}

    @property
    def records(self) -> list[BoxingRecord]:
        """One record per line, function, direction, layouts and shape. Most bytes first."""
        return sorted(self._records.values(), key=lambda record: -record.wire_bytes)

    @property
    def by_function(self) -> dict[str, Totals]:
        """Totals per function, forward and backward together. Most bytes first."""
        totals: dict[str, Totals] = {}
        for record in self.records:
            before = totals.get(record.function, Totals(0, 0, 0))
            added = (record.num_boxings, record.sent_bytes, record.wire_bytes)
            totals[record.function] = Totals(*(a + b for a, b in zip(before, added, strict=True)))
        return dict(sorted(totals.items(), key=lambda item: -item[1].wire_bytes))

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank put on the wire."""
        return sum(record.sent_bytes for record in self._records.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes that all ranks together put on the wire."""
        return sum(record.wire_bytes for record in self._records.values())

    def of_stage(self, world: World) -> BoxingTrace:
        """The same trace, for boxings of one of this rank's stages, whose world has numbers in place of ranks."""
        made = copy(self)
        made._world, made._outer = world, self._outer and self._outer.of_stage(world)
        return made

    def add(self, site: Site, direction: str, plan: BoxingPlan | BoxingPath, dtype: torch.dtype) -> None:
        """Count one boxing. Every rank counts it, also one that takes no part.

        A rank with several stages comes by in the run of each, and sends for each.
        """
        number, rank_of = self._world.rank, self._world.rank_of
        source, destination = on_ranks(plan.source, rank_of), on_ranks(plan.destination, rank_of)
        change, sent = describe_sbp_change(source, destination), sent_by_number(plan, rank_of)
        is_first = rank_of is None or rank_of.index(self.rank) == number
        key = (site, direction, source, destination, plan.shape, dtype)
        record = self._records.get(key) or self._records.setdefault(
            key, BoxingRecord(site.function, site, direction, change, plan.kind, tuple(plan.shape), dtype)
        )
        record.num_boxings += is_first
        record.sent_bytes += sent.get(number, 0)
        record.wire_bytes += sum(sent.values()) if is_first else 0
        if self._outer is not None:
            self._outer.add(site, direction, plan, dtype)

    def add_reduction(
        self,
        group: tuple[int, ...],
        tensors: list[torch.Tensor],
        change: str,
        kind: str,
        sent_bytes: int,
        what: str = "gradients",
    ) -> None:
        """Count a bucket of gradients or parameters that ``group`` exchanges around a step, and this rank's part."""
        num_elements = sum(t.numel() for t in tensors)
        site, dtype = find_site(what), tensors[0].dtype
        record = self._records.setdefault(
            (site, group, num_elements, dtype, kind),
            BoxingRecord(what, site, "step", change, kind, (num_elements,), dtype),
        )
        record.num_boxings += 1
        record.sent_bytes += sent_bytes
        record.wire_bytes += sent_bytes * len(group)
        if self._outer is not None:
            self._outer.add_reduction(group, tensors, change, kind, sent_bytes, what)

    def site(self, function: str = "") -> Site:
        """The line and function of the boxing that is about to run."""
        return find_site(function)

    def __str__(self) -> str:
        records = self.records
        count = sum(record.num_boxings for record in records)
        if not records:
            return "no boxings"
        shown = [record for record in records if record.wire_bytes] or records
        rows = [("function", "boxing", "of", "times", "moved", "pass", "line")]
        rows += [
            (r.function, f"{r.change} ({r.kind})", f"{str(r.dtype).removeprefix('torch.')} {r.shape}",
             str(r.num_boxings), format_bytes(r.wire_bytes), r.direction, f"{r.site.line}  {r.site.code}".strip())
            for r in shown
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
        free = count - sum(record.num_boxings for record in shown)
        lines.append(
            f"{count} boxings moved {format_bytes(self.wire_bytes)} between all ranks, rank {self.rank} sent "
            f"{format_bytes(self.sent_bytes)}" + (f"; {free} of them moved nothing and are not shown" if free else "")
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        count = sum(record.num_boxings for record in self._records.values())
        return f"BoxingTrace({count} boxings, {format_bytes(self.wire_bytes)} moved)"


@contextmanager
def trace() -> Iterator[BoxingTrace]:
    """Count the boxings of this context: which line caused them, forward and backward, and the bytes they moved.

    Costs nothing outside the context. A context inside another one counts for both.

    Yields:
        a ``BoxingTrace``: ``print`` it, or read ``records``, ``by_function``, ``sent_bytes`` (of this rank) and
        ``wire_bytes`` (of all ranks).

    >>> p = wb.placement(ranks=[0, 1])
    >>> with wb.debug.trace() as t:
    ...     x = wb.ones(4, placement=p, sbp="B").to_global(sbp="S(0)")
    >>> t.by_function
    {'to_global': Totals(num_boxings=1, sent_bytes=0, wire_bytes=0)}
    """
    world = current()
    traced = BoxingTrace(world, outer=world.context.tracer)
    with world.context.temporarily(tracer=traced):
        yield traced


def find_site(function: str = "") -> Site:
    """The innermost line of user code, and the function that it called."""
    frame, ours = user_frame()
    named = [name for name in map(_called_in, ours) if name]
    function = function or (named[-1] if named else "backward")
    return Site(function, frame.f_code.co_filename, frame.f_lineno) if frame else Site(function, "", 0)


def _called_in(frame: FrameType) -> str:
    """The function that the user called, from a frame of the workbench: ``__torch_function__`` knows torch's."""
    name = frame.f_code.co_name
    if name == "__torch_function__":
        return fold_name(frame.f_locals["func"]).folded
    return name if name.isidentifier() and not name.startswith("_") else ""
