"""Boxing paths: several boxings in order, where that is cheaper than the direct exchange.

The direct exchange brings each rank every slice and term that it needs, once. Two kinds of boxing can be cheaper in
steps. *A sum that several ranks need*: directly, each of them reads all terms; P -> S -> B adds each slice once. *Few
ranks that hold what many need*: directly, they send the same slice to each; S on few -> S on many -> B sends it once.
The search is a shortest path over layouts on the two placements, priced by the link's constants alone, so every rank
finds the same path without communication. Layouts in between split or copy the tensor; they have no terms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter

from workbench.core.boxing import BoxingPlan, LinkCost, plan_boxing
from workbench.core.boxing_prices import BoxingPrices, LayoutSummary
from workbench.core.layout import Layout, Shape
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, Split, broadcast
from workbench.units import format_bytes, format_seconds

WORTHWHILE = 0.9
"""A path must take at most this part of the direct exchange's predicted time: predictions are not more exact."""
_NUM_LONGEST_DIMS = 2


@dataclass(frozen=True)
class BoxingPath:
    """Several boxings in order that together bring a tensor from ``source`` to ``destination``.

    It prints, prices and counts like a ``BoxingPlan``. ``steps`` are plans; each starts where the last one ends. No
    layout in between has terms, so one step completes a sum, of the same terms in the same order as the direct
    exchange. A destination without terms therefore gets the same bits on all ranks, on a path or directly.
    """

    steps: tuple[BoxingPlan, ...]
    kind = "path"
    is_local = False

    @property
    def source(self) -> Layout:
        """The layout before the first step."""
        return self.steps[0].source

    @property
    def destination(self) -> Layout:
        """The layout after the last step."""
        return self.steps[-1].destination

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """All layouts of the path, including source and destination."""
        return (self.source, *(step.destination for step in self.steps))

    @property
    def shape(self) -> Shape:
        """The logical shape."""
        return self.steps[0].shape

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.steps[0].itemsize

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Bytes on the wire by sending rank, over all steps."""
        return self._over_steps([step.bytes_sent for step in self.steps])

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        """Bytes on the wire by receiving rank, over all steps."""
        return self._over_steps([step.bytes_received for step in self.steps])

    def _over_steps(self, by_step: list[dict[int, int]]) -> dict[int, int]:
        ranks = dict.fromkeys(rank for layout in self.layouts for rank in layout.placement)
        return {rank: sum(counts.get(rank, 0) for counts in by_step) for rank in ranks}

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes on the wire, summed over ranks and steps."""
        return sum(step.wire_bytes for step in self.steps)

    @cached_property
    def peak_temporary_bytes(self) -> int:
        """Largest staging space of any rank in any step, including the tensor between two steps."""
        between = [layout.local_shape(self.shape, rank) for layout in self.layouts[1:-1] for rank in layout.placement]
        held = max((math.prod(shape) * self.itemsize for shape in between), default=0)
        return held + max(step.peak_temporary_bytes for step in self.steps)

    @property
    def title(self) -> str:
        """Source, destination and shape on one line."""
        return f"boxing {self.source} -> {self.destination} of {self.shape}"

    def time_s(self, cost: LinkCost) -> float:
        """Predicted seconds: the steps do not overlap."""
        return sum(step.time_s(cost) for step in self.steps)

    def describe(self, max_moves: int = 16) -> str:
        """The path as text: the plan of each step, and the totals."""
        lines = [f"boxing {self.source} -> {self.destination}", f"  in {len(self.steps)} steps"]
        for number, step in enumerate(self.steps, 1):
            text = step.describe(max_moves)
            lines += [f"  {number}. {text}".replace("\n", "\n     ")]
        lines.append(
            f"  together on the wire {format_bytes(self.wire_bytes)}, at most "
            f"{format_bytes(max(self.bytes_sent.values()))} sent by a rank; "
            f"temporary at most {format_bytes(self.peak_temporary_bytes)} on a rank"
        )
        if (cost := self.steps[0].cost) is not None:
            direct = plan_boxing(self.source, self.destination, self.shape, self.itemsize)
            times = self.time_s(cost), direct.time_s(cost)
            lines.append("  predicted {}, directly {}".format(*map(format_seconds, times)))
        return "\n".join(lines)

    __str__ = describe


