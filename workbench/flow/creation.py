"""Functions that make tensors: local ones of this process, or with ``placement=`` and ``sbp=`` global ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from workbench.errors import LayoutError
from workbench.flow.devices import torch_device
from workbench.flow.local_tensor import join_with_local_tensors, local
from workbench.flow.old_spellings import missing_layout
from workbench.flow.world_join import join
from workbench.tensors import creation as layouts
from workbench.tensors import random

GLOBAL = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")
"""Names that make global tensors too."""
LOCAL = ("as_tensor", "from_numpy", "linspace", "logspace", "normal", "scalar_tensor")
"""Names that make local tensors only."""


def _creator(name: str) -> Callable[..., torch.Tensor]:
    make_local: Callable[..., torch.Tensor] = getattr(torch, name)
    make_global: Callable[..., torch.Tensor] | None = getattr(layouts, name) if name in GLOBAL else None

    @functools.wraps(make_global or make_local, assigned=("__name__", "__qualname__"))
    def create(*args: Any, placement: Any = None, sbp: Any = None, **options: Any) -> torch.Tensor:
        join_with_local_tensors()
        if (placement is None) != (sbp is None):
            raise missing_layout(f"flow.{name}", (), placement, sbp)
        if placement is not None:
            if make_global is None:
                raise LayoutError(
                    f"flow.{name}(placement=..., sbp=...): it makes local tensors only. Make it global, then box it: "
                    f"flow.{name}(...).to_global(placement, flow.sbp.broadcast).to_global(sbp=...)."
                )
            return make_global(*args, placement=placement, sbp=sbp, **options)
        if options.get("device") is not None:
            options["device"] = torch_device(options["device"])
        learns = options.pop("requires_grad", False)
        made = local(make_local(*args, **options))
        return made.requires_grad_() if learns else made

    also = " With ``placement=`` and ``sbp=`` a global tensor, with the same numbers for every layout." * bool(
        make_global
    )
    create.__doc__ = f"``torch.{name}``: a local tensor.{also}"
    return create


arange, empty, eye, full, ones, rand, randint, randn, randperm, tensor, zeros = map(_creator, GLOBAL)
as_tensor, from_numpy, linspace, logspace, normal, scalar_tensor = map(_creator, LOCAL)


def manual_seed(seed: int) -> None:
    """Seed the numbers of local tensors, modules and global tensors; with the same seed on all ranks."""
    join()
    random.manual_seed(seed)
