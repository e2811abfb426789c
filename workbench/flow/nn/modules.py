"""``flow.nn`` of eager programs: torch's modules, which can also be placed on ranks and assigned to a stage.

``flow.nn.Linear`` is ``torch.nn.Linear`` with the methods of ``flow.nn.Module``, and so is every other module.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.errors import LayoutError
from workbench.flow import old_spellings
from workbench.flow.devices import torch_device
from workbench.flow.nn.module_config import ModuleConfig
from workbench.flow.world_join import join_if_launched
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import to_global
from workbench.tensors.global_tensor import GlobalTensor

Self = TypeVar("Self", bound="Module")

join_if_launched()


class Module(nn.Module):
    """``torch.nn.Module`` whose parameters can become global tensors.

    >>> layer = flow.nn.Linear(5, 8).to_global(flow.placement("cpu", ranks=[0]), flow.sbp.broadcast)
    >>> layer.weight.sbp, layer(flow.ones(4, 5).to_global(layer.weight.placement, flow.sbp.broadcast)).shape
    ((B,), torch.Size([4, 8]))
    """

    def to_global(
        self: Self, placement: Placement | None = None, sbp: Any = None, *, broadcast_from: int | None = None
    ) -> Self:
        """Parameters and buffers as global tensors, in place. All ranks of the world call it.

        The module's own weights are the logical ones: S gives every rank its slice of them (OneFlow takes each rank's
        weights as a slice of a larger module). They are equal on the ranks of the placement, or ``broadcast_from``
        names the rank whose weights count. Weights that are global already are boxed and stay the same objects.

        Raises:
            LayoutError: no placement or no sbp for a local weight; ranks of the placement hold different weights. The
                message names the parameter, also in an ``SbpError``.
        """
        made: dict[int, Any] = {}  # a weight that two modules share stays one
        for path, module in self.named_modules():
            for tensors in (module._parameters, module._buffers):
                for name, value in tensors.items():
                    if value is None:
                        continue
                    if id(value) not in made:
                        full_name = f"{path}.{name}".lstrip(".")
                        made[id(value)] = value, _to_global_weight(value, placement, sbp, full_name, broadcast_from)
                    tensors[name] = made[id(value)][1]
        return self

    to_consistent = old_spellings.to_consistent

    @cached_property  # so that a module may have a ``config`` of its own
    def config(self) -> ModuleConfig:
        """The settings of this module for a graph that holds it, e.g. ``config.stage_id = 0``."""
        return ModuleConfig(self)

    def cuda(self: Self, device: Any = None) -> Self:
        """``torch.nn.Module.cuda``; the module stays on the CPU where there is no GPU."""
        moved: Self = self.to("cuda" if device is None else device)
        return moved

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``torch.nn.Module.to``; "cuda" means the CPU where there is no GPU. ``to(GraphModule)`` gives ``config``."""
        if args and args[0] is ModuleConfig:
            return self.config
        move: Any = super().to
        return move(*map(torch_device, args), **{name: torch_device(value) for name, value in kwargs.items()})


def _to_global_weight(
    value: torch.Tensor, placement: Placement | None, sbp: Any, name: str, source: int | None
) -> torch.Tensor:
    """A weight in the layout that is asked for; one that is global already stays the same object."""
    try:
        if isinstance(value, GlobalTensor):
            detached: Any = value.detach()
            value._take_data(box(detached, value._layout_of(placement, sbp)))
            return value
        if placement is None or sbp is None:
            raise old_spellings.missing_layout("to_global", value.shape, placement, sbp)
        layout = Layout.of(placement, sbp).normalized(tuple(value.shape))
        with torch.no_grad():
            whole = to_global(value.detach(), placement, (broadcast,) * placement.num_axes, broadcast_from=source)
            moved = box(whole, layout)
    except LayoutError as error:
        raise type(error)(f"{name}: {error}") from error
    return nn.Parameter(moved, value.requires_grad) if isinstance(value, nn.Parameter) else moved


def from_torch(name: str) -> Any:
    """The member of ``flow.nn`` for a name of ``torch.nn``: modules with ``to_global``, other members unchanged.

    Raises:
        AttributeError: torch has no such name.
    """
    found = getattr(nn, name)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        return found
    made = type(name, (found, Module), {"__doc__": found.__doc__, "__module__": "workbench.flow.nn"})
    made.__qualname__ = name
    return made
