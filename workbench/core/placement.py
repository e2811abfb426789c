"""The placement of a tensor: a device type and a grid of ranks.

The shape of the grid is the hierarchy that an nd-sbp refers to, one entry per axis. The order of the ranks is
meaningful: ``ranks=[1, 0]`` puts the first slice on rank 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from workbench.errors import PlacementError

DEVICE_TYPES = ("cpu", "cuda", "meta")


class _Array(Protocol):
    def tolist(self) -> Any: ...


RanksLike: TypeAlias = "int | Sequence[RanksLike] | _Array"
"""A rank, a list of ranks, or nested lists of equal lengths; an array counts as its lists."""


def _flatten(ranks: Any, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Flat ranks and grid shape of nested lists; raises where the lists are ragged or hold anything but ints."""
    if hasattr(ranks, "tolist"):
        ranks = ranks.tolist()
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        return (ranks,), ()
    if not isinstance(ranks, Sequence) or isinstance(ranks, str):
        raise PlacementError(f"{where}: ranks hold {ranks!r}, a {type(ranks).__name__}. Give (nested) lists of ints.")
    children = [_flatten(child, where) for child in ranks]
    shapes = {shape for _, shape in children}
    if len(shapes) > 1:
        raise PlacementError(
            f"{where}: rows have unlike shapes {sorted(shapes)}. All rows of a rank grid are equally long."
        )
    flat = tuple(rank for child, _ in children for rank in child)
    return flat, (len(children), *(shapes.pop() if shapes else ()))


@dataclass(frozen=True)
class Placement:
    """A device type and a grid of ranks.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` (or ``"meta"`` for planning without data).
        grid: the ranks in row-major order of ``shape``.
        shape: sizes of the axes.

    >>> Placement.of("cpu", [[0, 1], [2, 3]]).shape
    (2, 2)
    """

    device_type: str
    grid: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, device_type: str, ranks: RanksLike) -> Placement:
        """A placement from nested lists of ranks; a plain list is one axis.

        Raises:
            PlacementError: unknown device type, no rank, a negative rank, a rank twice, ragged lists.
        """
        where = f"placement({device_type!r}, ranks={ranks!r})"
        if device_type not in DEVICE_TYPES:
            hint = ' Write "cuda" for GPUs.' if device_type == "gpu" else ""
            raise PlacementError(f"{where}: device type is none of {', '.join(DEVICE_TYPES)}.{hint}")
        flat, shape = _flatten(ranks, where)
        if not shape:
            shape = (1,)
        if not flat:
            raise PlacementError(f"{where}: holds 0 ranks, needs at least 1. Name the ranks, e.g. ranks=[0, 1].")
        twice = sorted({rank for rank in flat if flat.count(rank) > 1}) if len(set(flat)) < len(flat) else []
        if twice:
            raise PlacementError(
                f"{where}: rank {twice[0]} stands {flat.count(twice[0])} times; a rank has one place in a grid."
            )
        if min(flat) < 0:
            raise PlacementError(f"{where}: rank {min(flat)} is negative; ranks count from 0.")
        return cls(device_type, flat, shape)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Placement) and self._identity == other._identity

    @property
    def _identity(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        return self.device_type, self.grid, self.shape

    @cached_property
    def _hash(self) -> int:
        return hash((self.device_type, self.grid, self.shape))

    @property
    def type(self) -> str:
        """The device type, under the name that torch devices use."""
        return self.device_type

    @property
    def ranks(self) -> Any:
        """The rank grid as nested lists, as it was given."""
        return self._nested(self.grid, self.shape)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.grid)

    def has_ranks_of(self, other: Placement) -> bool:
        """Whether both are grids of the same ranks, in any order and shape.

        >>> Placement.of("cpu", [0, 1, 2, 3]).has_ranks_of(Placement.of("cpu", [[0, 2], [1, 3]]))
        True
        """
        return self.device_type == other.device_type and self._position.keys() == other._position.keys()

    def includes(self, other: Placement) -> bool:
        """Whether all ranks of ``other`` are among these, in any order and shape.

        >>> Placement.of("cpu", [0, 1]).includes(Placement.of("cpu", [[1]]))
        True
        """
        return self.device_type == other.device_type and self._position.keys() >= other._position.keys()

    @property
    def num_axes(self) -> int:
        """Number of axes; an nd-sbp on this placement has one entry for each."""
        return len(self.shape)

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.grid)}

    def __contains__(self, rank: object) -> bool:
        return rank in self._position

    def __iter__(self) -> Iterator[int]:
        return iter(self.grid)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Grid coordinates of ``rank``, one per axis; raises ``PlacementError`` if it is not in the grid."""
        if rank not in self._position:
            raise PlacementError(f"rank {rank} is not in {self}, which holds ranks {list(self.grid)}.")
        index, result = self._position[rank], []
        for size in reversed(self.shape):
            index, coordinate = divmod(index, size)
            result.append(coordinate)
        return tuple(reversed(result))

    def rank_at(self, coordinates: Sequence[int]) -> int:
        """The rank at grid ``coordinates``, one per axis."""
        index = 0
        for coordinate, size in zip(coordinates, self.shape, strict=True):
            index = index * size + coordinate
        return self.grid[index]

    def check_world(self, world_size: int) -> None:
        """Raise ``PlacementError`` if a rank does not exist in a world of ``world_size`` ranks."""
        missing = [rank for rank in self.grid if rank >= world_size]
        if missing:
            raise PlacementError(
                f"{self}: rank {missing[0]} does not exist; this world has {world_size} rank{'s' * (world_size > 1)} "
                f"(0 to {world_size - 1}). Start more engines or name fewer ranks."
            )

    @staticmethod
    def _nested(flat: tuple[int, ...], shape: tuple[int, ...]) -> list[Any]:
        if len(shape) == 1:
            return list(flat)
        stride = math.prod(shape[1:])
        return [Placement._nested(flat[i * stride : (i + 1) * stride], shape[1:]) for i in range(shape[0])]

    def __repr__(self) -> str:
        return f'placement("{self.device_type}", ranks={self.ranks})'
