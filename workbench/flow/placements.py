"""``flow.placement``: the ranks of a tensor, in the newer spelling and the older ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.core.placement import Placement
from workbench.errors import PlacementError
from workbench.flow import devices, old_spellings
from workbench.flow.hosts import in_grid
from workbench.flow.local_tensor import join_with_local_tensors
from workbench.transport.launchers import launcher_value

_ON_SEVERAL = (
    "A program runs on several in a notebook's cell under %%global, or with python -m workbench.flow.launch "
    "--nproc_per_node 2 program.py."
)


class _PlacementFactory:
    """``flow.placement(type="cuda", ranks=[0, 1])``; see ``__call__``."""

    def __call__(
        self, type: str | None = None, ranks: Any = None, hierarchy: Any = None, *, device_type: str | None = None
    ) -> Placement:
        """A placement on ranks of this world.

        Args:
            type: ``"cuda"`` (or ``"gpu"``; the CPU where the ranks have no GPUs) or ``"cpu"``.
            ranks: a list, or nested lists for several axes. Their order matters. The older spelling is a dict from
                machine to its devices, ``{0: [0, 1]}``.
            hierarchy: the sizes of the axes, in the older spelling.
            device_type: the older name of ``type``.

        Raises:
            PlacementError: a device type or a rank does not exist (the message lists those that do), or a rank is named
                twice.

        >>> flow.placement("cuda", ranks=[[0, 1]]).shape
        (1, 2)
        """
        world = join_with_local_tensors()
        if device_type is not None:
            old_spellings.warn_old_spelling(
                f'placement(device_type="{device_type}")', f'placement(type="{device_type}")'
            )
        name = type if type is not None else device_type
        if not isinstance(name, str) or ranks is None:
            raise PlacementError(
                f"placement(type={name!r}, ranks={ranks!r}): both are needed; this world has ranks 0 to "
                f'{world.world_size - 1} on {world.device.type}. Write e.g. flow.placement("cpu", ranks=[0]).'
            )
        if isinstance(ranks, Mapping):
            machines = ranks
            ranks = in_grid(_ranks_of(machines, world.world_size), hierarchy)
            old_spellings.warn_old_spelling(f'placement("{name}", {machines!r})', f'placement("{name}", ranks={ranks})')
        elif hierarchy is not None:
            ranks = in_grid(list(ranks), hierarchy)
        made = Placement.of(devices.device_type(name), ranks)
        try:
            made.check_world(world.world_size)
        except PlacementError as error:
            if world.world_size > 1:
                raise
            raise PlacementError(f"{error} {_ON_SEVERAL}") from None
        return made

    def all(self, type: str) -> Placement:
        """All ranks of the world on one axis."""
        return Placement.of(devices.device_type(type), list(range(join_with_local_tensors().world_size)))


placement = _PlacementFactory()


def _ranks_of(machines: Mapping[Any, Any], world_size: int) -> list[int]:
    """The ranks of ``{machine: devices}``. All machines have as many ranks; those of machine 0 come first."""
    per_machine = launcher_value("local_world_size", world_size)
    num_machines = max(1, world_size // per_machine)
    found = []
    for machine, listed in machines.items():
        for device in [listed] if isinstance(listed, int) else listed:
            if not (isinstance(machine, int) and 0 <= machine < num_machines and 0 <= device < per_machine):
                raise PlacementError(
                    f"placement({dict(machines)!r}): device {device} of machine {machine} is not there; this world has "
                    f"machines 0 to {num_machines - 1} with devices 0 to {per_machine - 1} each. Start more "
                    "processes (--nproc_per_node), or name devices that are there."
                )
            found.append(machine * per_machine + device)
    return found
