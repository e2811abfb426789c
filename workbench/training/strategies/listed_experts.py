"""Experts of a list, each on one rank of its group: rows go to the rank of their expert, and come back as terms.

Other ranks run an expert on placeholders. A result is a partial sum on all ranks of the stage, so ranks work on their
experts at the same time until something needs the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.sbp import partial_sum
from workbench.core.strategy import ResolvedLayer
from workbench.tensors.boxing.box import box, box_implicitly
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.strategies.blocks import module_around
from workbench.training.strategies.layouts import LayoutsInUse


def listed_experts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By path of a module that is one of a list of experts, its number and how many there are.

    A list of experts has a name with "expert" in it, and modules with parameters of equal shapes. One inside of an
    expert counts as other parts of it.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in path.rpartition(".")[2].lower()
        if is_list and not module_around(path, found):
            parts = dict(module.named_children())
            shapes = {tuple(parameter.shape for parameter in part.parameters()) for part in parts.values()}
            if len(parts) > 1 and len(shapes) == 1 and () not in shapes:
                found |= {f"{path}.{name}": (number, len(parts)) for number, name in enumerate(parts)}
    return found


def hook_listed_experts(model: nn.Module, in_use: LayoutsInUse, choices: Sequence[ResolvedLayer]) -> list[Any]:
    """Hooks of the experts of lists that a row ``expert`` spreads over ranks."""
    listed, ends, handles = listed_experts(model), dict[str, _Ends](), list[Any]()
    for choice in choices:
        if choice.expert is None:
            continue
        path = module_around(choice.name, listed)
        if path not in ends:
            ends[path] = _Ends(in_use, choice, path)
            handles += ends[path].hook(model.get_submodule(path))
        if path != choice.name:
            handles += _EndsOfLayer(in_use, choice, choice.name, ends[path]).hook(model.get_submodule(choice.name))
    return handles


class _Ends:
    """The hooks of one expert. ``choice`` is that of one of its layers."""

    def __init__(self, in_use: LayoutsInUse, choice: ResolvedLayer, path: str) -> None:
        self._in_use, self._choice, self._path = in_use, choice, path
        self.is_running = False

    def hook(self, module: nn.Module) -> list[Any]:
        """Add both hooks."""
        return [
            module.register_forward_pre_hook(self.begin, with_kwargs=True),
            module.register_forward_hook(self.end),
        ]

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments on the rank of the expert."""
        self.is_running = True
        plan = self._in_use.layouts.plan

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, GlobalTensor):
                return leaf
            return box_implicitly(leaf, plan.input_layout(self._choice, len(leaf._spec.shape)), self._path)

        args, kwargs = tree_map(bring, (args, kwargs))
        return args, kwargs

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The results as terms on all ranks of the stage."""
        self.is_running = False
        plan, stage = self._in_use.layouts.plan, self._choice.stage
        terms = plan.layout(stage, partial_sum, partial_sum, context=partial_sum)

        def give_back(leaf: Any) -> Any:
            if not isinstance(leaf, GlobalTensor):
                return leaf
            return box(leaf, terms if leaf.is_floating_point() else terms.broadcast(), self._path)

        return tree_map(give_back, output)


class _EndsOfLayer(_Ends):
    """The hooks of a layer in an expert, for calls by code outside of the expert.

    They have tensors of other ranks, or plain ones. A part of the expert that runs again in backward has tensors of the
    expert's rank.
    """

    def __init__(self, in_use: LayoutsInUse, choice: ResolvedLayer, path: str, around: _Ends) -> None:
        super().__init__(in_use, choice, path)
        self._around = around

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments on the rank of the expert, in a call from outside of it."""
        given = {x._spec.layout.placement for x in tree_leaves((args, kwargs)) if isinstance(x, GlobalTensor)}
        own = self._in_use.layouts.plan.input_layout(self._choice, 1).placement
        if self._around.is_running or given == {own}:
            return args, kwargs
        return super().begin(module, args, kwargs)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The results as terms on all ranks of the stage, after a call from outside."""
        return super().end(module, args, output) if self.is_running else output
