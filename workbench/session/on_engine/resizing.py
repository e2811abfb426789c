"""Before engines are given back: the ranks that stay get all of the modules, optimizers and global tensors.

A parallelized module keeps its strategy if that fits the ranks that stay, with another data degree if need be; else it
becomes data parallel. Other global tensors keep one split, or become whole. All stay the same objects.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.presets import refitted
from workbench.core.sbp import Split, broadcast
from workbench.session import user_modules
from workbench.session.on_engine import completion as engine_assist
from workbench.session.on_engine.sent_values import kind, spread
from workbench.session.on_engine.shell import shell
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.reached_objects import OF_TORCH, PLAIN_VALUES, is_of_others
from workbench.tensors.world import World, current
from workbench.training.gradients.stale_optimizer import optimizers_of
from workbench.training.parallel import place
from workbench.training.strategies.state import STATE, describe, state_of

Rows = list[tuple[str, str]]
"""(variable, how it lies now, or why it was not moved)."""


def withdraw(num_ranks: int) -> Rows:
    """Bring the user's variables onto the first ``num_ranks`` ranks. All ranks call it and get the same rows."""
    namespace = shell().user_ns
    return withdraw_from({name: namespace[name] for name in engine_assist.names()}, num_ranks, current())


def withdraw_from(variables: Mapping[str, Any], num_ranks: int, world: World) -> Rows:
    """The same for given variables."""
    values = _with_attributes(spread(variables))
    own = {name: said for name, value in values.items() if (said := _describe(value, num_ranks))[1]}
    told = all_gather_object(own, world, "resize")
    alike = [name for name, said in told[0].items() if all(each.get(name) == said for each in told)]
    alike.sort(key=lambda name: (told[0][name][0], name))
    firsts = {name: next(other for other in alike if values[other] is values[name]) for name in alike}
    same = all_gather_object(firsts, world, "resize")
    alike = [name for name in alike if all(each[name] == same[0][name] for each in same)]
    rows = [(name, _withdraw(values[name], num_ranks, world)) for name in alike if same[0][name] == name]
    others = sorted({name for each in told for name in each} - set(alike))
    return [row for row in rows if row[1]] + [(name, "not moved: it differs between ranks") for name in others]


def _with_attributes(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, and what modules have as plain attributes, under names such as ``model.0.mask``: on their own, as
    some may differ between ranks, such as what only the ranks of a stage have computed.
    """
    found = dict(variables)
    for name, value in variables.items():
        if isinstance(value, nn.Module):
            for path, part in value.named_modules(prefix=name):
                found |= {f"{path}.{own}": each for own, each in vars(part).items() if own not in OF_TORCH}
    return found


def _describe(value: Any, num_ranks: int) -> tuple[int, str]:
    """What of a value lies on ranks behind the first ``num_ranks``, as all ranks say it; empty if nothing does. Before
    it, when it is moved: modules first, as with them go their parameters, which others may hold.
    """
    strategies = "; ".join(str(state_of(module).strategy) for module in _parallelized(value, num_ranks))
    tensors = "; ".join(f"{each.layout_on_ranks} {tuple(each.shape)}" for each in _beyond(value, num_ranks))
    if not strategies:
        return 2, tensors
    return (0 if isinstance(value, nn.Module) else 1), f"{strategies}; {tensors}"


def _withdraw(value: Any, num_ranks: int, world: World) -> str:
    """Move a value; returns how it lies now, empty if it has moved with another one."""
    said = []
    for module in _parallelized(value, num_ranks):
        state = state_of(module)
        strategy = refitted(state.strategy, describe(module), num_ranks)
        place(module, strategy, optimizers_of(module, world), num_ranks)
        said.append(f"under {strategy}" + ("" if strategy == state.strategy else f" in place of {state.strategy}"))
    for tensor in _beyond(value, num_ranks):
        split = next((each for each in tensor.sbp if isinstance(each, Split)), broadcast)
        target = Layout(Placement.of(tensor.placement.type, list(range(num_ranks))), (split,))
        with torch.no_grad():
            tensor._take_data(box(tensor.detach(), target))
        said.append(str(target))
    return ", ".join(dict.fromkeys(said))


def _parallelized(value: Any, num_ranks: int) -> list[nn.Module]:
    """The parallelized modules in a value that lie on ranks behind the first, each once."""
    inside = [module for each in _inside(value) if isinstance(each, nn.Module) for module in each.modules()]
    return [
        module
        for module in dict.fromkeys(inside)
        if STATE in module.__dict__ and any(max(ranks) >= num_ranks for ranks in state_of(module).placements)
    ]


def _beyond(value: Any, num_ranks: int) -> list[GlobalTensor]:
    """The global tensors in a value that lie on ranks behind the first, each once."""
    inside = (
        tensor
        for each in _inside(value)
        for tensor in ([*each.parameters(), *each.buffers()] if isinstance(each, nn.Module) else [each])
        if isinstance(tensor, GlobalTensor)
    )
    found = {id(tensor): tensor for tensor in inside if max(tensor.placement) >= num_ranks}
    return list(found.values())


def _inside(value: Any) -> Iterator[nn.Module | GlobalTensor]:
    """The modules and global tensors in a value, in lists, dictionaries and objects, in one order on all ranks: not
    those in a set, which has another order on each.
    """
    waiting, seen = [value], set[int]()
    while waiting:
        one = waiting.pop()
        if type(one) in PLAIN_VALUES or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module | GlobalTensor):
            yield one
        elif isinstance(one, dict):
            waiting += reversed([*one.values()])
        elif isinstance(one, list | tuple | deque):
            waiting += reversed(one)
        else:
            waiting += reversed(_attributes(one))


def _attributes(value: Any) -> list[Any]:
    """The attributes of an object of the user's, or of one with a state. What an optimizer has of its parameters moves
    with these.
    """
    made: Any = type(value)
    if not _is_users(made) and (is_of_others(made) or kind(value) != "stateful"):
        return []
    moved = ("param_groups", "state") if isinstance(value, Optimizer) else ()
    return [each for name, each in getattr(value, "__dict__", {}).items() if name not in moved]


@lru_cache(maxsize=1024)
def _is_users(made: Any) -> bool:
    """Whether a class is of a cell or of a file of the user's, or only holds attributes."""
    if made is SimpleNamespace or made.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(made.__module__), "__file__", None)
    return file is not None and not is_of_others(made) and user_modules.is_users(file)
