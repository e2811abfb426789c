"""Local tensors of eager programs: torch's, with ``to_global``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from workbench.core.placement import Placement
from workbench.flow import old_spellings
from workbench.flow.devices import torch_device
from workbench.flow.world_join import join
from workbench.tensors import conversion as entry
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.world import World


class LocalTensor(torch.Tensor):
    """A tensor of this process alone, as ``flow.randn(4, 5)`` makes it; torch's results from it are local tensors too.

    >>> flow.ones(2, 3).to_global(flow.placement("cpu", ranks=[0]), flow.sbp.broadcast).shape
    torch.Size([2, 3])
    """

    def to_global(
        self, placement: Placement | None = None, sbp: Any = None, *, broadcast_from: int | None = None
    ) -> GlobalTensor:
        """The ranks' local tensors as one global tensor. All ranks of the world call it.

        Tensors of ranks outside the placement do not count: on ``ranks=[0]``, rank 0's tensor is the whole. S
        concatenates the ranks' tensors, P adds them up. B means that they are equal, and their values are compared.
        (OneFlow takes the first rank's tensor without a comparison, as ``broadcast_from=0`` does.)

        Raises:
            LayoutError: no placement or no sbp; ranks disagree about dtype, dims, or the values of B.
            SbpError: a split dim out of range, or not one entry per axis of the placement.
        """
        if placement is None or sbp is None:
            raise old_spellings.missing_layout("to_global", self.shape, placement, sbp)
        join()
        return entry.to_global(self.as_subclass(torch.Tensor), placement, sbp, broadcast_from=broadcast_from)

    to_consistent = old_spellings.to_consistent

    def to_local(self) -> LocalTensor:
        """This tensor itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.to``; "cuda" means the CPU where there is no GPU."""
        return super().to(*map(torch_device, args), **{name: torch_device(value) for name, value in kwargs.items()})

    def cuda(self, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.cuda``; the tensor stays on the CPU where there is no GPU."""
        return self.to("cuda" if device is None else device)

    def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.new_empty``. ``copy.deepcopy`` makes its tensors by it, where torch's makes plain ones."""
        return local(super().new_empty(*args, **kwargs))

    def clone(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.clone``, by which ``copy.deepcopy`` makes tensors without elements."""
        return local(super().clone(*args, **kwargs))

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """``torch.Tensor.backward``. Inside a step of ``nn.Graph`` the schedule decides when it runs."""
        running = join().context.running
        if running is None or not running.defers_backward([self], is_plain=not args and not kwargs):
            super().backward(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        first, *lines = super().__repr__().split("\n")
        cut = len("LocalTensor(") - len("tensor(")
        return "\n".join([first.replace("LocalTensor(", "tensor(", 1), *(line[cut:] for line in lines)])

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if self.dim() else format(self.item(), spec)

    is_global = False
    is_local = True


torch.serialization.add_safe_globals([LocalTensor])  # so that torch.load reads what torch.save has written


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor as a local one of eager programs; local and global tensors are returned unchanged."""
    return tensor.as_subclass(LocalTensor) if type(tensor) is torch.Tensor else tensor


def join_with_local_tensors() -> World:
    """The world, as ``join`` gives it, with the program's choice that ``to_local`` gives local tensors."""
    world = join()
    world.context.local_type = LocalTensor
    return world


def to_global(data: Any, placement: Placement | None = None, sbp: Any = None) -> Any:
    """Every tensor in ``data`` (one, or containers of them) by its ``to_global``; torch's plain ones count as local.

    >>> flow.to_global([torch.ones(2)], flow.placement("cpu", ranks=[0]), flow.sbp.broadcast)[0].sbp
    (B,)
    """

    def convert(leaf: Any) -> Any:
        return local(leaf).to_global(placement, sbp) if isinstance(leaf, torch.Tensor) else leaf  # type: ignore[attr-defined]

    return tree_map(convert, data)


def to_local(data: Any) -> Any:
    """Every tensor in ``data`` as this rank's part of it, a local tensor; empty on ranks outside the placement."""
    return tree_map(lambda leaf: local(leaf.to_local()) if hasattr(leaf, "to_local") else leaf, data)
