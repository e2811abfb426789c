"""Layout and logical shape of tensors in one world, and what was learnt of them."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout, Shape
from workbench.tensors.world import World

_MAX_UNUSED = 20_000
"""Those that no tensor has are forgotten when there are so many: shapes that differ at every step must not fill the
memory.
"""


class Spec:
    """Layout and logical shape of a tensor in one world. Interned: equal specs are the same object.

    Attributes:
        has_partial: whether it lies as terms on an axis.
        is_placeholder: whether this rank is outside the placement.
        local_shape: shape of this rank's shard; the logical shape for a placeholder.
        plans: the world's cache of what to do for a function and its arguments' specs.
        exchanges: by target and dtype, how this rank boxes (see ``exchange``).
        targets: by the arguments of ``to_global``, the spec they ask for.
    """

    __slots__ = (
        "__weakref__",
        "_dual",
        "_term_ranks",
        "exchanges",
        "has_partial",
        "is_placeholder",
        "layout",
        "local_shape",
        "plans",
        "shape",
        "targets",
        "world",
    )

    def __init__(self, world: World, layout: Layout, shape: Shape) -> None:
        self.world, self.layout, self.shape, self.plans = world, layout, shape, world.plans
        self.exchanges: dict[Any, Any] = {}
        self.targets: dict[Any, Spec] = {}
        self._dual: Spec | None = None
        self._term_ranks: tuple[int, ...] | None = None
        self.has_partial = layout.has_partial
        self.is_placeholder = world.rank not in layout.placement
        self.local_shape = shape if self.is_placeholder else layout.local_shape(shape, world.rank)

    @property
    def is_whole_everywhere(self) -> bool:
        """Whether every rank of the world holds the whole tensor."""
        num_ranks = self.layout.placement.num_ranks if self.layout.is_broadcast else 1
        return num_ranks == self.world.world_size

    @property
    def dual(self) -> Spec:
        """The spec of this tensor's gradient."""
        if self._dual is None:
            self._dual = spec_of(self.world, self.layout.dual(), self.shape)
        return self._dual

    @property
    def term_ranks(self) -> tuple[int, ...]:
        """The ranks that hold terms of the same part of this tensor's gradient as this rank does, itself among them."""
        if self._term_ranks is None:
            groups = plan_boxing(self.layout.dual(), self.layout, self.shape, itemsize=1).groups
            self._term_ranks = next((group for group in groups if self.world.rank in group), (self.world.rank,))
        return self._term_ranks

    def __repr__(self) -> str:
        return f"Spec({self.layout}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self


def spec_of(world: World, layout: Layout, shape: Shape) -> Spec:
    """The one ``Spec`` of a layout (split dims counted from the front) and a logical shape."""
    key = (layout, shape)
    spec = world.specs.get(key)
    if spec is None:
        layout.placement.check_world(world.world_size)
        if len(world.specs) % _MAX_UNUSED == _MAX_UNUSED - 1:
            _forget_unused(world)
        spec = world.specs[key] = Spec(world, layout.normalized(shape), tuple(shape))
    return spec


def _forget_unused(world: World) -> None:
    """Drop what was learnt of layouts and shapes, and those that no tensor has.

    Ranks do so at different times. The newest plans stay: a plan serves all dtypes, but the first one has decided it.
    """
    plans = list(world.plans.items())
    world.forget_decisions()
    world.plans.update(plans[len(plans) // 2 :])
    for spec in world.specs.values():
        spec._dual = None
    used = WeakValueDictionary(world.specs)
    world.specs.clear()
    world.specs.update(used.items())