@lru_cache(maxsize=4096)
def find_boxing_path(
    source: Layout, destination: Layout, shape: Shape, itemsize: int, cost: LinkCost
) -> BoxingPlan | BoxingPath:
    """The cheapest boxing from ``source`` to ``destination`` over a link: the direct plan, or up to three in order.

    >>> a, b = Placement.of("cpu", [0, 1, 2, 3]), Placement.of("cpu", [4, 5, 6, 7])
    >>> path = find_boxing_path(Layout.of(a, "P"), Layout.of(b, "B"), (1024, 1024), 4, LinkCost(1e-5, 1e9))
    >>> [str(layout) for layout in path.layouts]
    ['P on cpu:[0, 1, 2, 3]', 'S(0) on cpu:[4, 5, 6, 7]', 'B on cpu:[4, 5, 6, 7]']

    Raises:
        LayoutError: see ``plan_boxing``.
    """
    direct = plan_boxing(source, destination, shape, itemsize).on(cost)
    if direct.is_local or 0 in shape:
        return direct
    search = _Search(direct, cost)
    between = search.run()
    if not between:
        return direct
    layouts = (direct.source, *between, direct.destination)
    pairs = itertools.pairwise(layouts)
    return BoxingPath(tuple(plan_boxing(a, b, shape, itemsize).on(cost) for a, b in pairs))


class _Search:
    """A shortest path by the prices of single boxings; bounds keep it from pricing most of them."""

    def __init__(self, direct: BoxingPlan, cost: LinkCost) -> None:
        self.shape, self.latency_s = direct.shape, cost.latency_s
        self.source, self.destination = merge_axes(direct.source, direct.destination, direct.shape)
        self.prices = BoxingPrices(direct.shape, direct.itemsize, cost)
        self.best_s = WORTHWHILE * direct.time_s(cost)
        self.least_s = self._least_time_s(direct, cost)
        self.path: tuple[Layout, ...] = ()

    def _least_time_s(self, direct: BoxingPlan, cost: LinkCost) -> float:
        """A lower bound for all paths: two start-ups, and the bytes that some rank must receive or send on any path.

        A destination of terms needs no second start-up, because S -> P moves nothing.
        """
        source, destination, itemsize = direct.source, direct.destination, direct.itemsize
        moved = 0
        if not destination.has_partial:
            moved = max(direct.bytes_received.values())
            if self.source.has_partial:  # a part of a sum, at least
                moved = itemsize * max(math.prod(destination.local_shape(self.shape, r)) for r in destination.placement)
        if source.num_replicas == 1:
            leaving = (r for r in source.placement if r not in destination.placement)
            moved = max(
                moved, itemsize * max((math.prod(source.local_shape(self.shape, r)) for r in leaving), default=0)
            )
        return (1 if destination.has_partial else 2) * cost.latency_s + moved / cost.bandwidth_bytes_per_s

    def run(self) -> tuple[Layout, ...]:
        """The layouts between, or none where the direct exchange is best."""
        if self.best_s <= self.least_s:
            return ()
        prices = self.prices
        source, destination = prices.summary(self.source), prices.summary(self.destination)
        stops = [_Stop(prices.summary(x)) for x in candidates(self.source, self.destination, self.shape)]
        for stop in stops:
            stop.to_s, stop.onward_s = (
                prices.at_least_s(source, stop.summary),
                prices.at_least_s(stop.summary, destination),
            )
        for stop in sorted(stops, key=lambda stop: stop.to_s + stop.onward_s):
            self._try(stop, stop)
        if self.destination.has_partial:  # rare, and of little use: the last step of such a path moves nothing
            return self.path
        nearest = sorted(stops, key=lambda stop: stop.to_s)
        onward = sorted(((stop.onward_s, stop) for stop in stops), key=itemgetter(0))
        for a in nearest:
            for low_s, b in onward:
                if a.to_s + self.latency_s + low_s >= self.best_s:
                    break
                if a is not b and not self._goes_back(a.layout, b.layout):
                    self._try(a, b)
        return self.path

    def _goes_back(self, a: Layout, b: Layout) -> bool:
        here, there = self.source.placement, self.destination.placement
        return here is not there and a.placement is there and b.placement is here

    def _try(self, a: _Stop, b: _Stop) -> None:
        """Price one step after the other, while the bounds allow a better path, by way of ``a`` and ``b`` (or one)."""
        between_s = 0.0 if a is b else self.prices.at_least_s(a.summary, b.summary)
        if not a.to_is_exact and a.to_s + between_s + b.onward_s < self.best_s:
            a.to_s, a.to_is_exact = self.prices.time_s(self.source, a.layout), True
        if not b.onward_is_exact and a.to_s + between_s + b.onward_s < self.best_s:
            b.onward_s, b.onward_is_exact = self.prices.time_s(b.layout, self.destination), True
        if a is not b and a.to_s + between_s + b.onward_s < self.best_s:
            between_s = self.prices.time_s(a.layout, b.layout)
        if a.to_s + between_s + b.onward_s < self.best_s:
            self.best_s = a.to_s + between_s + b.onward_s
            self.path = (a.layout,) if a is b else (a.layout, b.layout)


