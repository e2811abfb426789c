"""Which ranks exchange tokens for experts that are split over them, and whose experts are whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, Split, broadcast


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Ranks at one place of the model axis, which send tokens to one another.

    Attributes:
        ranks: in the order of the data axis.
        bounds: the experts of each, from the first one to the one behind the last.
        experts: the number of all experts, also those at other places of the model axis.
    """

    ranks: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    experts: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of experts of each rank."""
        return tuple(stop - start for start, stop in self.bounds)

    def even_choices(self, choices: int, place: int) -> int:
        """How many of a rank's choices are experts of the rank at ``place``, if all experts are chosen alike often.

        >>> ExpertGroup((0, 1), ((0, 2), (2, 4)), 4).even_choices(12, 1)
        6
        """
        start, stop = self.bounds[place]
        return choices * stop // self.experts - choices * start // self.experts


def expert_layout(stage: Placement, data: int, model: int, over_data: int) -> Layout:
    """The layout of weights whose dim 0 counts experts: split over the model axis and ``over_data`` ranks of the data
    axis, copied over the rest of it.

    >>> str(expert_layout(Placement.of("cpu", [[0, 1], [2, 3]]), 2, 2, over_data=2))
    '(S(0), S(0)) on cpu:[[0, 1], [2, 3]]'
    """
    axes: list[tuple[int, Sbp]] = [(data // over_data, broadcast), (over_data, Split(0)), (model, Split(0))]
    kept = [(size, entry) for size, entry in axes if size > 1] or axes[:1]
    placement = Placement(stage.device_type, stage.grid, tuple(size for size, _ in kept))
    return Layout(placement, tuple(entry for _, entry in kept))


def owner_layout(stage: Placement, data: int, model: int, over_data: int, expert: tuple[int, int]) -> Layout:
    """The layout of the weights of one of a list of experts: whole on one rank of each group.

    >>> str(owner_layout(Placement.of("cpu", [[0, 1], [2, 3]]), 2, 2, over_data=1, expert=(3, 4)))
    'B on cpu:[1, 3]'
    """
    number, experts = expert
    row, column = divmod(number * over_data * model // experts, model)
    ranks = tuple(stage.grid[(first + row) * model + column] for first in range(0, data, over_data))
    return Layout(Placement(stage.device_type, ranks, (len(ranks),)), (broadcast,))


def layouts_of_travel(stage: Placement, data: int, model: int, over_data: int) -> tuple[Layout, Layout]:
    """Two layouts of the chosen tokens, one row for each choice: the boxing from one to the other moves as many bytes
    as tokens that go to their experts, if all experts are chosen alike often.

    >>> [str(layout) for layout in layouts_of_travel(Placement.of("cpu", [0, 1]), 2, 1, over_data=2)]
    ['S(0) on cpu:[0, 1]', 'S(1) on cpu:[0, 1]']
    """
    layout = expert_layout(stage, data, model, over_data)
    axis = len(layout.sbp) - 1 - (model > 1)
    rows: list[Sbp] = [broadcast if place > axis else Split(0) for place in range(len(layout.sbp))]
    features = [Split(1) if place == axis else entry for place, entry in enumerate(rows)]
    return layout.with_sbp(tuple(rows)), layout.with_sbp(tuple(features))


@lru_cache(maxsize=256)
def expert_groups(stage: Placement, data: int, model: int, over_data: int, experts: int) -> Mapping[int, ExpertGroup]:
    """The group of every rank of a stage whose grid is data x model.

    >>> expert_groups(Placement.of("cpu", [[0, 1], [2, 3]]), 2, 2, 2, 8)[1]
    ExpertGroup(ranks=(1, 3), bounds=((2, 4), (6, 8)), experts=8)
    """
    layout = expert_layout(stage, data, model, over_data)
    found: dict[int, ExpertGroup] = {}
    for first in range(0, data, over_data):
        for column in range(model):
            ranks = tuple(stage.grid[(first + row) * model + column] for row in range(over_data))
            bounds = tuple(layout.region((experts,), rank)[0] for rank in ranks)
            found |= dict.fromkeys(ranks, ExpertGroup(ranks, bounds, experts))
    return found
