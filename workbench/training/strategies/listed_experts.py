"""Experts of a list, each on one rank of its group: rows go to the rank of their expert, and come back as terms.

Other ranks run an expert on placeholders. A result is a partial sum on all ranks of the stage, so ranks work on their
experts at the same time until something needs the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.rows import Layer
from workbench.core.sbp import partial_sum
from workbench.core.strategy import ResolvedLayer
from workbench.tensors.boxing.box import box, box_implicitly
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.strategies.fused_experts import listed_experts
from workbench.training.strategies.layouts import LayoutsInUse


def hook_listed_experts(
    model: nn.Module, layers: Sequence[Layer], in_use: LayoutsInUse, choices: Sequence[ResolvedLayer]
) -> list[Any]:
    """Hooks of the experts of lists that a row ``expert`` spreads over ranks."""
    handles: list[Any] = []
    for path in listed_experts(model):
        inside = (
            choice
            for layer, choice in zip(layers, choices, strict=True)
            if choice.expert is not None and f"{layer.name}.".startswith(f"{path}.")
        )
        choice = next(inside, None)
        if choice is not None:
            expert, ends = model.get_submodule(path), _Ends(in_use, choice, path)
            handles.append(expert.register_forward_pre_hook(ends.begin, with_kwargs=True))
            handles.append(expert.register_forward_hook(ends.end))
    return handles


class _Ends:
    """The hooks of one expert. ``choice`` is that of one of its layers."""

    def __init__(self, in_use: LayoutsInUse, choice: ResolvedLayer, path: str) -> None:
        self._in_use, self._choice, self._path = in_use, choice, path

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments on the rank of the expert."""
        plan = self._in_use.layouts.plan

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, GlobalTensor):
                return leaf
            return box_implicitly(leaf, plan.input_layout(self._choice, len(leaf._spec.shape)), self._path)

        args, kwargs = tree_map(bring, (args, kwargs))
        return args, kwargs

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The results as terms on all ranks of the stage."""
        plan, stage = self._in_use.layouts.plan, self._choice.stage
        terms = plan.layout(stage, partial_sum, partial_sum, context=partial_sum)

        def give_back(leaf: Any) -> Any:
            if not isinstance(leaf, GlobalTensor):
                return leaf
            return box(leaf, terms if leaf.is_floating_point() else terms.broadcast(), self._path)

        return tree_map(give_back, output)


__all__ = ["hook_listed_experts"]