@dataclass(slots=True)
class _Stop:
    """A layout in between, with the seconds to it and from it: lower bounds, or exact."""

    summary: LayoutSummary
    to_s: float = 0.0
    onward_s: float = 0.0
    to_is_exact: bool = False
    onward_is_exact: bool = False

    @property
    def layout(self) -> Layout:
        return self.summary.layout


def candidates(source: Layout, destination: Layout, shape: Shape) -> list[Layout]:
    """Layouts that a path may pass: splits, or splits and copies, on the two placements.

    Copies alone would be more than any rank needs. The dims are those that the two layouts split, and the two longest.
    """
    by_length = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -shape[dim])
    used = {entry.dim for layout in (source, destination) for entry in layout.sbp if isinstance(entry, Split)}
    dims = sorted({*by_length[:_NUM_LONGEST_DIMS], *(dim for dim in used if shape[dim] > 1)})
    entries: list[Sbp] = [*map(Split, dims), broadcast]
    found = []
    for placement in dict.fromkeys((destination.placement, source.placement)):
        for sbp in _nested(entries, placement.num_axes):
            layout = Layout(placement, sbp)
            if not layout.is_broadcast and layout not in (source, destination):
                found.append(layout)
    return found


def _nested(entries: Sequence[Sbp], num_axes: int) -> Iterator[tuple[Sbp, ...]]:
    if num_axes == 0:
        yield ()
        return
    for rest in _nested(entries, num_axes - 1):
        for entry in entries:
            yield (*rest, entry)


def merge_axes(source: Layout, destination: Layout, shape: Shape) -> tuple[Layout, Layout]:
    """The same two layouts with as few axes as possible: on one placement together, on two separately.

    >>> p = Placement.of("cpu", [[0, 1], [2, 3]])
    >>> [str(layout) for layout in merge_axes(Layout.of(p, "S(0), S(0)"), Layout.of(p, "B, B"), (8, 8))]
    ['S(0) on cpu:[0, 1, 2, 3]', 'B on cpu:[0, 1, 2, 3]']
    """
    if source.placement == destination.placement:
        first, second = _merge((source, destination), shape)
        return first, second
    return _merge((source,), shape)[0], _merge((destination,), shape)[0]


def _merge(layouts: tuple[Layout, ...], shape: Shape) -> tuple[Layout, ...]:
    placement = layouts[0].placement
    sizes: list[int] = []
    rows: list[tuple[Sbp, ...]] = []  # per axis that stays, one entry for each of the layouts
    for axis, size in enumerate(placement.shape):
        row = tuple(layout.sbp[axis] for layout in layouts)
        if size == 1:
            continue
        if rows and row == rows[-1] and all(map(_cuts_evenly, layouts, row, [shape] * len(layouts))):
            sizes[-1] *= size
        else:
            sizes.append(size)
            rows.append(row)
    if not rows:
        sizes, rows = [1], [(broadcast,) * len(layouts)]
    if len(sizes) == placement.num_axes:
        return layouts
    flat = Placement(placement.device_type, placement.grid, tuple(sizes))
    return tuple(Layout(flat, tuple(row[i] for row in rows)) for i in range(len(layouts)))


def _cuts_evenly(layout: Layout, entry: Sbp, shape: Shape) -> bool:
    """Whether nested cuts are one cut into as many parts; of 6 rows, 2 x 2 makes 2, 1, 2, 1 and 4 makes 2, 2, 1, 1."""
    if not isinstance(entry, Split):
        return True
    parts = math.prod(layout.placement.shape[axis] for axis in layout.axes_splitting(entry.dim))
    return shape[entry.dim] % parts == 0
