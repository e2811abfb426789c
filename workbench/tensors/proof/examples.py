"""Calls with their arguments: what a proof walks. They are collected by running a function in a world of one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Sbp, Split, broadcast, partial_sum
from workbench.tensors import install  # noqa: F401 - installs the patches of torch
from workbench.tensors.dispatch.arguments import in_order
from workbench.tensors.dispatch.registry import Name, fold_name
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of, wrap
from workbench.tensors.simulated import Simulated
from workbench.tensors.world import World
from workbench.transport.threads import ThreadHub, ThreadTransport


@dataclass
class Example:
    """One call of one function with plain logical arguments, bound to positions as its rule sees them."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.args, self.kwargs = in_order(self.func, self.args, self.kwargs)
        self._leaves, self._structure = tree_flatten((self.args, self.kwargs))

    @property
    def name(self) -> Name:
        """The function's folded name, and whether the call writes into its first argument."""
        name = fold_name(self.func)
        return Name(name.folded, in_place=True) if self.kwargs.get("inplace") else name

    @property
    def operands(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def with_operands(self, operands: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """Arguments and keyword arguments with other tensors in the place of the operands."""
        remaining = iter(operands)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, as a list, on one device; of an in-place function, its target."""
        args, kwargs = self.with_operands(operands)
        return self.results(self.func(*args, **kwargs), args)

    def results(self, result: Any, args: Any) -> list[torch.Tensor]:
        """The tensors in what the function returned, as plain ones."""
        found = [args[0]] if self.name.in_place else tree_flatten(result)[0]
        with local_torch():
            return [leaf.as_subclass(torch.Tensor) for leaf in found if isinstance(leaf, torch.Tensor)]

    def __str__(self) -> str:
        shown = [f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor)
                 else leaf for leaf in self._leaves]  # fmt: skip
        args, kwargs = tree_unflatten([_Text(value) for value in shown], self._structure)
        texts = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        return f"{self.name.folded}{'_' * self.name.in_place}({', '.join(texts)})"


class _Text:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return self.value if isinstance(self.value, str) else repr(self.value)


def collect(function: Callable[..., Any], operands: Iterable[Any]) -> list[Example]:
    """The calls that ``function`` makes of functions that need a plan, each once.

    It runs in a world of one rank, where every layout holds the whole: with operands that lie as S(0), as B and as P,
    because functions written with others look at layouts before they choose a way.
    """
    found: dict[str, Example] = {}
    operands = list(operands)
    for entry in (Split(0), broadcast, partial_sum):
        world = World(0, 1, torch.device("cpu"), ThreadTransport(ThreadHub(1), 0))
        world.context.generator = torch.Generator().manual_seed(0)
        world.on_plan = lambda func, args, kwargs: _keep(found, func, args, kwargs)
        with Simulated(world), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of fallbacks and deprecations do not matter here
            function(*tree_map(lambda value, e=entry, w=world: _to_global(value, e, w), operands))
    return list(found.values())


def _keep(found: dict[str, Example], func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    with local_torch():
        plain_args, plain_kwargs = tree_map(_copy, (args, kwargs))
    example = Example(func, plain_args, plain_kwargs)
    found.setdefault(str(example), example)


def _copy(value: Any) -> Any:
    return value.detach().clone().as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def _to_global(value: Any, entry: Sbp, world: World) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, GlobalTensor):
        return value
    fits = value.dim() > 0 if isinstance(entry, Split) else isinstance(entry, Broadcast) or value.is_floating_point()
    layout = Layout(Placement.of("cpu", [0]), (entry if fits else broadcast,))
    tensor = wrap(value.detach().clone(), spec_of(world, layout, tuple(value.shape)))
    return tensor.requires_grad_() if value.is_floating_point() else tensor
